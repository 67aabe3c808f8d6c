"""Save variables of the ranks after cells, when it is due, and load them again.

A checkpoint is a directory. It is written under a temporary name and renamed when it is complete,
so an interrupted save leaves the previous checkpoint intact. The ranks write it, in `saving`.
"""

import json
import os
import re
import shutil
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from gpumagic import faults
from gpumagic.cluster.engines import RanksError, interrupt
from gpumagic.display.progress_line import ProgressLine
from gpumagic.display.units import duration, size, some
from gpumagic.errors import GpuError
from gpumagic.usercode.files import shell

_SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0}
_STOP_S, _LOOK_S = 60.0, 0.5  # so long the end of a cluster waits for a save
_INCOMPLETE, _ABOUT = ".incomplete", "about.json"
_KEPT = 2


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint: its directory, and what is known of it."""

    path: str
    variables: dict[str, str]  # module, optimizer, state, tensor or data, by name
    nbytes: int
    ranks: int  # that saved it
    saved: float  # seconds since 1970

    def __str__(self) -> str:
        return f"checkpoint of {some(self.variables)}: {size(self.nbytes)} to {self.path}"

    def loaded(self) -> str:
        """What is said when it has been loaded."""
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.saved))
        names, ranks = some(self.variables), f"{self.ranks} rank{'s' * (self.ranks > 1)}"
        return f"{names} loaded from {self.path}, saved {when} by {ranks}"


def begin(directory: str) -> Path:
    """Make the directory in which the next one is to be written."""
    numbers = [int(path.name[:6]) for path in _each(Path(directory))]
    path = Path(directory) / f"{max(numbers, default=0) + 1:06}{_INCOMPLETE}"
    path.mkdir(parents=True)
    return path


def complete(path: Path, checkpoint: Checkpoint) -> None:
    """Give one that is whole its name, and remove those that are too old."""
    (path / _ABOUT).write_text(json.dumps(asdict(checkpoint)))
    os.replace(path, checkpoint.path)
    older = [each for each in _each(path.parent) if each.name[:6] < path.name[:6]]
    whole = [each for each in older if not each.suffix]
    for each in {*older} - {*whole[1 - _KEPT :]}:
        shutil.rmtree(each, ignore_errors=True)


def find(directory: str) -> Checkpoint:
    """The last complete one in a directory, or the one that it is itself. Raises `GpuError`."""
    for path in (Path(directory), *reversed(_each(Path(directory)))):
        if (path / _ABOUT).is_file() and path.suffix != _INCOMPLETE:
            about = json.loads((path / _ABOUT).read_text())
            return Checkpoint(**{**about, "path": str(path)})
    raise GpuError(f"{directory}: there is no complete checkpoint")


def _each(directory: Path) -> list[Path]:
    """Those that there are, the oldest first."""
    return sorted(p for suffix in ("", _INCOMPLETE) for p in directory.glob("[0-9]" * 6 + suffix))


class Checkpoints:
    """The checkpoints of one cluster."""

    def __init__(self, cluster: Any) -> None:
        self._cluster = cluster
        self._plan: tuple[list[str], str, float] | None = None  # names, where to, every seconds
        self._due = 0.0
        self._written: Checkpoint | None = None  # meanwhile, by the ranks
        self._calls = False

    def save(self, *names: str, to: str | None, every: str | None = None) -> Checkpoint | None:
        """Save variables of the ranks, now or after cells.

        Tensors, numbers, lists, dicts, and what has a `state_dict`; of what is whole on each rank,
        rank 0's. `to` is a directory that all ranks see, in which the last two stay; `every` is
        ``"10min"``, ``"30s"``, ``"2h"``: after cells. Raises `GpuError`, and nothing was written.
        """
        if not names or len(set(names)) < len(names) or not to:
            raise GpuError("name each variable once, as in checkpoint net,opt --to runs/cats")
        directory = os.path.abspath(os.path.expanduser(to))
        if every is not None:
            found = re.fullmatch(r"(\d+(?:\.\d+)?)(s|min|h)", every)
            if not found or not float(found[1]):
                raise GpuError(f"--every {every}: type --every 10min, 30s or 2h")
            plan = [*names], directory, float(found[1]) * _SECONDS[found[2]]
            self._call(f"start({[*names]}, '')")  # refuses now what it would refuse then
            self._plan, self._due = plan, time.monotonic() + plan[2]
            return None
        self._wait()
        made: Checkpoint = self._call(f"start({[*names]}, {directory!r})")
        self._written = made
        if error := self._wait():
            raise GpuError(f"{made} failed: {error}")
        return made

    def restore(self, directory: str) -> Checkpoint:
        """Load a checkpoint into the variables of all ranks, which may be another number of them.

        The last complete one in the directory, or the one that it is. Raises `GpuError` for a
        module or an optimizer that is not there or has another shape; then nothing was changed.
        """
        self._wait()
        path = os.path.abspath(os.path.expanduser(directory))
        loaded: Checkpoint = self._call(f"restore({path!r})")
        self._cluster.keep(*loaded.variables)
        return loaded

    def off(self) -> None:
        """Save no more after cells; what is being written is waited for."""
        self._plan = None
        self._wait(_STOP_S)

    def after_cell(self) -> None:
        """Tell of the save that failed, and begin the next if it is time; fails in no case."""
        if self._calls or not (self._plan or self._written):
            return
        notes = []
        try:
            written = self._written
            if written and (error := self._ended(0.0)):
                notes.append(f"{written} failed: {error}")
            if self._plan and not self._written and time.monotonic() >= self._due:
                names, directory, every_s = self._plan
                self._due = time.monotonic() + every_s
                self._written = self._call(f"start({names}, {directory!r})")
                notes.append(str(self._written))
        except (GpuError, RanksError, KeyboardInterrupt) as error:
            notes.append(f"no checkpoint: {faults.in_words(error)}")
        if notes and (report := self._cluster.last_report):
            self._cluster.last_report = replace(report, notes=(*report.notes, *notes))

    def _call(self, call: str, where: str = "@all") -> Any:
        """Call one of `saving` as a cell does, which Ctrl-C or a death ends; rank 0's answer."""
        report = self._cluster.last_report
        self._calls = True
        try:
            code = f"__import__('gpumagic.cluster.saving', fromlist=['saving']).{call}"
            answer = self._cluster.run(code, where)[0][0]
        finally:
            self._cluster.last_report, self._calls = report, False
        if answer and isinstance(answer, str):
            raise GpuError(answer)
        return answer

    def _ended(self, within: float) -> str:
        """Look whether what is being written is over; why it failed, if it did."""
        try:
            over, error = self._call(f"state({within})", "@0")
        except (GpuError, RanksError) as lost:
            over, error = True, str(lost)
        self._written = None if over else self._written
        return str(error)

    def _wait(self, at_most: float = float("inf")) -> str:
        """Wait for what is being written; why it failed, if it did."""
        began = time.monotonic()
        with ProgressLine(shell()) as line:
            while self._written and (waited := time.monotonic() - began) < at_most:
                line.update(f"{self._written} · {duration(waited)}")
                try:
                    if error := self._ended(_LOOK_S):
                        return error
                except KeyboardInterrupt:
                    raise interrupt(f"{self._written} goes on", []) from None
        return ""
