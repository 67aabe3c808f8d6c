"""Give the placement's GPU to a library that picks the first one, as CUDA_VISIBLE_DEVICES does.

Libraries write `torch.device("cuda:0")`, `set_device(0)`, `.to(0)`, and ask how many GPUs there
are. Only names and numbers are taken so: a device that exists already, such as a tensor's, stays
what it is. Code of the user's, torch's and Python's means what it says, and so does a name that
the user's code holds and passes to a library.
"""

import sys
import types
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import torch
import torch.accelerator
import torch.cuda._utils
import torch.jit.annotations
from torch import Tensor

from gpumagic.placement.scope import Placement, placement
from gpumagic.usercode.files import is_users, leave_out_ours, module_of, unseen

# torch's modules that pass on a device from their callers, and methods that libraries override.
_PASSING_MODULES = ("torch.cuda", "torch.accelerator", "torch.nn.modules.module")
_PASSING_METHODS = ("to", "cuda")
FIRST, NAMES = "cuda:0", (str, int)


class _Libraries(dict[str, str]):
    """The installed library of each file; empty for torch, gpumagic, Python and the user's."""

    def __missing__(self, file: str) -> str:
        name = module_of(file).partition(".")[0]
        self[file] = library = "" if name in ("torch", "gpumagic") else name
        return library


_library_of = _Libraries()


def _asking(frame: types.FrameType | None, given: object) -> str:
    """Return the library that names a device at this frame; empty if the user or torch does."""
    while frame is not None and _passes_on(frame):
        frame = frame.f_back
    library = "" if frame is None else _library_of[frame.f_code.co_filename]
    return "" if library and _is_users(given, frame) else library


def _passes_on(frame: types.FrameType) -> bool:
    module = str(frame.f_globals.get("__name__"))
    return module.startswith(_PASSING_MODULES) or frame.f_code.co_name in _PASSING_METHODS


def _is_users(given: object, frame: types.FrameType | None) -> bool:
    """Whether the user's code holds this very string: ``pipeline(device="cuda:0")``."""
    if given != FIRST:
        return False
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return False
    held = (*frame.f_code.co_consts, *frame.f_locals.values(), *frame.f_globals.values())
    return any(value is given for value in held)


def _on_a_gpu() -> Placement | None:
    """Return the placement in force if it is on a CUDA device and the user does not overrule it."""
    place = placement()
    on_gpu = place is not None and place.device is not None and place.device.type == "cuda"
    return place if on_gpu and place is not None and not place.overruled() else None


def meant(given: Any, frame: types.FrameType, *, noted: bool = True) -> Any:
    """Return the placement's GPU if `given` is how a library names the first one, else `given`."""
    if given not in (0, FIRST) or (place := _on_a_gpu()) is None:
        return given
    return _taken(place, _asking(frame, given), noted=noted) or given


def _taken(place: Placement, library: str, *, noted: bool = True) -> torch.device | None:
    """Return the placement's device for a library's first GPU, and note whose it was."""
    if not library or place.device is None or place.device.index == 0:
        return None
    if noted:
        place.taken[library] = None
    return place.device


def spread(find: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap what finds a `device_map`, whose devices threads use: numbers become devices.

    A map with the first GPU alone has the placement's; one with several GPUs is the user's wish.
    """

    @unseen
    @wraps(find)
    def found(*args: Any, **kwargs: Any) -> Any:
        device_map = find(*args, **kwargs)
        if not isinstance(device_map, dict) or (place := _on_a_gpu()) is None:
            return device_map
        gpus = {n: _device("cuda", n) for n in device_map.values() if type(n) is int}
        if gpus.keys() == {0}:
            gpus[0] = _taken(place, str(find.__module__).partition(".")[0]) or gpus[0]
        return {part: gpus.get(device, device) for part, device in device_map.items()}

    return found


class _DeviceType(type):
    """Metaclass of the class that replaces `torch.device`, which cannot be inherited from."""

    def __call__(cls, *args: Any, **kwargs: Any) -> torch.device:
        try:
            made = _device(*args, **kwargs)
        except BaseException as error:
            leave_out_ours(error)
            raise
        if made.index != 0 or made.type != "cuda" or (place := _on_a_gpu()) is None:
            return made
        given = next(iter((*args, *kwargs.values())))
        if isinstance(given, _device):
            return made
        return _taken(place, _asking(sys._getframe(1), given)) or made

    # Equal to the original, since torch finds it in tables and in tuples of types.
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


def _counting(count: Callable[[], int]) -> Callable[[], int]:
    @wraps(count)
    def counted() -> int:
        found = count()
        library = found > 1 and _library_of[sys._getframe(1).f_code.co_filename]
        return 1 if library and _on_a_gpu() is not None else found

    return counted


def _taking(
    function: Callable[..., Any], position: int, *, noted: bool = True
) -> Callable[..., Any]:
    """Wrap a function that takes a device at this position, or as `device=`."""

    @wraps(function)
    def taking(*args: Any, **kwargs: Any) -> Any:
        try:
            if len(args) > position and type(args[position]) in NAMES:
                device = meant(args[position], sys._getframe(1), noted=noted)
                args = (*args[:position], device, *args[position + 1 :])
            elif kwargs and type(kwargs.get("device")) in NAMES:
                kwargs["device"] = meant(kwargs["device"], sys._getframe(1), noted=noted)
            return function(*args, **kwargs)
        except BaseException as error:
            leave_out_ours(error)
            raise

    return taking


def _annotated(to_type: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap TorchScript's reader of annotations, which compares with `torch.device` itself."""

    @wraps(to_type)
    def annotated(annotation: Any, *args: Any, **kwargs: Any) -> Any:
        return to_type(torch.device if annotation is _device else annotation, *args, **kwargs)

    return annotated


# Methods that `torch.Tensor` inherits.
METHODS = {name: _taking(getattr(Tensor, name), 1) for name in ("to", "cuda")}


def twins() -> Iterator[tuple[Any, str, Any, Any]]:
    """Yield (owner, name, original, twin) for what takes a device, or counts them."""
    yield torch, "device", _device, _device_twin
    for module in (torch.cuda, torch.accelerator):
        yield module, "device_count", module.device_count, _counting(module.device_count)
    for owner, name in (
        (torch.cuda, "_get_device_index"),  # for set_device, synchronize, get_device_properties …
        (torch.accelerator, "_get_device_index"),
        (torch.cuda, "mem_get_info"),
    ):
        yield owner, name, getattr(owner, name), _taking(getattr(owner, name), 0, noted=False)
    # Module.to reads its arguments by this.
    yield torch._C._nn, "_parse_to", torch._C._nn._parse_to, _taking(torch._C._nn._parse_to, 0)
    reader = torch.jit.annotations.try_ann_to_type
    yield torch.jit.annotations, "try_ann_to_type", reader, _annotated(reader)
