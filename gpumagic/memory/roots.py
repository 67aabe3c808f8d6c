"""List the roots of the search for GPU memory: named objects, such as variables.

An object that no root reaches is found through its referrers. Such an object is held by C++, a
library or running code, or is in a reference cycle.
"""

import gc
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from inspect import CO_OPTIMIZED
from traceback import walk_stack, walk_tb
from types import ModuleType, TracebackType
from typing import Any

from gpumagic.memory.memory_report import EXCEPTION, GARBAGE, OUTPUT
from gpumagic.memory.object_graph import Root, Walk
from gpumagic.usercode.files import is_ours, is_users, label, shell
from gpumagic.usercode.frames import local_variables, tracebacks
from gpumagic.usercode.values import comes_from, defined_in, is_module, own

_UNDERSCORES = ("_", "__", "___")


def kept_errors() -> list[BaseException]:
    """Return the exceptions that are kept for `%debug` and `%tb`, each once."""
    found = [getattr(sys, name, None) for name in ("last_exc", "last_value")]
    found.append(getattr(getattr(shell(), "last_execution_result", None), "error_in_exec", None))
    return list({id(error): error for error in found if isinstance(error, BaseException)}.values())


def release_errors() -> None:
    """Release the kept exceptions, and clear the frames of the exception being handled."""
    handled, ipython = sys.exc_info()[1], shell()
    for trace in tracebacks(handled) if handled is not None else ():
        try:
            trace.tb_frame.clear()
        except RuntimeError:  # the frame is running
            continue
        trace.tb_frame.f_locals  # noqa: B018  Python 3.12 keeps the variables until this is read
    for name in ("last_exc", "last_value", "last_traceback", "last_type"):
        vars(sys).pop(name, None)
    if ipython is not None:
        ipython.last_execution_result = None
        for shown in (ipython.InteractiveTB, ipython.SyntaxTB):
            vars(shown).pop("tb", None)
            if getattr(shown, "pdb", None) is not None:
                shown.pdb = None  # IPython makes a new debugger for the next %debug


def _place(trace: TracebackType | None) -> str:
    """Return the user's first cell or file in a traceback; empty if the traceback has neither."""
    files = [frame.f_code.co_filename for frame, _ in walk_tb(trace)]
    return next((label(file) for file in files if is_users(file)), "")


class KeptOutputs:
    """Find the names under which IPython keeps results of cells: `Out[5]`, `_5` and `_`."""

    def __init__(self, namespace: Mapping[str, Any]) -> None:
        self._namespace: Any = namespace
        self._shell = shell()
        self._out: dict[int, Any] = namespace.get("_oh") or {}
        hook = getattr(self._shell, "displayhook", None)
        kept = {f"_{number}": value for number, value in self._out.items()}
        kept |= {name: getattr(hook, name, None) for name in _UNDERSCORES}
        # If the user has assigned a value to `_` or `_5`, this name is an ordinary variable.
        ours = {name for name, value in kept.items() if namespace.get(name, self) is value}
        self._names = ours | {"_oh", "Out"}

    def numbered(self) -> dict[str, Any]:
        """Return outputs by name: ``"Out[5]"``, and ``"_"`` to ``"___"`` if not in `Out`."""
        found = {f"Out[{number}]": value for number, value in self._out.items()}
        for name in _UNDERSCORES:
            value = self._namespace.get(name)
            if name in self._names and all(value is not each for each in found.values()):
                found[name] = value
        return found

    def has(self, name: str) -> bool:
        """Whether a name is one of IPython's names for outputs: `Out`, `_5`, `_`."""
        return name in self._names

    def drop(self, names: list[str]) -> None:
        """Delete outputs, given as keys of `numbered`, and all of IPython's names for them."""
        found = self.numbered()
        gone = {id(found[name]) for name in names}
        for space in (self._namespace, self._out, getattr(self._shell, "user_ns_hidden", {})):
            for name in [name for name, value in space.items() if id(value) in gone]:
                if name in self._names or space is self._out:
                    del space[name]
        hook = getattr(self._shell, "displayhook", None)
        for name in _UNDERSCORES:
            if id(getattr(hook, name, None)) in gone:
                setattr(hook, name, "")
        result = getattr(self._shell, "last_execution_result", None)
        if id(getattr(result, "result", None)) in gone:
            self._shell.last_execution_result = None


_IMPORTING = ("__loader__", "__spec__")  # set by an import; a loader may refer to anything
_module_names = vars(ModuleType)["__dict__"].__get__


