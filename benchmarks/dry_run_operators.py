"""Compare dry runs' peaks with what virtual GPUs measure: every operator that torch tests.

    python benchmarks/dry_run_operators.py [--only NAME ...] [--part N/M] [--size N]

Every entry of OpInfo runs on its first samples, forward and backward: followed by a dry run, and
then for real on a virtual GPU. Prints those whose peaks differ by more than a block of 512 bytes
and 2 %, those that a dry run cannot follow, and a line of counts. `--size` makes samples larger.
Ends with 1 if one is off that is not known to be.
"""

from __future__ import annotations

import argparse
import collections
import gc
import json
import sys
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch.testing._internal import common_methods_invocations as samples_of
from torch.utils._pytree import tree_leaves, tree_map

import gpumagic
from gpumagic.device.caching_allocator import BLOCK
from gpumagic.dryrun import follow_code
from gpumagic.dryrun.fakes import Stopped

SAMPLES = 6
TOGETHER = 12
"""How many entries share a dry run."""
WHERE = "cuda:0"
CAPACITY = "8GiB"
MOST = 0.02
KNOWN = frozenset(
    [
        *("cumprod", "masked.cumprod", "prod", "linalg.vander", "matrix_exp"),
        *("linalg.householder_product", "ormqr", "nn.functional.one_hot"),
        *("native_batch_norm", "_native_batch_norm_legit", "nn.functional.batch_norm"),
        *("nn.functional.batch_norm.without_cudnn", "nn.functional.linear_cross_entropy.chunked"),
    ]
)
"""The entries that are off with samples of the usual size, as docs/dry-runs.md says."""


@dataclass(frozen=True)
class Case:
    """An entry's sample, on a virtual GPU."""

    name: str
    op: Any
    given: Any
    backward: bool


class OnGpu:
    """What a virtual GPU counts."""

    def reset(self) -> int:
        """Begin to look for a peak; the bytes that there are."""
        torch.cuda.reset_peak_memory_stats(WHERE)
        return torch.cuda.memory_allocated(WHERE)

    def peak(self) -> int:
        """The most since then."""
        return torch.cuda.max_memory_allocated(WHERE)


class InDryRun(follow_code.HeldMemory):
    """What a dry run counts, for the code that it follows to read."""

    def __init__(self) -> None:
        super().__init__()
        global _counted
        _counted = self

    def reset(self) -> int:
        """As of a GPU."""
        self.reset_peak()
        return self.now.get(WHERE, 0)

    def peak(self) -> int:
        """As of a GPU."""
        return self.most.get(WHERE, 0)


_counted: InDryRun


def name_of(op: Any) -> str:
    """An entry's name, with its variant."""
    return op.name + (f".{op.variant_test_name}" if op.variant_test_name else "")


def cases_of(op: Any) -> list[Case]:
    """The first samples of an entry."""
    wanted = (torch.float32, torch.int64, torch.complex64)
    dtype = next((d for d in wanted if d in op.dtypes), next(iter(op.dtypes), torch.float32))
    backward = op.supports_autograd and (dtype.is_floating_point or dtype.is_complex)
    found = []
    for _, sample in zip(range(SAMPLES), op.sample_inputs("cpu", dtype, requires_grad=backward)):  # noqa: B905
        given = tree_map(there, (sample.input, sample.args, sample.kwargs))
        if "device" in given[2]:
            given[2]["device"] = WHERE
        found.append(Case(name_of(op), op, given, backward))
    return found


def there(x: Any) -> Any:
    """A sample's tensor on the virtual GPU."""
    if isinstance(x, torch.Tensor):
        return x.detach().to(WHERE).requires_grad_(x.requires_grad)
    return torch.device(WHERE) if isinstance(x, torch.device) else x


