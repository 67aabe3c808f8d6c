"""Write the cells of a session that ran on all ranks as a script for torchrun, and for Slurm.

It needs PyTorch and no gpumagic: parts are taken and gathered by a few functions of its own. What
the cells need of others stands before them, at its place in the session.
"""

import ast
import builtins
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from gpumagic.cluster.shared_out import Sharing
from gpumagic.display.units import some
from gpumagic.errors import GpuError
from gpumagic.usercode.session_code import CodePart, code_part, needed, parts_of, plain_python

_HEADER = """\
#!/bin/bash
#SBATCH --job-name={job}
#SBATCH --nodes={hosts}
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node={each}
# Written by %gpucluster script, of the cells that ran on all ranks and what they need.
# Here:        torchrun --nproc-per-node {each} {name}
# With Slurm:  sbatch {name}, with what else your cluster asks for: --partition, --time
# To bash, which Slurm starts it with, the next line starts the ranks; to Python it is a text.
"exec" "srun" "torchrun" "--nnodes={hosts}" "--nproc-per-node={each}" \
"--rdzv-backend=c10d" "--rdzv-endpoint=$(scontrol show hostnames | head -n 1):29500" "{name}"
"""
_BEGIN = """\
import os

import torch
import torch.distributed as dist

_rank, _ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
_device = torch.device("cpu")
if torch.cuda.is_available():
    _device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(_device)
"""
_INIT = 'dist.init_process_group("nccl" if _device.type == "cuda" else "gloo")\n'
# A notebook makes once what ranks are to have alike; what they draw on their own is unlike.
_SEED = "torch.manual_seed(0)  # so that all make the same of what the notebook has made once\n"
_SEED_NUMPY = '__import__("numpy").random.seed(0)\n'
_UNLIKE = "torch.manual_seed(1 + _rank)"
_END = "dist.destroy_process_group()\n"
_HERE = '''
def _here(value):
    """The same on this rank's device: tensors, modules, and what holds some."""
    if isinstance(value, (torch.Tensor, torch.nn.Module)):
        return value.to(_device)
    if isinstance(value, dict):
        return {key: _here(item) for key, item in value.items()}
    return type(value)(map(_here, value)) if type(value) in (list, tuple) else value
'''
_PART = '''
def _part(items):
    """This rank's items, in order; the first ranks take the remainder."""
    if isinstance(items, dict):
        return {key: _part(column) for key, column in items.items()}
    each, more = divmod(len(items), _ranks)
    start = _rank * each + min(_rank, more)
    stop = start + each + (_rank < more)
    if isinstance(items, torch.utils.data.Dataset):
        return torch.utils.data.Subset(items, range(start, stop))
    return items.iloc[start:stop] if hasattr(items, "iloc") else items[start:stop]
'''
_GATHER = '''
def _by_rank(value):
    """The values of all ranks, in their order."""
    found = [None] * _ranks
    dist.all_gather_object(found, value.detach().cpu() if torch.is_tensor(value) else value)
    return found


def _joined(parts):
    """All items of the parts, in order."""
    first = parts[0]
    if torch.is_tensor(first):
        return torch.cat(parts)
    if isinstance(first, dict):
        return {key: _joined([part[key] for part in parts]) for key in first}
    if hasattr(first, "iloc"):
        return __import__("pandas").concat(parts)
    if hasattr(first, "__array__"):
        return __import__("numpy").concatenate(parts)
    return type(first)(item for part in parts for item in part)


def _reduced(parts, how):
    """Their mean, sum, min or max, or the last of them."""
    if how == "last":
        return parts[-1]
    stacked = torch.stack([torch.as_tensor(part) for part in parts])
    stacked = stacked.double() if how == "mean" and not stacked.is_floating_point() else stacked
    found = getattr(stacked, {"min": "amin", "max": "amax"}.get(how, how))(0)
    return found if torch.is_tensor(parts[0]) else found.item()
'''


class SharedOnRanks(Sharing, Protocol):
    """What a line of `%%ongpu @…` asks for."""

    @property
    def where(self) -> str:
        """`@all`, `@0,1`, `@1`."""


def write_script(
    cells: Sequence[str],
    path: str | Path,
    *,
    ranks: int,
    hosts: int = 1,
    asked: Callable[[str], SharedOnRanks],
    force: bool = False,
) -> list[str]:
    """Write a script that does what the cells of ``%%ongpu @all`` did, and what they need.

    Parameters
    ----------
    cells : sequence of str
        The text of every cell of the session, as typed, in the order in which they ran. One that
        ran several times on all ranks is written once, where it ran last.
    path : str or Path
    ranks, hosts : int
        How many ranks on how many hosts its header asks for.
    asked : callable
        What stands after ``%%ongpu`` to what it asks for: ``placing_request`` of the magics.
    force : bool
        Write over a file that is there.

    Returns
    -------
    list of str
        What a reader should know: what was left out, and names that no cell binds.

    Raises
    ------
    GpuError
        No cell ran on ranks, the file is there already, or `hosts` have not as many ranks each.
    """
    path = Path(path)
    if path.exists() and not force:
        raise GpuError(f"{path} is there already; type --force to write over it, or another name")
    if ranks % hosts:
        raise GpuError(f"{ranks} ranks are not as many on each of {hosts} hosts; type a multiple")
    every, on_ranks = _read(cells, asked)
    if not on_ranks:
        raise GpuError("no cell of this session ran on ranks; run one of %%ongpu @all first")
    kept = needed(every, [cell.part for cell in on_ranks.values()])
    header = _HEADER.format(
        job=path.stem.replace(" ", "-"), hosts=hosts, each=ranks // hosts, name=path.name
    )
    body = "\n".join(_body(kept, on_ranks))
    own = {getattr(n, "attr", getattr(n, "id", "")) for n in ast.walk(ast.parse(body))}
    begin = _BEGIN + ("" if "init_process_group" in own else _INIT) + _SEED
    begin += _SEED_NUMPY * ("numpy" in body)
    helpers = "".join(
        text
        for name, text in (("_here(", _HERE), ("_part(", _PART), ("_by_rank(", _GATHER))
        if name in body
    )
    end = "" if "destroy_process_group" in own else _END
    try:
        path.write_text(f"{header}{begin}{helpers}\n{body}\n\n{end}", encoding="utf-8")
    except OSError as error:
        raise GpuError(f"{path} cannot be written: {error.strerror}; type another name") from None
    return _notes(kept, body)


