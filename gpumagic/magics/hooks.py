"""Explain errors, display values of magics, and label torch's allocations with cell names."""

import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from IPython.core.error import UsageError
from IPython.display import display

from gpumagic import faults
from gpumagic.errors import CrossDeviceWarning, GpuError


@contextmanager
def in_one_line(magic: str) -> Iterator[None]:
    """Turn a GpuError, or a CUDA error outside user code, into a UsageError of one line."""
    try:
        yield
    except (GpuError, RuntimeError) as error:
        if _is_users(error) or not (text := one_line(magic, error)):
            raise
        traceback.clear_frames(error.__traceback__)
        error.__cause__ = error.__context__ = error.__traceback__ = None
        raise UsageError(text) from None


def _is_users(error: BaseException) -> bool:
    """Whether an error's traceback contains user code; False for a GpuError."""
    from gpumagic.usercode.files import innermost_of
    from gpumagic.usercode.frames import errors

    chain = () if isinstance(error, GpuError) else errors(error)
    return any(innermost_of(each.__traceback__) is not None for each in chain)


def one_line(magic: str, error: BaseException) -> str:
    """Return ``"magic: message"`` for a GpuError or a CUDA error; empty for any other error."""
    text = cuda_advice(error) or (str(error) if isinstance(error, GpuError) else "")
    return text if not text or text.startswith(f"{magic} ") else f"{magic}: {text}"


def cuda_advice(error: BaseException, check_line: str = "") -> str:
    """Return advice if an error or one of its causes is a CUDA error; empty for other errors."""
    from gpumagic.device import cuda_state as state
    from gpumagic.usercode.files import innermost_of, last_cell
    from gpumagic.usercode.frames import errors

    chain = [*errors(error)]
    if "torch" in sys.modules:
        line = innermost_of(chain[-1].__traceback__)
        where = f"{line.label}, line {line.line}" if line else last_cell()
        state.look(where, chain[-1], check_line)
        if (death := state.death()) is not None and any(map(state.is_death, chain)):
            from gpumagic.frameworks.what_is_left import what_is_left

            return what_is_left(death)
    return next(filter(None, (state.advice(each, check_line) for each in chain)), "")


def cuda_state() -> Any:
    if "torch" not in sys.modules:
        return None
    from gpumagic.device import cuda_state

    return cuda_state


class Explaining:
    """Explain errors wherever one shell shows a traceback, for example in widget callbacks."""

    def __init__(self, shell: Any, cell: Callable[[], Any]) -> None:
        self.shell = shell
        self._cell = cell  # returns the running cell
        self._shown = 0  # the id of the error explained in the running cell, or 0
        self._active = False
        self._death_shown = self._death_published = False

    def install(self) -> None:
        self._original = self.shell.showtraceback
        self._active = True
        self.shell.showtraceback = self._showtraceback

    def uninstall(self) -> None:
        self._active = False  # another tool may have saved our method, and still call it
        if vars(self.shell).get("showtraceback") == self._showtraceback:
            del self.shell.showtraceback
            if self.shell.showtraceback != self._original:
                self.shell.showtraceback = self._original

    def _showtraceback(self, exc_tuple: Any = None, *args: Any, **kwargs: Any) -> Any:
        raised: Any = exc_tuple[1] if isinstance(exc_tuple, tuple) else sys.exc_info()[1]
        # Without a raised error, the user typed %tb. Explain the last error; show library frames.
        error: Any = raised or getattr(sys, "last_value", None)
        if not self._explains(error):
            return self._original(exc_tuple, *args, **kwargs)
        found, earlier = self._between_devices(error), list[BaseException]()
        if not found:
            from gpumagic.memory.roots import kept_errors

            earlier = kept_errors()  # must precede `_original`, which releases these errors
        with ExitStack() as afterwards:
            afterwards.callback(self._explain, error, found, earlier)
            with faults.kept("shortening a traceback"):
                from gpumagic.memory.oom_state import read
                from gpumagic.usercode.frames import cut_ours, end_at_user, libraries_hidden

                cut_ours(error)
                ours = type(error).__module__.startswith("gpumagic.checked.")
                ends_at_user = ours or isinstance(error, CrossDeviceWarning)
                if ends_at_user:
                    end_at_user(error)
                if raised and (found or ends_at_user or read(error)):
                    afterwards.enter_context(libraries_hidden(error))
            return self._original(exc_tuple, *args, **kwargs)

    def _explains(self, error: BaseException | None) -> bool:
        in_use = not sys.modules.keys().isdisjoint(("torch", "jax", "tensorflow", "cupy"))
        return self._active and error is not None and in_use

    def explain_unshown(self, error: BaseException) -> None:
        """Explain a cell's error if another tool, not `_showtraceback`, has shown the traceback."""
        if id(error) != self._shown and self._explains(error):
            self._explain(error, self._between_devices(error))
        self._shown = 0

    def report_death(self, where: str, check_line: str) -> None:
        """If CUDA has failed, tell the user and JupyterLab once. `where` names the ended cell."""
        if (state := cuda_state()) is None:
            return
        if (death := state.look(where, check_line=check_line)) is None:  # CUDA works
            self._death_shown = self._death_published = False
        elif not self._death_published:
            self._death_published = True
            with faults.kept("reporting that CUDA is dead"):
                from gpumagic.frameworks.what_is_left import what_is_left
                from gpumagic.telemetry.state_files import publish_death

                publish_death(death)
                if not self._death_shown:
                    print(f"→ {what_is_left(death)}")

    def _between_devices(self, error: Any) -> Any:
        with self._not_timed():
            from gpumagic.frameworks.public import explain

            return explain(error)

    def _explain(self, error: Any, found: Any, earlier: Sequence[BaseException] = ()) -> None:
        self._shown = id(error)
        with self._not_timed():
            from gpumagic.memory.explain_out_of_memory import explain_out_of_memory

            if sys.modules.get("torch"):
                from gpumagic.dryrun.try_fix import try_fix

                found = try_fix(error, found, self.shell)
            if not found and (line := cuda_advice(error, getattr(self._cell(), "check_line", ""))):
                self._death_shown = (state := cuda_state()) and state.death() is not None
                print(f"→ {line}")
            elif found := found or explain_out_of_memory(error, earlier=earlier):
                display(found)

    @contextmanager
    def _not_timed(self) -> Iterator[None]:
        """Exclude this context from the cell's counts and time. Record an error, raise none."""
        start, active, self._active = time.perf_counter(), self._active, False
        # While `_active` is False, an error inside this context is not explained in turn.
        with suppress(KeyboardInterrupt), faults.kept("explaining an error"):
            from gpumagic.ledger.attribute import uncounted

            with uncounted():
                yield
        self._active = active
        if (cell := self._cell()) and cell.run:
            cell.run.left_out += time.perf_counter() - start


