"""Define `gpumagic.watch()`, and the base class that counts the copies of JAX or TensorFlow."""

import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from types import FrameType, ModuleType
from typing import Any, NamedTuple

from gpumagic import faults
from gpumagic.device import has_virtual
from gpumagic.errors import CrossDeviceWarning
from gpumagic.frameworks.framework import Framework
from gpumagic.frameworks.known import counted_here
from gpumagic.ledger import ledger_view
from gpumagic.ledger.attribute import refusal
from gpumagic.ledger.entry import DISPLAY, PRINT, Count, Ledger, Tally, locate
from gpumagic.usercode.files import in_cell, is_ours, module_of


class watch:
    """Count copies between devices, and waits for a device: ``with gpumagic.watch() as w:``.

    A watch counts calls of torch, JAX and TensorFlow, but not of CuPy. Calls in an inner watch also
    count in the outer watch. All watches count the torch and JAX calls of a thread without a watch.

    Parameters
    ----------
    strict : bool
        Raise `ImplicitCopyError` at the first implicit copy or wait. A call that names no device,
        such as ``.item()``, is implicit.
    warn : bool, default True
        Give one `CrossDeviceWarning` for each line that repeatedly copies torch tensors between
        devices, or repeatedly waits for a device.
    frameworks : sequence of Framework, optional
        Count only these frameworks.

    Examples
    --------
    >>> with gpumagic.watch() as w:
    ...     for x in batches:
    ...         total += net(x.to("cuda:0")).sum().item()
    >>> w.ledger.transfers, w.ledger.waits, w.ledger.nbytes
    (10, 10, 81920)
    >>> w
    10 transfers: 80.0 KiB to cuda:0 at line 3: `x.to("cuda:0")`; 10 waits at line 3: …
    """

    def __init__(
        self,
        *,
        strict: bool = False,
        warn: bool = True,
        frameworks: Sequence[Framework] | None = None,
    ) -> None:
        self._strict, self._warn, self._frameworks = strict, warn, frameworks
        self._counting: ExitStack | None = None
        self.checks: AbstractContextManager[Any] = nullcontext()  # active while the watch runs
        self._tally = Tally()

    def start(self) -> "watch":
        """Start counting. Any thread may call `stop`."""
        if self._counting is not None:
            raise RuntimeError("this watch is already running")
        self._tally = Tally(virtual=has_virtual())
        with ExitStack() as stack:
            stack.enter_context(self.checks)
            for framework in counted_here() if self._frameworks is None else self._frameworks:
                with faults.kept(f"starting to count copies of {framework.name}"):
                    stack.enter_context(framework.count(self._tally, self._strict, warn=self._warn))
            self._counting = stack.pop_all()
        return self

    def stop(self, *exc: object) -> None:
        """Stop counting; a second call does nothing."""
        counting, self._counting = self._counting, None
        if counting is not None:
            counting.close()

    __enter__, __exit__ = start, stop

    @property
    def ledger(self) -> Ledger:
        """The copies and waits that were counted so far."""
        tally = self._tally
        return tally.ledger() if tally.counts else Ledger(virtual=tally.virtual)

    def __repr__(self) -> str:
        return ledger_view.line(self.ledger) or ledger_view.NOTHING

    def _repr_html_(self) -> str:
        return self.ledger._repr_html_()

    def _repr_mimebundle_(self, **_: object) -> dict[str, Any]:
        return self.ledger._repr_mimebundle_()


PRINTING = {"__repr__", "__str__", "__format__"}


def inside_of(framework: ModuleType, ours: str) -> Callable[[str], bool]:
    """Return a function that tells whether a file belongs to the framework or to its patches.
    The patches are this file, and the files in this folder whose names begin with `ours`."""
    its, here = (os.path.abspath(os.path.dirname(str(f))) for f in (framework.__file__, __file__))
    starts = os.path.join(its, ""), os.path.join(here, ours), os.path.abspath(__file__)
    return lru_cache(maxsize=4096)(lambda file: file.startswith(starts))


class Call(NamedTuple):
    """Record who called a function of the framework, and the function's name."""

    user: FrameType | None  # the innermost frame of the user's code
    inner: FrameType | None  # the innermost frame outside the framework
    via: str  # the cause of an indirect call, such as "print"; else empty
    function: str  # name of the called function

    @property
    def library(self) -> str:
        """The library module that made the call; empty for the user's code, or if `via` is set."""
        return "" if self.via or self.inner is None else module_of(self.inner.f_code.co_filename)


