"""Run GPU tests with pytest, on virtual GPUs if the machine has no GPU.

The plugin does not import torch until an option, ini setting, marker or fixture needs GPUs.
"""

from __future__ import annotations

import gc
from collections.abc import Generator, Iterator
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from gpumagic.display.units import NOT_KNOWN, many, size
from gpumagic.errors import GpuError

if TYPE_CHECKING:
    from gpumagic.device import Device
    from gpumagic.ledger.entry import Ledger

_SETTINGS = {
    "virtual_gpus": "number of virtual GPUs for all tests, if the machine has no GPU",
    "virtual_gpu_memory": "memory of each virtual GPU, such as 8GiB",
}
_MARKER = 'gpus(number=1, memory="8GiB"): needs these GPUs; virtual ones if there are none'
_TYPED = 'gpus(2, memory="8GiB")'
_EXAMPLE = "type for example: pytest --virtual-gpus 2 --virtual-gpu-memory 8GiB"
_HIDE = "set CUDA_VISIBLE_DEVICES= to test on virtual GPUs"
_MOST_HOLDERS = 3
_owner = pytest.StashKey[object]()  # what turned virtual GPUs on: "run" (the options) or a marker
_failed = pytest.StashKey[bool]()
_ledger = pytest.StashKey["GpuLedger"]()
_memory = pytest.StashKey["GpuMemory"]()


class Wanted(NamedTuple):
    """The GPUs that all tests or a marked test need."""

    number: int = 1
    memory: str | int | None = None

    def fits(self, found: list[Device]) -> bool:
        """Whether enough GPUs have enough memory; unknown memory counts as enough."""
        least = int(Bytes(self.memory or 0))
        return sum((gpu.memory_total or least) >= least for gpu in found) >= self.number


def _gpus_here() -> list[Device]:
    """Return the GPUs that torch can use; without torch, all GPUs of the machine."""
    if find_spec("torch") is None:
        from gpumagic.device import here as found
    else:
        from gpumagic.placement.torch_devices import devices as found
    return found(memory=False)


def _turn_on(config: pytest.Config, wanted: Wanted, owner: object) -> None:
    from gpumagic.virtual import enable

    enable(*wanted)
    config.stash[_owner] = owner


def _turn_off(config: pytest.Config, *unless: object) -> None:
    if config.stash.get(_owner, None) not in (None, *unless):
        from gpumagic.virtual import disable

        config.stash[_owner] = None
        disable()


def _start(config: pytest.Config, options: object) -> None:
    """Turn on the virtual GPUs that the options or the ini file ask for."""
    number, memory = (getattr(options, name, None) or config.getini(name) for name in _SETTINGS)
    leads_workers = getattr(options, "numprocesses", None) and not hasattr(config, "workerinput")
    if not number or leads_workers or config.stash.get(_owner, None):
        return
    try:
        if all(gpu.virtual for gpu in _gpus_here()):
            asked = int(number) if number.isdecimal() else number
            _turn_on(config, Wanted(asked, memory or None), "run")
    except GpuError as error:
        raise pytest.UsageError(f"{_plain(error)}; {_EXAMPLE}") from None


