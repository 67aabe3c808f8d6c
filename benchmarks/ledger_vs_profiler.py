"""The ledger against torch's profiler and CUDA's own synchronization warnings, on a real GPU.

Run it with `python benchmarks/ledger_vs_profiler.py [NOTEBOOK]` where there is a GPU. The code
cells of a notebook (the one below, if none is named) run three times: with the ledger, under
`torch.profiler`, and under `torch.cuda.set_sync_debug_mode("warn")`. Bytes by direction must equal
those of the profiler's memcpy events. Waits are compared line by line, and each difference is
explained. Exits 0 if they agree, 1 if not, 2 where there is no GPU.
"""

import collections
import json
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

import gpumagic

CELLS = [
    "import torch\nfrom torch import nn\ntorch.manual_seed(0)",
    "x = torch.randn(256, 64).to('cuda')\npinned = torch.randn(1000).pin_memory()\n"
    "y = pinned.to('cuda', non_blocking=True)",
    "net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)).cuda()\n"
    "optimizer = torch.optim.Adam(net.parameters())\nlog = []\n"
    "for step in range(20):\n"
    "    optimizer.zero_grad()\n"
    "    loss = net(x).square().mean()\n"
    "    loss.backward()\n"
    "    optimizer.step()\n"
    "    log.append(loss.item())",
    "half = x.cpu().half()\nback = half.to('cuda')\nback32 = half.to('cuda', torch.float32)\n"
    "strided = x.T[::2].cpu()\nwide = torch.empty(4, 8).copy_(x[0, :8].double())",
    "z = x[x > 0]\nn = x.nonzero()\nu = (x * 3).round().unique()\nx[torch.tensor([0, 2])]\n"
    "x[torch.tensor([1])] = 0.0\nif x.sum() > 0:\n    pass\nr = repr(x[:2])\nt = x[:2].tolist()",
    "parts = torch.repeat_interleave(torch.arange(5, device='cuda'))\n"
    "counts = parts.bincount()\nsame = torch.equal(x, x)\ntorch.cuda.synchronize()",
]
WAYS = {"HtoD": "host_to_device", "DtoH": "device_to_host", "PtoP": "device_to_device"}
WHY = {
    "synchronize": "set_sync_debug_mode does not see torch.cuda.synchronize()",
    "bincount": "one wait in the ledger; torch reads least and greatest one after the other",
    "equal": "one wait in the ledger, whatever torch reads within",
}


def cells_of(path: str | None) -> list[str]:
    if path is None:
        return CELLS
    notebook = json.loads(Path(path).read_text())
    sources = ["".join(c["source"]) for c in notebook["cells"] if c["cell_type"] == "code"]
    # A magic is no Python; the cells are run as plain code.
    return ["\n".join("" if w.startswith("%") else w for w in s.splitlines()) for s in sources]


def run(cells: list[str]) -> None:
    space: dict[str, object] = {"__name__": "__main__"}
    for number, cell in enumerate(cells):
        exec(compile(cell, f"cell {number}.py", "exec"), space)
    torch.cuda.synchronize()


def traced(run: Callable[[], object]) -> list[dict[str, Any]]:
    """What `torch.profiler` saw while it ran."""
    activity = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[activity.CPU, activity.CUDA]) as profile:
        run()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "profile.json"
        profile.export_chrome_trace(str(path))
        return list(json.loads(path.read_text())["traceEvents"])


def bytes_of(events: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Bytes by direction, from the profiler's memcpy events."""
    found = dict.fromkeys(WAYS.values(), 0)
    for event in events:
        if event.get("cat") == "gpu_memcpy":
            for word, way in WAYS.items():
                if word in event["name"]:
                    found[way] += int(event["args"]["bytes"])
    return found


def waits_of(events: Iterable[Mapping[str, Any]]) -> int:
    """The profiler's synchronize events; those that it makes itself at its end are among them."""
    return sum(
        event.get("cat") in ("cuda_runtime", "cuda_driver")
        and event["name"].endswith("Synchronize")
        for event in events
    )


def warned(cells: list[str]) -> collections.Counter[tuple[str, int]]:
    """Waits by line, from CUDA's synchronization warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            run(cells)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    # The line is that of the innermost Python frame, which may be a library's.
    return collections.Counter(
        (w.filename, w.lineno) for w in caught if "synchroniz" in str(w.message)
    )


def main() -> int:
    if not torch.cuda.is_available():
        print(
            "benchmarks/ledger_vs_profiler.py needs a real GPU, and torch sees none here: there is "
            "nothing to compare the ledger with (on virtual GPUs tests/ledger/test_watch_exact.py "
            "compares it with what the devices themselves did)"
        )
        return 2
    cells = cells_of(sys.argv[1] if len(sys.argv) > 1 else None)
    run(cells)  # what is loaded and allocated once is so now
    with gpumagic.watch(warn=False) as w:
        run(cells)
    print(w.ledger, "\n")
    # A profiler counts the few bytes that a wait reads too.
    ours: collections.Counter[str] = collections.Counter()
    for e in w.ledger:
        ours[e.direction] += e.nbytes
    theirs = bytes_of(traced(lambda: run(cells)))
    ways = [*theirs]
    print(f"{'bytes':20}{'ledger':>14}{'profiler':>14}")
    for way in ways:
        differs = "" if ours[way] == theirs[way] else "   DIFFERENT"
        print(f"{way:20}{ours[way]:14,}{theirs[way]:14,}{differs}")
    print("a wait for a size reads 4 or 8 bytes; the ledger says 8")
    slack = 8 * sum(e.count for e in w.ledger if e.kind == "wait" and e.operator != "item")
    agree = all(abs(ours[way] - theirs[way]) <= slack for way in ways)

    seen = warned(cells)
    counted: collections.Counter[tuple[str, int]] = collections.Counter()
    operators = collections.defaultdict(set)
    for e in w.ledger:
        if e.line is not None and (e.kind == "wait" or e.blocking):
            place = str(e.file), e.line
            counted[place] += e.count if e.kind == "wait" else e.blocking
            operators[place].add(e.operator)
    print(f"\n{'waits at':24}{'ledger':>8}{'CUDA':>8}")
    for place in sorted({*counted, *seen}):
        why = "; ".join(WHY[o] for o in sorted(operators[place]) if o in WHY)
        if counted[place] != seen[place] and not why:
            why = "CUDA names a library's line" if place not in counted else "NOT EXPLAINED"
            agree = agree and why != "NOT EXPLAINED"
        print(f"{place[0]}:{place[1]:<14}{counted[place]:>8}{seen[place]:>8}  {why}")
    return int(not agree)


if __name__ == "__main__":
    sys.exit(main())
