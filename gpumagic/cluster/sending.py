"""Send to the ranks the variables and functions that a cell reads.

A rank gets the variables that it lacks, and those whose *fingerprint* (a hash) has changed in the
notebook. Each tensor has a number. If a rank already has a tensor, only this number is sent. So an
optimizer that is sent later refers to the parameters that the rank has.
"""

import hashlib
import io
import linecache
import re
import types
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import Any
from weakref import WeakValueDictionary
from zlib import crc32

import cloudpickle  # type: ignore[import-untyped]
import torch
from torch.utils.weak import WeakTensorKeyDictionary

from gpumagic.cluster.scattered import Unsent
from gpumagic.errors import GpuError
from gpumagic.faults import first_line, in_words
from gpumagic.usercode.files import label, user_namespace
from gpumagic.usercode.values import globals_of
from gpumagic.usercode.variables import NOT_VARIABLES

State = tuple[int, bool]  # the version and the `requires_grad` of a tensor
Fingerprint = tuple[bytes, int]  # the hash and the `id()` of a variable's value

_numbers = count(1)
_number_of: Any = WeakTensorKeyDictionary()


def _number(tensor: torch.Tensor) -> int:
    return int(_number_of.setdefault(tensor, next(_numbers)))


def _state(tensor: torch.Tensor) -> State:
    """Return a tensor's state. An inference tensor has no version and always counts as changed."""
    return (next(_numbers) if tensor.is_inference() else tensor._version), tensor.requires_grad


def file_in_rank(file: str) -> str:
    """Return a file's name in ranks: for a cell, ``<ipython-input-NUMBER-CHECKSUM>``."""
    number = re.match(r"In \[(\d+)\]", label(file))
    if number is None and not file.startswith("<"):
        return file
    return f"<ipython-input-{number[1] if number else 0}-{crc32(file.encode()):08x}>"


def _code_in_rank(code: types.CodeType, sources: dict[str, str]) -> types.CodeType:
    file = file_in_rank(code.co_filename)
    sources[file] = "".join(linecache.getlines(code.co_filename))
    consts = (
        _code_in_rank(each, sources) if isinstance(each, types.CodeType) else each
        for each in code.co_consts
    )
    return code.replace(co_filename=file, co_consts=tuple(consts))


class _Variables:
    """A placeholder for the notebook's variables. A rank unpickles it as the rank's variables."""

    def __reduce__(self) -> Any:
        return user_namespace, ()


class NotebookPickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickle the notebook's functions without the variables that they read."""

    def __init__(self, stream: Any, protocol: int | None = None) -> None:
        super().__init__(stream, protocol=protocol)
        self.notebook = user_namespace()
        self.sources: dict[str, str] = {}
        self.globals_read: dict[str, None] = {}  # variables that the pickled functions read

    def reducer_override(self, value: Any) -> Any:
        if issubclass(type(value), torch.Tensor):
            return self.tensor(value)
        reduced = super().reducer_override(value)
        if type(value) is types.FunctionType and value.__globals__ is self.notebook:
            make, (code, _, *args), (attributes, slots), *rest = reduced
            self.globals_read |= dict.fromkeys(globals_of(code))
            args = (_code_in_rank(code, self.sources), _Variables(), *args)
            return make, args, (attributes, {**slots, "__globals__": {}}), *rest
        return reduced

    def tensor(self, tensor: torch.Tensor) -> Any:
        """Pickle only a tensor's number and state, which are enough for a fingerprint."""
        return tuple, ((_number(tensor), _state(tensor)),)


def fingerprint(name: str, value: Any) -> tuple[bytes, Iterable[str]]:
    """Return the hash of a value, and the names of the globals that functions in the value read."""
    stream = io.BytesIO()
    pickler = NotebookPickler(stream)
    try:
        pickler.dump(value)
    except Exception as error:  # noqa: BLE001  the user's object may raise anything
        why = first_line(error)
        raise GpuError(f"{name} cannot be sent to the ranks ({why}); create it there") from None
    return hashlib.blake2b(stream.getbuffer(), digest_size=16).digest(), pickler.globals_read


def fingerprints_here(names: Iterable[str]) -> dict[str, Fingerprint]:
    """Return fingerprints of variables of this process; omit variables that cannot be sent."""
    space, fingerprints = user_namespace(), dict[str, Fingerprint]()
    for name in space.keys() & set(names):
        with suppress(GpuError):
            fingerprints[name] = fingerprint(name, space[name])[0], id(space[name])
    return fingerprints


