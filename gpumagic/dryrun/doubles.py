"""Stand-ins for the user's objects, so that a dry run can change them as it likes.

Guarantees: tensors become fakes without data, everything that can change is copied with its
structure (one copy for each object, so aliases agree), and no method of the user's is called to do
so. What cannot be copied is either shared, if using it changes nothing, or replaced by a stand-in
that ends the dry run when it is used.
"""

import collections
import copy
import functools
import random
import sys
import types
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from gpumagic.dryrun import locks
from gpumagic.dryrun.doubled import (
    ATOM_SET,
    ATOMS,
    CACHED,
    RESTARTED,
    SHARED,
    SMALL_ARRAY,
    is_plain,
)
from gpumagic.dryrun.fakes import Fakes
from gpumagic.dryrun.fakes_of import fake_of
from gpumagic.dryrun.unknown import Refused


class Doubles:
    """Makes the stand-in of any value, and keeps which is whose.

    Parameters
    ----------
    mode : Fakes
    count : callable
        Told each stand-in of a tensor.
    tracked : callable
        Called when a backward pass reaches a tensor that an earlier cell computed.
    """

    def __init__(
        self, mode: Fakes, count: Callable[[Any], None], tracked: Callable[[], None]
    ) -> None:
        self._mode, self._count, self._tracked = mode, count, tracked
        self._memo: dict[int, tuple[Any, Any]] = {}  # with the original: its id must stay its own
        self._weak: dict[int, tuple[Any, weakref.ref[Any]]] = {}

    def of(self, value: Any) -> Any:
        """The stand-in of `value`; the value itself where nothing in it can change."""
        kind = type(value)
        if kind in ATOM_SET or issubclass(kind, ATOMS):
            return value
        if id(value) in self._memo:
            return self._memo[id(value)][1]
        if issubclass(kind, Tensor):
            return self.tensor(value)
        make = self._maker(kind)
        if make is None:
            return value
        try:
            return make(value)
        except Exception as error:  # noqa: BLE001  what the user's own keys and slots may raise
            name = type(error).__name__
            return self._keep(value, Refused(f"copying a {kind.__name__} raised {name}"))

    def known(self, value: Any) -> Any:
        """The stand-in that `value` has already, or None."""
        return self._memo.get(id(value), (None, None))[1]

    def tensors(self) -> list[Tensor]:
        """The real tensors that have a stand-in."""
        return [value for value, _ in self._memo.values() if isinstance(value, Tensor)]

    def release(self) -> None:
        """Hold the stand-ins no longer, so that memory is free when the code frees it."""
        for key, (value, double) in self._memo.items():
            if isinstance(double, Tensor):
                self._weak[key] = value, weakref.ref(double)
        self._memo.clear()

    def tensor(self, tensor: Tensor) -> Any:
        """The fake of a tensor."""
        if id(tensor) in self._memo:
            return self._memo[id(tensor)][1]
        if id(tensor) in self._weak and (double := self._weak[id(tensor)][1]()) is not None:
            return double
        try:
            fake = fake_of(self._mode, tensor, self._tracked)
        except Exception as error:  # noqa: BLE001  layouts and subclasses that torch has no fakes for
            text = str(error).strip().splitlines() or [type(error).__name__]
            kind = f"{type(tensor).__name__} ({tensor.layout})"
            return self._keep(tensor, Refused(f"a {kind} has no dry run: {text[0]}"))
        self._keep(tensor, fake)
        self._count(fake)
        if fake.is_leaf and fake.grad is not None:
            self._count(fake.grad)
            self._keep(tensor.grad, fake.grad)
        if tensor.grad_fn is None and fake.requires_grad:
            for hook in (tensor._backward_hooks or {}).values():
                fake.register_hook(self.of(hook))
            for hook in (tensor._post_accumulate_grad_hooks or {}).values():
                fake.register_post_accumulate_grad_hook(self.of(hook))
        return fake

    def _keep(self, value: Any, double: Any) -> Any:
        self._memo[id(value)] = (value, double)
        return double

    # -- by kind
    def _maker(self, kind: type) -> Callable[[Any], Any] | None:
        if kind in _MAKERS:
            return functools.partial(_MAKERS[kind], self)
        for base, make in _BASES:
            if issubclass(kind, base):
                return functools.partial(make, self)
        array = sys.modules.get("numpy")
        if array is not None and issubclass(kind, array.ndarray):
            return self._array
        if array is not None and kind in (array.random.Generator, array.random.RandomState):
            return self._deep
        room = kind.__module__.split(".")[0]
        if room == "pandas" and hasattr(kind, "copy"):
            return lambda value: self._keep(value, value.copy())
        if hasattr(kind, "__next__") and room != "torch":
            return self._iterator
        if room in SHARED or "__del__" in dir(kind) or not is_plain(kind):
            return None
        return self._instance

    def _list(self, value: list[Any]) -> Any:
        if set(map(type, value)) <= ATOM_SET:
            return self._keep(value, list(value))
        made: list[Any] = self._keep(value, [])
        made.extend(self.of(item) for item in value)
        return made

    def _tuple(self, value: tuple[Any, ...]) -> Any:
        made = tuple(self.of(item) for item in value)
        if all(a is b for a, b in zip(made, value, strict=True)):
            return value
        return self._keep(value, made)

    def _dict(self, value: dict[Any, Any]) -> Any:
        made: dict[Any, Any] = self._keep(value, type(value)())
        if isinstance(value, collections.defaultdict):
            made.default_factory = self.of(value.default_factory)  # type: ignore[attr-defined]
        made.update([(self.of(k), self.of(v)) for k, v in list(value.items())])
        return made

    def _collection(self, value: Any) -> Any:
        items = [self.of(item) for item in value]
        extra = (value.maxlen,) if isinstance(value, collections.deque) else ()
        return self._keep(value, type(value)(items, *extra))

    def _method(self, value: types.MethodType) -> Any:
        return self._keep(value, types.MethodType(self.of(value.__func__), self.of(value.__self__)))

    def _partial(self, value: Any) -> Any:
        args = [self.of(item) for item in value.args]
        words = {k: self.of(v) for k, v in value.keywords.items()}
        return self._keep(value, functools.partial(self.of(value.func), *args, **words))

    def _reference(self, value: Any) -> Any:
        target = value()
        if target is None:
            return value
        try:
            return self._keep(value, weakref.ref(self.of(target)))
        except TypeError:
            return value

    def _cached(self, value: Any) -> Any:
        inner = self.of(value.__wrapped__)
        return self._keep(value, functools.lru_cache(**value.cache_parameters())(inner))

    def _function(self, value: types.FunctionType) -> Any:
        local = "<locals>" in value.__qualname__ and value.__closure__
        words = value.__kwdefaults__ or {}
        fixed = all(self.of(v) is v for v in (*(value.__defaults__ or ()), *words.values()))
        if not local and fixed and not vars(value):
            return value
        cells = tuple(self._cell(cell) for cell in value.__closure__ or ())
        made = types.FunctionType(value.__code__, value.__globals__, value.__name__, None, cells)
        self._keep(value, made)
        made.__defaults__ = self.of(value.__defaults__)
        made.__kwdefaults__ = {k: self.of(v) for k, v in words.items()} or None
        made.__qualname__, made.__module__ = value.__qualname__, value.__module__
        made.__doc__, made.__annotations__ = value.__doc__, value.__annotations__
        vars(made).update({k: self.of(v) for k, v in vars(value).items()})
        return made

    def _cell(self, cell: types.CellType) -> Any:
        if id(cell) in self._memo:
            return self._memo[id(cell)][1]
        made = self._keep(cell, types.CellType())
        with suppress(ValueError):  # not bound yet
            made.cell_contents = self.of(cell.cell_contents)
        return made

    def _generator(self, value: torch.Generator) -> Any:
        made = torch.Generator(device=value.device)
        made.set_state(value.get_state())
        return self._keep(value, made)

    def _deep(self, value: Any) -> Any:
        return self._keep(value, copy.deepcopy(value))

    def _array(self, value: Any) -> Any:
        if value.nbytes <= SMALL_ARRAY:
            return self._keep(value, value.copy())
        # Writing into it is an error of numpy's own, and names the line.
        view = value.view()
        view.flags.writeable = False
        return self._keep(value, view)

    def _iterator(self, value: Any) -> Any:
        if type(value) in RESTARTED:
            return self._keep(value, copy.copy(value))
        kind = type(value).__name__
        return self._keep(value, Refused(f"reading a {kind} would use it up: it cannot be copied"))

    def _instance(self, value: Any) -> Any:
        kind = type(value)
        base = next((b for b in (list, dict, set, tuple) if issubclass(kind, b)), object)
        if base is tuple:
            items = [self.of(item) for item in tuple.__iter__(value)]
            made = self._keep(value, tuple.__new__(kind, items))
        else:
            made = self._keep(value, base.__new__(kind))
        if base is list:
            list.extend(made, [self.of(item) for item in list.__iter__(value)])
        elif base is dict:
            if isinstance(value, collections.defaultdict):
                made.default_factory = self.of(value.default_factory)
            # An ordered one keeps its order apart; neither asks the user's own methods.
            kept = collections.OrderedDict if isinstance(value, collections.OrderedDict) else dict
            for key, item in list(kept.items(value)):
                kept.__setitem__(made, self.of(key), self.of(item))
        elif base is set:
            set.update(made, {self.of(item) for item in set.__iter__(value)})
        with suppress(AttributeError):
            held = object.__getattribute__(value, "__dict__")
            object.__getattribute__(made, "__dict__").update(
                {name: self.of(item) for name, item in list(held.items())}
            )
        for owner in kind.__mro__:
            for slot in vars(owner).values():
                if type(slot) is types.MemberDescriptorType and "__slots__" in vars(owner):
                    with suppress(AttributeError, TypeError):
                        slot.__set__(made, self.of(slot.__get__(value)))
        return made


_MAKERS: dict[type, Callable[[Doubles, Any], Any]] = {
    list: Doubles._list,
    tuple: Doubles._tuple,
    dict: Doubles._dict,
    collections.OrderedDict: Doubles._dict,
    collections.defaultdict: Doubles._dict,
    set: Doubles._collection,
    frozenset: Doubles._collection,
    collections.deque: Doubles._collection,
    types.FunctionType: Doubles._function,
    types.MethodType: Doubles._method,
    functools.partial: Doubles._partial,
    CACHED: Doubles._cached,
    weakref.ref: Doubles._reference,
    random.Random: Doubles._deep,
    **locks.MAKERS,
}
_BASES: tuple[tuple[type, Callable[[Doubles, Any], Any]], ...] = (
    (torch._C.Generator, Doubles._generator),
    (nn.Module, Doubles._instance),
    (torch.optim.Optimizer, Doubles._instance),
)
