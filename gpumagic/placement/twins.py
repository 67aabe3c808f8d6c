"""Make twins of torch's functions that create tensors, or that take or count devices.

A twin wraps the original function and uses the placement (the device for new tensors), unless the
caller gives a device. If a library asks for GPU 0, it gets the placement's GPU. A user gets GPU 0.
"""

import types
from collections.abc import Callable, Iterator
from functools import lru_cache, partial, wraps
from sys import _getframe
from types import FrameType
from typing import Any

import torch
import torch.accelerator
import torch.cuda._utils
import torch.jit.annotations
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.utils._device import DeviceContext, _device_constructors
from torch.utils.data import DataLoader
from torch.utils.data._utils import pin_memory
from torch.utils.data.dataloader import _BaseDataLoaderIter

from gpumagic.placement import Placement, in_force, placement, suspended, traced_device
from gpumagic.placement.dataloader import deliver
from gpumagic.usercode.files import leave_out_ours, module_of, unseen, user_frame

Function = Callable[..., Any]
Args = tuple[Any, ...]
Adapter = Callable[[Function, Args, dict[str, Any], FrameType | None], Any]
"""A twin calls this with the original, args, kwargs, and the caller's frame (None in dynamo)."""


def _twin(function: Function, adapter: Adapter) -> Function:
    @wraps(function)
    def twin(*args: Any, **kwargs: Any) -> Any:
        try:
            return adapter(function, args, kwargs, None if is_dynamo_compiling() else _getframe(1))
        except BaseException as error:
            leave_out_ours(error)
            raise

    return twin


# Functions of these modules, and methods with these names, pass on a device that a caller chose.
_PASSING_MODULES = ("torch.cuda", "torch.accelerator", "torch.nn.modules.module")
_PASSING_METHODS = ("to", "cuda", "set_module_tensor_to_device")
# These modules choose no device. For example, accelerate's hooks follow the `device_map`.
_NEUTRAL = ("torch.", "gpumagic.", "accelerate.hooks.", "accelerate.utils.operations.")
_FIRST, _NAMES = "cuda:0", (str, int)


@lru_cache(maxsize=8192)
def _library_of(file: str) -> str:
    """Return the library of a source file; empty for `_NEUTRAL`, Python and user code."""
    module = f"{module_of(file)}."
    return "" if module.startswith(_NEUTRAL) else module.partition(".")[0]


def _library_at(frame: FrameType | None, given: object) -> str:
    """Return the library that chose the device `given` in `frame`; empty if no library did."""
    while frame is not None and (
        str(frame.f_globals.get("__name__")).startswith(_PASSING_MODULES)
        or frame.f_code.co_name in _PASSING_METHODS
    ):
        frame = frame.f_back
    library = "" if frame is None else _library_of(frame.f_code.co_filename)
    return "" if library and _is_users(given, frame) else library


def _is_users(given: object, frame: FrameType | None) -> bool:
    """Whether the user chose `given`: the user's code or variables have the same string object."""
    if (frame := user_frame(frame)) is None or given != _FIRST:
        return False
    held = (*frame.f_code.co_consts, *frame.f_locals.values(), *frame.f_globals.values())
    return any(value is given for value in held)


def _on_a_gpu() -> Placement | None:
    place = placement()
    if place is None or place.device is None or place.device.type != "cuda" or place.overruled():
        return None
    return place


def _first_of(given: object, frame: FrameType | None) -> torch.device | None:
    """Return the placement's GPU if a library chose `given` (a GPU 0) in `frame`, else None."""
    place = _on_a_gpu()
    library = _library_at(frame, given) if place is not None else ""
    return place.take(library) if place is not None and library else None


def _placed_name(given: Any, frame: FrameType | None) -> Any:
    first = _first_of(given, frame) if given in (0, _FIRST) else None
    return given if first is None else first


def _taking(
    position: int, function: Function, args: Args, kwargs: dict[str, Any], frame: FrameType | None
) -> Any:
    """Adapt a function that takes a device at `position`, or as `device=`."""
    if len(args) > position and type(args[position]) in _NAMES:
        args = (*args[:position], _placed_name(args[position], frame), *args[position + 1 :])
    elif type(kwargs.get("device")) in _NAMES:
        kwargs["device"] = _placed_name(kwargs["device"], frame)
    return function(*args, **kwargs)


