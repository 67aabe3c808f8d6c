"""Run GPU tests with pytest, on virtual GPUs if the machine has no GPU.

The plugin does not import torch until an option, ini setting or marker asks for GPUs.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, NamedTuple

import pytest

from gpumagic.device.cards import bytes_in
from gpumagic.display.units import many, size
from gpumagic.errors import GpuError

if TYPE_CHECKING:
    from gpumagic.device import Device

_SETTINGS = {
    "virtual_gpus": "number of virtual GPUs for all tests, if the machine has no GPU",
    "virtual_gpu_memory": "memory of each virtual GPU, such as 8GiB",
}
_MARKER = 'gpus(number=1, memory="8GiB"): the test needs these GPUs; virtual ones if there are none'
_TYPED = 'gpus(2, memory="8GiB")'
_EXAMPLE = "type for example: pytest --virtual-gpus 2 --virtual-gpu-memory 8GiB"
_HIDE = 'set CUDA_VISIBLE_DEVICES="" to test on virtual GPUs'
_owner = pytest.StashKey[object]()  # what turned virtual GPUs on: "run" (the options) or a marker


class Wanted(NamedTuple):
    """The GPUs that a marked test needs, or that the options ask for."""

    number: int = 1
    memory: str | int | None = None

    @property
    def nbytes(self) -> int:
        """Return the memory of each GPU in bytes; raise GpuError if the text is not a size."""
        found = bytes_in(self.memory) if isinstance(self.memory, str) else self.memory or 0
        if found is None:
            raise GpuError(f"{self.memory!r} is not a size; type for example 512MiB or 1GiB")
        return found

    def fits(self, found: list[Device]) -> bool:
        """Whether enough GPUs have enough memory; unknown memory counts as enough."""
        enough = (gpu.memory_total is None or gpu.memory_total >= self.nbytes for gpu in found)
        return sum(enough) >= self.number


def _gpus_here() -> list[Device]:
    """Return the GPUs that torch can use; without torch, the GPUs that this process can see."""
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
    """Turn on the virtual GPUs of the options or the ini file, unless the machine has a GPU."""
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
        if type(wanted.number) is int and wanted.nbytes >= 0:
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


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """After all fixtures end, turn virtual GPUs off if the next test does not need them."""
    _turn_off(item.config, "run", nextitem and nextitem.get_closest_marker("gpus"))
