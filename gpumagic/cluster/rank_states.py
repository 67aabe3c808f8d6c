"""Ask ranks what they do, and sample the GPUs of hosts that have only ranks.

One rank of each such host posts snapshots to the store while somebody watches. A reader gets the
last one at once.
"""

import json
import time
from contextlib import suppress
from typing import Any

from gpumagic import faults
from gpumagic.cluster import engine
from gpumagic.cluster.engines import Engines, RankEngine
from gpumagic.cluster.this_rank import looked_at, pulse_of, told_by
from gpumagic.errors import GpuError
from gpumagic.telemetry.collect import host_name
from gpumagic.telemetry.snapshot import Snapshot

ANSWER_S = 2.0


def rows_of(engines: Engines) -> tuple[dict[str, Any], ...]:
    """A row by rank; one that runs a cell or is gone cannot answer, and has a row too."""
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
            where = json.loads(engines.read(pulse_of(rank.number)) or b"{}")
            state = f"busy, line {where['line']}" if where else "busy"
        except GpuError:
            engines.check()
        state = f"gone: {rank.lost}" if rank.lost else state
        rows.append({"rank": rank.number, "state": state, **about})
    return tuple(rows)


# Who has not asked for so long looks no more.
_PATIENCE_S = 5.0


class RankHosts:
    """The other hosts on which a cluster has ranks."""

    def __init__(self, engines: Engines) -> None:
        self._engines = engines
        self._asked_at = float("-inf")
        self._looked_at: set[int] = set()  # ranks that say what their hosts do
        self._said: dict[str, Any] = {}  # by host

    def now(self) -> list[Snapshot]:
        """What their GPUs do, as a rank of each answers; one that runs a cell cannot."""
        asked = [self._engines.ask(rank, engine.host_now) for rank in self._elsewhere().values()]
        told = []
        for each in asked:
            with suppress(TimeoutError, GpuError):
                told.append(Snapshot.from_dict(self._engines.answer(each, ANSWER_S)))
        return told

    def heard(self) -> list[dict[str, Any]] | None:
        """What was said last of each host, and the ranks' processes there, at once; None where all
        ranks are on this host."""
        self._asked_at = time.monotonic()
        hosts, said = self._elsewhere(), self._said
        told = [
            {"pids": self._pids(host), "snapshot": said[host]} for host in hosts if host in said
        ]
        return told if hosts else None

    def listen(self) -> None:
        """Have a rank of each host say what it does while somebody looks; to be called often."""
        looks = time.monotonic() - self._asked_at < _PATIENCE_S
        wanted = {r.number: host for host, r in self._elsewhere().items()} if looks else {}
        store = self._engines.store
        with faults.kept("learning what the hosts of ranks do"):
            for number in self._looked_at - wanted.keys():
                store.delete_key(looked_at(number))
                store.delete_key(told_by(number))
            for number in wanted.keys() - self._looked_at:
                store.set(looked_at(number), "")
            self._looked_at = {*wanted}
            found = {host: self._engines.read(told_by(number)) for number, host in wanted.items()}
            self._said = {host: json.loads(said) for host, said in found.items() if said}

    def _elsewhere(self) -> dict[str, RankEngine]:
        """A rank of each host but this one."""
        there = [rank for rank in self._engines.ranks if not rank.lost]
        first = {rank.about["host"]: rank for rank in reversed(there)}
        first.pop(host_name(), None)
        return first

    def _pids(self, host: str) -> list[int]:
        ranks = self._engines.ranks
        return [rank.about["pid"] for rank in ranks if rank.about["host"] == host]