def _count(count: Function, args: Args, kwargs: dict[str, Any], frame: FrameType | None) -> int:
    """Adapt `device_count`. While a placement on a GPU is in force, a library sees one GPU."""
    found: int = count()
    library = found > 1 and frame is not None and _library_of(frame.f_code.co_filename)
    return 1 if library and _on_a_gpu() is not None else found


def _annotated(read: Function, args: Args, kwargs: dict[str, Any], _: FrameType | None) -> Any:
    """Adapt TorchScript's reader of annotations, which knows only the original `torch.device`."""
    annotation, *rest = args
    return read(torch.device if annotation is _device else annotation, *rest, **kwargs)


class _DeviceType(type):
    """Metaclass of the twin of `torch.device`. The original allows no subclasses."""

    @unseen
    def __call__(cls, *args: Any, **kwargs: Any) -> torch.device:
        made = _device(*args, **kwargs)
        given = next(iter((*args, *kwargs.values())))
        if made.index != 0 or made.type != "cuda" or isinstance(given, _device):
            return made
        return _first_of(given, _getframe(2)) or made  # frame 1 is the wrapper made by `unseen`

    # The twin equals the original, because torch looks `torch.device` up in tables and tuples.
    def __eq__(cls, other: object) -> bool:
        return other is cls or other is _device

    def __hash__(cls) -> int:
        return hash(_device)

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _device)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, _device)

    def __getattr__(cls, name: str) -> Any:
        return getattr(_device, name)

    def __repr__(cls) -> str:
        return repr(_device)


_device = torch.device
_device_twin: Any = _DeviceType("device", (), {"__module__": "torch", "__doc__": _device.__doc__})

# Modules of "host code", whose small tensors, such as step counters and seeds, belong on the host.
_HOST_CODE = (
    *("torch.optim", "torch.utils.", "torch.distributed.", "torch.nn.utils.rnn"),
    *("torch._tensor", "torch._utils", "gpumagic.", "diffusers.schedulers.", "fastai.data."),
)
_others: set[object] = set()  # names of modules that were checked and are not host code


def _is_host_code(module: object) -> bool:
    name = str(module)
    # A user who calls `collate` wants the batch on the device. A DataLoader suspends placement.
    if name.startswith(_HOST_CODE) and name != "torch.utils.data._utils.collate":
        return True
    _others.add(module)
    return False


def _chosen(frame: FrameType | None = None, default: bool = False) -> torch.device | None:
    """Return the device to use; None if no placement applies, or if `frame` runs host code.
    If `default`, the caller passed `device=None`. Then torch's host code gets the device too."""
    if is_dynamo_compiling():
        return traced_device()
    if (place := placement()) is None or place.overruled():
        return None
    module = "" if frame is None else frame.f_globals.get("__name__")
    host = _is_host_code(module) and not (default and str(module).startswith("torch."))
    return None if host else place.device


def _factory(make: Function) -> Function:
    # `placed` runs for every new tensor, so the usual case makes the fewest checks.
    current, get_frame, others = in_force.get, _getframe, _others

    @wraps(make)
    def placed(*args: Any, **kwargs: Any) -> Any:
        place = None if is_dynamo_compiling() else current()
        try:
            if place is None:
                return _make(make, args, kwargs, None)
            frame = get_frame(1)
            if frame.f_globals.get("__name__") in others and not kwargs and place.direct:
                return make(*args, **place.keywords)
            return _make(make, args, kwargs, frame)
        except BaseException as error:
            leave_out_ours(error)
            raise

    return placed


def _make(make: Function, args: Args, kwargs: dict[str, Any], frame: FrameType | None) -> Any:
    if frame is not None and type(kwargs.get("device")) in _NAMES:
        kwargs["device"] = _placed_name(kwargs["device"], frame)
    named = kwargs.get("device") is not None or kwargs.get("out") is not None
    if named or kwargs.get("pin_memory") or (device := _chosen(frame, "device" in kwargs)) is None:
        return make(*args, **kwargs)
    generator = kwargs.get("generator")
    if generator is not None and generator.device != device:
        # A generator works only on its own device, so make the tensor there and copy it.
        needs_grad = kwargs.pop("requires_grad", False)
        kwargs["device"] = generator.device
        return make(*args, **kwargs).to(device).requires_grad_(needs_grad)
    kwargs["device"] = device
    return make(*args, **kwargs)