def fingerprints_of(
    variables: Iterable[tuple[str, Any]], space: Mapping[str, Any], hidden: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Fingerprint]]:
    """Return the variables that a cell and its functions read, and the variables' fingerprints."""
    values: dict[str, Any] = {}
    fingerprints: dict[str, Fingerprint] = {}
    queue = deque(variables)
    while queue:
        name, value = queue.popleft()
        # Skip IPython's hidden variables, unless the user has assigned them.
        if "." in name or name in values or name in NOT_VARIABLES or hidden.get(name) is value:
            continue
        values[name] = value
        hashed, globals_read = fingerprint(name, value)
        fingerprints[name] = hashed, id(value)
        queue.extend((each, space[each]) for each in globals_read if each in space)
    return values, fingerprints


def pack(values: Any, known: Mapping[int, State] = {}, sources: Any = None) -> bytes:
    """Pickle values; replace a tensor by its number if `known` has the tensor's current version."""

    class Pickler(NotebookPickler):
        def __init__(self, stream: Any, protocol: int | None = None) -> None:
            super().__init__(stream, protocol)
            self.sources = sources if sources is not None else {}

        def tensor(self, tensor: torch.Tensor) -> Any:
            number, state = _number(tensor), _state(tensor)
            if number in known and known[number][0] == state[0]:
                return _known_tensor, (number, state)
            make, args, *_ = tensor.__reduce_ex__(2)
            return _keep, (number, state, make, args)

    stream = io.BytesIO()
    module = types.SimpleNamespace(__name__="gpumagic_pickle", Pickler=Pickler)
    torch.save(values, stream, pickle_module=module)
    return stream.getvalue()


def pack_any(value: Any) -> bytes:
    """Pickle a value. If pickling fails, pickle an `Unsent` instead."""
    try:
        return pack(value)
    except Exception as error:  # noqa: BLE001  the user's object may raise anything
        return pack(Unsent(repr(value), first_line(error)))


def unpack(data: bytes) -> Any:
    """Unpickle values, with tensors on the CPU; return None if `data` is empty."""
    if not data:
        return None
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)


_known: WeakValueDictionary[int, torch.Tensor] = WeakValueDictionary()
"""The tensors that this rank has received, by number (see `_number`)."""
_states: dict[int, State] = {}
"""By number: a received tensor's state in the notebook at the time of sending."""
_sent: dict[str, Fingerprint] = {}
"""By name: the fingerprint in the notebook when this rank last got or assigned the variable."""
_received: dict[str, bytes] = {}
"""Hashes of received variables in this rank, computed after the variables moved to the GPU."""
_unread: set[str] = set()  # names of variables received for the next cell, which has not begun


def _keep(number: int, state: State, make: Any, args: tuple[Any, ...]) -> torch.Tensor:
    tensor: torch.Tensor = make(*args)
    _known[number], _states[number] = tensor, state
    return tensor


def _known_tensor(number: int, state: State) -> torch.Tensor:
    """Return the rank's tensor. Apply the notebook's `requires_grad` if the notebook changed it."""
    tensor = _known[number]
    if state != _states[number] and tensor.is_leaf:
        tensor.requires_grad_(state[1])
    _states[number] = state
    return tensor


@dataclass
class Wants:
    """The variables that a rank wants before a cell, and the tensors that the rank already has."""

    names: dict[str, bool]  # names to send; True if the rank has an older value
    kept: list[str]  # names not to send, because the notebook and this rank changed the object
    tensors: dict[int, State]  # states of the tensors that the rank has, by number


def wanted(fingerprints: dict[str, Fingerprint]) -> Wants:
    """Compare the notebook's fingerprints with this rank's; return the variables to send."""
    for number in _states.keys() - _known.keys():
        del _states[number]
    wants, space = Wants({}, [], dict(_states)), user_namespace()
    for name, (now, identity) in fingerprints.items():
        before = _sent.get(name) if name in space else None
        if before is None or before[0] != now:
            same = before is not None and before[1] == identity and name not in _unread
            if same and _received.get(name) != _fingerprints_now([name]).get(name):
                wants.kept.append(name)
            else:
                wants.names[name] = before is not None
    return wants


def receive(variables: bytes, fingerprints: dict[str, Fingerprint]) -> str:
    """Unpickle and set variables, and record fingerprints; return an error text, or ""."""
    try:
        got = unpack(variables) or {}
    except Exception as error:  # noqa: BLE001  the user's object may raise anything
        return f"{in_words(error)} (when the rank unpickled what the notebook sent)"
    user_namespace().update(got)
    _unread.update(got)
    _sent.update(fingerprints)
    return ""


def note_received() -> None:
    """Hash received variables after their move to the GPU. The move must not count as a change."""
    _received.update(_fingerprints_now(_unread))
    _unread.clear()


def _fingerprints_now(names: Iterable[str]) -> dict[str, bytes]:
    return {name: hashed for name, (hashed, _) in fingerprints_here(names).items()}
