"""Measure on one device, real or virtual: each function gives rows."""

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from hardware.programs import MODELS
from hardware.rows import Row, at_least, at_most, near, same
from torch import nn
from torch.nn import functional as F

import gpumagic
from gpumagic.cell.report import Report
from gpumagic.cell.run import Run
from gpumagic.placement.torch_devices import find
from gpumagic.usercode.files import last_cell

BIG = 64 * 2**20
ROUNDS = 7


def placed(function: Callable[..., Any], *args: Any, device: str) -> tuple[Report, Any]:
    """A call as a `%%ongpu` cell would make it, which brings `args` first."""
    gc.collect()
    torch.cuda.empty_cache()
    run = Run(find(device), {"args": args, "function": function}, ["args"])
    run.start()
    try:
        value = function(*args)
    finally:
        report = run.finish()
    assert report is not None
    return report, value


def peaks(report: Report) -> dict[str, int]:
    """A cell's peaks in bytes, by device."""
    return {memory.device: memory.peak for memory in report.memory}


def placing_rows(shell: Any, device: str) -> Iterator[Row]:
    """What a cell makes and what it brings, each the object that it was."""
    shell.run("import torch\nfrom torch import nn\nX = torch.arange(12.0).view(3, 4)")
    shell.run("net = nn.Linear(4, 2)\nadam = torch.optim.Adam(net.parameters())\nalias = X")
    before = dict(shell.ns)
    values = shell.ns["X"].clone(), shell.ns["net"].weight.detach().clone()
    cell = f"%%ongpu {device} --quiet\nmade = torch.ones(3)\nnet(X).sum().backward()\nadam.step()"
    done = shell.run(cell)
    yield same("the cell's error", repr(done.error), "None")
    space = shell.ns
    wheres = {
        "made": space["made"],
        "X": space["X"],
        "alias": space["alias"],
        "parameter": space["net"].weight,
        "Adam's state": space["adam"].state[space["net"].weight]["exp_avg"],
    }
    for name, tensor in wheres.items():
        yield same(f"{name}: device", str(tensor.device), device)
    for name in ("X", "net", "adam"):
        yield same(f"{name}: the same object", space[name] is before[name], True)
    yield same("X: values", torch.equal(space["X"].cpu(), values[0]), True)
    moved = (space["net"].weight.detach().cpu() - values[1]).abs().max().item()
    yield near("the largest step of Adam", moved, 1e-3, rel=0.01)
    yield same("placed after the cell", str(torch.ones(1).device), "cpu")


