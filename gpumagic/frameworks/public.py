"""Define gpumagic's public functions for all frameworks: `where`, `move`, `on`, `explain` …"""

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar, copy_context
from dataclasses import replace
from itertools import chain
from typing import Any

from gpumagic import faults
from gpumagic.device import CPU, Device, cuda_state, resolve_one
from gpumagic.display.units import both
from gpumagic.errors import GpuError, check_exception
from gpumagic.frameworks import known
from gpumagic.frameworks.framework import Framework, FrameworksOn, device_of
from gpumagic.frameworks.known import Needed, holds, imported
from gpumagic.mismatch.explanation import Explanation, trial_on
from gpumagic.moving.moved import Moves, Origins, all_of
from gpumagic.usercode.files import P, R, last_cell, name_in, unseen
from gpumagic.usercode.values import Step, class_name, is_tensor, own, parts_of, walk
from gpumagic.usercode.variables import own_variables


def devices(*, memory: bool = True) -> list[Device]:
    """Return the GPUs that the caller's framework can use, with free bytes if `memory` is true."""
    return needed_in(sys._getframe(1).f_globals, "gpumagic.devices").devices(memory)


def cpu() -> Any:
    """Return the CPU's device object in the caller's framework: ``device(type='cpu')`` in torch."""
    return _framework("cpu").own(CPU)


def gpu(i: object = 0) -> Any:
    """Return GPU `i`; `i` is a number, or any other spelling of one GPU, such as ``"cuda:1"``.

    In torch, a number gives ``device(type='cuda', index=i)`` even if there is no such GPU.
    """
    framework = _framework("gpu")
    if isinstance(i, int):
        return framework.own(Device("cuda", i))
    return framework.own(resolve_one(i, framework.devices()))


def num_gpus() -> int:
    """Return the number of GPUs that the caller's framework can use."""
    return len(_framework("num_gpus").devices())


def try_gpu(i: object = 0) -> Any:
    """Return GPU `i` if there is one, else the CPU; `i` is any spelling of one GPU."""
    framework = _framework("try_gpu")
    return framework.own(resolve_one(f"{i}?", framework.devices()))


def try_all_gpus() -> list[Any]:
    """Return all GPUs; an empty list if there are none."""
    framework = _framework("try_all_gpus")
    return [framework.own(device) for device in framework.devices()]


def needed_in(namespace: dict[str, Any], what: str) -> Needed:
    """Return the frameworks that this namespace uses, else a default; GpuError if there is none."""
    needed = Needed(None, namespace)
    if needed.others and not holds(namespace, {"torch"}):
        needed.torch = False  # only other code imported torch, such as gpumagic's virtual GPUs
    needed.others = needed.others or (() if needed.torch else tuple(imported()))
    needed.check(what)
    return needed


def _framework(name: str) -> Framework:
    """Return the first framework that the caller of ``gpumagic.<name>`` uses."""
    return needed_in(sys._getframe(2).f_globals, f"gpumagic.{name}").frameworks[0]


def where(value: object) -> str:
    """Return the device of an array, or the devices of the arrays in a container.

    Arrays may be from torch, JAX, TensorFlow or CuPy, or from a library that supports DLPack or
    CUDA's array interface, such as MLX, Numba or cuDF. Virtual GPUs are named like real GPUs.

    Parameters
    ----------
    value : object
        An array, or a container of arrays: a list, dict, module, optimizer or dataclass.

    Returns
    -------
    str
        The device, such as ``"cuda:1"`` or ``"cpu"``; ``"cuda"`` if the GPU's number is unknown.
        ``"cuda:0 + cuda:1"`` for an array that is sharded over two devices. ``"cuda:0 and cpu"``
        for a container with arrays on two devices; GPUs come first.

    Raises
    ------
    GpuError
        The value contains no array.

    Examples
    --------
    >>> gpumagic.where(torch.ones(3, device="cuda:1"))
    'cuda:1'
    >>> gpumagic.where(jax.device_put(x, NamedSharding(mesh, PartitionSpec("batch"))))
    'cuda:0 + cuda:1'
    >>> gpumagic.where({"net": net, "batch": numpy_array})
    'cuda:0 and cpu'
    """
    if (found := _device(value)) is not None:
        return found
    within: set[str] = set()

    def into(value: Any) -> Iterable[tuple[Step, Any]]:
        if (device := _device(value)) is not None:
            within.update(device.split(" + "))
            return ()
        split = FrameworksOn(CPU, tuple(known.in_use())).parts(value)
        return parts_of(value) if split is None else (((".", ""), part) for part in split[0])

    for _ in walk([((), value)], into):
        pass
    devices = sorted(within, key=lambda each: (each == "cpu", len(each), each))
    if not devices:
        cure = "give an array, or a list, dict or module that contains arrays"
        raise GpuError(f"where: this {class_name(type(value))} contains no array; {cure}")
    return both(devices)


