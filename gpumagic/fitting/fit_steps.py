"""Search for the largest value that fits: foretell, then confirm, going up or down."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from gpumagic.device import Device
from gpumagic.device.cards import Card
from gpumagic.display.units import size
from gpumagic.dryrun.held_memory import measure
from gpumagic.errors import GpuError
from gpumagic.fitting.fit_result import Largest, Tried
from gpumagic.fitting.fit_search import largest
from gpumagic.fitting.fit_trials import Confirming, Predicting
from gpumagic.placement.torch_devices import as_torch
from gpumagic.telemetry.measurements import board
from gpumagic.usercode.program import Program

_MOST_RUNS = 8  # up and down, where what is measured leads back and forth


@dataclass(frozen=True)
class Asked:
    """What a fit is of."""

    program: Program
    space: dict[str, Any]
    name: str
    values: Sequence[float]  # ascending
    device: Device
    cards: tuple[Card, ...]  # that are not here, in the place of `device`
    margin: float
    dry: bool


@dataclass
class Fitting:
    """A search in progress; whatever happens, `found` and `tried` are what is known by then."""

    asked: Asked
    tell: Callable[[str], object]
    notes: dict[str, None] = field(default_factory=dict)
    interrupted: bool = False

    def __post_init__(self) -> None:
        a = self.asked
        where = [(card.name, card.usable) for card in a.cards] or [self._free()]
        self._rooms = {name: (free, int(free * (1 - a.margin))) for name, free in where}
        self.predicting = Predicting(a.program, a.space, a.name, a.device, a.cards, self._told)
        self._confirming = Confirming(a.program, a.space, a.name, a.device, self._told)

    def _free(self) -> tuple[str, int]:
        target = as_torch(self.asked.device)
        _, free = measure(target).memory[str(target)]
        if free is None:
            raise GpuError(f"how much memory is free on {target} is not known")
        return str(self.asked.device), free

    def _told(self, value: float, by: str) -> None:
        """Say how far it is."""
        tried = self._tried(value)
        (_, room), *_ = self._rooms.values()
        line = f"{by} of {self.asked.name} = {value}"
        if tried.ran is False:
            line += ": out of memory"
        elif tried.needed is not None:
            line += f" needs {size(tried.needed)}, and {size(room)} may be used"
        title = self.asked.program.text.strip().partition("\n")[0]
        board.post({"line": f"{title} · {line}", "bars": []})
        self.tell(line)

    # -- the search
    def run(self) -> None:
        """Foretell, and then confirm; what dry runs cannot follow is run from the start."""
        a, predict = self.asked, self.predicting
        predict(a.values[0])
        if predict.ended is not None:
            self._without_dry_runs()
            return
        for _, room in self._rooms.values():
            largest(a.values, predict, room)
        if not a.dry:
            self._confirm()

    def _without_dry_runs(self) -> None:
        run = self.predicting.ended
        assert run is not None
        ends = [str(m.error) for m in run.mismatches]
        ends += [run.error] if run.error else [str(u) for u in run.unknown if u.ended]
        self.predicting.needed.clear()
        if self.asked.dry:
            raise GpuError(f"a dry run cannot tell: {ends[0]}")
        self.predicting.trains = None
        self.notes[f"found by runs alone, since a dry run ends at {ends[0]}"] = None
        ((_, room),) = self._rooms.values()
        largest(self.asked.values, self._confirming, room, from_below=True)

    def _confirm(self) -> None:
        """Run the value that was foretold, and go up or down by what that measures."""
        ((free, room),) = self._rooms.values()
        run, values = self._confirming, self.asked.values
        beside = min(room, free - run.beside)  # the copies are there too
        for _ in range(_MOST_RUNS):
            value = largest(values, self._estimate, beside)
            if value is None or value in run.measured:
                break
            if math.isinf(run(value)):
                lower = [v for v in values if v < value]
                if lower:
                    largest(lower, run, beside)
                break
        best = largest(values, self._estimate, room)
        if best is not None and best not in run.measured:
            self.notes[
                f"{self.asked.name} = {best} is foretold alone: a run would need "
                f"{size(run.beside)} more, for copies of what lies there already"
            ] = None

    def _estimate(self, value: float) -> float:
        """What a value needs by all that is known; infinite from the one on that did not run."""
        measured = self._confirming.measured
        if value in measured:
            return measured[value]
        if any(math.isinf(need) and value >= refused for refused, need in measured.items()):
            return math.inf
        more = [m - self.predicting(v) for v, m in measured.items() if math.isfinite(m)]
        return self.predicting(value) + max(more, default=0.0)

    # -- what is known
    def _tried(self, value: float) -> Tried:
        measured = self._confirming.measured.get(value)
        return Tried(
            value,
            self.predicting.needed.get(value),
            int(measured) if measured is not None and math.isfinite(measured) else None,
            None if measured is None else math.isfinite(measured),
        )

    def tried(self) -> tuple[Tried, ...]:
        """All values that were asked about."""
        known = {**self.predicting.needed, **self._confirming.measured}
        return tuple(self._tried(value) for value in sorted(known))

    def found(self) -> tuple[Largest, ...]:
        """The largest value known to fit, for each place."""
        virtual = self.asked.device.virtual and not self.asked.cards
        return tuple(
            Largest(where, free, room, *self._largest(room), virtual)
            for where, (free, room) in self._rooms.items()
        )

    def _largest(self, room: int) -> tuple[float | None, bool]:
        """That value, and whether it ran."""
        tried, followed = self.tried(), self.predicting.ended is None
        need = self._estimate if followed else self._confirming.measured.__getitem__
        best = max((t.value for t in tried if need(t.value) <= room), default=None)
        return best, any(t.value == best and t.ran for t in tried)