def _normal(make: Function, args: Args, kwargs: dict[str, Any], frame: FrameType | None) -> Any:
    """Adapt `normal`. If an argument is a tensor, the result is on that tensor's device."""
    follows = any(isinstance(a, Tensor) for a in (*args, *kwargs.values()))
    return make(*args, **kwargs) if follows else _make(make, args, kwargs, frame)


def _convert(make: Function, args: Args, kwargs: dict[str, Any], frame: FrameType | None) -> Any:
    """Adapt `as_tensor` and `asarray`, but leave an existing tensor where it is."""
    data = args[0] if args else kwargs.get("data", kwargs.get("obj"))
    if kwargs.get("device") is None and not isinstance(data, Tensor):
        kwargs["device"] = _chosen(frame, "device" in kwargs)  # None: torch's default device
    return make(*args, **kwargs)


def _on_host(make: Function, args: Args, kwargs: dict[str, Any], frame: FrameType | None) -> Any:
    """Adapt `from_numpy` and similar functions. Copy the resulting tensor to the device."""
    device, flags = _chosen(frame), getattr(args[0] if args else None, "flags", None)
    if device is not None and device.type != "cpu" and not getattr(flags, "writeable", True):
        args = (args[0].copy(), *args[1:])  # avoids torch's warning about read-only arrays
    made = make(*args, **kwargs)
    return made if device is None else made.to(device)


def _load(load: Function, args: Args, kwargs: dict[str, Any], _: FrameType | None) -> Any:
    if len(args) < 2 and kwargs.get("map_location") is None:
        kwargs["map_location"] = _chosen()
    return load(*args, **kwargs)


def _pin(pin: Function, args: Args, kwargs: dict[str, Any], _: FrameType | None) -> Any:
    """Adapt a DataLoader's `pin_memory`. Only tensors on the CPU can be pinned."""
    elsewhere = isinstance(args[0], Tensor) and args[0].device.type != "cpu"
    return args[0] if elsewhere else pin(*args, **kwargs)


def _recheck_later(make: Function, args: Args, kwargs: dict[str, Any], _: FrameType | None) -> None:
    """Adapt `with torch.device(...)`, so that later factory calls check `overruled`."""
    make(*args, **kwargs)
    if place := placement():
        place.direct = False


def _new(make: Function, args: Args, kwargs: dict[str, Any], _: FrameType | None) -> Any:
    """Adapt `torch.Tensor(...)`, but not calls of its subclasses."""
    made = make(*args, **kwargs)
    return _fresh(made, args[1:], kwargs) if args[0] is Tensor else made


def _fresh(made: Tensor, args: Args, kwargs: dict[str, Any]) -> Tensor:
    """Copy a result of `torch.Tensor(...)` to the device, unless the result shares memory."""
    alias = bool(args) and isinstance(args[0], (Tensor, torch.UntypedStorage))
    device = None if kwargs or alias else _chosen()
    return made if device is None else made.to(device)


class _LegacyType(type):
    """Metaclass of the classes that replace `torch.FloatTensor`, `torch.IntTensor` and so on."""

    real: Any

    @unseen
    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return _fresh(cls.real(*args, **kwargs), args, kwargs)

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, cls.real)

    def __getattr__(cls, name: str) -> Any:
        return getattr(type.__getattribute__(cls, "real"), name)


def _checked(check: Function, args: Args, kwargs: dict[str, Any], _: FrameType | None) -> Any:
    """Adapt the check of `device_map`, which raises under a placement if accelerate is missing."""
    try:
        return check(*args, **kwargs)
    except ValueError:
        if (*args, *kwargs.values()) != (None,) or (device := _chosen()) is None:
            raise
        return {"": device}


