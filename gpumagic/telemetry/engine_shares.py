"""Tell how busy each process kept each GPU, by what its engines had done at the last look."""

import time
from collections.abc import Callable, Iterable

from gpumagic import drm

# A mean over longer than this says nothing of now.
_LONGEST_S = 30.0


class EngineShares:
    """Remembers each client's counters; the clock is for those that count nanoseconds."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._looked = float("-inf")
        # Of each client and engine what was done, and what could have been.
        self._before: dict[tuple[str, int, str], tuple[int, int | None]] = {}

    def look(self, clients: Iterable[drm.Client]) -> dict[tuple[int, str], float]:
        """Percent by pid and PCI address: of the engine that a process kept busiest since the last
        look; none of who was not there then, or where that is long ago."""
        now, before, self._before = self._monotonic(), self._before, {}
        passed_s, self._looked = now - self._looked, now
        shares: dict[tuple[int, str, str], float] = {}
        for client in clients:
            for engine, (done, of, capacity) in client.engines.items():
                key = (client.address, client.id, engine)
                was, was_of = before.get(key, (done, None))
                # A value may fall for a while; until it has caught up, the larger one holds.
                self._before[key] = max(done, was), of
                possible = passed_s * 1e9 if of is None else of - (was_of or of)
                if key in before and 0 < passed_s <= _LONGEST_S and possible > 0:
                    its = (client.pid, client.address, engine)
                    share = 100.0 * (max(done, was) - was) / possible / capacity
                    shares[its] = shares.get(its, 0.0) + share
        busy: dict[tuple[int, str], float] = {}
        for (pid, address, _), share in shares.items():
            busy[pid, address] = max(busy.get((pid, address), 0.0), min(share, 100.0))
        return busy
