"""List where what holds memory can be found from, in the order in which it is told.

The notebook's variables come first, then what Python and IPython keep of cells that are over, what
runs now, and modules: the user's, then those of libraries.
"""

import asyncio
import contextvars
import os
import sys
import threading
import types
from collections.abc import Container, Iterator, Mapping
from traceback import walk_stack, walk_tb
from typing import Any

from gpumagic.memory.heap import Root
from gpumagic.memory.kept_by_ipython import KeptOutputs, kept_errors
from gpumagic.memory.memory_report import EXCEPTION, OUTPUT
from gpumagic.memory.step_names import local_variables
from gpumagic.usercode.files import is_ours, is_users, label, shell
from gpumagic.usercode.values import comes_from, defined_in, is_module, own

_HERE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "")
# Python's machinery, which leads to whatever imported a module.
_IMPORTING = ("__loader__", "__spec__")
_module_names = vars(types.ModuleType)["__dict__"].__get__


class Roots:
    """The roots of one notebook at one moment."""

    def __init__(self, namespace: Mapping[str, Any]) -> None:
        self._namespace = namespace
        self._shell = shell()
        self._modules = {
            name: module
            for name, module in [*sys.modules.items()]
            if issubclass(type(module), types.ModuleType)
        }
        self._frames = dict(_running())

    def closed(self) -> list[Any]:
        """Objects that lead to everything: each is a root, and not on the way from another."""
        spaces = [_module_names(module) for module in self._modules.values()]
        found = [self._namespace, self._namespace.get("_oh"), sys.modules, *spaces, *self._frames]
        if self._shell is not None:
            parts = own(self._shell)
            values = [*parts.values(), *parts.get("_trait_values", {}).values()]
            found += [self._shell, *(each for each in values if _is_of_ipython(each))]
        return found

    def near(self) -> Iterator[list[Root]]:
        """The notebook, cells that are over, what runs now, and the user's modules."""
        yield from self._variables()
        yield self._outputs()
        yield [*_exceptions(self._shell)]
        yield [*self._running(users=True)]
        values = contextvars.copy_context().items()
        yield [Root(f"the context variable {each.name!r}", value) for each, value in values]
        yield [Root(f"the task {asyncio.Task.get_name(task)!r}", task) for task in _tasks()]
        yield [*self._globals(users=True)]

    def far(self, wanted: Container[int]) -> Iterator[Root]:
        """What IPython, frames and modules of libraries hold, of what has the wanted ids."""
        for name, value in own(self._shell).items():
            if id(value) in wanted:
                yield Root(f"get_ipython().{name}", value, holder="IPython")
        for root in (*self._running(users=False), *self._globals(users=False)):
            if id(root.value) in wanted:
                yield root

    def is_users_class(self, value: Any) -> bool:
        """Whether something is a class that the notebook or a module of the user's defines."""
        if not issubclass(type(value), type):
            return False
        home = defined_in(value)
        if home == self._namespace.get("__name__", "__main__"):
            return True
        module = self._modules.get(home) if type(home) is str else None
        return module is not None and _is_users_module(module)

    def _variables(self) -> Iterator[list[Root]]:
        """Modules before what else refers to their parameters, optimizers last."""
        ranks: tuple[list[Root], ...] = ([], [], [])
        hidden = getattr(self._shell, "user_ns_hidden", {})
        kept = KeptOutputs(self._namespace).variables()
        for name, value in kept.items():
            if type(name) is str and not (name in hidden and hidden[name] is value):
                last = comes_from(type(value), "torch.optim.Optimizer")
                ranks[0 if is_module(value) else 2 if last else 1].append(Root(name, value))
        yield from ranks

    def _outputs(self) -> list[Root]:
        found = KeptOutputs(self._namespace).numbered()
        names = [name for name in ("_", "__", "___") if name in self._namespace]
        found |= {name: self._namespace[name] for name in names}
        found["the last output"] = getattr(
            getattr(self._shell, "last_execution_result", None), "result", None
        )
        return [Root(name, value, OUTPUT) for name, value in found.items()]

    def _running(self, *, users: bool) -> Iterator[Root]:
        """The variables of frames that run now: below a cell, those of libraries lead far."""
        for frame, name in self._frames.items():
            if is_users(frame.f_code.co_filename) is users and not self._is_known(frame):
                for local, value in local_variables(frame).items():
                    yield Root(f"{name}: {local}", value, holder=name)

    def _is_known(self, frame: types.FrameType) -> bool:
        return frame.f_locals is self._namespace or frame.f_locals is frame.f_globals

    def _globals(self, *, users: bool) -> Iterator[Root]:
        for name, module in self._modules.items():
            names = _module_names(module)
            if _is_users_module(module) is users and names is not self._namespace:
                for key, value in [*names.items()]:
                    if key not in _IMPORTING and _is_at_home(value, name):
                        yield Root(f"{name}.{key}", value, holder=name)


