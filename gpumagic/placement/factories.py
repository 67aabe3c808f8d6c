"""Make placed twins of the functions of torch that make tensors.

A twin looks up the placement of its own context and calls the original with that device; without a
placement it is the original. An explicit `device=`, `out=` or `pin_memory=` is left alone.
"""

import functools
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils.data
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.utils._device import DeviceContext, _device_constructors
from torch.utils.data._utils import pin_memory
from torch.utils.data.dataloader import _BaseDataLoaderIter

from gpumagic.placement import dataloader
from gpumagic.placement.first_gpu import NAMES, meant, spread
from gpumagic.placement.scope import in_force, placement, suspended, traced_device
from gpumagic.usercode.files import leave_out_ours, unseen

Wrapper = Callable[..., Any]

# Code whose small tensors are meant for the host: optimizers count their steps there, samplers draw
# their seeds, printing formats its digits, schedulers use NumPy; a default device must not reach
# into it.
_HOST_CODE = (
    "torch.optim",
    "torch.utils.",
    "torch.distributed.",
    "torch.nn.utils.rnn",
    "torch._tensor",
    "torch._utils",
    "gpumagic.",
    "diffusers.schedulers.",
    "fastai.data.",
)
# Called by the user, it makes batches; called by a loader, it runs without placement anyway.
_COLLATE = "torch.utils.data._utils.collate"


class _Verdicts(dict[str | None, bool]):
    def __missing__(self, module: str | None) -> bool:
        name = str(module)
        verdict = self[module] = name.startswith(_HOST_CODE) and name != _COLLATE
        return verdict


_is_host_code = _Verdicts()


def _chosen(caller: int | None = None) -> torch.device | None:
    """Return the device of the placement in force, unless the user or host code overrules it.

    The code is that of the frame `caller` levels above the calling function, if given.
    """
    if is_dynamo_compiling():
        return traced_device()
    place = placement()
    if place is None or place.overruled():
        return None
    if caller is not None:
        code = sys._getframe(caller + 1).f_globals
        if _is_host_code[code.get("__name__")]:
            return None
    return place.device


def _factory(make: Wrapper, caller: int = 1) -> Wrapper:
    # The one hot path of a placement: its first test makes all the others unnecessary.
    current, frame, is_host_code = in_force.get, sys._getframe, _is_host_code

    @functools.wraps(make)
    def placed(*args: Any, **kwargs: Any) -> Any:
        place = None if is_dynamo_compiling() else current()
        try:
            if (
                place is not None
                and place.direct is not None
                and not kwargs
                and not is_host_code[frame(caller).f_globals.get("__name__")]
            ):
                return make(*args, **place.keywords)
            if place is not None and type(kwargs.get("device")) in NAMES:
                kwargs["device"] = meant(kwargs["device"], frame(caller))
            told = kwargs.get("device") is not None or kwargs.get("out") is not None
            if told or kwargs.get("pin_memory") or (device := _chosen(caller)) is None:
                return make(*args, **kwargs)
            generator = kwargs.get("generator")
            if generator is not None and generator.device != device:
                # A generator draws on its own device only; the numbers are brought over.
                needs_grad = kwargs.pop("requires_grad", False)
                kwargs["device"] = generator.device
                return make(*args, **kwargs).to(device).requires_grad_(needs_grad)
            kwargs["device"] = device
            return make(*args, **kwargs)
        except BaseException as error:
            leave_out_ours(error)
            raise

    return placed


def _converter(make: Wrapper) -> Wrapper:
    """Wrap `as_tensor` and `asarray`: an existing tensor stays where it is."""

    @unseen
    @functools.wraps(make)
    def placed(*args: Any, **kwargs: Any) -> Any:
        data = args[0] if args else kwargs.get("data", kwargs.get("obj"))
        if kwargs.get("device") is None and not isinstance(data, Tensor):
            # None where there is no placement, as if nothing were said.
            kwargs["device"] = _chosen(2)
        return make(*args, **kwargs)

    return placed


def _host_maker(make: Wrapper) -> Wrapper:
    """Wrap `from_numpy` and its like: their results, which are host tensors, are copied."""

    @unseen
    @functools.wraps(make)
    def placed(*args: Any, **kwargs: Any) -> Any:
        made = make(*args, **kwargs)
        device = _chosen(2)
        return made if device is None else made.to(device)

    return placed


def _normal(make: Wrapper) -> Wrapper:
    """Wrap `normal`: with two numbers and a size it is placed; with tensors it follows them."""
    plain = _factory(make, caller=3)

    @unseen
    @functools.wraps(make)
    def placed(*args: Any, **kwargs: Any) -> Any:
        follows = any(isinstance(a, Tensor) for a in (*args, *kwargs.values()))
        return (make if follows else plain)(*args, **kwargs)

    return placed


