"""Save variables of the ranks between cells, and load them again.

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

from gpumagic.cluster.engines import RanksError
from gpumagic.display.units import size, some
from gpumagic.errors import GpuError

_SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0}
_INCOMPLETE, _ABOUT = ".incomplete", "about.json"
_KEPT = 2


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint: its directory and contents."""

    path: str
    variables: dict[str, str]  # kinds by name: module, tensor, …
    nbytes: int
    ranks: int  # number of ranks that saved it
    saved: float  # Unix time

    def __str__(self) -> str:
        return f"checkpoint of {some(self.variables)}: {size(self.nbytes)} to {self.path}"

    def loaded(self) -> str:
        """Return the message after loading."""
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.saved))
        names, ranks = some(self.variables), f"{self.ranks} rank{'s' * (self.ranks > 1)}"
        return f"{names} loaded from {self.path}, saved {when} by {ranks}"


def begin(directory: str) -> Path:
    """Create the directory of the next checkpoint."""
    numbers = [int(path.name[:6]) for path in _each(Path(directory))]
    path = Path(directory) / f"{max(numbers, default=0) + 1:06}{_INCOMPLETE}"
    path.mkdir(parents=True)
    return path


def complete(path: Path, checkpoint: Checkpoint) -> None:
    """Rename a complete checkpoint, and remove old ones."""
    (path / _ABOUT).write_text(json.dumps(asdict(checkpoint)))
    os.replace(path, checkpoint.path)
    older = [each for each in _each(path.parent) if each.name[:6] < path.name[:6]]
    whole = [each for each in older if not each.suffix]
    for each in {*older} - {*whole[1 - _KEPT :]}:
        shutil.rmtree(each, ignore_errors=True)


def find(directory: str) -> Checkpoint:
    """Return the last complete checkpoint in a directory, or the directory itself."""
    for path in (Path(directory), *reversed(_each(Path(directory)))):
        if (path / _ABOUT).is_file() and path.suffix != _INCOMPLETE:
            about = json.loads((path / _ABOUT).read_text())
            return Checkpoint(**{**about, "path": str(path)})
    raise GpuError(f"{directory}: there is no complete checkpoint")


def _each(directory: Path) -> list[Path]:
    """Return the checkpoints, the oldest first."""
    return sorted(p for suffix in ("", _INCOMPLETE) for p in directory.glob("[0-9]" * 6 + suffix))


class Checkpoints:
    """The checkpoints of one cluster."""

    def __init__(self, cluster: Any) -> None:
        self._cluster = cluster
        self._plan: tuple[list[str], str, float] | None = None  # names, directory, seconds
        self._due = 0.0
        self._calls = False

    def save(self, *names: str, to: str | None, every: str | None = None) -> Checkpoint | None:
        """Save variables of the ranks, now or after cells.

        Tensors, numbers, lists, dicts, and objects with a `state_dict`; replicated values from
        rank 0. `to` is a directory that all ranks see; the last two checkpoints stay there. `every`
        is ``"10min"``, ``"30s"``, ``"2h"``, after cells. If it raises `GpuError`, there is no new
        checkpoint.
        """
        if not names or len(set(names)) < len(names) or not to:
            raise GpuError("name each variable once, as in checkpoint net,opt --to runs/cats")
        directory = os.path.abspath(os.path.expanduser(to))
        if every is None:
            made: Checkpoint = self._call(f"save({[*names]}, {directory!r})")
            return made
        found = re.fullmatch(r"(\d+(?:\.\d+)?)(s|min|h)", every)
        if not found or not float(found[1]):
            raise GpuError(f"--every {every}: type --every 10min, 30s or 2h")
        self._call(f"save({[*names]}, '')")  # refuse now what would fail later
        self._plan = [*names], directory, float(found[1]) * _SECONDS[found[2]]
        self._due = time.monotonic() + self._plan[2]
        return None

    def restore(self, directory: str) -> Checkpoint:
        """Load a checkpoint into the variables of all ranks, of any number.

        Loads the last complete one in the directory, or the directory itself. Raises `GpuError` if
        a module or an optimizer is missing or has another shape; then nothing is changed.
        """
        path = os.path.abspath(os.path.expanduser(directory))
        loaded: Checkpoint = self._call(f"restore({path!r})")
        self._cluster.keep(*loaded.variables)
        return loaded

    def off(self) -> None:
        """Stop saving after cells."""
        self._plan = None

    def after_cell(self) -> None:
        """Save if it is due, and report it below the cell; never raises."""
        if self._calls or not self._plan or time.monotonic() < self._due:
            return
        names, directory, every_s = self._plan
        try:
            note = str(self._call(f"save({names}, {directory!r})"))
        except (GpuError, RanksError, KeyboardInterrupt) as error:
            note = f"no checkpoint: {error}"
        self._due = time.monotonic() + every_s
        if report := self._cluster.last_report:
            self._cluster.last_report = replace(report, notes=(*report.notes, note))

    def _call(self, call: str) -> Any:
        """Call a function of `saving` on all ranks, as a cell; return rank 0's answer."""
        report = self._cluster.last_report
        self._calls = True
        try:
            code = f"__import__('gpumagic.cluster.saving', fromlist=['saving']).{call}"
            answer, *_ = self._cluster.run(code)[0] or [None]
        finally:
            self._cluster.last_report, self._calls = report, False
        if isinstance(answer, str):
            raise GpuError(answer)
        return answer
