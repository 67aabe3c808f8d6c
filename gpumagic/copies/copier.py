"""Copy whatever a notebook's variables hold, with the relations between the objects.

One pickle is written and read back, so that each object has one copy. Tensors and arrays go beside
it (`Blocks`); functions and classes of the notebook are made anew, with copies as their globals;
libraries are shared.
"""

import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import torch
from torch import Tensor

from gpumagic.copies import shared_objects
from gpumagic.copies.originals import Originals
from gpumagic.copies.reducers import REDUCERS, reduce_class, reduce_instance
from gpumagic.copies.storages import Blocks
from gpumagic.usercode.values import own


class Copier(cloudpickle.Pickler):  # type: ignore[misc]
    """Copies values in two steps: `write` reads the originals, `read` makes the copies."""

    def __init__(
        self,
        namespace: dict[str, Any],
        fresh: dict[str, Any],
        blocks: Blocks,
        stays: Callable[[Any], bool] | None = None,
    ) -> None:
        self._stays = stays  # whether an object is shared that would be copied else
        self._stream = io.BytesIO()
        super().__init__(self._stream, protocol=5)
        self.blocks = blocks
        self.originals = Originals(namespace, fresh)

    def write(self, values: Any) -> None:
        """Read the originals; raises `Uncopied`, and what pickling raises, for what has no copy."""
        try:
            with warnings.catch_warnings():
                # Python 3.12 warns that from 3.14 on it will not copy iterators of itertools.
                warnings.simplefilter("ignore", DeprecationWarning)
                self.dump(values)
        finally:
            for kind in self.originals.marked:
                if "__slotnames__" in vars(kind):
                    type.__delattr__(kind, "__slotnames__")

    def read(self) -> Any:
        """Make the copies; `Blocks.copy` comes before."""
        self._stream.seek(0)
        made = _Reader(self._stream, self.originals).load()
        for finish in self.originals.later:
            finish()
        return made

    def clear(self) -> None:
        """Hold nothing any more."""
        self.clear_memo()
        self._stream.close()
        self.originals.clear()

    def persistent_id(self, value: Any) -> int | None:
        """The number of what is shared; None for what is copied. pickle asks for every object."""
        originals = self.originals
        if self._stays is not None and self._stays(value):
            return originals.number(value)
        if type(value) in shared_objects.INLINE:
            if type(value) is dict and originals.is_known(value):
                return originals.number(originals.space(value))
            return None
        return originals.number(value) if originals.shares(value) else None

    def reducer_override(self, value: Any) -> Any:
        """How an object is made anew, as `object.__reduce__` says it."""
        kind = type(value)
        if issubclass(kind, Tensor):
            return self._reduce_tensor(value, kind)
        reduce = REDUCERS.get(kind, reduce_class if issubclass(kind, type) else None)
        if reduce is not None:
            return reduce(self.originals, value)
        shared_objects.refuse(value, kind)
        if shared_objects.is_array(value, kind):
            return self.blocks.copied, (self.blocks.add(value),)
        return reduce_instance(self.originals, value, kind)

    def _reduce_tensor(self, tensor: Tensor, kind: type) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            number = self.blocks.add(tensor)
            leaf = tensor.is_leaf
            held: dict[str, Any] = {}
            if leaf and tensor.grad is not None:
                held["grad"] = tensor.grad
            for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
                if leaf and getattr(tensor, name, None):
                    held[name] = getattr(tensor, name)
        state = (held, own(tensor) or None)
        args = (number, None if kind is Tensor else kind)
        if not any(state):
            return self.blocks.copied, args
        return self.blocks.copied, args, state, None, None, _set_tensor


class _Reader(pickle.Unpickler):
    def __init__(self, stream: io.BytesIO, originals: Originals) -> None:
        super().__init__(stream)
        self._originals = originals

    def persistent_load(self, number: int) -> Any:
        return self._originals[number]


def _set_tensor(tensor: Tensor, state: Any) -> None:
    held, attributes = state
    with torch._C.DisableTorchFunctionSubclass():
        for name, value in held.items():
            setattr(tensor, name, value)
    if attributes:
        own(tensor).update(attributes)