def peak_rows(device: str) -> Iterator[Row]:
    """A report's peak against torch's own, of the same code without us."""

    def hold() -> None:
        first = torch.empty(BIG, dtype=torch.uint8, device=device)
        del first
        second = torch.empty(BIG // 2 + 100, dtype=torch.uint8, device=device)
        del second

    torch.cuda.init()
    gc.collect()
    torch.cuda.empty_cache()  # a block of another size would be taken whole
    torch.cuda.reset_peak_memory_stats(device)
    hold()
    true = torch.cuda.max_memory_allocated(device)
    report, _ = placed(hold, device=device)
    yield same("peak, bytes", peaks(report).get(device), true)


def memory_rows(shell: Any, device: str) -> Iterator[Row]:
    """Who holds what, the lines that made it, and a peak's lines, against torch's counters."""
    shell.run("import torch")
    torch.cuda.init()
    shell.run("%gpumem --record on")
    shell.run(f"held = torch.ones({BIG // 4}, device={device!r})\nmore = held[:1000] * 2")
    cell = last_cell()
    holders = {h.path: h for h in gpumagic.memory().holders if h.device == device}
    shell.run("%gpumem --record off")
    told = sum(holder.nbytes for holder in holders.values())
    yield same("rows of %gpumem, bytes", told, torch.cuda.memory_allocated(device))
    for line, name in enumerate(("held", "more"), 1):
        made = holders[name].made if name in holders else "no such row"
        yield same(f"{name}: made in", str(made), f"{cell}, line {line}")
    shell.run(f"%%ongpu {device} --memory --quiet\nw = held.clone().requires_grad_()")
    shell.run(f"%%ongpu {device} --memory --quiet\n(w * w).sum().backward()")
    report = gpumagic.last_report()
    peak = report.peak
    yield near("a peak of --memory, bytes", peak.nbytes, peaks(report)[device], rel=0.02)
    lines = dict(peak.lines)
    yield same("its lines together", sum(lines.values()), peak.nbytes)
    yield at_least("of its line", lines.get("line 2: (w * w).sum().backward()", 0), BIG)
    yield same("its line", peak.line, "line 2: (w * w).sum().backward()")
    del shell.ns["held"], shell.ns["more"], shell.ns["w"]


def out_of_memory_rows(shell: Any, device: str) -> Iterator[Row]:
    """The error, and that nothing is kept by it."""
    shell.run("import torch")
    torch.cuda.init()
    before = torch.cuda.memory_allocated(device)
    total = torch.cuda.get_device_properties(device).total_memory
    cell = f"%%ongpu {device}\nhog = torch.empty({2 * total}, dtype=torch.uint8)"
    done = shell.run(cell)
    yield same("the error", type(done.error).__name__, "OutOfMemoryError")
    yield same("said in the report", "OutOfMemoryError after" in done.text, True)
    yield same("still allocated", torch.cuda.memory_allocated(device) - before, 0)
    done = shell.run(f"%%ongpu {device} --quiet\nassert torch.ones(2).sum().item() == 2")
    yield same("the next cell's error", repr(done.error), "None")


def cost_row(shell: Any, name: str, body: str, device: str, limit: float) -> Row:
    """A cell under `%%ongpu` against the bare one, in rounds that alternate; `limit`: their ratio.

    The variables are there already, and both wait for the device at their end.
    """
    body = f"{body}\ntorch.cuda.synchronize()"
    cells = [body, f"%%ongpu {device} --quiet\n{body}"]
    took: list[list[float]] = [[], []]
    for turn in range(ROUNDS + 1):
        for way in (0, 1) if turn % 2 else (1, 0):
            begun = time.perf_counter()
            done = shell.run(cells[way])
            seconds = time.perf_counter() - begun
            assert done.error is None, done.text
            if turn:  # the first is the warm-up
                took[way].append(seconds)
    ratio = statistics.median(b / a for a, b in zip(*took, strict=True))
    bare = statistics.median(took[0])
    return at_most(f"{name}, {bare * 1e3:.1f} ms bare", ratio, limit, 1.0)


def entering_row(shell: Any, limit: float, device: str) -> Row:
    """Milliseconds that an empty `%%ongpu` cell takes more than an empty one."""
    costs = []
    for _ in range(50):
        times = []
        for cell in ("pass", f"%%ongpu {device} --quiet\npass"):
            begun = time.perf_counter()
            shell.run(cell)
            times.append(time.perf_counter() - begun)
        costs.append(times[1] - times[0])
    return at_most("entering and leaving, ms", statistics.median(costs) * 1e3, limit)


def dry_run_row(name: str, device: str, batch: int) -> Row:
    """The peak that a dry run tells against that of the same two steps of training."""
    make, shape = MODELS[name]
    torch.manual_seed(0)

    def train(net: Any, adam: Any, X: Any, y: Any) -> None:
        for _ in range(2):
            adam.zero_grad()
            F.cross_entropy(net(X), y).backward()
            adam.step()

    def made() -> tuple[Any, ...]:
        net = make()
        X, y = torch.randn(batch, *shape), torch.randint(10, (batch,))
        return net, torch.optim.Adam(net.parameters()), X, y

    placed(train, *made(), device=device)  # cuBLAS takes its workspace once
    given = made()
    gc.collect()
    predicted = gpumagic.dry_run(train, *given, on=device)
    if not predicted.complete:
        return Row(name, str(predicted), None, "complete", False)
    report, _ = placed(train, *given, device=device)
    true = peaks(report)[device]
    return near(f"{name}: peak, bytes", predicted.peak[device].peak, true, rel=0.05)


def fit_rows(device: str, room: int) -> Iterator[Row]:
    """The largest batch where so many bytes are free: it runs, and one a fifth larger does not."""

    def step(batch: int) -> None:
        net = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512))
        net(torch.randn(batch, 512)).square().mean().backward()

    placed(step, 8, device=device)  # cuBLAS takes its workspace once
    torch.cuda.empty_cache()
    hog = torch.empty(torch.cuda.mem_get_info(device)[0] - room, dtype=torch.uint8, device=device)
    before = torch.cuda.memory_allocated(device), torch.cuda.get_rng_state(device).tolist()
    found = gpumagic.fit(step, device, margin=0, batch=range(1, 10**6))
    after = torch.cuda.memory_allocated(device), torch.cuda.get_rng_state(device).tolist()
    yield same("fit: confirmed by a run", found.confirmed, True)
    yield same("fit: bytes and random state are as before", after == before, True)
    value = int(found.value or 0)
    for what, batch, error in (
        ("it", value, ""),
        ("a fifth more", value * 6 // 5 + 1, "OutOfMemoryError"),
    ):
        yield same(f"fit: what {what} ends in", _error_of(step, batch, device), error)
    del hog


def _error_of(function: Callable[..., Any], argument: Any, device: str) -> str:
    try:
        placed(function, argument, device=device)
    except torch.OutOfMemoryError as error:
        return type(error).__name__
    return ""


def stream_rows(device: str, size: int) -> Iterator[Row]:
    """A cell's time and bytes hold for a second stream too."""
    a = torch.randn(size, size, device=device)
    pinned = torch.ones(1000).pin_memory()
    side = torch.cuda.Stream(device)
    begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    found = []

    def work() -> None:
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            begun.record(side)
            b = a
            for _ in range(20):
                b = a @ a
            ended.record(side)
            found.extend([b, pinned.to(device, non_blocking=True)])
        found.append(pinned.to(device, non_blocking=True))

    work()
    torch.cuda.synchronize(device)
    found.clear()
    report, _ = placed(work, device=device)
    seconds = begun.elapsed_time(ended) / 1e3
    yield at_least("seconds, with those of the side stream", report.seconds, seconds, seconds)
    yield same("bytes copied in both", report.ledger.nbytes, 2 * pinned.nbytes)
    yield same("their values", [t.sum().item() for t in found[1:]], [1000.0, 1000.0])
    torch.testing.assert_close(found[0], a @ a)


def interrupt_rows(kernel: Any, device: str, size: int) -> Iterator[Row]:
    """Ctrl-C while kernels are queued: the cell ends, says so, and the device is as before."""
    kernel.run(
        f"%load_ext gpumagic\nimport torch\na = torch.ones({size}, {size}, device='{device}')"
    )
    sent = kernel.send(f"%%ongpu {device}\nprint('go', flush=True)\nwhile True: b = a @ a")
    kernel.outputs(sent, until=lambda kind, content: "go" in content.get("text", ""))
    begun = time.perf_counter()
    kernel.manager.interrupt_kernel()
    found = kernel.outputs(sent)
    yield at_most("seconds until the cell had ended", time.perf_counter() - begun, 10)
    errors = [content["ename"] for kind, content in found if kind == "error"]
    yield same("the error", errors, ["KeyboardInterrupt"])
    shown = [c["data"]["text/plain"] for kind, c in found if kind == "display_data"]
    yield same("said in the report", any("KeyboardInterrupt after" in s for s in shown), True)
    _, reply = kernel.run(f"%%ongpu {device} --quiet\nassert (a @ a)[0, 0].item() == {size}")
    yield same("the next cell", reply["status"], "ok")