class _OnRanks:
    """A cell of `%%ongpu @…`: its code, and what its line asks for."""

    def __init__(self, code: str, above: Sequence[str], asked: SharedOnRanks) -> None:
        self.code, self.above, self.asked = code, above, asked
        self.tree = ast.parse(code)
        whole = code_part(self.tree, code)
        shared = frozenset(self.asked.split)
        self.part = CodePart(code, whole.reads | shared, whole.binds)

    def lines(self, moved: Sequence[str]) -> Iterator[str]:
        """The cell as the script has it; `moved` are variables that come to the device."""
        split = self.asked.split
        joined = {name: f"_joined(_by_rank({name}))" for name in self.asked.gather}
        joined |= {name: f"_reduced(_by_rank({name}), {how!r})" for name, how in self.asked.reduce}
        yield from (f"# {line}" for line in self.above)
        yield from (f"{name} = _here({name})" for name in moved if name not in split)
        yield from (f"_whole_{name}, {name} = {name}, _here(_part({name}))" for name in split)
        where = self.asked.where.removeprefix("@")
        code = self._shown()
        yield from code if where == "all" else _on(where, code)
        yield from (f"{name} = _whole_{name}" for name in split if name not in joined)
        yield from (f"{name} = {call}" for name, call in joined.items())

    def _shown(self) -> Iterator[str]:
        """Its code; the value of its last expression is printed, as the notebook shows it."""
        lines, body = self.code.rstrip().splitlines(), self.tree.body
        last = body[-1]
        ends = isinstance(last, ast.Expr) and not lines[-1].rstrip().endswith(";")
        if not ends or ast.unparse(last).startswith("print("):
            yield from lines
            return
        shares = len(body) > 1 and body[-2].end_lineno == last.lineno
        before = ast.unparse(ast.Module(body[:-1], [])).splitlines()
        yield from before if shares else lines[: last.lineno - 1]
        yield f"_value = {ast.unparse(last)}"
        yield "if _value is not None:"
        yield '    print(f"rank {_rank}: {_value!r}")'


def _on(ranks: str, code: Iterable[str]) -> Iterator[str]:
    """Code that only some ranks run."""
    yield f"if _rank in ({ranks},):"
    # Not by its lines: a text of several would be another.
    whole = ast.unparse(ast.parse("\n".join(code)))
    yield from (f"    {line}" for line in whole.splitlines())


def _read(
    cells: Sequence[str], asked: Callable[[str], SharedOnRanks]
) -> tuple[list[CodePart], dict[int, _OnRanks]]:
    """All parts in order, and by their ids those that are cells of ranks."""
    last = {cell.strip(): number for number, cell in enumerate(cells)}
    every: list[CodePart] = []
    on_ranks: dict[int, _OnRanks] = {}
    for number, cell in enumerate(cells):
        above, code = plain_python(cell)
        line = next((line for line in above if line.startswith("%%ongpu")), "")
        if not line.removeprefix("%%ongpu").lstrip().startswith("@"):
            every += parts_of(code)
        elif last[cell.strip()] == number and code and "--dry-run" not in line:
            one = _OnRanks(code, above, asked(line.removeprefix("%%ongpu")))
            every.append(one.part)
            on_ranks[id(one.part)] = one
    return every, on_ranks


def _body(kept: Sequence[CodePart], on_ranks: dict[int, _OnRanks]) -> Iterator[str]:
    values, on, unlike = set[str](), False, False
    inner: dict[str, frozenset[str]] = {}  # what functions and classes read
    for each in kept:
        cell = on_ranks.get(id(each))
        if on is not (cell is not None):
            on = cell is not None
            yield f"\ntorch.set_default_device({'_device' if on else 'None'})"
        if cell is None:
            values = values - each.binds if each.defines else values | each.binds
            inner |= dict.fromkeys(each.binds, each.reads if each.defines else frozenset())
            yield f"\n{each.text}\n" if "\n" in each.text else each.text
            continue
        yield from () if unlike else (_UNLIKE,)
        yield ""
        yield from cell.lines(sorted(values & _reached(each.reads, inner)))
        values, unlike = values - each.binds, True


def _reached(names: Iterable[str], inner: Mapping[str, frozenset[str]]) -> set[str]:
    """The names, and those that the functions among them read."""
    found, todo = set[str](), [*names]
    while todo:
        name = todo.pop()
        todo += inner.get(name, frozenset()) - found - {name}
        found.add(name)
    return found


def _notes(kept: Sequence[CodePart], body: str) -> list[str]:
    bound = {name for each in kept for name in each.binds} | {*dir(builtins)}
    unknown = sorted({name for each in kept for name in each.reads} - bound)
    notes = [f"no cell binds {some(unknown)}: add it to the script"] if unknown else []
    out = [
        line.partition("# left out: ")[2] for line in body.splitlines() if "# left out: " in line
    ]
    return notes + [f"left out: {each}" for each in out]