def _is_of_ipython(value: Any) -> bool:
    home = str(defined_in(type(value))).partition(".")[0]
    return home in ("IPython", "ipykernel")


def _is_at_home(value: Any, module: str) -> bool:
    """False of classes that a module has from another, in whose name they are told."""
    return not issubclass(type(value), type) or defined_in(value) in (module, "__main__")


def _is_users_module(module: types.ModuleType) -> bool:
    return is_users(_module_names(module).get("__file__"))


def _running() -> Iterator[tuple[types.FrameType, str]]:
    """The frames of all threads, but those of gpumagic itself, and what to call them."""
    names = {thread.ident: f" of the thread {thread.name!r}" for thread in threading.enumerate()}
    innermost = sys._current_frames()
    # A frame that holds itself stays until it is collected.
    innermost[threading.get_ident()] = _caller()
    names[threading.get_ident()] = ""
    for thread, first in innermost.items():
        for frame, _ in walk_stack(first):
            if is_ours(frame.f_code.co_filename):
                continue
            yield frame, f"{frame.f_code.co_name}(){names.get(thread, '')}, which runs now"


def _caller() -> types.FrameType:
    """The frame that asked for this search."""
    frame = sys._getframe()
    while frame.f_code.co_filename.startswith(_HERE) and frame.f_back is not None:
        frame = frame.f_back
    return frame


def _tasks() -> list[asyncio.Task[Any]]:
    """The tasks of all loops; from Python 3.14 on, C keeps its own to itself."""
    names = ("_all_tasks", "_scheduled_tasks")  # until Python 3.11, and since
    return [task for name in names for task in getattr(asyncio.tasks, name, ())]


def _exceptions(ipython: Any) -> Iterator[Root]:
    """The errors that are kept, or handled now."""
    for error in (*kept_errors(), *_handled()):
        yield Root(_of_cell(error.__traceback__), error, EXCEPTION)
    shown = own(getattr(ipython, "InteractiveTB", None))
    for trace in (getattr(sys, "last_traceback", None), shown.get("tb")):
        if trace is not None:
            yield Root(_of_cell(trace), trace, EXCEPTION)
    if (debugger := shown.get("pdb")) is not None:
        yield Root("%debug", debugger, EXCEPTION)


def _handled() -> list[BaseException]:
    """What `except` blocks of all threads handle now."""
    found: dict[int, Any] = sys._current_exceptions()
    # Until Python 3.12 the type, the value and the traceback.
    errors = [each[1] if type(each) is tuple else each for each in found.values()]
    return [error for error in errors if error is not None]


def _of_cell(trace: types.TracebackType | None) -> str:
    files = [frame.f_code.co_filename for frame, _ in walk_tb(trace)]
    place = next((label(file) for file in files if is_users(file)), "")
    return f"the exception of {place}" if place else "an exception"
