"""Send the variables that a cell reads to the ranks, with the notebook's code.

Only variables that a rank lacks or that differ are sent. A tensor that the rank has is sent by
name, so an optimizer that follows finds its parameters. A function reads the variables of its rank.
"""

import hashlib
import io
import linecache
import re
import types
from collections import deque
from collections.abc import Iterable, Mapping
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import cloudpickle  # type: ignore[import-untyped]
import torch
from torch.utils.weak import WeakTensorKeyDictionary

from gpumagic.errors import GpuError
from gpumagic.faults import first_line
from gpumagic.usercode.files import label, user_namespace
from gpumagic.usercode.values import globals_of
from gpumagic.usercode.variables import NOT_VARIABLES

_FILE = "<ipython-input-{}-rank>"
_numbers = count(1)
_number_of: Any = WeakTensorKeyDictionary()
State = tuple[int, bool]
"""A tensor's version, and its `requires_grad`."""
Print = tuple[bytes, int]
"""A variable's fingerprint, and the id of its object."""
_known: WeakValueDictionary[int, torch.Tensor] = WeakValueDictionary()
"""In a rank: the tensors that were sent to it, by the numbers that the notebook gave them."""
_states: dict[int, State] = {}
"""Their states in the notebook when they were sent."""


def _keep(number: int, state: State, make: Any, args: tuple[Any, ...]) -> torch.Tensor:
    tensor: torch.Tensor = make(*args)
    _known[number], _states[number] = tensor, state
    return tensor


def _known_tensor(number: int, state: State) -> torch.Tensor:
    """Return the rank's tensor, with the notebook's `requires_grad` if that has changed."""
    tensor = _known[number]
    if state != _states[number] and tensor.is_leaf:
        tensor.requires_grad_(state[1])
    _states[number] = state
    return tensor


def known_tensors() -> dict[int, State]:
    """Return the states in which the notebook sent the tensors that are still in this rank."""
    for number in _states.keys() - _known.keys():
        del _states[number]
    return dict(_states)


class _Variables:
    """A placeholder for the notebook's variables, which becomes the rank's."""

    def __reduce__(self) -> Any:
        return user_namespace, ()


def file_in_rank(file: str) -> str:
    """Return the name of a cell in a rank, which has none of the notebook's files."""
    number = re.search(r"\d+", label(file))
    return _FILE.format(number[0] if number else 0)


def _code_in_rank(code: types.CodeType, sources: dict[str, str]) -> types.CodeType:
    file = file_in_rank(code.co_filename)
    sources[file] = "".join(linecache.getlines(code.co_filename))
    consts = (
        _code_in_rank(each, sources) if isinstance(each, types.CodeType) else each
        for each in code.co_consts
    )
    return code.replace(co_filename=file, co_consts=tuple(consts))


class NotebookPickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles the notebook's functions without the variables that they read."""

    def __init__(self, stream: Any, protocol: int | None = None) -> None:
        super().__init__(stream, protocol=protocol)
        self.notebook = user_namespace()
        self.sources: dict[str, str] = {}
        self.met: dict[str, None] = {}  # variables that its functions read

    def reducer_override(self, value: Any) -> Any:
        if issubclass(type(value), torch.Tensor):
            return self.tensor(value)
        reduced = super().reducer_override(value)
        if type(value) is types.FunctionType and value.__globals__ is self.notebook:
            make, (code, _, *args), (attributes, slots), *rest = reduced
            self.met |= dict.fromkeys(globals_of(code))
            args = (_code_in_rank(code, self.sources), _Variables(), *args)
            return make, args, (attributes, {**slots, "__globals__": {}}), *rest
        return reduced

    def tensor(self, tensor: torch.Tensor) -> Any:
        """Return how pickle recreates a tensor."""
        return NotImplemented


class _Fingerprint(NotebookPickler):
    """Writes a tensor as its number, version and `requires_grad`."""

    def tensor(self, tensor: torch.Tensor) -> Any:
        return tuple, ((number_of(tensor), _version(tensor), tensor.requires_grad),)


def number_of(tensor: torch.Tensor) -> int:
    """Return a number that is unique to a living tensor."""
    if tensor not in _number_of:
        _number_of[tensor] = next(_numbers)
    return int(_number_of[tensor])


def _version(tensor: torch.Tensor) -> int:
    """Return the tensor's version, which each write changes; always new in inference mode."""
    return next(_numbers) if tensor.is_inference() else tensor._version


def fingerprint(name: str, value: Any) -> bytes:
    """Return a hash of the value; raise `GpuError` if it cannot be sent."""
    return _read(name, value)[0]


def _read(name: str, value: Any) -> tuple[bytes, Iterable[str]]:
    """Return its fingerprint, and the variables that its functions read."""
    stream = io.BytesIO()
    pickler = _Fingerprint(stream)
    try:
        pickler.dump(value)
    except Exception as error:  # noqa: BLE001  whatever the user's own object raises
        why = first_line(error)
        raise GpuError(f"{name} cannot be sent to the ranks ({why}); make it in the cell") from None
    return hashlib.blake2b(stream.getbuffer(), digest_size=16).digest(), pickler.met


def pack(values: Any, known: Mapping[int, State] | None = None, sources: Any = None) -> bytes:
    """Return values as bytes; unchanged tensors in `known` are sent by number."""
    there = known or {}

    class Pickler(NotebookPickler):
        def __init__(self, stream: Any, protocol: int | None = None) -> None:
            super().__init__(stream, protocol)
            self.sources = sources if sources is not None else {}

        def tensor(self, tensor: torch.Tensor) -> Any:
            number, state = number_of(tensor), (_version(tensor), tensor.requires_grad)
            if number in there and there[number][0] == state[0]:
                return _known_tensor, (number, state)
            make, args, *_ = tensor.__reduce_ex__(2)
            return _keep, (number, state, make, args)

    module = types.ModuleType("gpumagic_pickle")
    module.Pickler = Pickler  # type: ignore[attr-defined]
    stream = io.BytesIO()
    torch.save(values, stream, pickle_module=module)
    return stream.getvalue()


class Unsent:
    """A placeholder for a rank's value that cannot be pickled, with the reason."""

    def __init__(self, text: str, why: str) -> None:
        self._text, self.why = text, why

    def __repr__(self) -> str:
        return f"{self._text} (it stays in its rank)"


def pack_any(value: Any) -> bytes:
    """Return the bytes of a value, or of an `Unsent`."""
    try:
        return pack(value)
    except Exception as error:  # noqa: BLE001  the user's value has no pickle
        return pack(Unsent(repr(value), first_line(error)))


def unpack(data: bytes) -> Any:
    """Return the values, tensors on the CPU."""
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)


def prints_of(
    variables: Iterable[tuple[str, Any]], space: Mapping[str, Any], hidden: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Print]]:
    """Return the variables that a cell reads, also indirectly, with their fingerprints.

    Without those in `hidden`, which IPython has put there.
    """
    values: dict[str, Any] = {}
    prints: dict[str, Print] = {}
    queue = deque(variables)
    while queue:
        name, value = queue.popleft()
        if "." in name or name in values or name in NOT_VARIABLES or hidden.get(name) is value:
            continue
        values[name] = value
        hashed, met = _read(name, value)
        prints[name] = hashed, id(value)
        queue.extend((each, space[each]) for each in met if each in space)
    return values, prints
