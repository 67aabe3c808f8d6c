"""List the roots from which memory is held, in the order of the report.

First the notebook's variables, then what Python and IPython keep of finished cells (errors,
outputs), then what runs now, and modules: the user's before libraries'. What none of them reaches
is followed backwards.
"""

import asyncio
import contextvars
import gc
import os
import sys
import threading
import types
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from traceback import walk_stack, walk_tb
from types import TracebackType
from typing import Any

from gpumagic.memory.memory_report import EXCEPTION, GARBAGE, OUTPUT
from gpumagic.memory.object_graph import Root, Walk, of_kinds
from gpumagic.memory.paths import local_variables
from gpumagic.usercode.files import is_ours, is_users, label, shell
from gpumagic.usercode.frames import errors
from gpumagic.usercode.values import (
    class_name,
    comes_from,
    defined_in,
    is_module,
    of_function,
    own,
)

_LAST = ("last_exc", "last_value", "last_traceback", "last_type")
# What the debugger still looks at when it has ended; it sets all of it when it begins.
_LOOKED_AT = {"botframe", "stopframe", "returnframe", "cmdframe", "stack", "curframe"}
_LOOKED_AT |= {"curframe_locals", "_chained_exceptions"}
_UNDERSCORES = ("_", "__", "___")


def tracebacks(error: BaseException) -> Iterator[TracebackType]:
    """Yield every step of the tracebacks of an error and of the errors that it was raised from."""
    for each in errors(error):
        trace = each.__traceback__
        while trace is not None:
            yield trace
            trace = trace.tb_next


def kept_errors() -> list[BaseException]:
    """The exceptions that are kept for `%debug` and `%tb`, each once."""
    result = getattr(shell(), "last_execution_result", None)
    found = [getattr(sys, name, None) for name in _LAST[:2]]
    found.append(getattr(result, "error_in_exec", None))
    return list({id(error): error for error in found if isinstance(error, BaseException)}.values())


class KeptErrors:
    """The exceptions that are kept for `%debug` and `%tb`, and the one that is handled now."""

    def __init__(self) -> None:
        self._shell = shell()
        self._handled = sys.exc_info()[1]
        self._kept = [*kept_errors(), *([self._handled] if self._handled is not None else [])]

    def let_go(self) -> str:
        """Release them, and return what they were; their printed text stays."""
        places = dict.fromkeys(map(_place, self._kept))
        if self._handled is not None:
            _empty(self._handled)
        self._kept.clear()
        self._handled = None
        for name in _LAST:
            vars(sys).pop(name, None)
        if self._shell is not None:
            self._shell.last_execution_result = None
            for shown in (self._shell.InteractiveTB, self._shell.SyntaxTB):
                vars(shown).pop("tb", None)
                debugger = getattr(shown, "pdb", None)
                for name in _LOOKED_AT if debugger is not None else ():
                    vars(debugger).pop(name, None)
        return f"the exception{'s' * (len(places) > 1)} of {', '.join(places)}"


def _empty(error: BaseException) -> None:
    """Empty the frames of an error that have ended."""
    for trace in tracebacks(error):
        try:
            trace.tb_frame.clear()
        except RuntimeError:  # it is running
            continue
        trace.tb_frame.f_locals  # noqa: B018  Python 3.12 keeps a copy until it is read again


def _place(error: BaseException) -> str:
    """Return the cell or file that an error ended, or its class if no user's code was running."""
    files = (trace.tb_frame.f_code.co_filename for trace in tracebacks(error))
    return next((label(file) for file in files if is_users(file)), type(error).__name__)


