"""Take objects apart and make them anew, without calling the notebook's own methods."""

import copy
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from gpumagic.copies import shared_objects
from gpumagic.copies.originals import Originals
from gpumagic.moving.find_tensors import own_attributes


def reduce_instance(originals: Originals, value: Any, kind: type) -> Any:
    """How a pickle makes an object anew; NotImplemented for its class's own way."""
    if shared_objects.is_generator(kind):
        return _new_generator, (originals, originals.number(value))
    if issubclass(kind, torch.jit.ScriptModule):
        return _reduce_script(originals, value)
    if issubclass(kind, torch.utils.data.DataLoader):
        # Its running workers are the notebook's; a copy starts its own.
        held = {**own_attributes(value), "_iterator": None}
        return _reduced(originals, value, object, (), (held, {}, None))
    base = shared_objects.solid_base(kind)
    if issubclass(kind, BaseException):
        return _reduced(originals, value, base, value.args, (own_attributes(value), {}, None))
    ours = originals.is_ours(kind)
    if base in _ITEMS and shared_objects.by_attributes(kind, ours):
        items = _ITEMS[base](value)
        given = (items,) if base in _FROZEN else ()
        filled = None if base in _FROZEN else items
        state = (own_attributes(value), shared_objects.slots_of(value), filled)
        return _reduced(originals, value, base, given, state)
    if ours and "__slotnames__" not in vars(kind):
        originals.marked.append(kind)  # object.__reduce_ex__ keeps these names in the class
    return NotImplemented


# Read by the base's own methods: those of the notebook are not called.
_ITEMS: dict[type, Callable[[Any], Any]] = {
    object: lambda value: None,
    list: lambda value: list(list.__iter__(value)),
    set: lambda value: list(set.__iter__(value)),
    dict: lambda value: dict(dict.items(value)),
    tuple: lambda value: tuple(tuple.__iter__(value)),
    frozenset: lambda value: tuple(frozenset.__iter__(value)),
}
_FROZEN = (tuple, frozenset)


def _reduced(
    originals: Originals, value: Any, base: type, given: tuple[Any, ...], state: Any
) -> Any:
    args = (originals, originals.number(value), type(value), base, *given)
    if issubclass(type(value), nn.RNNBase):
        return _new_instance, args, (originals, *state), None, None, _set_recurrent
    return _new_instance, args, state, None, None, _set_instance


def _new_instance(originals: Originals, number: int, kind: type, base: Any, *args: Any) -> Any:
    return originals.once(number, lambda: base.__new__(kind, *args))


def _set_instance(value: Any, state: Any) -> None:
    held, slots, items = state
    if items is not None:
        base: Any = shared_objects.solid_base(type(value))
        (list.extend if base is list else base.update)(value, items)
    if held:
        object.__getattribute__(value, "__dict__").update(held)
    for (owner, name), item in slots.items():
        vars(owner)[name].__set__(value, item)


def _set_recurrent(value: Any, state: Any) -> None:
    originals, *rest = state
    _set_instance(value, rest)
    # cuDNN wants a recurrent layer's weights in one piece, as Module.to leaves them.
    originals.later.append(value.flatten_parameters)


def _new_generator(originals: Originals, number: int) -> Any:
    def make() -> torch.Generator:
        original = originals[number]
        made = torch.Generator(original.device)
        made.set_state(original.get_state())
        return made

    return originals.once(number, make)


def _reduce_script(originals: Originals, module: Any) -> Any:
    held = [
        (path, [*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)])
        for path, part in module.named_modules()
    ]
    return _new_script, (originals, originals.number(module), held)


def _new_script(originals: Originals, number: int, held: Any) -> Any:
    def make() -> Any:
        made = copy.deepcopy(originals[number])  # compiled code has no other copy
        parts = dict(made.named_modules())
        for path, tensors in held:
            for name, tensor in tensors:
                parts[path]._c.setattr(name, tensor)
        return made

    return originals.once(number, make)


def _reduce_reference(originals: Originals, reference: Any) -> Any:
    args = (originals, originals.number(reference), reference(), reference.__callback__)
    return _new_reference, args


def _new_reference(originals: Originals, number: int, target: Any, callback: Any) -> Any:
    originals.alive.append(target)
    if target is None:
        return originals[number]
    return originals.once(number, lambda: weakref.ref(target, callback))


def _reduce_weak_dict(originals: Originals, value: Any) -> Any:
    return type(value), (), (originals, list(value.items())), None, None, _set_weak_dict


def _set_weak_dict(made: Any, state: Any) -> None:
    originals, items = state
    originals.alive.append(items)
    made.update(items)


def _reduce_weak_set(originals: Originals, value: Any) -> Any:
    return type(value), (), (originals, list(value)), None, None, _set_weak_dict


def _reduce_lock(originals: Originals, lock: Any) -> Any:
    shared_objects.refuse(lock, type(lock))
    return (threading.Lock if type(lock) is shared_objects.LOCKS[0] else threading.RLock), ()


REDUCERS: dict[type, Callable[[Originals, Any], Any]] = {
    weakref.ref: _reduce_reference,
    weakref.WeakSet: _reduce_weak_set,
    **dict.fromkeys(shared_objects.WEAK_DICTS, _reduce_weak_dict),
    **dict.fromkeys(shared_objects.LOCKS, _reduce_lock),
}
