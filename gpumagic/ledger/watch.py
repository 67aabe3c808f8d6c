"""Watch a stretch of code with `gpumagic.watch()`: count its copies and waits.

Nothing is counted outside of a watch, and a watch counts only its own thread or task.
"""

import os
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from importlib.util import find_spec
from types import ModuleType

from gpumagic.ledger import attribute, ledger_view
from gpumagic.ledger.advice import Alarm
from gpumagic.ledger.entry import Entry, Ledger, Tally
from gpumagic.usercode.values import torch_here

_lock = threading.RLock()
BESIDE: list[Callable[[Tally, bool], AbstractContextManager[object]]] = []
"""Context managers that count for other frameworks than torch: into a tally, strictly or not."""


def _torch() -> ModuleType | None:
    """Return the context that counts for torch; None if torch is not installed."""
    if torch_here() is None and find_spec("torch") is None:
        return None
    from gpumagic.ledger import dispatch

    return dispatch


class watch:
    """Count every copy between devices and every wait for one: ``with gpumagic.watch() as w:``.

    It counts the code within, also in threads that the code starts and in nested watches: of torch,
    and of JAX and TensorFlow once they are imported. At the first watch, a few of torch's operators
    are replaced at the devices' own dispatch key; they pass calls on while nothing watches. Nothing
    else of torch is replaced.

    Parameters
    ----------
    strict : bool
        Raise `ImplicitCopyError` at the first copy or wait that is implicit.
    warn : bool, default True
        Give a `CrossDeviceWarning` once for each line where torch's tensors are copied or waited
        for again and again.
    beside : bool, default True
        Count the other frameworks too.

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

    def __init__(self, *, strict: bool = False, warn: bool = True, beside: bool = True) -> None:
        self._strict = strict
        self._beside = BESIDE if beside else ()
        self._others: ExitStack | None = None
        self._alarm = Alarm(strict=strict) if strict or warn else None
        self._active: attribute.ActiveWatch | None = None
        self._tally = Tally()

    def start(self) -> "watch":
        """Begin to count. `stop` must be called, by any thread."""
        if self._active is not None:
            raise RuntimeError("this watch runs already")
        self._tally = Tally()
        outer = attribute.current.get()
        while outer is not None and not outer.live:  # a suspended generator's may end in any order
            outer = outer.outer
        active = attribute.ActiveWatch(self._tally, self._alarm, self._strict, outer)
        self._active = active
        try:
            with _lock:
                attribute.running = (*attribute.running, active)
            # What is idle is taken out only while nothing runs, so this comes after.
            attribute.current.set(active)
            if torch := _torch():
                self._tally.virtual = torch.install()
            if self._beside:
                self._others = ExitStack()
                for count in self._beside:
                    self._others.enter_context(count(self._tally, self._strict))
        except BaseException:  # an interrupt
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """Stop counting; calling it twice does no harm."""
        active, self._active = self._active, None
        if active is None:
            return
        active.live = False
        if self._others is not None:
            self._others.close()
        with _lock:
            attribute.running = tuple(w for w in attribute.running if w is not active)
        if attribute.current.get() is active:
            attribute.current.set(active.outer)

    def __enter__(self) -> "watch":
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()

    @property
    def ledger(self) -> Ledger:
        """What was counted, up to now if it still runs."""
        tally = self._tally
        return tally.ledger() if tally.counts else Ledger(virtual=tally.virtual)

    @property
    def entries(self) -> tuple[Entry, ...]:
        """The ledger's entries."""
        return self.ledger.entries

    def __repr__(self) -> str:
        return ledger_view.line(self.ledger) or ledger_view.NOTHING

    def _repr_html_(self) -> str:
        return self.ledger._repr_html_()


def _forget() -> None:
    attribute.running = ()
    attribute.current.set(None)


if hasattr(os, "register_at_fork"):
    # A forked worker of a DataLoader is no part of the watched code.
    os.register_at_fork(after_in_child=_forget)