def run(case: Case, meter: Any) -> tuple[int, int, int]:
    """Peak of the forward pass, what it leaves, and the peak of both passes."""
    gc.collect()
    torch.manual_seed(0)
    before = meter.reset()
    out = case.op(case.given[0], *case.given[1], **case.given[2])
    forward = meter.peak() - before
    held = meter.reset() - before
    targets = [t for t in tree_leaves(out) if torch.is_tensor(t) and t.requires_grad]
    sources = [t for t in tree_leaves(case.given) if torch.is_tensor(t) and t.requires_grad]
    if case.backward and sources and targets:
        ones = [torch.ones_like(t) for t in targets]
        gradients = torch.autograd.grad(targets, sources, ones, allow_unused=True)
        del gradients
    return forward, held, max(forward, meter.peak() - before)


def run_all(cases: list[Case], meter: Any = None) -> list[Any]:
    """All of them; where one cannot, the reason. In a dry run they are printed."""
    found: list[Any] = []
    for case in cases:
        try:
            found.append(run(case, meter or _counted))
        except (Exception, Stopped) as error:  # noqa: BLE001  of the sample: it is said
            found.append(f"{type(error).__name__}: {error}".splitlines()[0][:150])
    if meter is None:
        print(json.dumps(found))
    return found


def compare(cases: list[Case]) -> list[tuple[Case, Any, Any]]:
    """Each with what was foretold and what was measured."""
    result = gpumagic.dry_run(run_all, cases, limit=500)
    if not result.printed:
        raise RuntimeError(str(result))
    predicted = json.loads(result.printed.splitlines()[-1])
    return list(zip(cases, predicted, run_all(cases, OnGpu()), strict=True))


def kind_of(predicted: Any, measured: Any) -> str:
    """How near the two are."""
    if isinstance(measured, str):
        return "fails"
    if isinstance(predicted, str):
        return "not followed"
    if list(predicted) == list(measured):
        return "same"
    near = abs(predicted[2] - measured[2]) <= max(BLOCK, MOST * measured[2])
    return "near" if near else "off"


def samples(ops: list[Any]) -> list[Case]:
    """Of all of them that have some."""
    found = []
    for op in ops:
        try:
            found += cases_of(op)
        except Exception as error:  # noqa: BLE001  a sample of other sizes may be none
            print(f"  {'no samples':12s} {name_of(op)}: {str(error).splitlines()[:1]}")
    return found


def check(ops: list[Any], verbose: bool = False) -> tuple[collections.Counter[str], set[str]]:
    """Compare all samples of these entries, print those that are off, count, and name them."""
    follow_code.HeldMemory = InDryRun  # type: ignore[misc]
    gpumagic.virtual.enable(1, CAPACITY)
    counts: collections.Counter[str] = collections.Counter()
    off = set()
    for start in range(0, len(ops), TOGETHER):
        cases = samples(ops[start : start + TOGETHER])
        gc.freeze()
        for case, predicted, measured in compare(cases):
            kind = kind_of(predicted, measured)
            counts[kind] += 1
            off |= {case.name} if kind == "off" else set()
            if kind in ("off", "not followed") or verbose:
                shapes = [tuple(t.shape) for t in tree_leaves(case.given) if torch.is_tensor(t)]
                said = f"  {kind:12s} {case.name} {predicted} {measured} {shapes}"
                print(said[:200], flush=True)
        gc.unfreeze()
    return counts, off


def main() -> int:
    """Compare and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--only", nargs="+", default=[], help="names of entries")
    parser.add_argument("--part", default="0/1", metavar="N/M", help="which of how many parts")
    parser.add_argument(
        "--size", type=int, default=5, help="of small axes; others are two and four times that"
    )
    parser.add_argument("--verbose", action="store_true")
    asked = parser.parse_args()
    samples_of.S, samples_of.M, samples_of.L = (n * asked.size for n in (1, 2, 4))
    warnings.simplefilter("ignore")
    part, parts = map(int, asked.part.split("/"))
    ops = [op for op in samples_of.op_db if not asked.only or name_of(op) in asked.only]
    counts, off = check(ops[part::parts], asked.verbose)
    print(f"{counts.total()} samples: {', '.join(f'{n} {kind}' for kind, n in counts.items())}")
    if unknown := sorted(off - KNOWN):
        print(f"not known to be off: {', '.join(unknown)}")
    return int(bool(unknown))


if __name__ == "__main__":
    sys.exit(main())
