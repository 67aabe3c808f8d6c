"""Replace torch's factories with twins (wrappers) while any placement is in force.

A factory creates tensors, such as `torch.zeros`. A placement is a device for new tensors. A torch
function mode would double the cost of every operator; a twin adds 0.4 µs to each new tensor.
"""

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import FunctionType, ModuleType
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.overrides
from torch import Tensor
from torch._C import _len_torch_function_stack  # private, but torch.utils._device imports this too
from torch.jit import _builtins, _recursive
from torch.utils._device import _device_constructors

from gpumagic.placement import Placement, in_force, placement, put_in_force
from gpumagic.placement.twins import IN_LIBRARIES, METHODS, SPACES, twins
from gpumagic.usercode.files import is_users
from gpumagic.usercode.values import defined_in, members_of

# torch caches tables of its functions. Build the tables now, so that no twin becomes a key.
for _table in ("get_ignored_functions", "get_testing_overrides", "get_overridable_functions"):
    getattr(torch.overrides, _table)()
_device_constructors()


def enter(
    device: torch.device, *, batches: bool = True, namespace: dict[str, Any] | None = None
) -> Placement:
    """Begin a placement, and put twins in `namespace` too. Pass the result to `leave`."""
    outer, modes = in_force.get() and placement(), _len_torch_function_stack()
    implied = device.type == "cpu" and not modes
    place = Placement(device, batches, outer, modes, {} if implied else {"device": device})
    if not implied and device.type == "cuda":
        # Let "cuda" without an index, and torch.cuda.current_device(), mean this GPU.
        place.previous_index = torch.cuda.current_device()
        torch.cuda.set_device(device)
    try:
        _install(namespace)
    except BaseException:
        _restore_current_device(place)
        raise
    put_in_force(place)
    return place


def leave(place: Placement) -> None:
    """End a placement, from any context; a second call does nothing."""
    if place.device is None:
        return
    place.device, place.direct = None, False
    if in_force.get() is place:
        put_in_force(place.outer)
    try:
        _remove()
    finally:
        _restore_current_device(place)


def _restore_current_device(place: Placement) -> None:
    if place.previous_index is not None:
        # A failed or missing device must not prevent the end of the placement.
        with suppress(RuntimeError, AssertionError, AttributeError):
            torch.cuda.set_device(place.previous_index)


_lock = threading.RLock()
_Swap = tuple[Any, str, Any, Any]  # owner, name of an attribute or key, old value, new value
_in_torch: list[_Swap] = []
_in_modules: list[_Swap] = []  # swaps in the modules of libraries
# User modules' namespaces, by module name. Each swap searches them again, since reloads add names.
_of_users: dict[str, dict[str, Any]] = {}
_twin_of: dict[int, Any] = {}  # by the original's id, since hashing a value could run user code
_real_of: dict[int, Any] = {}  # originals by the twin's id
# Ids of torch's modules, of originals and of twins. A namespace without such a value needs no swap.
_ids: set[int] = set()
_placements = 0  # number of placements that have not ended
_namespaces: dict[int, dict[str, Any]] = {}  # swapped namespaces by id


def find_swaps() -> None:
    """Find the names to swap in all modules. An early call makes the next `enter` faster."""
    with _lock:
        if not _in_torch:
            for owner, name, real, twin in twins():
                _in_torch.append((vars(owner) if owner in SPACES else owner, name, real, twin))
                _twin_of[id(real)], _real_of[id(twin)] = twin, real
            for owner in (_builtins, _recursive):
                _in_torch.append((owner, "_find_builtin", _find_builtin, _find_operator))
            _ids.update(map(id, SPACES), _twin_of, _real_of)
        if _placements == 0:
            _register(_new_modules())
            _fill_dynamos_tables()


def _install(namespace: dict[str, Any] | None) -> None:
    """Count a placement, and swap names in `namespace`. The first placement swaps all names."""
    global _placements
    with _lock:
        find_swaps()
        if _placements == 0:
            if not _finder.importing:
                _swap_torch()
            sys.meta_path.insert(0, _finder)
            _swap(_in_modules)
            for names in _of_users.values():
                _swap_namespace(names)
        _placements += 1
        try:
            if namespace is not None:
                _swap_namespace(namespace)
        except BaseException:
            _remove()
            raise


def _remove() -> None:
    global _placements
    with _lock:
        _placements -= 1
        if _placements:
            return
        sys.meta_path.remove(_finder)
        _swap_torch(back=True)
        _swap(_in_modules, back=True)
        # Modules imported during the placement may refer to twins, so restore the originals there.
        imported = _new_modules()
        for module in imported.values():
            _swap(_swaps_in(getattr(module, "__dict__", {}), _real_of))
        _register(imported)
        while _namespaces:
            _swap(_swaps_in(_namespaces.popitem()[1], _real_of))


def installed() -> bool:
    return _placements > 0


_find_builtin: Callable[[Any], str | None] = _builtins._find_builtin


def _find_operator(function: Any) -> Any:
    return _find_builtin(_real_of.get(id(function), function))  # TorchScript knows no twins


