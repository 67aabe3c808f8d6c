"""Act before and after each cell: explain errors, display values, record memory, notice growth.

The exception stays as it is, except that our own frames are removed so that `%debug` starts in the
user's code. It works wherever the shell shows a traceback: under `%%time` and `%run`, and in
callbacks of widgets. Nothing is imported before a framework is.
"""

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from IPython.display import display

from gpumagic import faults

_FRAMEWORKS = ("torch", "jax", "tensorflow", "cupy")
# By name, so that loading the extension does not import it.
_SNAPSHOT = ("gpumagic.telemetry.snapshot", "Snapshot")


def cuda_state() -> Any:
    """Return the module `gpumagic.device.cuda_state` if torch is imported, else None."""
    if "torch" not in sys.modules:
        return None
    from gpumagic.device import cuda_state

    return cuda_state


class Explaining:
    """Explains errors below their tracebacks in one shell."""

    def __init__(self, shell: Any, cell: Callable[[], Any]) -> None:
        self.shell = shell
        self._cell = cell  # returns the running one
        self._shown = 0  # the id of an error, until its cell has ended
        self._active = False
        self._death_told = self._death_published = False
        self.last: Any = None
        """The last explanation, a record or a line; None before the first."""

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
        error: Any = exc_tuple[1] if isinstance(exc_tuple, tuple) and len(exc_tuple) > 1 else None
        error = error or sys.exc_info()[1]
        again = error is None  # %tb shows every frame
        error = error or getattr(sys, "last_value", None)
        if not self._explains(error):
            return self._original(exc_tuple, *args, **kwargs)
        from gpumagic.memory.roots import kept_errors

        earlier = kept_errors()  # IPython is about to release them
        found = self._between_devices(error)
        with ExitStack() as afterwards:
            afterwards.callback(self._explain, error, found, earlier)
            with faults.kept("shortening a traceback"):
                from gpumagic.usercode.frames import cut_ours, end_at_user, libraries_hidden

                cut_ours(error)
                ends_at_user = type(error).__module__.startswith("gpumagic.checked.")
                if ends_at_user:
                    end_at_user(error)
                if (found or ends_at_user) and not again:
                    afterwards.enter_context(libraries_hidden(error))
            return self._original(exc_tuple, *args, **kwargs)

    def _explains(self, error: BaseException | None) -> bool:
        """Whether an error can be one of ours to explain: a framework is imported."""
        in_use = not sys.modules.keys().isdisjoint(_FRAMEWORKS)
        return self._active and error is not None and in_use

    def explain_unshown(self, error: BaseException) -> None:
        """Explain the error that ended a cell, if its traceback was not shown through here."""
        # A tool may show tracebacks its own way.
        if id(error) != self._shown and self._explains(error):
            self._explain(error, self._between_devices(error))
        self._shown = 0

    def tell_death(self, where: str) -> None:
        """Say once that CUDA is dead, also in the panel; `where` is the cell that ended."""
        state = cuda_state()
        if self._death_published and state.death() is None:  # a virtual GPU's, and it works again
            self._death_told = self._death_published = False
        if state is None or self._death_published:
            return
        if (death := state.look(where)) is not None:
            self._death_published = True
            with faults.kept("reporting that CUDA is dead"):
                from gpumagic.memory.save_host import what_is_left
                from gpumagic.telemetry.state_files import publish_death

                publish_death(death)
                if not self._death_told:
                    print(f"→ {what_is_left(death)}")

    def _between_devices(self, error: Any) -> Any:
        with self._not_timed():
            from gpumagic.frameworks.public import explain

            return explain(error)

    def _explain(self, error: Any, found: Any, earlier: Sequence[BaseException] = ()) -> None:
        self._shown = id(error)
        with self._not_timed():
            from gpumagic.magics.arguments import of_cuda
            from gpumagic.memory.explain_out_of_memory import explain_out_of_memory

            if line := of_cuda(error):
                self.last = line
                self._death_told = cuda_state().death() is not None
                print(f"→ {line}")
            elif found := found or explain_out_of_memory(error, earlier=earlier):
                self.last = found
                display(found)

    @contextmanager
    def _not_timed(self) -> Iterator[None]:
        """Leave the time within out of the cell's; the user's own error is shown whatever fails."""
        start = time.perf_counter()
        with suppress(KeyboardInterrupt), faults.kept("explaining an error"):
            yield
        cell = self._cell()
        if cell and cell.run:
            cell.run.left_out += time.perf_counter() - start


