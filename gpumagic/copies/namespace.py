"""Copy what a piece of code reads, so that timing it changes nothing of the user's.

Guarantees: the user's variables, every object in them, autograd's graphs and memory are the same
before and after; functions and classes of the notebook see the copies; two worlds can be used at
the same time, on two threads; what fails or is interrupted leaves nothing behind.
"""

import gc
import time
import types
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gpumagic.copies import shared_objects
from gpumagic.copies.copier import Copier
from gpumagic.copies.storages import Blocks
from gpumagic.errors import GpuError
from gpumagic.moving.find_tensors import TensorFinder
from gpumagic.moving.move import move_all, wait_for
from gpumagic.usercode.variables import variables_read

# IPython's own lists of what was typed and given: they stay the notebook's.
_HISTORY = ("_ih", "_oh", "_dh")
_FUNCTION = "(function)"


class CopiedVariables:
    """Copies, on one device, of the variables that a piece of code reads.

    `names` are those that the code says; the notebook's functions are followed from there. With
    `in_place` there are no copies: the variables are brought to the device, until `close`. What
    `stays` says is shared with the notebook. Raises GpuError for a variable that has no copy, with
    what else to type, and torch.OutOfMemoryError, leaving nothing behind.
    """

    def __init__(
        self,
        namespace: dict[str, Any],
        names: Iterable[str],
        device: torch.device,
        *,
        function: Callable[..., Any] | None = None,
        in_place: bool = False,
        stays: Callable[[Any], bool] | None = None,
        otherwise: str = ", or type --in-place",
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.seconds, self.nbytes = 0.0, 0  # of copying, the device waited for
        self.notes: tuple[str, ...] = ()
        self.function = function
        # Where to execute the code; names that it does not read are there too, not copied.
        self.globals = namespace
        self._namespace, self._stays, self._otherwise = namespace, stays, otherwise
        history = [namespace[name] for name in _HISTORY if name in namespace]
        known = (n for n in names if n in namespace and n != "__builtins__")
        self._names = [n for n in known if not any(namespace[n] is h for h in history)]
        self._origins: list[tuple[torch.device, list[Tensor]]] = []
        self._blocks: Blocks | None = None
        self._module: types.ModuleType | None = None
        self._finalized = False
        start = clock()
        try:
            if in_place:
                self._bring(device)
            else:
                self._copy(device)
            wait_for(device)
            self.seconds = clock() - start
        except BaseException:
            self.close()  # in place, the variables go back, whenever an interrupt came
            raise

    def close(self, *, emptied: bool = True) -> None:
        """Let go of everything, so that the memory is free at once; in place, move back.

        Without `emptied`, functions that were made with these variables go on having them.
        """
        self._take_back()
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
    def _copy(self, device: torch.device) -> None:
        self._module = types.ModuleType(self._namespace.get("__name__") or "__main__")
        self.globals = vars(self._module)
        self.globals.clear()
        self.globals.update(self._namespace)
        self._blocks = Blocks()
        copier = Copier(self._namespace, self.globals, self._blocks, self._stays)
        try:
            self._make(copier, device)
        except BaseException as error:  # noqa: BLE001  its frames would keep the copies alive
            raise error.with_traceback(None) from None
        finally:
            copier.clear()

    def _make(self, copier: Copier, device: torch.device) -> None:
        values = {name: self._namespace[name] for name in self._names}
        if self.function is not None:
            values[_FUNCTION] = self.function
        assert self._blocks is not None
        try:
            copier.write(values)
        except Exception as error:  # noqa: BLE001  what pickling the user's own objects may raise
            raise self._refusal(values, error) from None
        finder = TensorFinder(self._namespace.get("__name__") or "__main__")
        finder.variables({**values, **copier.originals.met}.items())
        homes = {id(f.tensor): f.home or device for f in finder.tensors}
        self._blocks.copy(homes)
        try:
            made = copier.read()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # noqa: BLE001
            line = (str(error).strip().splitlines() or [""])[0]
            raise GpuError(
                f"copying {', '.join(values)} raised {type(error).__name__}: {line}; make them in "
                f"the cell{self._otherwise}"
            ) from None
        self._finalized = copier.originals.finalized
        self.function = made.pop(_FUNCTION, None)
        self.globals.update(made)
        tracked = (f.path for f in finder.tensors if f.tensor.grad_fn is not None)
        notes = {f"{path}: copied without its autograd graph": None for path in tracked}
        self.notes = (*notes, *copier.originals.notes)
        self.nbytes = self._blocks.nbytes

    def _refusal(self, values: dict[str, Any], error: Exception) -> GpuError:
        """The line that names the variable that has no copy."""
        for name, value in values.items():
            copier = Copier(self._namespace, {}, Blocks(), self._stays)
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
    def _bring(self, device: torch.device) -> None:
        space = dict(self._namespace)
        names = list(self._names)
        if self.function is not None:
            space[_FUNCTION] = self.function
            names.append(_FUNCTION)
        variables = list(variables_read(names, space))
        finder = TensorFinder()
        finder.variables(variables)
        origins: dict[torch.device, list[Any]] = {}
        for found in finder.found:
            if found.must_move(device):
                origins.setdefault(found.tensor.device, []).append(found.tensor)
        for held in finder.movable:
            origins.setdefault(held.tensors[0].tensor.device, []).append(held.value)
        self._origins = list(origins.items())
        try:
            moves = move_all(variables, device, followers=self._optimizers())
        except GpuError as error:
            self._origins = []
            raise torch.OutOfMemoryError(str(error)) from None
        except BaseException:
            self._take_back()
            raise
        self.nbytes = moves.nbytes

    def _take_back(self) -> None:
        origins, self._origins = self._origins, []
        for device, tensors in origins:
            move_all([("", tensors)], device, followers=self._optimizers())

    def _optimizers(self) -> list[tuple[str, Optimizer]]:
        return [(n, v) for n, v in self._namespace.items() if issubclass(type(v), Optimizer)]


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
