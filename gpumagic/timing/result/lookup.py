"""Look timings up by device and by point of a sweep.

A device may be spelled in any way that people use, and need not be on this machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from functools import cached_property
from itertools import combinations, product
from typing import Any

from gpumagic import device as names
from gpumagic.device import Device
from gpumagic.errors import GpuError
from gpumagic.timing.ask import sweep as sweeping
from gpumagic.timing.result.crossover import Crossover, flips
from gpumagic.timing.result.machine import Machine
from gpumagic.timing.result.timing import Agreement, Timing


class Lookup:
    """The part of a `Comparison` that its own judgements build on."""

    timings: tuple[Timing, ...]
    agreements: tuple[Agreement, ...]
    sweep: Mapping[str, tuple[Any, ...]]
    machine: Machine

    @cached_property
    def devices(self) -> tuple[str, ...]:
        """Every WHERE once, in their order."""
        return tuple(dict.fromkeys(t.where for t in self.timings))

    @cached_property
    def alone(self) -> tuple[str, ...]:
        """The devices without those that ran together, unless there are no others."""
        return tuple(where for where in self.devices if "+" not in where) or self.devices

    @cached_property
    def points(self) -> list[dict[str, Any]]:
        """The points of which something is known, in the order of measuring."""
        return list({sweeping.key(t.values): dict(t.values) for t in self.timings}.values())

    @cached_property
    def _by_point(self) -> dict[tuple[str, tuple[tuple[str, str], ...]], Timing]:
        return {(t.where, sweeping.key(t.values)): t for t in self.timings}

    def at(self, where: str, values: Mapping[str, Any]) -> Timing | None:
        """The timing of one of `devices` at one point; None where it was not measured."""
        return self._by_point.get((where, sweeping.key(values)))

    def among(self, where: object) -> str:
        """The one of `devices` that `where` names; `GpuError` if it is none."""
        if where in self.devices:
            return str(where)
        parts = {part for name in self.devices for part in name.split("+")}
        ordinals = sorted(int(part[5:]) for part in parts if part.startswith("cuda:"))
        known = [Device("cuda", ordinal=ordinal) for ordinal in ordinals]
        with suppress(GpuError):
            asked = [str(names.resolve_one(part.strip(), known)) for part in str(where).split("+")]
            for name in self.devices:
                if sorted(asked) == sorted(name.split("+")):
                    return name
        has = ", ".join(self.devices)
        raise GpuError(f"{sweeping.label(where)} is not in this comparison; it has {has}")

    def timing(self, where: object, **values: Any) -> Timing:
        """One device's timing, at one point of the sweep.

        Parameters
        ----------
        where : object
            As anywhere: ``"cuda:0"``, ``0``, ``"cpu"``; ``"0+1"``.
        **values
            The sweep's variables: ``n=256``.

        Raises
        ------
        GpuError
            It is not in this comparison.
        """
        name = self.among(where)
        if set(values) != set(self.sweep):
            wanted = ", ".join(f"{v}={sweeping.label(x[0])}" for v, x in self.sweep.items())
            raise GpuError(
                f"the sweep is over {', '.join(self.sweep)}; say at which value: {wanted}"
                if self.sweep
                else f"there is no sweep over {', '.join(values)}; leave it out"
            )
        found = self.at(name, values)
        if found is None:
            asked = ", ".join(f"{v} = {sweeping.label(x)}" for v, x in values.items())
            raise GpuError(f"{name} was not timed at {asked}; see .sweep for its values")
        return found

    def median(self, where: object, **values: Any) -> float:
        """Seconds of one run. Raises `GpuError` like `timing`, and where there is no time."""
        found = self.timing(where, **values)
        if found.median is None:
            raise GpuError(f"{found.where} has no time: {found.error or 'it was not measured'}")
        return found.median

    def of(self, where: str) -> list[Timing]:
        """One device's timings, in the order of measuring."""
        return [t for t in self.timings if t.where == where]

    def disagreement(self, where: str) -> Agreement | None:
        """The worst one of a device that gave other numbers than the first."""
        found = [a for a in self.agreements if a.where == where and a.same is False]
        return max(found, key=lambda a: a.largest or 0.0, default=None)

    @cached_property
    def axis(self) -> str | None:
        """The variable to draw along: the first with the most numbers; None without a sweep."""
        if not self.sweep:
            return None

        def numbers(name: str) -> int:
            values = self.sweep[name]
            return len(values) if all(sweeping.number(v) is not None for v in values) else 0

        return max(self.sweep, key=numbers)

    @cached_property
    def crossovers(self) -> tuple[Crossover, ...]:
        """Where the order of two devices flips; empty where `axis` has no numbers.

        Of every two devices, for each value of the sweep's other variable.
        """
        name = self.axis
        values = self.sweep[name] if name else ()
        known = [(x, value) for value in values if (x := sweeping.number(value)) is not None]
        if name is None or len(known) < len(values):
            return ()
        known.sort(key=lambda pair: pair[0])
        found = []
        for fixed, (a, b) in product(self.panels, combinations(self.alone, 2)):
            first, second = (
                [self.at(where, {**fixed, name: value}) for _, value in known] for where in (a, b)
            )
            for x, seconds, now in flips([x for x, _ in known], first, second):
                faster, slower = (a, b) if now == 0 else (b, a)
                found.append(Crossover(faster, slower, name, x, seconds, fixed))
        return tuple(found)

    @cached_property
    def panels(self) -> list[dict[str, Any]]:
        """The other variable at each of its values: a plot each; ``[{}]`` where there is none."""
        others = {name: values for name, values in self.sweep.items() if name != self.axis}
        return sweeping.points(others)