class Once:
    """Displays the values of magics in one shell, each value once in its cell."""

    def __init__(self, shell: Any, cell: Callable[[], object]) -> None:
        self._formatter = shell.display_formatter.ipython_display_formatter
        # A terminal writes "Out[1]:" before it knows whether anything follows.
        self._must_say_something = not hasattr(shell, "kernel")
        self._cell = cell
        self._shown: object = None
        self._shown_in: object = None

    def install(self) -> None:
        self._formatter.for_type_by_name(*_SNAPSHOT, self._display)

    def uninstall(self) -> None:
        self._formatter.deferred_printers.pop(_SNAPSHOT, None)
        for kind, printer in list(self._formatter.type_printers.items()):
            if printer == self._display:
                self._formatter.type_printers.pop(kind)

    def show(self, value: Any, **how: Any) -> Any:
        """Display a value now and return it; `how` is for the table of a Snapshot."""
        self._formatter.for_type(type(value), self._display)
        _publish(value, **how)
        self._shown, self._shown_in = value, self._cell()
        return value

    def _display(self, value: Any) -> None:
        again = value is self._shown and self._shown_in is self._cell()
        self._shown = self._shown_in = None
        if not again:
            _publish(value)
        elif self._must_say_something:
            print(f"<{type(value).__name__}>")


def _publish(value: Any, **how: Any) -> None:
    if hasattr(value, "_ipython_display_"):
        value._ipython_display_()
        return
    shown = value
    if not hasattr(value, "_repr_html_"):
        from gpumagic.gputable.gpu_table import GpuTable

        shown = GpuTable(value, **how)
    shapes = {"text/plain": repr(shown), "text/html": shown._repr_html_()}
    display(shapes | shown._repr_mimebundle_(), raw=True)


_STAMPING = "recording which cell allocates"


class MemoryHooks:
    """Records which cell allocates memory, and notices what grows; waits for a GPU in use."""

    def __init__(self, shell: Any) -> None:
        self.shell = shell
        self._threads = threading.local()  # a subshell runs its cells on a thread of its own
        self._growth: Any = None

    def pre_run_cell(self, info: Any) -> None:
        self._threads.stamped = None
        if info.store_history and (cuda := _working_cuda()):
            with faults.kept(_STAMPING):
                self._threads.stamped = _stamp(cuda.memory)

    def post_run_cell(self, result: Any = None) -> None:
        if not (cuda := _working_cuda()):
            return
        if stamped := getattr(self._threads, "stamped", None):
            with faults.kept(_STAMPING):
                _unstamp(cuda.memory, *stamped)
        info = getattr(result, "info", None)
        if info is not None and info.store_history and result.success:
            with faults.kept("looking for what grows from run to run"):
                self._look_for_growth(info.raw_cell)

    def _look_for_growth(self, cell: str) -> None:
        from gpumagic.memory.memory_changes import GrowthWatch

        self._growth = self._growth or GrowthWatch()
        if grown := self._growth.ended(cell):
            print(f"→ {grown}")


def _working_cuda() -> Any:
    return (state := cuda_state()) and state.working()


def _stamp(memory: Any) -> tuple[str, str] | None:
    """Have torch record the cell's name with each allocation; return it and the previous name."""
    # Another allocator than torch's own would warn, once, that it cannot.
    able = getattr(memory, "_memory_metadata_supported", lambda: True)
    if not hasattr(memory._C, "_cuda_setMemoryMetadata") or not able():
        return None
    from gpumagic.usercode.files import next_cell

    before, cell = memory._get_memory_metadata(), next_cell()
    memory._set_memory_metadata(cell)
    return cell, before


def _unstamp(memory: Any, cell: str, before: str) -> None:
    """Restore the previous name, unless the cell has set another one."""
    if memory._get_memory_metadata() == cell:
        memory._set_memory_metadata(before)
