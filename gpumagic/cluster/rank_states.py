"""Ask ranks what they do, and sample the GPUs of hosts that have only ranks.

One rank of each such host posts snapshots to the store while somebody watches. A reader gets the
last one at once.
"""

import time
from contextlib import suppress
from typing import Any

from gpumagic import faults
from gpumagic.cluster import engine
from gpumagic.cluster.engines import Engines, RankEngine
from gpumagic.cluster.this_rank import HOST_REPORT, PULSE, WATCHED
from gpumagic.errors import GpuError
from gpumagic.telemetry.collect import host_name
from gpumagic.telemetry.snapshot import Snapshot

ANSWER_S = 2.0


def rows_of(engines: Engines) -> tuple[dict[str, Any], ...]:
    """Return a row for each rank; also for one that is busy or dead and cannot answer."""
    engines.check()
    asked: dict[int, Any] = {}
    for rank in engines.ranks:
        with suppress(GpuError):
            asked[rank.number] = engines.ask(rank, engine.about)
    rows = []
    for rank in engines.ranks:
        about, state = dict(rank.about, used=None), "idle"
        try:
            about = engines.answer(asked.get(rank.number), ANSWER_S)
        except TimeoutError:
            where = engines.read(PULSE.format(rank.number))
            state = f"busy, line {where['line']}" if where else "busy"
        except GpuError:
            engines.check()
        state = f"gone: {rank.lost}" if rank.lost else state
        rows.append({"rank": rank.number, "state": state, **about})
    return tuple(rows)


# After this many seconds without a request, nobody watches.
_PATIENCE_S = 5.0
_LOOK_S = 0.05


class RankHosts:
    """Other hosts that have ranks of a cluster."""

    def __init__(self, engines: Engines) -> None:
        self._engines = engines
        self._asked_at = float("-inf")
        self._watched: set[int] = set()  # ranks that report their host
        self._last: dict[str, Any] = {}  # by host

    def now(self) -> list[Snapshot]:
        """Return a snapshot of each host, without hosts that do not answer in time."""
        before, until = self._asked_at, time.monotonic() + ANSWER_S
        while len(found := self.heard() or []) < len(self._elsewhere()):
            if time.monotonic() > until:
                break
            self.listen()
            time.sleep(_LOOK_S)
        self._asked_at = before
        self.listen()
        return [Snapshot.from_dict(each["snapshot"]) for each in found]

    def heard(self) -> list[dict[str, Any]] | None:
        """Return the last snapshot of each host and the ranks' processes there, at once; None if
        all ranks are on this host."""
        self._asked_at = time.monotonic()
        hosts, last = self._elsewhere(), self._last
        found = [
            {"pids": self._pids(host), "snapshot": last[host]} for host in hosts if host in last
        ]
        return found if hosts else None

    def listen(self) -> None:
        """Make a rank of each host report while somebody watches; call this often."""
        looks = time.monotonic() - self._asked_at < _PATIENCE_S
        wanted = {r.number: host for host, r in self._elsewhere().items()} if looks else {}
        store = self._engines.store
        with faults.kept("learning what the hosts of ranks do"):
            for number in self._watched - wanted.keys():
                store.delete_key(WATCHED.format(number))
            for number in wanted.keys() - self._watched:
                store.delete_key(HOST_REPORT.format(number))
                store.set(WATCHED.format(number), "")
            self._watched = {*wanted}
            read = self._engines.read
            found = {host: read(HOST_REPORT.format(n)) for n, host in wanted.items()}
            self._last = {host: said for host, said in found.items() if said}

    def _elsewhere(self) -> dict[str, RankEngine]:
        """Return a rank of each other host."""
        there = [rank for rank in self._engines.ranks if not rank.lost]
        first = {rank.about["host"]: rank for rank in reversed(there)}
        first.pop(host_name(), None)
        return first

    def _pids(self, host: str) -> list[int]:
        ranks = self._engines.ranks
        return [rank.about["pid"] for rank in ranks if rank.about["host"] == host]
