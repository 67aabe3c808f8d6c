"""Ask each rank where it is and what it does, for the table of the ranks."""

import json
from contextlib import suppress
from typing import Any

from gpumagic.cluster import engine
from gpumagic.cluster.engines import Engines
from gpumagic.cluster.this_rank import pulse_of
from gpumagic.errors import GpuError

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