def _device(value: Any) -> str | None:
    framework = FrameworksOn(CPU, tuple(known.in_use())).of(value)
    return device_of(value) if framework is None else framework.where(value)


def move(value: object, where: object) -> Moves:
    """Move `value` to a device, in place where possible.

    Arrays of JAX, TensorFlow and CuPy cannot move in place, so copies replace them in lists, dicts
    and objects. If `value` itself is an array, a tuple or a pytree, use the result's ``.value``.

    Parameters
    ----------
    value : torch.Tensor, torch.nn.Module, torch.optim.Optimizer, array, or a container of them
        Lists, tuples, named tuples, dicts and dataclasses are searched to any depth.
    where : str, int or torch.device
        Any spelling of one device: ``1``, ``"cuda:1"``, ``"cpu"``, ``"free"`` …

    Returns
    -------
    Moves
        The moved variables and bytes, the variables that did not move, and the moved value.

    Raises
    ------
    GpuError
        There is no such device, or too little free memory. Nothing was moved.

    Examples
    --------
    >>> moves = gpumagic.move((net, optimizer, batch), 1)
    >>> moves
    moved the tuple: 1.2 MiB from cpu in 3.1 ms
    >>> params = gpumagic.move(params, 1).value  # JAX
    """
    if isinstance(value, str):
        raise GpuError(f"move: {value!r} is a string; give the variable itself, without quotes")
    caller = sys._getframe(1)
    name = name_in(caller, lambda held: held is value)
    name = name or ("a tensor" if is_tensor(value) else f"the {class_name(type(value))}")
    names = {name: value}
    needed = needed_in({**caller.f_globals, **names}, "gpumagic.move")
    device = needed.find(where)
    moves = all_of(each.move([*names.items()], device, names, []) for each in needed.frameworks)
    if moves.left and not moves.moved and not needed.torch:
        raise GpuError(f"move: {moves.left[0].reason}; nothing was moved")
    return replace(moves, value=names[name])


def bring_home(
    namespace: dict[str, Any], *, created: bool = False, whole: bool = False
) -> tuple[Moves, dict[str, set[str]]]:
    """Undo cells' moves; if `created`, also move variables made on a GPU. If `whole`, undo nothing
    if a variable would stay on a GPU. Return a report, and the GPUs of the variables that stay."""
    cuda_state.check()
    frameworks = known.in_use()
    home = [framework.home(namespace) for framework in frameworks]
    for framework in frameworks if created else ():
        held = (with_outputs if framework.name == "torch" else own_variables)(namespace)
        there = [(name, held[name]) for name in framework.away(held)]
        home.append(framework.move(there, CPU, namespace, []))
    held = own_variables(namespace)
    left = dict(chain.from_iterable(each.away(held).items() for each in frameworks))
    if whole and left:
        for framework, moves in zip(frameworks, home, strict=True):
            _undo(framework, moves, namespace)
        return Moves(), left
    return all_of(home), left


def with_outputs(namespace: Mapping[str, Any]) -> dict[str, Any]:
    """Return the user's variables, and the cells' results under names such as ``Out[3]``."""
    outputs = {f"Out[{number}]": value for number, value in namespace.get("Out", {}).items()}
    return own_variables(namespace) | outputs


def _undo(framework: Framework, moves: Moves, namespace: dict[str, Any]) -> None:
    """Move variables back to the GPUs on which they were before `home` moved them."""
    for moved in moves.moved:
        origins: Origins = []
        gpu = resolve_one(moved.sources[0], framework.devices())
        framework.move([(moved.name, namespace.get(moved.name))], gpu, namespace, origins)
        framework.remember(origins, last_cell())


