"""Copy the variables that a piece of code reads, so that running it changes none of the user's.

One pickle is written and read back, so each object has one copy. Tensors and arrays are copied
separately (`Arrays`). Functions and classes of the notebook are recreated with the copies as their
globals. Libraries are shared.

Guarantees: the user's variables, every object in them, autograd's graphs and memory are unchanged;
functions and classes of the notebook see the copies; two sets of copies can be used at the same
time, on two threads; an error or interrupt leaves nothing behind.
"""

from __future__ import annotations

import io
import pickle
import time
import types
import warnings
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import cloudpickle  # type: ignore[import-untyped]

from gpumagic.copies import memo
from gpumagic.copies.arrays import Arrays
from gpumagic.copies.memo import Memo
from gpumagic.copies.reducers import REDUCERS, reduce_class, reduce_instance, reduce_jitted
from gpumagic.device import cuda_state
from gpumagic.errors import GpuError
from gpumagic.faults import first_line, in_words
from gpumagic.frameworks.framework import FrameworksOn
from gpumagic.usercode.values import comes_from, is_tensor, torch_here

if TYPE_CHECKING:
    import torch


class Copier(cloudpickle.Pickler):  # type: ignore[misc]
    """Copies values in two steps: `write` reads the originals, `read` makes the copies."""

    def __init__(
        self,
        namespace: dict[str, Any],
        fresh: dict[str, Any],
        blocks: Arrays,
        stays: Callable[[Any], bool] | None = None,
    ) -> None:
        self._stays = stays  # whether to share an object that would be copied
        self._stream = io.BytesIO()
        super().__init__(self._stream, protocol=5)
        self.blocks = blocks
        self.originals = Memo(namespace, fresh, blocks.know)

    def write(self, values: Any) -> None:
        """Read the originals; raise `Uncopied` or pickle's error if one cannot be copied."""
        with warnings.catch_warnings():
            # Python 3.12 warns that 3.14 will not copy iterators of itertools.
            warnings.simplefilter("ignore", DeprecationWarning)
            self.dump(values)

    def read(self) -> Any:
        """Make the copies; call `StorageCopier.copy` first."""
        self._stream.seek(0)
        made = _Reader(self._stream, self.originals).load()
        for finish in self.originals.later:
            finish()
        return made

    def clear(self) -> None:
        """Drop all references."""
        self.clear_memo()
        self._stream.close()
        self.originals.clear()

    def persistent_id(self, value: Any) -> int | None:
        """Return the number of a shared object, None for others. pickle asks for every object."""
        originals = self.originals
        if self._stays is not None and self._stays(value):
            return originals.number(value)
        if type(value) in memo.INLINE:
            if type(value) is dict and originals.is_known(value):
                return originals.number(originals.space(value))
            return None
        return originals.number(value) if originals.shares(value) else None

    def reducer_override(self, value: Any) -> Any:
        """Return how an object is recreated, as `object.__reduce__` does."""
        kind = type(value)
        if is_tensor(value):
            return self.blocks.reduce(value)
        reduce = REDUCERS.get(kind, reduce_class if issubclass(kind, type) else None)
        if reduce is not None:
            return reduce(self.originals, value)
        if memo.is_jitted(kind):
            return reduce_jitted(self.originals, value)
        memo.refuse(value, kind)
        if self.blocks.has(value, kind):
            return self.blocks.reduce(value)
        return reduce_instance(self.originals, value, kind)


class _Reader(pickle.Unpickler):
    def __init__(self, stream: io.BytesIO, originals: Memo) -> None:
        super().__init__(stream)
        self._originals = originals

    def persistent_load(self, number: int) -> Any:
        return self._originals[number]


# IPython's lists of inputs and outputs stay the notebook's.
_HISTORY = ("_ih", "_oh", "_dh")
_FUNCTION = "(function)"


