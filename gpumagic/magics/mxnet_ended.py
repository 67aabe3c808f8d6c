"""Say, once in a kernel, to who imports MXNet that it has ended, and what to type in its place."""

import ast
from contextlib import suppress
from typing import Any

from gpumagic import faults

# The files on PyPI; the decision of the Apache Software Foundation in September 2023.
_ENDED = """\
→ MXNet, the framework that Dive into Deep Learning began with, has ended: its last release is 1.9.1
  (May 2022), and Apache retired it in 2023. For mx.gpu(1) type torch.device("cuda:1") in torch,
  jax.devices("gpu")[1] in JAX, or in either %%ongpu 1 as the first line of the cell."""


class MXNetEnded:
    """What IPython calls after each cell, of which it reads those that say mxnet."""

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self._told = False

    def install(self) -> None:
        self._shell.events.register("post_run_cell", self._post_run_cell)

    def uninstall(self) -> None:
        self._shell.events.unregister("post_run_cell", self._post_run_cell)

    def _post_run_cell(self, result: Any = None) -> None:
        cell = getattr(getattr(result, "info", None), "raw_cell", None) or ""
        if not self._told and "mxnet" in cell:
            with faults.kept("looking for an import of MXNet"):
                self._told = self._imports(cell, result)
                if self._told:
                    print(_ENDED)

    def _imports(self, cell: str, result: Any) -> bool:
        error = result.error_in_exec
        if isinstance(error, ModuleNotFoundError) and error.name == "mxnet":
            return True
        with suppress(SyntaxError):
            from gpumagic.frameworks.known import imports_of

            return "mxnet" in imports_of(ast.parse(self._shell.transform_cell(cell)))
        return False