def _over_gpus(parts: Any, library: str) -> Any:
    """Replace numbers in a `device_map` by devices, as weight-loading threads have no placement."""
    if not isinstance(parts, dict) or (place := _on_a_gpu()) is None:
        return parts
    gpus: dict[int, Any] = {n: _device("cuda", n) for n in parts.values() if type(n) is int}
    if gpus.keys() == {0}:  # otherwise, the user chose the GPUs, so keep their numbers
        gpus[0] = place.take(library)
    return {part: gpus.get(device, device) for part, device in parts.items()}


def _map_found(find: Function, args: Args, kwargs: dict[str, Any], _: FrameType | None) -> Any:
    return _over_gpus(find(*args, **kwargs), "transformers")


def _map_given(use: Function, args: Args, kwargs: dict[str, Any], _: FrameType | None) -> Any:
    if "execution_device" in kwargs:
        kwargs["execution_device"] = _over_gpus(kwargs["execution_device"], "accelerate")
    return use(*args, **kwargs)


IN_LIBRARIES: dict[str, dict[str, Callable[[Function], Function]]] = {
    "transformers.modeling_utils": {
        "check_and_set_device_map": partial(_twin, adapter=_checked),
        "_get_device_map": partial(_twin, adapter=_map_found),
    },
    "accelerate.big_modeling": {
        "attach_align_device_hook_on_blocks": partial(_twin, adapter=_map_given),
    },
}
"""Maps a module's name and a function's name to the code that makes the function's twin."""

SPACES = (torch, torch.fft, torch.nested)  # modules with functions that create tensors
_ADAPTED: dict[str, Adapter] = {
    "as_tensor": _convert,
    "asarray": _convert,
    "from_file": _on_host,
    "from_numpy": _on_host,
    "frombuffer": _on_host,
    "get_default_device": lambda get, *_: _chosen() or get(),
    "load": _load,
    "normal": _normal,
}
_OTHERS: tuple[tuple[Any, str, Adapter], ...] = (
    (DeviceContext, "__init__", _recheck_later),
    (_BaseDataLoaderIter, "__next__", deliver),
    (torch.cuda, "device_count", _count),
    (torch.accelerator, "device_count", _count),
    (torch.cuda, "_get_device_index", partial(_taking, 0)),  # used by set_device, synchronize …
    (torch.accelerator, "_get_device_index", partial(_taking, 0)),
    (torch.cuda, "mem_get_info", partial(_taking, 0)),
    (torch._C._nn, "_parse_to", partial(_taking, 0)),  # reads the arguments of Module.to
    (torch.jit.annotations, "try_ann_to_type", _annotated),
    (pin_memory, "pin_memory", _pin),
)
METHODS = {
    "__new__": _twin(Tensor.__new__, _new),
    **{name: _twin(getattr(Tensor, name), partial(_taking, 1)) for name in ("to", "cuda")},
}


def twins() -> Iterator[tuple[Any, str, Any, Any]]:
    """Yield (owner, name, original, twin) for all twins but `METHODS` and `IN_LIBRARIES`."""
    made: dict[Any, Function] = {}
    constructors = _device_constructors()
    for owner in SPACES:
        for name, value in list(vars(owner).items()):
            if not isinstance(value, (types.BuiltinFunctionType, types.FunctionType)):
                continue
            adapter = _ADAPTED.get(name) if owner is torch else None
            if adapter is not None or value in constructors:
                if value not in made:
                    made[value] = _twin(value, adapter) if adapter else _factory(value)
                yield owner, name, value, made[value]
    for name, value in list(vars(torch).items()):
        if type(value) is type(torch.FloatTensor):
            # `Tensor.type(cls)` needs the full name, "torch.FloatTensor".
            kind = f"torch.{value.__name__.rsplit('.', 1)[-1]}"
            yield torch, name, value, _LegacyType(kind, (), {"real": value})
    yield torch, "device", _device, _device_twin
    # Suspend placement, because a DataLoader's seeds, samplers and shared memory are on the host.
    yield DataLoader, "__iter__", DataLoader.__iter__, suspended()(DataLoader.__iter__)
    for owner, name, adapter in _OTHERS:
        value = vars(owner)[name]
        yield owner, name, value, _twin(value, adapter)