def _load(make: Wrapper) -> Wrapper:
    @unseen
    @functools.wraps(make)
    def placed(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        return make(f, _chosen() if map_location is None else map_location, *args, **kwargs)

    return placed


def _default_device(make: Wrapper) -> Wrapper:
    return functools.wraps(make)(lambda: _chosen() or make())


def _loader(check: Wrapper) -> Wrapper:
    """Wrap a loader that reads a `device_map`: without accelerate it refuses a default device."""

    @unseen
    @functools.wraps(check)
    def placed(device_map: Any) -> Any:
        try:
            return check(device_map)
        except ValueError:
            if device_map is not None or (device := _chosen()) is None:
                raise
            return {"": device}

    return placed


def _fresh(made: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Copy a result of `torch.Tensor(...)` to the device, unless it shares another's memory."""
    alias = bool(args) and isinstance(args[0], (Tensor, torch.UntypedStorage))
    device = None if kwargs or alias else _chosen()
    return made if device is None else made.to(device)


def tensor_new(make: Wrapper) -> Wrapper:
    @unseen
    def placed(cls: type, *args: Any, **kwargs: Any) -> Any:
        made = make(cls, *args, **kwargs)
        return _fresh(made, args, kwargs) if cls is Tensor else made

    return placed


class _LegacyType(type):
    """Replace `torch.FloatTensor` and its like, which are types and factories at once."""

    real: Any

    @unseen
    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return _fresh(cls.real(*args, **kwargs), args, kwargs)

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, cls.real)

    def __getattr__(cls, name: str) -> Any:
        return getattr(type.__getattribute__(cls, "real"), name)


_TENSOR_TYPE = type(torch.FloatTensor)


def _legacy(real: Any) -> Wrapper:
    # Tensor.type(cls) reads the name that C gives the class: "torch.FloatTensor".
    name = f"torch.{real.__name__.rsplit('.', 1)[-1]}"
    return _LegacyType(name, (), {"real": real})


_SPECIAL: dict[str, Callable[[Wrapper], Wrapper]] = {
    "as_tensor": _converter,
    "asarray": _converter,
    "from_file": _host_maker,
    "from_numpy": _host_maker,
    "frombuffer": _host_maker,
    "get_default_device": _default_device,
    "load": _load,
    "normal": _normal,
}


def _doubt(method: Wrapper) -> Wrapper:
    """Wrap the entry of `with torch.device(...)`: the hot path must look closer from then on."""

    @functools.wraps(method)
    def doubting(self: DeviceContext, *args: Any) -> Any:
        if place := placement():
            place.direct = None
        return method(self, *args)

    return doubting


# The modules of torch that have factories.
SPACES = (torch, torch.fft, torch.nested)


def twins() -> Iterator[tuple[Any, str, Any, Wrapper]]:
    """Yield (owner, name, original, twin) for everything that is swapped."""
    made: dict[Any, Wrapper] = {}
    constructors = _device_constructors()
    for owner in SPACES:
        for name, value in list(vars(owner).items()):
            if not isinstance(value, (types.BuiltinFunctionType, types.FunctionType)):
                continue
            special = _SPECIAL.get(name) if owner is torch else None
            if special is None and value not in constructors:
                continue
            if value not in made:
                made[value] = (special or _factory)(value)
            yield owner, name, value, made[value]
    for name, value in list(vars(torch).items()):
        if type(value) is _TENSOR_TYPE:
            yield torch, name, value, _legacy(value)
    yield from (
        (owner, name, vars(owner)[name], wrap(vars(owner)[name]))
        for owner, name, wrap in (
            # Seeds, samplers and shared memory are the host's.
            (torch.utils.data.DataLoader, "__iter__", suspended()),
            (_BaseDataLoaderIter, "__next__", dataloader.delivered),
            (pin_memory, "pin_memory", dataloader.pin_what_can_be),
            # C++ makes a DeviceContext for each `with` and pushes it without calling __enter__.
            (DeviceContext, "__init__", _doubt),
            (DeviceContext, "__enter__", _doubt),
        )
    )


# Functions of libraries that ask for the default device, or say which devices threads shall use:
# module → names, and what wraps them.
IN_LIBRARIES: dict[str, dict[str, Callable[[Wrapper], Wrapper]]] = {
    "transformers.modeling_utils": {
        "check_and_set_device_map": _loader,
        "_get_device_map": spread,
    }
}