# Module and name of the class Snapshot, which loading the extension must not import.
_SNAPSHOT = ("gpumagic.telemetry.snapshot", "Snapshot")


class DisplayOnce:
    """Display a magic's value at once, and not a second time as the cell's result."""

    def __init__(self, shell: Any, cell: Callable[[], object]) -> None:
        self._formatter = shell.display_formatter.ipython_display_formatter
        # In a terminal, IPython first writes "Out[1]:", so some text must follow.
        self._must_print = not hasattr(shell, "kernel")
        self._cell = cell
        self._shown: tuple[object, object] = None, None  # the last value and its cell

    def install(self) -> None:
        self._formatter.for_type_by_name(*_SNAPSHOT, self._display)

    def uninstall(self) -> None:
        self._formatter.deferred_printers.pop(_SNAPSHOT, None)
        for kind, printer in list(self._formatter.type_printers.items()):
            if printer == self._display:
                self._formatter.type_printers.pop(kind)

    def show(self, value: Any, **how: Any) -> Any:
        """Display a value now and return it; `how` has options for the table of a Snapshot."""
        self._formatter.for_type(type(value), self._display)
        _publish(value, **how)
        self._shown = value, self._cell()
        return value

    def _display(self, value: Any) -> None:
        (shown, cell), self._shown = self._shown, (None, None)
        if value is not shown or cell is not self._cell():
            _publish(value)
        elif self._must_print:
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


def stamp_memory() -> tuple[str, str] | None:
    """Give torch's allocations the cell's name as metadata. Return the new and old metadata."""
    state = cuda_state()
    with faults.kept(_STAMPING):
        memory: Any = getattr(state and state.live_cuda(), "memory", None)
        # Only torch's allocator supports metadata. With any other allocator, torch would warn.
        able = getattr(memory, "_memory_metadata_supported", lambda: True)
        if memory is not None and hasattr(memory._C, "_cuda_setMemoryMetadata") and able():
            from gpumagic.usercode.files import next_cell

            before, cell = memory._get_memory_metadata(), next_cell()
            memory._set_memory_metadata(cell)
            return cell, before
    return None


def unstamp_memory(cell: str, before: str) -> None:
    """Restore the metadata `before`, unless the cell has set other metadata or CUDA has failed."""
    state = cuda_state()
    with faults.kept(_STAMPING):
        if (cuda := state and state.live_cuda()) and cuda.memory._get_memory_metadata() == cell:
            cuda.memory._set_memory_metadata(before)
