"""Say how far a comparison is, now and then and never while something is timed."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from gpumagic import faults
from gpumagic.display.units import age, duration

Stage = Literal["copy", "warm up", "timing", "done"]
_PERIOD_S = 0.1


@dataclass(frozen=True)
class Progress:
    """How far a comparison is."""

    title: str  # the first line of the code
    where: str  # the device that is measured now
    values: Mapping[str, Any] = field(default_factory=dict)  # of the sweep's variables there
    stage: Stage = "copy"
    repeat: int = 0  # that were timed; 0 in the other stages
    done: int = 0  # measurements, each of one device at one value
    total: int = 1
    elapsed: float = 0.0  # seconds
    remaining: float | None = None  # seconds, by those that are done; None while there are none
    # Of each device: where, its median at this value so far, and `"waiting"`, a stage, `"done"`, or
    # why there is none.
    bars: tuple[tuple[str, float | None, str], ...] = ()

    def __str__(self) -> str:
        """``"cuda:0 · n = 256 · repeat 12 · 2 of 3 devices · about 4 s left"``."""
        parts = [self.where, *(f"{name} = {value}" for name, value in self.values.items())]
        if self.stage == "timing":
            parts.append(f"repeat {self.repeat}" if self.repeat else "first run")
        else:
            parts.append("inputs and first run" if self.stage == "copy" else self.stage)
        if self.total > 1:
            kind = "" if self.values else " devices"
            parts.append(f"{min(self.done + 1, self.total)} of {self.total}{kind}")
        # At 0 an estimate is over, and what it was of may not be.
        if self.remaining:
            parts.append(f"about {age(max(self.remaining, 1))} left")
        return " · ".join(part for part in parts if part)

    @property
    def share(self) -> float | None:
        """How much of its time is over; None while there is no estimate of the rest."""
        if self.remaining is None:
            return None
        return self.elapsed / ((self.elapsed + self.remaining) or 1.0)

    def posted(self) -> dict[str, Any]:
        """As JSON, for the monitor: its line, and a bar for each device, out of the slowest."""
        return {"line": f"{self.title} · {self}", "bars": bars(self.bars)}


def bars(medians: Sequence[tuple[str, float | None, str]]) -> list[dict[str, Any]]:
    """A bar for each device, its share of the slowest median; its state if it has none."""
    spelled = {"copy": "copying"}
    slowest = max((seconds for _, seconds, _ in medians if seconds), default=0.0)
    return [
        {
            "where": where,
            "share": seconds / slowest if seconds else 0.0,
            "text": duration(seconds) if seconds is not None else spelled.get(state, state),
        }
        for where, seconds, state in medians
    ]


class Reporter:
    """Calls `call` at most ten times a second; what it raises does not end the comparison."""

    def __init__(
        self,
        call: Callable[[Progress], object],
        title: str,
        wheres: Sequence[str],
        total: int,
        clock: Callable[[], float],
    ) -> None:
        self._call, self._clock = call, clock
        self._now = Progress(title, wheres[0], total=total)
        self._bars: dict[str, tuple[float | None, str]] = dict.fromkeys(wheres, (None, "waiting"))
        self._began = self._begun = clock()
        self._told = -math.inf

    @property
    def due(self) -> bool:
        """Whether it is time to tell again."""
        return self._clock() - self._told >= _PERIOD_S

    def begin(self, where: str, values: Mapping[str, Any]) -> None:
        """The measurement of a device at a value begins."""
        if values != self._now.values:
            self._bars = dict.fromkeys(self._bars, (None, "waiting"))
        self._now = replace(self._now, where=where, values=dict(values))
        self._begun = self._clock()
        self.at("copy")

    def at(self, stage: Stage, repeat: int = 0, median: float | None = None) -> None:
        """It is at a stage, with this median so far."""
        self._now = replace(self._now, stage=stage, repeat=repeat)
        self._bars[self._now.where] = median, stage
        self._tell()

    def end(self, median: float | None, state: str = "done") -> None:
        """The measurement has ended."""
        self._now = replace(self._now, done=self._now.done + 1)
        self._bars[self._now.where] = median, state
        self._tell()

    def close(self) -> None:
        """All is done."""
        self._now = replace(self._now, stage="done")
        self._told = -math.inf
        self._tell()

    def _tell(self) -> None:
        if not self.due:
            return
        now = self._told = self._clock()
        bars = tuple((where, *bar) for where, bar in self._bars.items())
        with faults.kept("showing how far a comparison is"):
            elapsed, remaining = now - self._began, self._remaining(now)
            self._call(replace(self._now, elapsed=elapsed, remaining=remaining, bars=bars))

    def _remaining(self, now: float) -> float | None:
        done = self._now.done
        if self._now.stage == "done":
            return 0.0
        if not done:
            return None
        each = (self._begun - self._began) / done
        rest = max(self._now.total - done - 1, 0) * each
        # This one may take longer than those before, and says nothing of those that follow.
        return rest + max(each - (now - self._begun), 0.0)
