"""`gpumagic.watch()`: the ledger of a stretch of code."""

import os
import threading

from gpumagic.ledger import attribute, dispatch, torch_2_8
from gpumagic.ledger import ledger_view as view
from gpumagic.ledger.copy_warnings import Alarm
from gpumagic.ledger.counts import Tally
from gpumagic.ledger.entry import Entry, Ledger

_lock = threading.RLock()


class watch:
    """Count every copy between devices and every wait for one: ``with gpumagic.watch() as w:``.

    Counts what the code within does, in threads that it starts too, and what a watch within that
    one counts. Nothing of torch is replaced but a few operators at the devices' own dispatch key,
    and all of it is put back at the end.

    Parameters
    ----------
    strict : bool
        Raise `CrossDeviceWarning` at the first copy or wait that is implicit.
    warn : bool, default True
        Give a `CrossDeviceWarning` once for each line that copies or waits again and again.

    Examples
    --------
    >>> with gpumagic.watch() as w:
    ...     for x in batches:
    ...         total += net(x.to("cuda:0")).sum().item()
    >>> w.ledger.transfers, w.ledger.waits, w.ledger.nbytes
    (10, 10, 81920)
    >>> w
    10 transfers: 80.0 KiB to cuda:0; 10 waits at line 3: `net(x.to("cuda:0")).sum().item()`
    """

    def __init__(self, *, strict: bool = False, warn: bool = True) -> None:
        self._alarm = Alarm(strict=strict) if strict or warn else None
        self._target: attribute.Target | None = None
        self._tally = Tally()
        self._entered: tuple[int, object] | None = None

    def start(self) -> "watch":
        """Begin. `stop` must be called, by any thread."""
        if self._target is not None:
            raise RuntimeError("this watch runs already")
        virtual = dispatch.install()
        try:
            self._begin(virtual)
        except BaseException:  # an interrupt
            if self._target is None:
                dispatch.remove()
            self.stop()
            raise
        return self

    def _begin(self, virtual: bool) -> None:
        self._tally = Tally(virtual)
        outer = attribute.current.get()
        while outer is not None and not outer.live:  # a suspended generator's may end in any order
            outer = outer.outer
        self._target = target = attribute.Target(self._tally, self._alarm, outer)
        with _lock:
            attribute.running = (*attribute.running, target)
        attribute.current.set(target)
        self._entered = torch_2_8.enter()

    def stop(self) -> None:
        """End; to call it twice does no harm."""
        target, self._target = self._target, None
        if target is None:
            return
        target.live = False
        try:
            torch_2_8.leave(self._entered)
            self._entered = None
            with _lock:
                attribute.running = tuple(t for t in attribute.running if t is not target)
            if attribute.current.get() is target:
                attribute.current.set(target.outer)
        finally:
            dispatch.remove()

    def __enter__(self) -> "watch":
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()

    @property
    def ledger(self) -> Ledger:
        """What was counted, up to now if it still runs."""
        return self._tally.ledger()

    @property
    def entries(self) -> tuple[Entry, ...]:
        """The ledger's entries."""
        return self.ledger.entries

    def __repr__(self) -> str:
        return view.line(self.ledger) or "no copies between devices, and no waits for one"

    def _repr_html_(self) -> str:
        return self.ledger._repr_html_()


def _forget() -> None:
    attribute.running = ()
    attribute.current.set(None)


if hasattr(os, "register_at_fork"):
    # A forked worker of a DataLoader is no part of the watched code.
    os.register_at_fork(after_in_child=_forget)
