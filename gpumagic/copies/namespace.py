"""Copy what a piece of code reads, so that timing it changes nothing of the user's.

Guarantees: the user's variables, every object in them, autograd's graphs and memory are the same
before and after; functions and classes of the notebook see the copies; two worlds can be used at
the same time, on two threads; what fails or is interrupted leaves nothing behind.
"""

from __future__ import annotations

import gc
import time
import types
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from gpumagic.copies import shared_objects
from gpumagic.copies.arrays import Arrays
from gpumagic.copies.copier import Copier
from gpumagic.errors import GpuError
from gpumagic.frameworks.beside import Beside
from gpumagic.usercode.torch_classes import comes_from, torch_here
from gpumagic.usercode.variables import variables_read

if TYPE_CHECKING:
    import torch

# IPython's own lists of what was typed and given: they stay the notebook's.
_HISTORY = ("_ih", "_oh", "_dh")
_FUNCTION = "(function)"


class CopiedVariables:
    """Copies, on one device, of the variables that a piece of code reads.

    `names` are those that the code says; the notebook's functions are followed from there. Tensors
    are copied to `device`, arrays of the frameworks `beside` torch to theirs. With
    `in_place` there are no copies: the variables are brought to the device, until `close`. What
    `stays` says is shared with the notebook. Raises GpuError for a variable that has no copy, with
    what else to type, and torch.OutOfMemoryError, leaving nothing behind.
    """

    def __init__(
        self,
        namespace: dict[str, Any],
        names: Iterable[str],
        device: torch.device | None,
        *,
        beside: Beside | None = None,
        function: Callable[..., Any] | None = None,
        in_place: bool = False,
        stays: Callable[[Any], bool] | None = None,
        otherwise: str = ", or type --in-place",
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.seconds, self.nbytes = 0.0, 0  # of copying, the device waited for
        self.sent = 0  # bytes of these that came from another device
        self.notes: tuple[str, ...] = ()
        self.function = function
        # Where to execute the code; names that it does not read are there too, not copied.
        self.globals = namespace
        self._namespace, self._stays, self._otherwise = namespace, stays, otherwise
        history = [namespace[name] for name in _HISTORY if name in namespace]
        known = (n for n in names if n in namespace and n != "__builtins__")
        self._names = [n for n in known if not any(namespace[n] is h for h in history)]
        self._beside = beside
        self._blocks: Arrays | None = None
        self._in_place = ExitStack()  # takes back what is elsewhere
        self._module: types.ModuleType | None = None
        self._finalized = False
        start = clock()
        try:
            if in_place:
                self._bring(device)
            else:
                self._copy(device)
            if device is not None:
                wait_for(device)
            if beside is not None:
                beside.wait()
            self.seconds = clock() - start
        except BaseException:
            self.close()  # in place, the variables go back, whenever an interrupt came
            raise

    def close(self, *, emptied: bool = True) -> None:
        """Let go of everything, so that the memory is free at once; in place, move back.

        Without `emptied`, functions that were made with these variables go on having them.
        """
        self._in_place.close()
        blocks, self._blocks = self._blocks, None
        space, self.globals, self._module = self.globals, {}, None
        self.function = None
        if blocks is None:
            return
        made = blocks.made()
        blocks.clear()
        if (
            emptied
            and not self._finalized
            and not any(_has_del(item) for item in list(space.values()))
        ):
            # A `__del__` of the notebook's must find its globals; torch.compile clears its own.
            for name in [n for n in space if not n.startswith("__")]:
                del space[name]
        del space
        if any(reference() is not None for reference in made):
            # Functions, classes and hooks are cycles, which only the collector ends.
            gc.collect()

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
            return Arrays(self._beside)
        from gpumagic.copies.storages import Blocks

        return Blocks(self._beside)

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
            from gpumagic.copies import tensors

            known = {**values, **copier.originals.met}
            homes, tracked = tensors.homes(self._namespace, known, device)
        self._blocks.copy(homes)
        try:
            made = copier.read()
        except Exception as error:
            if comes_from(type(error), "torch.OutOfMemoryError"):
                raise
            line = (str(error).strip().splitlines() or [""])[0]
            raise GpuError(
                f"copying {', '.join(values)} raised {type(error).__name__}: {line}; make them in "
                f"the cell{self._otherwise}"
            ) from None
        self._finalized = copier.originals.finalized
        self.function = made.pop(_FUNCTION, None)
        self.globals.update(made)
        self.notes = tuple(dict.fromkeys((*tracked, *copier.originals.notes)))
        self.nbytes, self.sent = self._blocks.nbytes, self._blocks.sent

    def _refusal(self, values: dict[str, Any], error: Exception) -> GpuError:
        """The line that names the variable that has no copy."""
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
                    f"the cell{self._otherwise}"
                )
            finally:
                copier.clear()
        return GpuError(f"the variables cannot be copied: {_kind(error)}")

    # -- in place
    def _bring(self, device: torch.device | None) -> None:
        space = dict(self._namespace)
        names = list(self._names)
        if self.function is not None:
            space[_FUNCTION] = self.function
            names.append(_FUNCTION)
        variables = list(variables_read(names, space))
        if device is not None:
            from gpumagic.copies.tensors import TensorsInPlace

            tensors = TensorsInPlace(self._namespace)
            self._in_place.callback(tensors.take_back)
            self.nbytes += tensors.bring(variables, device)
        if self._beside is not None and self._beside.frameworks:
            from gpumagic.copies.arrays_in_place import ArraysInPlace

            arrays = ArraysInPlace(self._namespace, self._beside)
            self._in_place.callback(arrays.take_back)
            self.nbytes += arrays.bring(variables)
            self.notes = tuple(arrays.left)


def wait_for(device: torch.device) -> None:
    """Return when torch has done there what it was given."""
    from gpumagic.moving import move

    move.wait_for(device)


def _kind(error: Exception) -> str:
    if isinstance(error, shared_objects.Uncopied):
        return str(error)
    if isinstance(error, RecursionError) or "recursion" in str(error):
        return "a structure nested too deeply"
    text = (str(error).strip().splitlines() or [type(error).__name__])[0]
    quoted = text.split("'")
    if "pickle" in text and len(quoted) > 2:
        return shared_objects.with_article(quoted[1].rsplit(".", 1)[-1])
    return f"something that refuses: {text}"


def _is_about(error: Exception, value: Any) -> bool:
    if isinstance(error, shared_objects.Uncopied):
        return error.value is value
    return f"{type(value).__name__}'" in str(error)


def _has_del(value: Any) -> bool:
    return isinstance(value, type) and shared_objects.defines(value, "__del__")