@dataclass(eq=False)
class Counter:
    """Record the state of a running watch."""

    tally: Tally
    strict: bool
    thread: int  # ident of the thread that began the watch


class CopyCounting:
    """Count a framework's copies and waits at each line of the user's code."""

    framework: str
    inside: Callable[[str], bool]  # see `inside_of`
    around: Collection[str] = ()
    """Names of the framework's internal wrappers; `Call.function` is never one of these."""
    all_threads = False  # whether watches also count threads that began no watch

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._running: tuple[Counter, ...] = ()
        self._patches = ExitStack()

    def patch(self, stack: ExitStack) -> None:
        """Patch the framework until `stack` is closed; GpuError if copies cannot be counted."""
        raise NotImplementedError

    def instead(self, count: Count) -> str:
        """Return advice on how to make an implicit copy or wait explicit."""
        raise NotImplementedError

    @contextmanager
    def count(self, tally: Tally, strict: bool) -> Iterator[None]:
        """Within the context, add the framework's copies and waits to `tally`."""
        one = Counter(tally, strict, threading.get_ident())
        with self._lock:
            if not self._running:
                with ExitStack() as stack:
                    self.patch(stack)
                    self._patches = stack.pop_all()
            self._running = (*self._running, one)
        try:
            yield
        finally:
            with self._lock:
                self._running = tuple(other for other in self._running if other is not one)
                if not self._running:
                    self._patches.close()

    def wrapped(self, real: Callable[..., Any], ask: Callable[..., Any]) -> Any:
        """Return a function that calls `ask`, then `real`, then the function that `ask` returned.
        The last function gets the result of `real` and its seconds. `ask` may also return None."""

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            if (after := self.guarded(ask, *args, **kwargs)) is None:
                return real(*args, **kwargs)
            start = time.perf_counter()
            result = real(*args, **kwargs)
            self.guarded(after, result, time.perf_counter() - start)
            return result

        return wrapped

    def guarded(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        try:
            return call(*args, **kwargs)
        except CrossDeviceWarning:  # from `refuse`, if a watch is strict
            raise
        except Exception as error:  # noqa: BLE001  must not stop the user's copy
            faults.keep(f"counting a copy by {self.framework}", error)

    def counters(self) -> Sequence[Counter]:
        mine = [one for one in self._running if one.thread == threading.get_ident()]
        return mine or (self._running if self.all_threads else ())

    def called_from(self, never: Collection[str] = ()) -> Call | None:
        """Return the framework's call that is running now. None if no watch counts this thread, if
        gpumagic made the call, or if the call runs within a function named in `never`."""
        if not self.counters():
            return None
        frame: FrameType | None = sys._getframe()
        function, printing = "", False
        while frame is not None and self.inside(frame.f_code.co_filename):
            if (name := frame.f_code.co_name) in never:
                return None
            printing = printing or name in PRINTING
            function = function if name in self.around else name
            frame = frame.f_back
        if frame is not None and is_ours(frame.f_code.co_filename):
            return None
        user, via = locate(frame, self._running)
        return Call(user, frame, via or (PRINT if printing else ""), function)

    def counts(
        self, call: Call, kind: str, operator: str, ends: tuple[str, str], **about: Any
    ) -> list[Count]:
        """Return the call's `Count` in each watch's `Tally`. New counts get the fields `about`."""
        frames = call.user, call.inner
        at = [None if frame is None else (id(frame.f_code), frame.f_lasti) for frame in frames]
        key = ((kind, operator, *ends), *at, call.via, threading.get_ident())
        found = []
        for one in self.counters():
            if (count := one.tally.counts.get(key)) is None:
                place = None if call.user is None else in_cell(call.user)
                # Keep the code of both frames alive, so that the ids in the key stay unique.
                kept = [None if frame is None else frame.f_code for frame in frames]
                about |= {"framework": self.framework, "via": call.via, "at": place, "kept": kept}
                count = one.tally.add(key, Count(kind, operator, *ends, **about))
            found.append(count)
        return found

    def refuse(self, counts: Iterable[Count]) -> None:
        """Raise ImplicitCopyError for an implicit copy or wait, if a running watch is strict."""
        __tracebackhide__ = True
        if any(one.strict for one in self.counters()):
            for count in counts:
                if count.implicit and count.via != DISPLAY and not count.within:
                    raise refusal(count, self.instead(count))
