"""What does a virtual GPU cost? Each operator and each training step against the CPU's.

Run it with `python benchmarks/virtual_speed.py`. One process and one thread, in rounds that
alternate between the devices, so that a slow minute slows both; processor time, so that other
programs do not count. Each figure is the median over the rounds, each difference and ratio the
median of the rounds'. The first row is the least that any kernel in Python costs: one registered by
`torch.library` that only hands its arguments to the CPU's. Microseconds are those of the machine,
so the limit is told in such kernels: the median of the rows was 7.4 of them, and is to be two
thirds of that. Exits 1 over a limit.
"""

import statistics
import sys
from collections.abc import Callable
from time import thread_time

import torch
from torch import nn
from torch.utils.benchmark import Timer

from gpumagic import virtual

ROUNDS = 60
OPERATOR, STEP = 4.9, 1.4  # kernels in Python more than the CPU's; times the CPU's
DEVICES = ("cpu", "cuda:1")
OPERATORS = {
    "add": "x + y",
    "add a number": "x + 1",
    "add in place": "x.add_(y)",
    "add into out=": "torch.add(x, y, out=z)",
    "relu": "x.relu()",
    "product": "x @ y",
    "sum": "x.sum()",
    "softmax": "x.softmax(1)",
    "cat": "torch.cat((x, y))",
    "max": "x.max(1)",
    "view": "x.view(-1)",
    "empty": "torch.empty(8, 8, device=d)",
}


def bare_kernel() -> Callable[..., torch.Tensor]:
    """An operator whose kernel is the shortest that there is in Python."""
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
    add = torch.ops.aten.add.Tensor
    torch.library.define("bare::add", "(Tensor a, Tensor b) -> Tensor")
    torch.library.impl("bare::add", "CPU", lambda a, b: add.redispatch(keys, a, b))
    return torch.ops.bare.add.default


def step_of_a_cnn(device: str) -> Callable[[], None]:
    """The network of examples/quickstart.ipynb."""
    torch.manual_seed(0)
    net = nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(32 * 4 * 4, 10)),
    ).to(device)
    images, labels = torch.randn(64, 1, 8, 8), torch.randint(10, (64,))
    return _step(net, images.to(device), labels.to(device), nn.functional.cross_entropy)


def step_of_an_encoder_layer(device: str) -> Callable[[], None]:
    torch.manual_seed(0)
    net = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True).to(device)
    words = torch.randn(16, 32, 128).to(device)
    return _step(net, words, words, nn.functional.mse_loss)


def _step(net: nn.Module, inputs: object, wanted: object, loss: Callable) -> Callable[[], None]:
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        loss(net(inputs), wanted).backward()
        optimizer.step()

    return step


def measured(timers: list[Timer], runs: int) -> list[list[float]]:
    """Seconds of each, by rounds."""
    for timer in timers:  # warm-up
        timer.timeit(runs)
    took: list[list[float]] = [[] for _ in timers]
    for round_ in range(ROUNDS):
        for n in range(len(timers)):
            at = (n + round_) % len(timers)
            took[at].append(timers[at].timeit(runs).mean)
    return took


def operators() -> bool:
    """Print a row for each; whether one is over its limit."""
    names = {"torch": torch, "bare": bare_kernel()}
    values = {
        d: {name: torch.randn(8, 8).to(d) for name in "xyz"} | names | {"d": d} for d in DEVICES
    }
    print(f"{'8 × 8, µs':20}{'CPU':>9}{'virtual':>9}{'more':>9}   × a Python kernel")
    bare = _row("a Python kernel", [("x + y", values["cpu"]), ("bare(x, y)", values["cpu"])])
    more = [_row(what, [(s, values[d]) for d in DEVICES], bare) for what, s in OPERATORS.items()]
    median = statistics.median(more) / bare
    over = median > OPERATOR
    print(f"{'median':50}{median:.1f} (limit {OPERATOR}){'   OVER' * over}")
    return over


def _row(what: str, ways: list[tuple[str, dict]], bare: float | None = None) -> float:
    """Print how many µs more than the first way the second takes."""
    timers = [Timer(statement, globals=names, timer=thread_time) for statement, names in ways]
    first, second = ([1e6 * t for t in times] for times in measured(timers, 50))
    more = statistics.median(b - a for a, b in zip(first, second, strict=True))
    figures = f"{statistics.median(first):9.2f}{statistics.median(second):9.2f}{more:9.2f}"
    print(f"{what:20}{figures}   {more / bare:.1f}" if bare else f"{what:20}{figures}")
    return more


def steps() -> bool:
    """Print a row for each training step; whether one is over its limit."""
    failed = False
    print(f"\n{'training step, ms':20}{'CPU':>9}{'virtual':>9}{'ratio':>9}{'limit':>7}")
    for what, make in (("small CNN", step_of_a_cnn), ("encoder layer", step_of_an_encoder_layer)):
        timers = [
            Timer("step()", globals={"step": make(device)}, timer=thread_time) for device in DEVICES
        ]
        cpu, other = measured(timers, 3)
        ratio = statistics.median(b / a for a, b in zip(cpu, other, strict=True))
        failed |= ratio > STEP
        print(
            f"{what:20}{1e3 * statistics.median(cpu):9.2f}{1e3 * statistics.median(other):9.2f}"
            f"{ratio:9.2f}{STEP:7.1f}{'   OVER' if ratio > STEP else ''}"
        )
    return failed


def main() -> int:
    torch.set_num_threads(1)
    virtual.enable(2)
    return int(operators() | steps())


if __name__ == "__main__":
    sys.exit(main())
