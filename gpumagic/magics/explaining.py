"""Show the explanation of an error, between devices, for want of memory, or of CUDA's own, under
its traceback; and once, that CUDA is dead.

The exception is left as it is, but for our own frames that stand in for torch's code: they are
taken out, so that `%debug` begins in the user's. So it is wherever the shell shows a traceback: for
`%%time`, `%run` and callbacks of widgets too.
"""

import sys
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
        from gpumagic.memory.array_shortage import explain_out_of_memory

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
