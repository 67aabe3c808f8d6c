"""A Snapshot in IPython: shown as a table, and after `%gpus` shown once."""

from collections.abc import Callable
from typing import Any

from IPython.display import display

# By name, so that loading us does not import it.
_SNAPSHOT = ("gpumagic.telemetry.snapshot", "Snapshot")


class Once:
    """Displays Snapshots in one shell.

    `%gpus` shows its table wherever in the cell it stands, and returns the Snapshot; when IPython
    then displays the value of that same cell, the table is not repeated.

    Parameters
    ----------
    shell : InteractiveShell
    cell : callable
        The cell that runs now, as an object that is the same throughout it.
    """

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
        for kind in [k for k in self._formatter.type_printers if k.__module__ == _SNAPSHOT[0]]:
            self._formatter.type_printers.pop(kind)

    def show(self, snapshot: Any) -> Any:
        """Show a Snapshot now; the value is the Snapshot."""
        _publish(snapshot)
        self._shown, self._shown_in = snapshot, self._cell()
        return snapshot

    def _display(self, snapshot: Any) -> None:
        again = snapshot is self._shown and self._shown_in is self._cell()
        self._shown = self._shown_in = None
        if not again:
            _publish(snapshot)
        elif self._must_say_something:
            print(f"<Snapshot of {len(snapshot.gpus)} GPUs>")


def _publish(snapshot: Any) -> None:
    from gpumagic.show import table

    shown = table(snapshot)
    display({"text/plain": shown.text(), "text/html": shown._repr_html_()}, raw=True)
