"""Read the programs, run them in forked children, and say how their results compare.

A program is a cell of a file of `programs/`. It runs plain on the CPU, which is the measure, and on
virtual GPUs: all of it under `%%ongpu 1`; what stands below its `# --` alone, after an earlier cell
that no magic stood above; and with the lines marked `# own`, in which it names the GPU itself as
the library has it, under no magic. `result` is what is compared.
"""

import ast
import multiprocessing
import re
import warnings
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

import gpumagic

PROGRAMS = Path(__file__).parent / "programs"
PLACED = ("placed", "earlier")
_SEED = (
    "import random, numpy, torch\n"
    "random.seed({0}); numpy.random.seed({0}); torch.manual_seed({0})\n"
)
_OWN = re.compile(r"^.*  # own$", re.MULTILINE)
_FORK = multiprocessing.get_context("fork")


@dataclass(frozen=True)
class Program:
    """One program: its library and title, its two halves, and what is expected of which way."""

    library: str
    title: str
    first: str
    second: str
    told: dict[str, tuple[str, str]]  # way → an outcome that is not "exact", and why

    @property
    def ways(self):
        """How it runs: `own` where it says a device, or the library picks one."""
        own = "own" in self.told or _OWN.search(self.first + "\n" + self.second)
        return (*PLACED, "own") if own else PLACED

    def cells(self, way):
        """The notebook's cells for one way of running it."""
        first, second = _SEED.format(0) + self.first, _SEED.format(1) + self.second
        if way != "own":
            first, second = _OWN.sub("", first), _OWN.sub("", second)
        magic = "%%ongpu 1\n"
        if way == "placed":
            return [f"{magic}{first}\n{second}"]
        return [first, (magic if way == "earlier" else "") + second]


def read_programs():
    """All programs, by file and in their order."""
    found = []
    for path in sorted(PROGRAMS.glob("*.py")):
        for cell in path.read_text().split("# %% ")[1:]:
            title, _, body = cell.partition("\n")
            first, _, second = body.partition("\n# --\n")
            told = re.findall(r"^# (placed|earlier|own): (\w+)(?:, because (.+))?$", first, re.M)
            told = {way: (outcome, why) for way, outcome, why in told}
            found.append(Program(path.stem, title, first, second, told))
    return found


@dataclass
class Ran:
    """What a way of running a program gave: its result, where that was, and the report."""

    error: str = ""
    leaves: list = field(default_factory=list)
    devices: set = field(default_factory=set)  # of the result's tensors
    named: set = field(default_factory=set)  # by the report
    worked: set = field(default_factory=set)  # the GPUs on which anything was allocated
    report: str = ""


def ran(program, way, shell):
    """Run a program in a forked child, so that no library carries over what it has made up."""
    _import_what_it_imports(program)
    here, there = _FORK.Pipe(duplex=False)
    child = _FORK.Process(target=_in_child, args=(program, way, shell, there))
    child.start()
    there.close()
    try:
        return here.recv()
    except EOFError:
        child.join()
        return Ran(error=f"the process ended with {child.exitcode}")
    finally:
        child.join(10)
        child.kill()


def _import_what_it_imports(program):
    # Before the fork, for the next program of the library has it then.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for node in ast.walk(ast.parse(program.first + "\n" + program.second)):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                exec(ast.unparse(node), {})


def _in_child(program, way, shell, there):
    warnings.simplefilter("ignore")
    done = Ran()
    if way != "plain":
        gpumagic.virtual.enable(2, "4GiB")
    for cell in program.cells(way):
        said = shell.run(cell)
        if said.error:
            done.error = f"{type(said.error).__name__}: {said.error}"
            break
    else:
        _note(done, way, tree_leaves(shell.ns["result"]), said.text)
    there.send(done)


def _note(done, way, leaves, text):
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    done.devices = {str(tensor.device) for tensor in tensors}
    done.leaves = [_plain(leaf) for leaf in leaves]
    if way != "plain":
        done.worked = {
            f"cuda:{n}" for n in range(2) if torch.cuda.memory_stats(n)["allocation.all.allocated"]
        }
    if way in PLACED:
        report = gpumagic.last_report()
        done.report = text
        done.named = {str(report.device), *(m.device for m in report.memory)}
        done.named |= {
            place for copy in report.ledger.copies for place in (copy.source, copy.destination)
        }
        done.named |= {"cpu"} if report.left else set()
        done.named |= set(filter(None, report.elsewhere.split(", ")))


def _plain(leaf):
    """A leaf as NumPy has it: no tensor is sent between processes."""
    if isinstance(leaf, torch.Tensor):
        leaf = leaf.detach().cpu().to_dense()
        return (leaf.float() if leaf.dtype == torch.bfloat16 else leaf).numpy()
    return leaf if isinstance(leaf, (str, type(None))) else np.asarray(leaf)


def outcome(plain, other, way):
    """How a result compares with the plain one: exact, close, differs, elsewhere or fails."""
    if other.error:
        return "fails", other.error
    if way in PLACED:
        if not other.devices <= other.named:
            return "fails", f"on {other.devices}, of which the report says {other.named}"
        wholly = other.worked == {"cuda:1"} or (way == "earlier" and "cuda:1" in other.worked)
        if other.devices - {"cuda:1"} or not wholly:
            return "elsewhere", f"on {other.devices or other.worked}"
    elif not other.worked:
        return "fails", "no GPU did anything"
    return compared(plain.leaves, other.leaves)


def compared(ours, theirs):
    """Whether leaves are exactly those others, or close by torch's own tolerances."""
    if len(ours) != len(theirs):
        return "differs", f"{len(ours)} parts are {len(theirs)}"
    pairs = list(zip(ours, theirs, strict=True))
    if all(_same(a, b) for a, b in pairs):
        return "exact", ""
    try:
        for a, b in (pair for pair in pairs if not _same(*pair)):
            torch.testing.assert_close(torch.as_tensor(a), torch.as_tensor(b), equal_nan=True)
    except (AssertionError, TypeError, ValueError) as error:
        return "differs", str(error)
    return "close", ""


def _same(one, other):
    if not isinstance(one, np.ndarray):
        return one == other
    return one.dtype == other.dtype and np.array_equal(one, other, equal_nan=one.dtype.kind in "fc")
