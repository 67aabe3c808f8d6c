"""Act before and after each cell: explain its error, record its memory, notice growth.

The exception stays as it is, except that our own frames are removed so that `%debug` starts in the
user's code. It works wherever the shell shows a traceback: under `%%time` and `%run`, and in
callbacks of widgets. Whoever imports MXNet is told once that it has ended.
"""

import ast
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from IPython.display import display

from gpumagic import faults
from gpumagic.device import cuda_state
from gpumagic.magics.arguments import of_cuda

_FRAMEWORKS = ("torch", "jax", "tensorflow", "cupy")


class Explaining:
    """The hooks in one IPython shell."""

    def __init__(self, shell: Any, cell: Callable[[], Any]) -> None:
        self.shell = shell
        self._cell = cell  # the one that runs
        self._shown = 0  # the id of an error, until its cell has ended
        self._active = False
        self._death_told = self._death_published = False

    def install(self) -> None:
        self._original = self.shell.showtraceback
        self._active = True
        self.shell.showtraceback = self._showtraceback

    def uninstall(self) -> None:
        self._active = False  # another tool may have kept our method, and call it
        if vars(self.shell).get("showtraceback") == self._showtraceback:
            del self.shell.showtraceback
            if self.shell.showtraceback != self._original:
                self.shell.showtraceback = self._original

    def _showtraceback(self, exc_tuple: Any = None, *args: Any, **kwargs: Any) -> Any:
        error = exc_tuple[1] if isinstance(exc_tuple, tuple) and len(exc_tuple) > 1 else None
        error = error or sys.exc_info()[1] or getattr(sys, "last_value", None)
        earlier = _kept_until_now()
        try:
            if self._active:
                _shorten(error)
            return self._original(exc_tuple, *args, **kwargs)
        finally:
            self._explain(error, earlier)

    def explain_unshown(self, error: BaseException) -> None:
        """Explain the error that ended a cell, if its traceback was not shown through here."""
        # A tool may show tracebacks its own way.
        if id(error) != self._shown:
            self._explain(error)
        self._shown = 0

    def tell_death(self, where: str) -> None:
        """Say once that CUDA is dead, and have the panel say it; `where` is the cell that ended."""
        death = None if self._death_published else cuda_state.look(where)
        if death is not None:
            self._death_published = True
            with faults.kept("telling that CUDA is dead"):
                from gpumagic.memory.rescue import told
                from gpumagic.telemetry.dead_cuda import publish

                publish(death)
                if not self._death_told:
                    print(f"→ {told(death)}")

    def _explain(self, error: BaseException | None, earlier: Sequence[BaseException] = ()) -> None:
        if not self._active or error is None:
            return
        self._shown = id(error)
        start = time.perf_counter()
        # The user's own has been shown; who has seen enough may interrupt.
        with suppress(KeyboardInterrupt), faults.kept("explaining an error"):
            if line := of_cuda(error):
                self._death_told = cuda_state.death() is not None
                print(f"→ {line}")
            elif (found := _explained(error, earlier)) is not None:
                display(found)
        cell = self._cell()
        if cell and cell.run:
            cell.run.left_out += time.perf_counter() - start


def _explained(error: BaseException, earlier: Sequence[BaseException]) -> Any:
    """What to show below an error, by the first framework whose it is; or None."""
    from gpumagic.frameworks.explain_error import explain

    found: Any = explain(error)
    if found is None and not sys.modules.keys().isdisjoint(_FRAMEWORKS):
        from gpumagic.memory.explain_out_of_memory import explain_out_of_memory

        found = explain_out_of_memory(error, earlier=earlier)
    return found


def _kept_until_now() -> list[BaseException]:
    """The errors that are kept now, which to show the next one lets go."""
    if sys.modules.keys().isdisjoint(_FRAMEWORKS):
        return []
    from gpumagic.memory.roots import kept_errors

    return kept_errors()


def _shorten(error: BaseException | None) -> None:
    """Take frames of ours out of an error: there are none where no framework was imported."""
    if error is not None and not sys.modules.keys().isdisjoint(_FRAMEWORKS):
        with faults.kept("shortening a traceback"):
            from gpumagic.usercode.frames import cut_ours

            cut_ours(error)


_EVENTS = ("pre_run_cell", "post_run_cell")
_STAMPING = "stamping a cell on what it allocates"


class MemoryHooks:
    """What IPython calls; nothing is done, nor imported, before torch has used a GPU, or JAX."""

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self._threads = threading.local()  # a subshell runs its cells on a thread of its own
        self._growth: Any = None

    def install(self) -> None:
        for event in _EVENTS:
            self._shell.events.register(event, getattr(self, f"_{event}"))
        _note_arrays("")  # what is there was made before anybody looked

    def uninstall(self) -> None:
        for event in _EVENTS:
            self._shell.events.unregister(event, getattr(self, f"_{event}"))
        for name in ("made_in", "ask"):
            if module := sys.modules.get(f"gpumagic.memory.{name}"):
                module.forget()

    def _pre_run_cell(self, info: Any) -> None:
        self._threads.stamped = None
        if cuda := cuda_state.working():
            with faults.kept("asking torch to note when memory runs out"):
                from gpumagic.memory.shortage import note_shortages

                note_shortages()
            if info.store_history:
                with faults.kept(_STAMPING):
                    self._threads.stamped = _stamp(cuda.memory)

    def _post_run_cell(self, result: Any = None) -> None:
        number = getattr(result, "execution_count", None)
        _note_arrays(f"In [{number}]" if number else "")
        if not (cuda := cuda_state.working()):
            return
        if stamped := getattr(self._threads, "stamped", None):
            with faults.kept(_STAMPING):
                _unstamp(cuda.memory, *stamped)
        info = getattr(result, "info", None)
        if info is not None and info.store_history and result.success:
            with faults.kept("looking for what grows from run to run"):
                self._look_for_growth(info.raw_cell)

    def _look_for_growth(self, cell: str) -> None:
        from gpumagic.memory.growth import GrowthWatch

        self._growth = self._growth or GrowthWatch()
        shell = self._shell
        if grown := self._growth.ended(cell, shell.transform_cell, shell.user_ns):
            print(f"→ {grown}")


def _note_arrays(cell: str) -> None:
    if "jax" in sys.modules:
        with faults.kept("noting which cell made an array"):
            from gpumagic.memory.ask import note

            note(cell)


def _stamp(memory: Any) -> tuple[str, str] | None:
    """Have what is allocated bear the cell's name; that, and the name that was borne before."""
    # Another allocator than torch's own would warn, once, that it keeps no such thing.
    kept = getattr(memory, "_memory_metadata_supported", lambda: True)
    if not hasattr(memory._C, "_cuda_setMemoryMetadata") or not kept():
        return None
    from gpumagic.usercode.files import next_cell

    before, cell = memory._get_memory_metadata(), next_cell()
    memory._set_memory_metadata(cell)
    return cell, before


def _unstamp(memory: Any, cell: str, before: str) -> None:
    """Put back the name that was borne before, unless the cell has set another one."""
    if memory._get_memory_metadata() == cell:
        memory._set_memory_metadata(before)


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