def _swap(swaps: Iterable[_Swap], *, back: bool = False) -> None:
    # Skip a name whose value is neither the original nor the twin, because the user patched it.
    for owner, name, old, new in swaps:
        if back:
            old, new = new, old
        if isinstance(owner, dict):
            if owner.get(name) is old:
                owner[name] = new
        elif getattr(owner, name) is old:
            setattr(owner, name, new)


def _swap_torch(*, back: bool = False) -> None:
    _swap(_in_torch, back=back)
    for name, method in METHODS.items():  # deleting a twin restores the inherited original
        if not back and name not in vars(Tensor):
            setattr(Tensor, name, method)
        elif back and vars(Tensor).get(name) is method:
            delattr(Tensor, name)


class _TorchFinder(MetaPathFinder):
    """Restores the originals while a torch module is imported, so that no module stores twins."""

    # A module in `IN_LIBRARIES` may see twins during its import. Its functions are swapped later.
    importing = 0  # number of torch modules that are being imported, in all threads

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if not (fullname.startswith("torch.") or fullname in IN_LIBRARIES):
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module
            spec.loader.exec_module = lambda module: self._import(run, module)  # type: ignore[method-assign]
        return spec

    def _import(self, run: Callable[[ModuleType], None], module: ModuleType) -> None:
        # Import without holding the lock, because an import may wait for another thread's import.
        of_torch = module.__name__ not in IN_LIBRARIES
        with _lock:
            self.importing += of_torch
            if self.importing:
                _swap_torch(back=True)
        try:
            run(module)
            if module.__name__ == "torch._dynamo":
                _fill_dynamos_tables()
        finally:
            with _lock:
                self.importing -= of_torch
                if installed() and not of_torch:
                    _register({module.__name__: module})
                    _swap(_in_modules)
                if installed() and not self.importing:
                    _swap_torch()


_finder = _TorchFinder()


def _swap_namespace(namespace: dict[str, Any]) -> None:
    if id(namespace) not in _namespaces:  # a namespace in the dict is already swapped
        _swap(_swaps_in(namespace, _twin_of))
        _namespaces[id(namespace)] = namespace


def _swaps_in(namespace: dict[str, Any], table: dict[int, Any]) -> Iterator[_Swap]:
    """Yield the swaps for a namespace's names and for default arguments of its functions."""
    values = [*namespace.values()]
    if _ids.isdisjoint(map(id, values)):
        return
    for name, value in [*namespace.items()]:
        if id(value) in table:
            yield namespace, name, value, table[id(value)]
    for value in values:
        # Use type(), because isinstance may run code of a user's object, such as a lazy proxy.
        if type(value) is FunctionType:
            yield from _defaults(value, table)
        elif issubclass(type(value), type) and defined_in(value) == namespace.get("__name__"):
            for member in list(members_of(value).values()):
                made = member.__func__ if type(member) in (staticmethod, classmethod) else member
                yield from _defaults(made, table)


def _defaults(function: Any, table: dict[int, Any]) -> Iterator[_Swap]:
    if type(function) is not FunctionType:
        return
    old = function.__defaults__ or ()
    if not table.keys().isdisjoint(map(id, old)):
        yield function, "__defaults__", old, tuple(table.get(id(v), v) for v in old)
    for name, value in (function.__kwdefaults__ or {}).items():
        if id(value) in table:
            yield function.__kwdefaults__, name, value, table[id(value)]


# Modules that `_new_modules` has returned. A set of ids is not enough, since ids are reused.
_known: WeakValueDictionary[str, Any] = WeakValueDictionary()
_last_known = ""


def _new_modules() -> dict[str, Any]:
    global _last_known
    name = next(reversed(sys.modules))
    if name == _last_known and _known.get(name) is sys.modules[name]:
        return {}  # the last imported module is known, so all modules are known
    modules, _last_known = list(sys.modules.items()), name
    new = {n: m for n, m in modules if _known.get(n) is not m}
    for name, module in new.items():
        with suppress(TypeError):  # None, which blocks a module's import, allows no weak reference
            _known[name] = module
    return new


def _register(modules: dict[str, Any]) -> None:
    for name, module in modules.items():
        names = getattr(module, "__dict__", {})
        if name.partition(".")[0] in ("torch", "gpumagic"):
            continue
        if isinstance(file := names.get("__file__"), str) and is_users(file):
            _of_users[name] = names
        else:
            _in_modules.extend(_swaps_in(names, _twin_of))
            for function, wrap in IN_LIBRARIES.get(name, {}).items():
                if function in names:
                    _in_modules.append((names, function, names[function], wrap(names[function])))


def _fill_dynamos_tables() -> None:
    # Dynamo looks functions up in tables by identity, and fills the tables at first use. Fill them
    # with the originals now, so that dynamo traces through a twin to the original.
    rules = sys.modules.get("torch._dynamo.trace_rules")
    functions = sys.modules.get("torch._dynamo.variables.torch")
    known = getattr(functions, "TorchInGraphFunctionVariable", None)
    for owner, name in ((rules, "get_torch_obj_rule_map"), (known, "_get_handlers")):
        getattr(owner, name, lambda: None)()
