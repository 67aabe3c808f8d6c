"""Show what `%gpus` and `%gpumem` return at once, and not again as the cell's value."""

from collections.abc import Callable
from typing import Any

from IPython.display import display

# By name, so that loading us does not import it.
_SNAPSHOT = ("gpumagic.telemetry.snapshot", "Snapshot")


class Once:
    """Displays in one shell what the magics return, each once in the cell of its magic."""

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
        """Show it now, a Snapshot in a table made as `how` says; returns it."""
        # The class that is ours and common to all: of widgets each has one of its own below it.
        ours = [kind for kind in type(value).__mro__ if kind.__module__.startswith("gpumagic.")]
        self._formatter.for_type(ours[-1], self._display)
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
    display({"text/plain": repr(shown), "text/html": shown._repr_html_()}, raw=True)