class Roots:
    """List the roots of one notebook at one moment."""

    def __init__(self, namespace: Mapping[str, Any]) -> None:
        self._namespace = namespace
        self._shell = shell()
        modules = [(n, m) for n, m in [*sys.modules.items()] if issubclass(type(m), ModuleType)]
        self._modules = {name: _module_names(module) for name, module in modules}
        innermost = sys._current_frames()
        # Start at the caller, because this frame would form a reference cycle with `self._frames`.
        innermost[threading.get_ident()] = sys._getframe(1)
        every = [frame for each in innermost.values() for frame, _ in walk_stack(each)]
        self._frames = [frame for frame in every if not is_ours(frame.f_code.co_filename)]

    def closed(self) -> list[Any]:
        """Return objects that reach nearly everything. The search does not pass through them."""
        out = self._namespace.get("_oh")
        return [self._namespace, out, sys.modules, *self._modules.values(), *self._frames]

    def near(self) -> Iterator[list[Root]]:
        """Yield groups of roots: variables, outputs, errors, running functions, modules."""
        yield from self._variables()
        yield self._outputs()
        yield [*_exceptions(self._shell)]
        yield [*self._running()]
        yield [*self._globals()]

    def is_users_class(self, value: Any) -> bool:
        """Whether a class is defined in the notebook or in a user's module."""
        home = defined_in(value)
        if home == self._namespace.get("__name__", "__main__"):
            return True
        names = self._modules.get(home) if type(home) is str else None
        return names is not None and is_users(names.get("__file__"))

    def _variables(self) -> Iterator[list[Root]]:
        """Yield variables in three groups: torch modules and classes, other values, optimizers."""
        ranks: tuple[list[Root], ...] = ([], [], [])
        hidden = getattr(self._shell, "user_ns_hidden", {})
        outputs = KeptOutputs(self._namespace)
        for name, value in [*self._namespace.items()]:
            is_ipythons = outputs.has(name) or (name in hidden and hidden[name] is value)
            if type(name) is str and not is_ipythons:
                first = is_module(value) or issubclass(type(value), type)
                last = comes_from(type(value), "torch.optim.Optimizer")
                ranks[0 if first else 2 if last else 1].append(Root(name, value))
        yield from ranks

    def _outputs(self) -> list[Root]:
        found = KeptOutputs(self._namespace).numbered()
        found |= {name: self._namespace[name] for name in _UNDERSCORES if name in self._namespace}
        result = getattr(self._shell, "last_execution_result", None)
        found["the last output"] = getattr(result, "result", None)
        return [Root(name, value, OUTPUT) for name, value in found.items()]

    def _running(self) -> Iterator[Root]:
        for frame in self._frames:
            code, name = frame.f_code, f"{frame.f_code.co_name}() (running)"
            if code.co_flags & CO_OPTIMIZED and is_users(code.co_filename):  # a function's frame
                for local, value in local_variables(frame).items():
                    yield Root(f"{name}: {local}", value, holder=name)

    def _globals(self) -> Iterator[Root]:
        for name, names in self._modules.items():
            if is_users(names.get("__file__")) and names is not self._namespace:
                for key, value in [*names.items()]:
                    if key not in _IMPORTING:
                        yield Root(f"{name}.{key}", value, holder=name)


def _exceptions(ipython: Any) -> Iterator[Root]:
    """Yield roots for the kept exceptions and for the exception being handled."""
    shown = own(getattr(ipython, "InteractiveTB", None))
    traces = getattr(sys, "last_traceback", None), shown.get("tb")
    for each in (*kept_errors(), sys.exc_info()[1], *traces):
        if each is not None:
            place = _place(each if isinstance(each, TracebackType) else each.__traceback__)
            yield Root(f"the exception of {place}" if place else "an exception", each, EXCEPTION)
    yield Root("%debug", own(shown.get("pdb")), EXCEPTION)


def walk_errors(walk: Walk, _: object) -> None:
    """Visit earlier cells' errors, which IPython leaves in uncollected reference cycles."""
    every = [each for each in gc.get_objects() if issubclass(type(each), BaseException)]
    places = [(each, _place(each.__traceback__)) for each in every]
    walk.walk(Root(f"the exception of {at}", each, EXCEPTION) for each, at in places if at)


def walk_unreachable(walk: Walk, missing: set[int]) -> None:
    """Visit the holders of tensors that no root reaches. `missing` has the ids of the tensors."""
    # An object with more references than known referrers has an unknown holder, such as C++.
    objects = {id(obj): obj for obj in gc.get_objects() if not walk.knows(obj)}

    def children(key: int) -> Iterator[int]:
        return filter(objects.__contains__, map(id, gc.get_referents(objects[key])))

    above = _inverse(objects, children)  # the referrers of each object
    leading = _reached(missing, above)  # `missing`, and all direct and indirect referrers
    # Use a new object to measure how many references this search itself holds to an object.
    objects[0] = []
    ours = sys.getrefcount(objects[0])
    elsewhere = [key for key in leading if sys.getrefcount(objects[key]) - ours > len(above[key])]
    # `Walk` is not used here, because it skips IPython's own objects, such as cell results.
    held = _reached(elsewhere, _inverse(leading, above.__getitem__))
    cycles = [key for key in leading if key not in held]
    for name, kind, keys in (
        ("held by C++, a library, or running code", "", [*held]),
        ("a reference cycle that is not collected yet", GARBAGE, cycles),
    ):
        left = [objects[key] for key in keys if not walk.knows(objects[key])]
        walk.walk([Root(name, obj, kind) for obj in left], within=leading)


def _inverse(keys: Iterable[int], edges: Callable[[int], Iterable[int]]) -> dict[int, list[int]]:
    """Return the reversed edges: for each key, the keys that have an edge to this key."""
    found = defaultdict[int, list[int]](list)
    for key in keys:
        for other in edges(key):
            found[other].append(key)
    return found


def _reached(starts: Iterable[int], edges: Mapping[int, list[int]]) -> dict[int, None]:
    """Return `starts` and all keys reachable from them, in the order of the search."""
    found, todo = dict[int, None](), [*starts]
    while todo:
        if (key := todo.pop()) not in found:
            found[key] = None
            todo += edges.get(key, ())
    return found
