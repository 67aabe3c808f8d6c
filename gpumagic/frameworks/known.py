"""Find the frameworks that code imports or uses, and their devices."""

import ast
import importlib
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

from gpumagic.device import Device, cuda_state, devices_changed, here, resolve_one
from gpumagic.errors import GpuError, torch_needed
from gpumagic.frameworks.framework import Framework
from gpumagic.usercode.files import is_users
from gpumagic.usercode.values import defined_in, of_function

if TYPE_CHECKING:
    import torch

_CLASSES = {"torch": "Torch", "jax": "Jax", "tensorflow": "TensorFlow", "cupy": "CuPy"}  # adapters
_PACKAGES = {  # packages that use a framework, for each framework other than torch
    "jax": {"jax", "jaxlib", "flax", "optax", "equinox"},
    "tensorflow": {"tensorflow", "keras"},
    "cupy": {"cupy", "cupyx", "cudf"},
}


def imported() -> list[Framework]:
    """Return the frameworks other than torch that this process has imported."""
    return [_made(module) for module in _PACKAGES if _is_imported(module)]


def in_use() -> list[Framework]:
    """Return the frameworks that this process has imported, torch first."""
    return [_made(module) for module in _CLASSES if _is_imported(module)]


def _is_imported(module: str) -> bool:
    return sys.modules.get(module) is not None


def counted_here() -> list[Framework]:
    """Return the frameworks whose copies are counted: the imported ones, and torch if installed."""
    installed = _is_imported("torch") or find_spec("torch") is not None
    return [*([torch_itself()] if installed else ()), *imported()]


def torch_itself() -> Framework:
    """Import torch and return its adapter."""
    return _made("torch")


def needed_by(named: set[str], namespace: Mapping[str, Any]) -> list[Framework]:
    """Return the frameworks other than torch used by the packages `named`, or by variables.
    Import the frameworks of `named`; the frameworks of variables are already imported."""
    # Omit frameworks that only a library uses: starting such a framework would take memory.
    for module, packages in _PACKAGES.items():
        if named & packages:
            with suppress(Exception):  # the cell's own import raises the same error
                importlib.import_module(module)
    ready = {module: packages for module, packages in _PACKAGES.items() if _is_imported(module)}
    return [_made(m) for m in ready if named & ready[m] or holds(namespace, ready[m])]


def holds(namespace: Mapping[str, Any], packages: set[str], also_modules: bool = True) -> bool:
    """Whether `namespace`, or a user's module in it, has a variable from these packages."""
    for value in list(namespace.values()):
        if type(value) is not ModuleType:
            named = of_function(value, "__module__") or defined_in(type(value))
            found = str(named).partition(".")[0] in packages
        elif also_modules and is_users(getattr(value, "__file__", None)):
            found = holds(vars(value), packages, also_modules=False)
        else:
            found = value.__name__.partition(".")[0] in packages
        if found:
            return True
    return False


def imports_of(tree: ast.AST | None) -> set[str]:
    """Return the packages that code imports: ``{"jax"}`` for ``import jax.numpy as jnp``."""
    names: set[str] = set()
    for node in () if tree is None else ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.add(node.module or "")
    return {name.partition(".")[0] for name in names}


class _Finder:
    """Create a framework's virtual GPUs when the framework is imported (an import hook)."""

    def __init__(self, count: int) -> None:
        self._count = count

    def find_spec(self, name: str, *others: Any) -> ModuleSpec | None:
        if name not in _PACKAGES:
            return None
        found = (each.find_spec(name, *others) for each in sys.meta_path if each is not self)
        spec = next(filter(None, found), None)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_and_make(module: ModuleType) -> None:
                run(module)
                with suppress(GpuError):  # `%gpus` and cells on a virtual GPU report the error
                    _made(name).make_virtual(self._count)

            spec.loader.exec_module = run_and_make  # type: ignore[method-assign]
        return spec


