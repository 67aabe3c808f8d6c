"""torch's own operator tests, run on a virtual GPU and on the CPU: how many agree bit for bit.

    python benchmarks/opinfo_virtual.py [--sample N] [--processes P] [--verbose]

Every entry of OpInfo runs on its first samples, in float32 where it has it, forward and backward.
Prints the entries that are not bit-exact and a line of counts. Ends with 1 if a result is on a
wrong device, if an entry is flagged that is not known to be, or if fewer are bit-exact than should
be.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import multiprocessing
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

SAMPLES = 8
MOST_OTHER = 22
"""How many of all entries may be anything but bit-exact, or refused where CUDA has them not."""
KNOWN = {
    "as_strided.partial_views": "the sample is a view, and its copy on another device is none",
    "empty": "its values are not initialized",
    "empty_like": "its values are not initialized",
    "empty_permuted": "its values are not initialized",
    "empty_strided": "its values are not initialized",
    "new_empty": "its values are not initialized",
    "new_empty_strided": "its values are not initialized",
    "sparse.mm.reduce": "CUDA does not have it either",
    "tensor_split": "CUDA refuses these arguments too",
}
"""Entries that are flagged, and why."""
CAPACITY = 8 * 2**30
KINDS = ("bit-exact", "refused", "close", "not comparable", "flagged", "wrong device")
"""Refused is an operator that torch's own tests say CUDA has not: so is it on a virtual GPU."""


@dataclass
class Entry:
    """What came of one operator's samples."""

    name: str
    results: collections.Counter[str] = field(default_factory=collections.Counter)
    said: str = ""

    @property
    def kind(self) -> str:
        """The worst of them."""
        for kind in ("wrong device", "flagged", "close", "bit-exact", "refused"):
            if self.results[kind]:
                return kind
        return "not comparable"


def entries(count: int | None) -> list[int]:
    """The places of the entries to run: all, or `count` of them evenly spread."""
    from torch.testing._internal.common_methods_invocations import op_db

    total = len(op_db)
    step = 1.0 if count is None else max(total / count, 1.0)
    return [int(n * step) for n in range(int(total / step))]


def check(places: list[int]) -> list[Entry]:
    """Run these entries in this process."""
    import torch

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    from torch.testing._internal.common_methods_invocations import op_db

    from gpumagic import virtual

    with _virtual(virtual):
        return [_entry(op_db[place]) for place in places]


@contextlib.contextmanager
def _virtual(virtual: Any) -> Iterator[None]:
    virtual.enable(2, CAPACITY)
    try:
        yield
    finally:
        virtual.disable()


def _entry(op: Any) -> Entry:
    import torch

    entry = Entry(op.name + (f".{op.variant_test_name}" if op.variant_test_name else ""))
    wanted = (torch.float32, torch.int64, torch.complex64)
    dtype = next((d for d in wanted if d in op.dtypes), next(iter(op.dtypes), torch.float32))
    backward = op.supports_autograd and dtype.is_floating_point
    # Samples and references of another device or library may fail in any way of their own.
    try:
        samples = list(op.sample_inputs("cpu", dtype, requires_grad=backward))[:SAMPLES]
    except Exception as error:  # noqa: BLE001
        entry.said = _said(error)
        return entry
    for sample in samples:
        try:
            expected = _run(op, sample, torch.device("cpu"), backward)
        except Exception as error:  # noqa: BLE001
            entry.said = entry.said or _said(error)
            continue
        try:
            kind = _compare(expected, _run(op, sample, torch.device("cuda:1"), backward))
        except Exception as error:  # noqa: BLE001
            not_there = isinstance(error, NotImplementedError) and not op.supported_dtypes("cuda")
            kind, entry.said = "refused" if not_there else "flagged", _said(error)
        entry.results[kind] += 1
    return entry


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:100]


def _run(op: Any, sample: Any, device: Any, backward: bool) -> list[Any]:
    """The tensors that come out, and the gradients of those that went in."""
    import torch
    from torch.utils._pytree import tree_leaves, tree_map

    def there(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            return x.detach().to(device).requires_grad_(x.requires_grad)
        return device if isinstance(x, torch.device) else x

    given = tree_map(there, (sample.input, sample.args, sample.kwargs))
    if "device" in given[2]:
        given[2]["device"] = device
    torch.manual_seed(0)
    out = [t for t in tree_leaves(op(given[0], *given[1], **given[2])) if torch.is_tensor(t)]
    sources = [t for t in tree_leaves(given) if torch.is_tensor(t) and t.requires_grad]
    targets = [t for t in out if t.requires_grad]
    if not backward or not sources or not targets:
        return out
    loss = sum((t.abs() if t.is_complex() else t).double().sum() for t in targets)
    gradients = torch.autograd.grad(loss, sources, allow_unused=True)
    return out + [g for g in gradients if g is not None]


def _compare(expected: list[Any], found: list[Any]) -> str:
    import torch

    if any(t.device != torch.device("cuda:1") for t in found):
        return "wrong device"
    pairs = [(_dense(a), _dense(b.cpu())) for a, b in zip(expected, found, strict=True)]
    if any(a.shape != b.shape or a.dtype != b.dtype for a, b in pairs):
        return "flagged"
    if all(torch.equal(a, b) or _close(a, b, 0, 0) for a, b in pairs):
        return "bit-exact"
    return "close" if all(_close(a, b, 1e-4, 1e-5) for a, b in pairs) else "flagged"


def _dense(tensor: Any) -> Any:
    import torch

    if tensor.dtype is torch.complex32:
        return tensor.to(torch.complex64)  # nothing compares complex halves
    return tensor if tensor.layout is torch.strided else tensor.to_dense()


def _close(a: Any, b: Any, rtol: float, atol: float) -> bool:
    import torch

    return torch.allclose(a, b, rtol=rtol, atol=atol, equal_nan=True)


def main(argv: list[str] | None = None) -> int:
    """Run, print, and judge."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--sample", type=int, metavar="N", help="about N entries, evenly spread")
    parser.add_argument("--processes", type=int, default=1, metavar="P")
    parser.add_argument("--verbose", action="store_true", help="say what each one said")
    options = parser.parse_args(argv)
    places = entries(options.sample)
    # Dealt out in turn: expensive entries stand together.
    hands = [places[n :: options.processes] for n in range(options.processes)]
    if options.processes == 1:
        done = [check(places)]
    else:
        with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
            done = pool.map(check, hands)
    found = [entry for part in done for entry in part]
    counts = collections.Counter(entry.kind for entry in found)
    for entry in sorted(found, key=lambda entry: entry.name):
        if entry.kind != "bit-exact":
            why = KNOWN.get(entry.name, "") if entry.kind == "flagged" else ""
            said = entry.said if options.verbose else ""
            print("  ".join(filter(None, (f"  {entry.kind:14s}", entry.name, why, said))))
    samples = sum(entry.results.total() for entry in found)
    summary = ", ".join(f"{counts[kind]} {kind}" for kind in KINDS)
    print(f"{len(found)} entries, {samples} samples: {summary}")
    right = counts["bit-exact"] + counts["refused"]
    enough = options.sample is not None or right >= len(found) - MOST_OTHER
    unknown = {entry.name for entry in found if entry.kind == "flagged"} - KNOWN.keys()
    return 0 if enough and not unknown and not counts["wrong device"] else 1


if __name__ == "__main__":
    sys.exit(main())