def _plain(error: GpuError) -> str:
    """Return an error's message without the advice, which is written for notebooks."""
    return str(error).partition("; ")[0]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options and the ini settings."""
    for name, about in _SETTINGS.items():
        option = f"--{name.replace('_', '-')}"
        parser.getgroup("gpumagic", "GPUs").addoption(option, help=about)
        parser.addini(name, about)


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Turn virtual GPUs on before a conftest.py asks torch for GPUs."""
    _start(early_config, early_config.known_args_namespace)


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker; turn virtual GPUs on if `pytest_load_initial_conftests` did not."""
    config.addinivalue_line("markers", _MARKER)
    config.add_cleanup(lambda: _turn_off(config))
    _start(config, config.option)


def _wanted(mark: pytest.Mark) -> Wanted:
    """Read a marker; fail the test with a one-line message if the marker has a mistake."""
    try:
        wanted = Wanted(*mark.args, **mark.kwargs)
        Bytes(wanted.memory or 0)
        if type(wanted.number) is int:
            return wanted
        said = f"{wanted.number!r} is not a number of GPUs"
    except (TypeError, GpuError) as error:
        said = str(error).removeprefix("Wanted.__new__() ")
    pytest.fail(f"@pytest.mark.gpus: {said}; type for example {_TYPED}", pytrace=False)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Before a marked test, turn on virtual GPUs if needed, or skip the test with a reason."""
    mark = item.get_closest_marker("gpus")
    if mark is None or item.config.stash.get(_owner, None) == mark:
        return
    wanted, found = _wanted(mark), _gpus_here()
    if wanted.fits(found):
        return
    if found:
        reason = ", ".join(f"{gpu} has {size(gpu.memory_total)}" for gpu in found)
        reason += f"; {_EXAMPLE if found[0].virtual else _HIDE}"
    else:
        try:
            _turn_on(item.config, wanted, mark)
            return
        except GpuError as error:
            reason = _plain(error)
    needs = f"needs {many(wanted.number, 'GPU')}{f' of {wanted.memory}' if wanted.memory else ''}"
    raise pytest.skip.Exception(f"{needs}: {reason}", _use_item_location=True)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, None, None]:
    """After all fixtures end, check for leaks; turn virtual GPUs off if no longer needed."""
    memory = item.stash.get(_memory, None)
    try:
        yield
        # A failed test is not checked, because the traceback keeps the test's variables alive.
        if memory and not item.stash.get(_failed, False):
            item.funcargs.clear()  # type: ignore[attr-defined]  # pytest also does this, but later
            memory.check()
    finally:
        if memory:
            memory.meter.stop()
        _turn_off(item.config, "run", nextitem and nextitem.get_closest_marker("gpus"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the implicit copies and waits, such as `.item()`, to the report of a failed test."""
    report = yield
    item.stash[_failed] = item.stash.get(_failed, False) or report.failed
    ledger = item.stash.get(_ledger, None)
    if ledger and report.failed and report.when == "call" and ledger.implicit:
        report.sections.append(("implicit copies and waits", repr(ledger.entries())))
    return report


def _compared(name: str) -> Any:
    compare = getattr(int, name)
    return lambda self, other: compare(self, Bytes(other) if isinstance(other, str) else other)


class Bytes(int):
    """A number of bytes. It is shown as ``1.5 GiB``, and can be compared to ``"1GiB"``."""

    def __new__(cls, given: str | int) -> Bytes:
        """Parse a number or a text; raise GpuError if the text is not a size."""
        from gpumagic.device.cards import bytes_in

        if (found := bytes_in(given) if isinstance(given, str) else given) is None:
            raise GpuError(f"{given!r} is not a size; type for example 512MiB or 1GiB")
        return super().__new__(cls, found)

    def __repr__(self) -> str:
        return size(int(self))

    __lt__, __le__, __gt__ = map(_compared, ("__lt__", "__le__", "__gt__"))
    __ge__, __eq__, __ne__ = map(_compared, ("__ge__", "__eq__", "__ne__"))
    __hash__ = int.__hash__


class GpuLedger(NamedTuple):
    """A test's implicit copies and waits so far; ``watch.ledger`` also has explicit ones."""

    watch: Any

    @property
    def implicit(self) -> str:
        """One line about implicit copies and waits, such as `.item()`; ``""`` if none."""
        from gpumagic.ledger import ledger_view

        return ledger_view.line(self.entries())

    def entries(self) -> Ledger:
        """Return the implicit copies and waits."""
        ledger: Ledger = self.watch.ledger
        return replace(ledger, entries=tuple(entry for entry in ledger if entry.implicit))


class GpuMemory:
    """The memory that a test uses on each CUDA device, as counted by torch's allocator."""

    may_leave: str | int = 0
    """The maximum number of bytes that the test may leave allocated on each GPU."""

    def __init__(self) -> None:
        from gpumagic.ledger.dispatch import MemoryMeter

        self._clean()
        self.meter = MemoryMeter()
        self.meter.start()

    def peak(self, where: object) -> Bytes:
        """Return the peak of the bytes allocated on a GPU since the test began."""
        from gpumagic.device import resolve_one

        __tracebackhide__ = True
        device = str(resolve_one(where, _gpus_here()))
        peaks = [found.peak for found in self.meter.read() if found.device == device]
        if not peaks:
            raise GpuError(f"the peak of {device} is not measured; type a GPU, such as cuda:0")
        return Bytes(peaks[0])

    def check(self) -> None:
        """Fail if the test has left more than `may_leave` bytes allocated on a GPU."""
        self._clean()
        grown = {m.device: Bytes(max(m.allocated - m.before, 0)) for m in self.meter.read()}
        left = {gpu: more for gpu, more in grown.items() if more > self.may_leave}
        if not left:
            return
        from gpumagic.memory.holders_by_name import memory

        lines = [f"the test leaves {more!r} on {gpu}" for gpu, more in left.items()]
        for row in [row for row in memory().holders if row.device in left][:_MOST_HOLDERS]:
            made = row.made or NOT_KNOWN
            lines.append(f"  {row.path} holds {size(row.nbytes)}, allocated in {made}")
        pytest.fail("\n".join(lines), pytrace=False)

    def _clean(self) -> None:
        from gpumagic.memory.allocator import clear_workspaces

        gc.collect()
        clear_workspaces()


@pytest.fixture
def gpu_ledger(request: pytest.FixtureRequest) -> Iterator[GpuLedger]:
    """Count a test's copies and waits, for example to ``assert not gpu_ledger.implicit``."""
    from gpumagic.frameworks.watching import watch

    with watch(warn=False) as watching:
        request.node.stash[_ledger] = ledger = GpuLedger(watching)
        yield ledger


@pytest.fixture
def gpu_memory(request: pytest.FixtureRequest) -> GpuMemory:
    """Measure a test's memory; a test that leaks fails. Example: ``gpu_memory.peak("cuda:0")``."""
    request.node.stash[_memory] = memory = GpuMemory()
    return memory
