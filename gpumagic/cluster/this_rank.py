"""Tell the notebook where the cell of this rank is, and end the cell when the notebook wants it.

An interrupt may come late: it ends no other cell than the one of which the store says that it is to
end. Python does not see one while it waits in a collective; a thread does.
"""

import json
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from gpumagic.cluster import group, leash
from gpumagic.cluster.bounded import bound_logs
from gpumagic.device import Device
from gpumagic.telemetry.sampler import Subscription, shared_sampler
from gpumagic.telemetry.snapshot import Snapshot

_PULSE_S = 0.5
# An interrupt that Python has not seen by then waits behind a collective.
_FREE_S = 1.0


def ending(cell: str) -> str:
    """The key in the store that is there once a cell is to end."""
    return f"end/{cell}"


def pulse_of(rank: int) -> str:
    """The key of what a rank said last of where it is; not there before it did."""
    return f"pulse/{rank}"


def looked_at(rank: int) -> str:
    """The key that is there while a rank is to say what the GPUs of its host do."""
    return f"look/{rank}"


def told_by(rank: int) -> str:
    """The key of what it said last of them."""
    return f"host/{rank}"


class ThisRank:
    """This process, once it is a rank."""

    def __init__(self, rank: int, device: Device, store: tuple[str, int]) -> None:
        self.rank, self.device = rank, device
        self.main = threading.get_ident()
        self.running = ""  # the cell
        self.cut = self.in_code = False
        self._watching: Subscription | None = None
        self._store = group.store_at(*store)
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)
        threading.Thread(target=self._pulse, daemon=True).start()
        threading.Thread(target=self._free, daemon=True).start()

    @contextmanager
    def runs(self, cell: str) -> Iterator[None]:
        """Within, the notebook hears where the cell is, and an interrupt ends a collective."""
        before = signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
        handler = signal.signal(signal.SIGINT, self._interrupt)
        self.cut, self.running = False, cell
        try:
            yield
        finally:
            self.running = ""
            signal.signal(signal.SIGINT, handler)
            signal.set_wakeup_fd(before)

    def _is_there(self, key: str) -> bool:
        try:
            return bool(self._store.check([key]))
        except RuntimeError:
            leash.end_orphan()
            return True

    def _is_to_end(self, cell: str) -> bool:
        return bool(cell) and self._is_there(ending(cell))

    def _interrupt(self, *_: object) -> None:
        """Interrupt the user's code, and nothing that has to be done after it."""
        if self.in_code and self._is_to_end(self.running):
            self.in_code = False
            raise KeyboardInterrupt

    def _pulse(self) -> None:
        """Say every half second where the cell is, and since when it is there and does nothing."""
        last, since, used = None, 0.0, 0.0
        while True:
            time.sleep(_PULSE_S)
            bound_logs()
            self._watch_host(self._is_there(looked_at(self.rank)))
            running = self.running
            if not running:
                self._say(pulse_of(self.rank), "")
                continue
            now, busy = time.monotonic(), time.process_time()
            place = running, *group.place_of(self.main)
            if place != last or busy - used > _PULSE_S / 4:
                last, since = place, now
            used = busy
            said = dict(zip(("cell", "file", "line", "call"), place, strict=True))
            self._say(pulse_of(self.rank), json.dumps({**said, "idle": now - since}))

    def _watch_host(self, wanted: bool) -> None:
        if wanted and self._watching is None:
            self._watching = shared_sampler().subscribe(self._say_host, processes=True)
        elif self._watching is not None and not wanted:
            self._watching.close()
            self._watching = None

    def _say_host(self, snapshot: Snapshot) -> None:
        self._say(told_by(self.rank), json.dumps(snapshot.to_dict()))

    def _say(self, key: str, said: str) -> None:
        try:
            self._store.set(key, said)
        except RuntimeError:
            leash.end_orphan()

    def _free(self) -> None:
        """The C level of an interrupt writes here, also while Python waits in a collective."""
        while number := self._woken.recv(1):
            cell = self.running
            if number[0] == signal.SIGINT and self._is_to_end(cell):
                time.sleep(_FREE_S)
                if self.running == cell:
                    self.cut = group.cut()
