"""Search for the largest value that fits: foretell, then confirm, going up or down."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from gpumagic import faults
from gpumagic.display.units import size
from gpumagic.dryrun.held_memory import measure
from gpumagic.errors import GpuError
from gpumagic.fitting.fit_result import Largest, Tried
from gpumagic.fitting.fit_search import largest
from gpumagic.fitting.fit_trials import Asked, Confirming, Predicting
from gpumagic.placement.torch_devices import as_torch
from gpumagic.telemetry.history import board

_MOST_RUNS = 8  # up and down, where what is measured leads back and forth


@dataclass
class Fitting:
    """A search in progress; whatever happens, `found`, `tried` and `stopped` say what is known."""

    asked: Asked
    tell: Callable[[str], object]
    notes: dict[str, None] = field(default_factory=dict)
    interrupted: bool = False
    stopped: str = ""  # why larger values are not known

    def __post_init__(self) -> None:
        a = self.asked
        where = [(card.name, card.usable) for card in a.cards] or [self._free()]
        self._rooms = {name: (free, int(free * (1 - a.margin))) for name, free in where}
        self.predicting = Predicting(a, self._told)
        self._values, self._last = a.values, a.values[0]
        self._confirming = Confirming(a, self._told)

    def _free(self) -> tuple[str, int]:
        target = as_torch(self.asked.device)
        _, free = measure(target).memory[str(target)]
        if free is None:
            raise GpuError(f"how much memory is free on {target} is not known")
        return str(self.asked.device), free

    def _told(self, value: float, by: str) -> None:
        """Say how far it is."""
        self._last = value
        tried = self._tried(value)
        (_, room), *_ = self._rooms.values()
        line = f"{by} of {self.asked.name} = {value}"
        if tried.ran is False:
            line += ": out of memory"
        elif value in self.predicting.ended:
            line += f" ended early: {self.predicting.ended[value]}"
        elif tried.needed is not None:
            line += f" needs {size(tried.needed)}, and {size(room)} may be used"
        title = self.asked.program.text.strip().partition("\n")[0]
        board.post({"line": f"{title} · {line}", "bars": []})
        self.tell(line)

    # -- the search
    def run(self) -> None:
        """Foretell, and then confirm; what dry runs cannot follow is run from the start."""
        predict = self.predicting
        self._leave_out_first(predict.raises)
        if math.isinf(predict(self._values[0])):
            self._without_dry_runs()
            return
        for _, room in self._rooms.values():
            largest(self._values, predict, room)
        if not self.asked.dry:
            self._confirm()
        self._say_what_is_open()

    def _leave_out_first(self, raises: dict[float, str]) -> None:
        """The first value where the code fails at it alone, as BatchNorm does at 1."""
        first, *rest = self._values[:2]
        self.predicting(first)
        if first in raises and rest and math.isfinite(self.predicting(rest[0])):
            self.notes[f"{self.asked.name} = {first} raises {raises[first]}"] = None
            self._values = self._values[1:]

    def _without_dry_runs(self) -> None:
        name, predict, run = self.asked.name, self.predicting, self._confirming
        why = predict.ended[self._values[0]]
        predict.needed.clear()
        if self.asked.dry:
            raise GpuError(f"a dry run cannot tell: {why}")
        predict.trains = None
        self.notes[f"found by runs alone, since a dry run ends at {why}"] = None
        ((_, room),) = self._rooms.values()
        first, *rest = self._values[:2]
        try:
            run(first)
        except Exception as error:
            try:
                again = run(rest[0]) if rest else None
            except Exception:  # noqa: BLE001  the first value's tells it
                again = None
            if again is None:
                run.error = error
                raise
            self.notes[f"{name} = {first} raises {faults.in_words(error)}"] = None
            self._values = self._values[1:]
        largest(self._values, run, room, from_below=True)

    def stop(self, error: Exception) -> bool:
        """Take an error as the end of the search; False where it is the code's or all there is."""
        if error is self._confirming.error or not self.tried():
            return False
        ours = "" if isinstance(error, GpuError) else "a fault of gpumagic: "
        self.stopped = (
            f"stopped at {self.asked.name} = {self._last}: {ours}{faults.in_words(error)}; "
            "this is what was known by then"
        )
        return True

    def _say_what_is_open(self) -> None:
        """That a value could not be told, where all that is smaller fits."""
        for found in self.found():
            ended = [v for v in self.predicting.ended if found.value and v > found.value]
            known = [t.value for t in self.tried() if found.value and t.value > found.value]
            if ended and min(ended) < min(known, default=math.inf):
                value = min(ended)
                why = self.predicting.ended[value]
                what = "raises" if value in self.predicting.raises else "is not known:"
                self.stopped = f"{self.asked.name} = {value} {what} {why}"

    def _confirm(self) -> None:
        """Run the predicted value, and go up or down by what that measures."""
        ((free, room),) = self._rooms.values()
        run, values = self._confirming, self._values
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
                f"{self.asked.name} = {best} is only predicted: a run would need "
                f"{size(run.beside)} more, for copies of what lies there already"
            ] = None

    def _estimate(self, value: float) -> float:
        """What a value needs by all that is known; infinite from the one on that did not run."""
        measured = self._confirming.measured
        if value in measured:
            return measured[value]
        if any(math.isinf(need) and value >= refused for refused, need in measured.items()):
            return math.inf
        known = self.predicting.needed
        more = [m - known[v] for v, m in measured.items() if math.isfinite(m) and v in known]
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
        tried = self.tried()
        best = max((t.value for t in tried if self._estimate(t.value) <= room), default=None)
        return best, any(t.value == best and t.ran for t in tried)