class CopiedVariables:
    """Make copies, on one device, of the variables that a piece of code reads.

    `names` are the code's; functions of the notebook are followed. Tensors are copied to `device`,
    arrays of other frameworks to the device that `others` has. `stays` decides what else is shared.
    Raises GpuError for a variable that cannot be copied, with what to type instead, and
    torch.OutOfMemoryError; then nothing is left behind.
    """

    def __init__(
        self,
        namespace: dict[str, Any],
        names: Iterable[str],
        device: torch.device | None,
        *,
        others: FrameworksOn | None = None,
        function: Callable[..., Any] | None = None,
        stays: Callable[[Any], bool] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.seconds, self.nbytes = 0.0, 0  # of copying, with the device synchronized
        self.sent = 0  # bytes of these that came from another device
        self.notes: tuple[str, ...] = ()
        self.function = function
        # The globals of the code; names that it does not read are there too, not copied.
        self.globals = namespace
        self._namespace, self._stays = namespace, stays
        history = [namespace[name] for name in _HISTORY if name in namespace]
        known = (n for n in names if n in namespace and n != "__builtins__")
        self._names = [n for n in known if not any(namespace[n] is h for h in history)]
        self._others = others
        self._blocks: Arrays | None = None
        self._module: types.ModuleType | None = None
        start = clock()
        try:
            self._copy(device)
            if device is not None:
                from gpumagic.moving.move import wait_for

                wait_for(device)
            if others is not None:
                others.wait()
            self.seconds = clock() - start
        except BaseException:
            self.close()
            raise

    def close(self, *, emptied: bool = True) -> None:
        """Free the memory at once.

        Without `emptied`, functions made with these variables keep them.
        """
        blocks, self._blocks = self._blocks, None
        space, self.globals, self._module = self.globals, {}, None
        self.function = None
        if blocks is None:
            return
        made = blocks.made()
        blocks.clear()
        if emptied:
            for name in [n for n in space if not n.startswith("__")]:
                del space[name]
        del space
        if any(reference() is not None for reference in made):
            # Functions, classes and hooks form cycles, which only the collector frees.
            cuda_state.collect()

    # -- copies
    def _copy(self, device: torch.device | None) -> None:
        self._module = types.ModuleType(self._namespace.get("__name__") or "__main__")
        self.globals = vars(self._module)
        self.globals.clear()
        self.globals.update(self._namespace)
        self._blocks = self._new_blocks()
        copier = Copier(self._namespace, self.globals, self._blocks, self._stays)
        try:
            self._make(copier, device)
        except BaseException as error:  # noqa: BLE001  its frames would keep the copies alive
            raise error.with_traceback(None) from None
        finally:
            copier.clear()

    def _new_blocks(self) -> Arrays:
        if torch_here() is None:
            return Arrays(self._others)
        from gpumagic.copies.storages import StorageCopier

        return StorageCopier(self._others)

    def _make(self, copier: Copier, device: torch.device | None) -> None:
        values = {name: self._namespace[name] for name in self._names}
        if self.function is not None:
            values[_FUNCTION] = self.function
        assert self._blocks is not None
        try:
            copier.write(values)
        except Exception as error:  # noqa: BLE001  what pickling the user's own objects may raise
            raise self._refusal(values, error) from None
        homes: dict[int, torch.device] = {}
        tracked: list[str] = []
        if device is not None:
            from gpumagic.copies import storages

            known = {**values, **copier.originals.met}
            homes, tracked = storages.homes(self._namespace, known, device)
        self._blocks.copy(homes)
        try:
            made = copier.read()
        except Exception as error:
            if comes_from(type(error), "torch.OutOfMemoryError"):
                raise
            raise GpuError(
                f"copying {', '.join(values)} raised {in_words(error)}; make them in the cell"
            ) from None
        self.function = made.pop(_FUNCTION, None)
        self.globals.update(made)
        self.notes = tuple(dict.fromkeys((*tracked, *copier.originals.notes)))
        self.nbytes, self.sent = self._blocks.nbytes, self._blocks.sent

    def _refusal(self, values: dict[str, Any], error: Exception) -> GpuError:
        """Return an error that names the variable that cannot be copied."""
        for name, value in values.items():
            copier = Copier(self._namespace, {}, self._new_blocks(), self._stays)
            try:
                copier.write({name: value})
            except Exception as failed:  # noqa: BLE001
                kind = _kind(failed)
                own = name if name != _FUNCTION else getattr(value, "__name__", "the function")
                what = kind if _is_about(failed, value) else f"it holds {kind}"
                return GpuError(
                    f"{own} ({what}) cannot be copied, so each run would change it; make it in "
                    "the cell"
                )
            finally:
                copier.clear()
        return GpuError(f"the variables cannot be copied: {_kind(error)}")


def _kind(error: Exception) -> str:
    if isinstance(error, memo.Uncopied):
        return str(error)
    if isinstance(error, RecursionError) or "recursion" in str(error):
        return "a structure nested too deeply"
    text = first_line(error)
    quoted = text.split("'")
    if "pickle" in text and len(quoted) > 2:
        return memo.with_article(quoted[1].rsplit(".", 1)[-1])
    return f"something that refuses: {text}"


def _is_about(error: Exception, value: Any) -> bool:
    if isinstance(error, memo.Uncopied):
        return error.value is value
    return f"{type(value).__name__}'" in str(error)