class KeptOutputs:
    """Find the results of cells among a notebook's variables: `Out[5]`, `_5` and `_`."""

    def __init__(self, namespace: Mapping[str, Any]) -> None:
        self._namespace: Any = namespace
        self._shell = shell()
        self._out: dict[int, Any] = namespace.get("_oh") or {}
        hook = getattr(self._shell, "displayhook", None)
        kept = {f"_{number}": value for number, value in self._out.items()}
        kept |= {name: getattr(hook, name, None) for name in _UNDERSCORES}
        # A user may have assigned `_` or `_5`, which then is a variable as any other.
        ours = {name for name, value in kept.items() if namespace.get(name, self) is value}
        self._names = ours | {"_oh", "Out"}

    def variables(self) -> dict[str, Any]:
        """The user's own."""
        return {n: value for n, value in self._namespace.items() if n not in self._names}

    def numbered(self) -> dict[str, Any]:
        """Return outputs by name: ``"Out[5]"``; or ``"_"``, ``"_5"`` if no longer in `Out`."""
        found = {f"Out[{number}]": value for number, value in self._out.items()}
        for name in _UNDERSCORES:
            value = self._namespace.get(name)
            if name in self._names and all(value is not each for each in found.values()):
                found[name] = value
        return found

    def has(self, name: str) -> bool:
        """Whether a name is one of IPython's for outputs: `Out`, `_5`, `_`."""
        return name in self._names

    def drop(self, names: list[str]) -> None:
        """Keep those of `numbered` no longer, under any of their names."""
        found = self.numbered()
        gone = {id(found[name]) for name in names}
        for number in [n for n, value in self._out.items() if id(value) in gone]:
            del self._out[number]
        hidden = getattr(self._shell, "user_ns_hidden", {})
        for name in [n for n in self._names if id(self._namespace.get(n)) in gone]:
            if name not in _UNDERSCORES:
                del self._namespace[name]
                hidden.pop(name, None)
        for name in _UNDERSCORES:
            hook = getattr(self._shell, "displayhook", None)
            if id(getattr(hook, name, None)) in gone:
                setattr(hook, name, "")
            for space in (self._namespace, hidden):
                if name in self._names and id(space.get(name)) in gone:
                    space[name] = ""
        result = getattr(self._shell, "last_execution_result", None)
        if id(getattr(result, "result", None)) in gone:
            self._shell.last_execution_result = None


_HERE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "")
# Python's import machinery, which refers to whatever imported a module.
_IMPORTING = ("__loader__", "__spec__")
_module_names = vars(types.ModuleType)["__dict__"].__get__


class Roots:
    """List the roots of one notebook at one moment."""

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
        """Objects that reach everything: each is a root, and no path passes through it."""
        spaces = [_module_names(module) for module in self._modules.values()]
        found = [self._namespace, self._namespace.get("_oh"), sys.modules, *spaces, *self._frames]
        if self._shell is not None:
            parts = own(self._shell)
            values = [*parts.values(), *parts.get("_trait_values", {}).values()]
            found += [self._shell, *(each for each in values if _is_of_ipython(each))]
        return found

    def near(self) -> Iterator[list[Root]]:
        """Yield the roots in the notebook, finished cells, running code, and the user's modules."""
        yield from self._variables()
        yield self._outputs()
        yield [*_exceptions(self._shell)]
        yield [*self._running(users=True)]
        values = contextvars.copy_context().items()
        yield [Root(f"the context variable {each.name!r}", value) for each, value in values]
        yield [Root(f"the task {asyncio.Task.get_name(task)!r}", task) for task in _tasks()]
        yield [*self._globals(users=True)]

    def far(self, wanted: Container[int]) -> Iterator[Root]:
        """Yield the wanted objects that IPython, or libraries' frames and modules, hold."""
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
        """Yield modules before others that refer to their parameters, optimizers last."""
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
    """Whether a class is defined in the module; imported ones are reported elsewhere."""
    return not issubclass(type(value), type) or defined_in(value) in (module, "__main__")


def _is_users_module(module: types.ModuleType) -> bool:
    return is_users(_module_names(module).get("__file__"))


def _running() -> Iterator[tuple[types.FrameType, str]]:
    """Yield the frames of all threads and their names, without gpumagic's own."""
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
    """Return the frame that started this search."""
    frame = sys._getframe()
    while frame.f_code.co_filename.startswith(_HERE) and frame.f_back is not None:
        frame = frame.f_back
    return frame


def _tasks() -> list[asyncio.Task[Any]]:
    """Return the tasks of all loops; from Python 3.14 on, C hides its own."""
    names = ("_all_tasks", "_scheduled_tasks")  # until Python 3.11, and since
    return [task for name in names for task in getattr(asyncio.tasks, name, ())]


