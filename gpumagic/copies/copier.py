"""Copy whatever a notebook's variables hold, with the relations between the objects.

One pickle is written and read back, so that each object has one copy. Tensors and arrays go beside
it (`Arrays`); functions and classes of the notebook are made anew, with copies as their globals;
libraries are shared.
"""

import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import cloudpickle  # type: ignore[import-untyped]

from gpumagic.copies import shared_objects
from gpumagic.copies.arrays import Arrays
from gpumagic.copies.originals import Originals
from gpumagic.copies.reducers import REDUCERS, reduce_class, reduce_instance, reduce_jitted
from gpumagic.usercode.values import is_tensor


class Copier(cloudpickle.Pickler):  # type: ignore[misc]
    """Copies values in two steps: `write` reads the originals, `read` makes the copies."""

    def __init__(
        self,
        namespace: dict[str, Any],
        fresh: dict[str, Any],
        blocks: Arrays,
        stays: Callable[[Any], bool] | None = None,
    ) -> None:
        self._stays = stays  # whether an object is shared that would be copied else
        self._stream = io.BytesIO()
        super().__init__(self._stream, protocol=5)
        self.blocks = blocks
        self.originals = Originals(namespace, fresh, blocks.know)

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
        if is_tensor(value):
            return self.blocks.reduce(value)
        reduce = REDUCERS.get(kind, reduce_class if issubclass(kind, type) else None)
        if reduce is not None:
            return reduce(self.originals, value)
        if shared_objects.is_jitted(kind):
            return reduce_jitted(self.originals, value)
        shared_objects.refuse(value, kind)
        if self.blocks.has(value, kind):
            return self.blocks.reduce(value)
        return reduce_instance(self.originals, value, kind)


class _Reader(pickle.Unpickler):
    def __init__(self, stream: io.BytesIO, originals: Originals) -> None:
        super().__init__(stream)
        self._originals = originals

    def persistent_load(self, number: int) -> Any:
        return self._originals[number]