def explain(
    error: BaseException, *, namespace: Mapping[str, Any] | None = None
) -> Explanation | None:
    """Explain an error about arrays on different devices; name the variables of the failed code.

    Parameters
    ----------
    error : BaseException
        An error of torch, JAX or TensorFlow, with its traceback.
    namespace : mapping, optional
        Variables that the failed code could read, in addition to those in the traceback's frames.

    Returns
    -------
    Explanation or None
        None if the error is not about devices, or if the cause is uncertain. `print` shows text,
        IPython shows HTML, and `.fix` is code to paste. An explanation keeps no array alive.

    Examples
    --------
    >>> try:
    ...     y = net(x)
    ... except RuntimeError as error:  # JAX: ValueError
    ...     print(gpumagic.explain(error))
    """
    check_exception("explain", error)
    # Users call `explain` in `except` blocks, where gpumagic's own error would hide theirs.
    with faults.kept("explaining an error"):
        made: Explanation | None = own(error).get(_EXPLAINED)
        if made is not None:
            return made
        for framework in known.in_use():
            if (found := framework.explain(error, namespace or {})) is not None:
                return found
    return None


@contextmanager
def explained_at_once(device: str) -> Iterator[None]:
    """If the `with` block raises an error, explain the error while the variables still exist.
    `device` is this trial's device. No fix names this device: other trials use other devices."""
    try:
        yield
    except Exception as error:
        context = copy_context()
        context.run(trial_on.set, device)
        own(error)[_EXPLAINED] = context.run(explain, error)
        raise


_EXPLAINED = "_gpumagic_explanation"
_LATER = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_entered: ContextVar[tuple[tuple["on", ExitStack], ...]] = ContextVar("gpumagic_on", default=())
"""The `on` objects that this thread or task has entered, each with its `ExitStack`."""


class on:
    """Make new tensors and modules on a device: ``with gpumagic.on(1):`` or ``@gpumagic.on(1)``.

    The device applies to factories (``torch.zeros``, ``torch.tensor`` …), ``torch.Tensor(...)``,
    ``torch.from_numpy``, ``torch.load``, new modules, and the batches of a `DataLoader`. A bare
    ``"cuda"`` means this GPU. An explicit ``device=`` or an inner ``with torch.device(...)`` has
    priority. Existing tensors stay where they are; `gpumagic.move` moves them. `on` also applies to
    new arrays of JAX, TensorFlow and CuPy, if the calling code uses these frameworks. Other threads
    and tasks are not affected.

    Parameters
    ----------
    where : str, int or torch.device
        Any spelling of one device: ``1``, ``"cuda:1"``, ``"cpu"``, ``"free"``, ``"1?"`` …
    batches : bool, default True
        Whether batches of a `DataLoader` are moved to the device.

    Raises
    ------
    GpuError
        There is no such device.

    Examples
    --------
    >>> with gpumagic.on(1) as device:
    ...     X = torch.ones(2, 3)
    >>> X.device
    device(type='cuda', index=1)

    >>> @gpumagic.on("free")
    ... def train(): ...
    """

    def __init__(self, where: object, *, batches: bool = True) -> None:
        self._needed = needed_in(sys._getframe(1).f_globals, "gpumagic.on")
        self._on = self._needed.find(where)
        self.device = self._needed.frameworks[0].own(self._on)
        self.batches = batches
        self._running: list[ExitStack] = []

    def __enter__(self) -> Any:
        stack = self._enter(sys._getframe(1).f_globals)
        self._running.append(stack)
        _entered.set((*_entered.get(), (self, stack)))
        return self.device

    def _enter(self, namespace: dict[str, Any] | None) -> ExitStack:
        with ExitStack() as stack:
            for framework in self._needed.frameworks:
                held = framework.place(self._on, batches=self.batches, namespace=namespace)
                stack.enter_context(held)
            return stack.pop_all()

    def __exit__(self, *exc: object) -> None:
        if not self._running:
            raise RuntimeError("this placement was not entered")
        # Other threads and tasks may have entered this object too. Prefer a stack of this thread.
        mine = [stack for one, stack in _entered.get() if one is self and stack in self._running]
        stack = (mine or self._running)[-1]
        self._running.remove(stack)
        _entered.set(tuple(each for each in _entered.get() if each[1] is not stack))
        stack.close()

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        # The body of a generator or coroutine would run after the call, when the context has ended.
        flags = getattr(getattr(function, "__code__", None), "co_flags", 0)
        if isinstance(function, (type, classmethod, staticmethod)) or flags & _LATER:
            what = "functions and methods, not generators, coroutines or classes"
            raise TypeError(f"@gpumagic.on wraps {what}; use `with gpumagic.on(...)` inside")
        namespace = getattr(inspect.unwrap(function), "__globals__", None)

        @unseen
        @functools.wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            with self._enter(namespace):
                return function(*args, **kwargs)

        return run