def _exceptions(ipython: Any) -> Iterator[Root]:
    """Yield the errors that are kept, or handled now."""
    for error in (*kept_errors(), *_handled()):
        yield Root(_of_cell(error.__traceback__), error, EXCEPTION)
    shown = own(getattr(ipython, "InteractiveTB", None))
    for trace in (getattr(sys, "last_traceback", None), shown.get("tb")):
        if trace is not None:
            yield Root(_of_cell(trace), trace, EXCEPTION)
    if (debugger := shown.get("pdb")) is not None:
        yield Root("%debug", debugger, EXCEPTION)


def _handled() -> list[BaseException]:
    """Return the errors that `except` blocks of all threads handle now."""
    found: dict[int, Any] = sys._current_exceptions()
    # Until Python 3.12 the type, the value and the traceback.
    errors = [each[1] if type(each) is tuple else each for each in found.values()]
    return [error for error in errors if error is not None]


def _of_cell(trace: types.TracebackType | None) -> str:
    files = [frame.f_code.co_filename for frame, _ in walk_tb(trace)]
    place = next((label(file) for file in files if is_users(file)), "")
    return f"the exception of {place}" if place else "an exception"


# -- what no root reaches
NATIVE = "held from C++, or by an expression that runs now"
CYCLE = "a reference cycle that is not collected yet"
_whole_name = vars(type)["__qualname__"].__get__
FarRoots = Callable[[Container[int]], Iterable[Root]]


def walk_unreachable(
    walk: Walk, missing: Callable[[list[Any]], Iterable[Any]], far: FarRoots
) -> None:
    """Find what keeps tensors alive that no near root reaches, backwards through the heap.

    If the search ends at IPython, a module or a class, that is the holder. Else the rule is the
    collector's: an object with more references than other objects account for is held from outside
    Python, such as by C++. Everything else is a cycle that waits to be collected.
    """
    objects: list[Any] = [obj for obj in gc.get_objects() if not walk.knows(obj)]
    numbers = {id(obj): number for number, obj in enumerate(objects)}
    above = _referrers(objects, numbers)
    todo = [numbers[id(obj)] for obj in missing(objects)]
    leading = dict.fromkeys(todo)
    while todo:
        new = [parent for parent in above.get(todo.pop(), ()) if parent not in leading]
        leading |= dict.fromkeys(new)
        todo += new
    within = {id(objects[number]) for number in leading}
    walk.walk([*far(within), *_classes(objects[n] for n in leading)], within=within)
    native = {n for n, count in _counts(objects, leading) if count > len(above.get(n, ()))}
    for number in sorted(leading, key=lambda n: (_rank(objects[n]), n not in native)):
        obj = objects[number]
        if not walk.knows(obj):
            holder, kind = (NATIVE, "") if number in native else (CYCLE, GARBAGE)
            name = f"{holder}: {class_name(type(obj))}"
            walk.walk([Root(name, obj, kind, holder)], within=within)


def _referrers(objects: list[Any], numbers: Mapping[int, int]) -> dict[int, list[int]]:
    """Return the referrers of each object, by number; an object's class does not count."""
    classes = of_kinds(objects, type)
    number_of = {**numbers, **dict.fromkeys(map(id, classes))}.get
    above = defaultdict[int, list[int]](list)
    for number, obj in enumerate(objects):
        for child in map(number_of, map(id, gc.get_referents(obj))):
            if child is not None:
                above[child].append(number)
    return above


def _classes(objects: Iterable[Any]) -> Iterator[Root]:
    for obj in objects:
        if issubclass(type(obj), type):
            name = f"{defined_in(obj)}.{_whole_name(obj)}"
            yield Root(name, obj)


def _counts(objects: list[Any], numbers: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Count the references to objects, without those of this search."""
    # One that nobody else holds shows how many the counting itself makes.
    objects.append([])
    ours = sys.getrefcount(objects[-1])
    for number in numbers:
        yield number, sys.getrefcount(objects[number]) - ours


def _rank(obj: Any) -> int:
    """Rank objects: those with the most telling names first, tensors last."""
    if comes_from(type(obj), "torch.Tensor", "torch.UntypedStorage"):
        return 2
    return 1 if defined_in(type(obj)) == "builtins" and of_function(obj, "__name__") is None else 0