def make_virtual(count: int) -> list[str]:
    """Create `count` virtual GPUs in each framework, now or at its import; 0 removes them.
    Return an error message for each framework that started too early."""
    sys.meta_path[:] = [each for each in sys.meta_path if type(each) is not _Finder]
    if count:
        sys.meta_path.insert(0, _Finder(count))
    said = []
    for framework in imported():
        try:
            framework.make_virtual(count)
        except GpuError as error:
            said.append(str(error))
    return said


def started() -> list[Framework]:
    """Return the frameworks other than torch that have initialized their devices."""
    return [framework for framework in imported() if framework.started()]


@cache
def _made(module: str) -> Framework:
    adapter = importlib.import_module(f"gpumagic.frameworks.{module}_framework")
    return cast(Framework, getattr(adapter, _CLASSES[module])())


_found: dict[str, Device] = {}  # devices by name: `cpu`, and GPUs after CUDA has started
devices_changed.append(_found.clear)


class Needed:
    """Find the frameworks that given code imports, or that the variables of a notebook use."""

    def __init__(self, tree: ast.AST | None, namespace: dict[str, Any]) -> None:
        named = imports_of(tree)
        self.others = tuple(needed_by(named, namespace))
        wanted = "torch" in named or not self.others
        self.torch = _is_imported("torch") or (wanted and find_spec("torch") is not None)
        self.unusable = ""  # the error if torch cannot use the device

    @classmethod
    def by(cls, namespace: dict[str, Any], *codes: object) -> "Needed":
        """Find the frameworks that code texts need. Ignore all texts if one text is invalid."""
        with suppress(SyntaxError, ValueError):
            text = "\n".join(code for code in codes if isinstance(code, str))
            return cls(ast.parse(text), namespace)
        return cls(None, namespace)

    @property
    def frameworks(self) -> tuple[Framework, ...]:
        """Return the frameworks that the code needs, torch first."""
        return (*((torch_itself(),) if self.torch else ()), *self.others)

    def check(self, what: str) -> None:
        """Raise GpuError if there is no framework; `what` is the feature that needs it."""
        if not self.torch and not self.others:
            with torch_needed(f"{what} without JAX, TensorFlow or CuPy"):
                importlib.import_module("torch")

    def find(self, where: object) -> Device:
        """Return the one device that `where` names, or raise `GpuError`."""
        if not self.torch:
            return resolve_one(where, self.devices("free" in str(where)))
        if (device := _found.get(str(where))) is None:
            device = self._look_up(where)
            started = device.kind == "cuda" and cuda_state.live_cuda() is not None
            if self.torch and (where == "cpu" or (started and re.search(r"\d", str(where)))):
                _found[str(where)] = device
        elif device.kind == "cuda":
            cuda_state.check()
        return device

    def _look_up(self, where: object) -> Device:
        from gpumagic.placement.torch_devices import find

        try:
            return find(where)
        except GpuError as error:
            # torch may be a CPU build. If other frameworks have the GPU, do not use torch.
            if not self.others or cuda_state.death():
                raise
            device = resolve_one(where, self._of_others("free" in str(where)))
            self.torch, self.unusable = False, str(error)
            return device

    def devices(self, memory: bool = False) -> list[Device]:
        """Return the GPUs that these frameworks can use here, in order of ordinals."""
        if not self.torch:
            return self._of_others(memory)
        from gpumagic.placement import torch_devices

        return torch_devices.devices(memory=memory)

    def of_torch(self, device: Device) -> "torch.device | None":
        """Return the `torch.device`; None if the code does not use torch."""
        return torch_itself().own(device) if self.torch else None

    def _of_others(self, memory: bool) -> list[Device]:
        found = here(memory=memory)
        # Without NVML (ROCm, Jetson), use the devices of the first framework that has devices.
        return found or next(filter(None, (other.devices() for other in self.others)), [])
