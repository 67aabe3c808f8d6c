"""Answer `gpumagic.where(x)`: on which devices the data of anything are.

Nothing is imported, nothing is computed, and no code of an object's own class runs but what tells
where an array is.
"""

import sys
import types
from collections import UserDict, deque
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Any

from gpumagic.errors import GpuError
from gpumagic.frameworks import known
from gpumagic.frameworks.exchange import device_of
from gpumagic.usercode.values import bases_of, class_name, defined_in, members_of, own

# What holds no data, and what leads to everything.
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_CLOSED = (*_PLAIN, type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType)
# Objects of these lead to threads, locks and the notebook itself; of these they do not.
_NO_LIBRARIES = {*sys.stdlib_module_names, "IPython", "ipykernel", "gpumagic"}
_OPEN = (UserDict, partial, types.SimpleNamespace)


def where(value: object) -> str:
    """Tell where the data of anything are: of an array, a module, a container of them.

    It asks torch's tensors, the arrays of JAX, TensorFlow and CuPy, and whatever else has DLPack's
    or CUDA's array interface: MLX, Numba, cuDF. On virtual GPUs it is as on real ones.

    Parameters
    ----------
    value : object
        An array, or what holds arrays: lists, dicts, modules, optimizers, dataclasses.

    Returns
    -------
    str
        The device: ``"cuda:1"``, ``"cpu"``; ``"cuda"`` where only the driver knows which one. An
        array that is spread over several has a ``+`` between them. Of what holds arrays on
        several devices, all are named, the GPUs first.

    Raises
    ------
    GpuError
        There is no data on any device in it.

    Examples
    --------
    >>> gpumagic.where(torch.ones(3, device="cuda:1"))
    'cuda:1'
    >>> gpumagic.where(jax.device_put(x, NamedSharding(mesh, PartitionSpec("batch"))))
    'cuda:0 + cuda:1'
    >>> gpumagic.where({"net": net, "batch": numpy_array})
    'cuda:0 and cpu'
    """
    found = _device(value)
    if found is not None:
        return found
    devices = sorted({each for array in _arrays(value) for each in array.split(" + ")}, key=_order)
    if not devices:
        kind = class_name(type(value))
        raise GpuError(
            f"where: there is no array in this {kind}, so it is on no device; give an array, or "
            "what holds arrays: a list, a dict, a module"
        )
    *first, last = devices
    return f"{', '.join(first)} and {last}" if first else last


def _order(device: str) -> tuple[bool, str, int]:
    kind, _, ordinal = device.partition(":")
    return kind == "cpu", kind, int(ordinal or 0) if ordinal.isdecimal() or not ordinal else 0


def _device(value: Any) -> str | None:
    """Where one array is; None of anything else."""
    tensor = getattr(sys.modules.get("torch"), "Tensor", None)
    if tensor is not None and issubclass(type(value), tensor):
        return str(value.device)
    for framework in known.imported():
        if framework.is_array(value):
            return framework.where(value)
    return device_of(value)


def _arrays(value: Any) -> Iterator[str]:
    """Where all arrays within are, by following what containers and objects hold."""
    seen: dict[int, Any] = {}  # keeps what it met alive, so that an id stays its own
    todo = deque([value])
    while todo:
        value = todo.popleft()
        if id(value) in seen or issubclass(type(value), _CLOSED):
            continue
        seen[id(value)] = value
        found = _device(value)
        if found is not None:
            yield found
        else:
            todo.extend(_held(value))


def _held(value: Any) -> Iterator[Any]:
    """What a container or an object holds."""
    kind = type(value)
    for framework in known.imported():
        if (parts := framework.parts(value)) is not None:
            yield from parts[0]
            return
    if issubclass(kind, dict):
        yield from [*dict.values(value)]
    for base in (list, tuple, set, frozenset, deque):
        if issubclass(kind, base):
            yield from [*base.__iter__(value)]
    home = str(defined_in(kind)).partition(".")[0]
    if home not in _NO_LIBRARIES or issubclass(kind, _OPEN):
        yield from [*own(value).values()]
        yield from _in_slots(value)


def _in_slots(value: Any) -> Iterator[Any]:
    for base in bases_of(type(value)):
        for member in members_of(base).values():
            if type(member) is types.MemberDescriptorType:
                with suppress(AttributeError):  # never set
                    yield member.__get__(value)
