"""How objects are taken apart and made anew, without calling the notebook's own methods."""

import copy
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from gpumagic.copies import shared_objects
from gpumagic.moving.find_tensors import own_attributes

if TYPE_CHECKING:
    from gpumagic.copies.copier import Copier


def reduce_instance(copier: "Copier", value: Any, kind: type) -> Any:
    """How a pickle makes an object anew; NotImplemented for its class's own way."""
    index = copier.keep(value)
    if shared_objects.is_generator(kind):
        return _new_generator, (copier, index)
    if issubclass(kind, torch.jit.ScriptModule):
        return _reduce_script(copier, value)
    if issubclass(kind, torch.utils.data.DataLoader):
        # Its running workers are the notebook's; a copy starts its own.
        state: Any = ({**own_attributes(value), "_iterator": None}, {}, None)
        return _new_instance, (copier, index, kind, object), state, None, None, _set_instance
    if issubclass(kind, BaseException):
        state = (own_attributes(value), {}, None)
        args: tuple[Any, ...] = (copier, index, kind, shared_objects.solid_base(kind), *value.args)
        return _new_instance, args, state, None, None, _set_instance
    ours = copier.is_ours(kind)
    if not shared_objects.by_attributes(kind, ours):
        if ours and "__slotnames__" not in vars(kind):
            copier.marked.append(kind)  # object.__reduce_ex__ keeps these names in the class
        return NotImplemented
    base: Any = shared_objects.solid_base(kind)
    args = (copier, index, kind, base)
    items: Any = None
    if base in (list, set):
        items = list(base.__iter__(value))
    elif base is dict:
        items = dict(dict.items(value))
    elif base in (tuple, frozenset):
        args = (*args, tuple(base.__iter__(value)))
    elif base is not object:
        if ours and "__slotnames__" not in vars(kind):
            copier.marked.append(kind)
        return NotImplemented
    state = (own_attributes(value), shared_objects.slots_of(value), items)
    if issubclass(kind, nn.RNNBase):
        return _new_instance, args, (copier, *state), None, None, _set_recurrent
    return _new_instance, args, state, None, None, _set_instance


def _new_instance(copier: "Copier", index: int, kind: type, base: Any, *args: Any) -> Any:
    return copier.once(index, lambda: base.__new__(kind, *args))


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
    copier, *rest = state
    _set_instance(value, rest)
    # cuDNN wants a recurrent layer's weights in one piece, as Module.to leaves them.
    copier.later.append(value.flatten_parameters)


def _new_generator(copier: "Copier", index: int) -> Any:
    def make() -> torch.Generator:
        original = copier.original(index)
        made = torch.Generator(original.device)
        made.set_state(original.get_state())
        return made

    return copier.once(index, make)


def _reduce_script(copier: "Copier", module: Any) -> Any:
    held = [
        (path, [*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)])
        for path, part in module.named_modules()
    ]
    return _new_script, (copier, copier.keep(module), held)


def _new_script(copier: "Copier", index: int, held: Any) -> Any:
    def make() -> Any:
        made = copy.deepcopy(copier.original(index))  # compiled code has no other copy
        parts = dict(made.named_modules())
        for path, tensors in held:
            for name, tensor in tensors:
                parts[path]._c.setattr(name, tensor)
        return made

    return copier.once(index, make)


def _reduce_reference(copier: "Copier", reference: Any) -> Any:
    args = (copier, copier.keep(reference), reference(), reference.__callback__)
    return _new_reference, args


def _new_reference(copier: "Copier", index: int, target: Any, callback: Any) -> Any:
    copier.alive.append(target)
    if target is None:
        return copier.original(index)
    return copier.once(index, lambda: weakref.ref(target, callback))


def _reduce_weak_dict(copier: "Copier", value: Any) -> Any:
    return type(value), (), (copier, list(value.items())), None, None, _set_weak_dict


def _set_weak_dict(made: Any, state: Any) -> None:
    copier, items = state
    copier.alive.append(items)
    made.update(items)


def _reduce_weak_set(copier: "Copier", value: Any) -> Any:
    return type(value), (), (copier, list(value)), None, None, _set_weak_dict


def _reduce_lock(copier: "Copier", lock: Any) -> Any:
    shared_objects.refuse(lock, type(lock))
    return (threading.Lock if type(lock) is shared_objects.LOCKS[0] else threading.RLock), ()


REDUCERS: dict[type, Callable[["Copier", Any], Any]] = {
    weakref.ref: _reduce_reference,
    weakref.WeakSet: _reduce_weak_set,
    **dict.fromkeys(shared_objects.WEAK_DICTS, _reduce_weak_dict),
    **dict.fromkeys(shared_objects.LOCKS, _reduce_lock),
}
