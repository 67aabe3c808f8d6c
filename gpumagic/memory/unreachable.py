"""Find what keeps tensors alive that no near root reaches, backwards through the heap.

If the search ends at IPython, a module or a class, that is the holder. Else the rule is the garbage
collector's: an object with more references than other objects account for is held from outside
Python, such as by C++. Everything else is a cycle that waits to be collected.
"""

import gc
import sys
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, UntypedStorage

from gpumagic.memory.memory_report import GARBAGE
from gpumagic.memory.object_graph import Root, Walk, of_kinds
from gpumagic.usercode.files import is_users, label
from gpumagic.usercode.values import class_name, defined_in, of_function

NATIVE = "held from C++, or by an expression that runs now"
CYCLE = "a reference cycle that is not collected yet"
_whole_name = vars(type)["__qualname__"].__get__
FarRoots = Callable[[Container[int]], Iterable[Root]]


def walk_unreachable(
    walk: Walk, missing: Callable[[list[Any]], Iterable[Any]], far: FarRoots
) -> None:
    """Walk only the objects from which a missing tensor can be reached."""
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
            walk.walk([Root(f"{holder}: {_name(obj)}", obj, kind, holder)], within=within)


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
    if issubclass(type(obj), (Tensor, UntypedStorage)):
        return 2
    return 1 if defined_in(type(obj)) == "builtins" and of_function(obj, "__name__") is None else 0


def _name(obj: Any) -> str:
    name = of_function(obj, "__name__")
    code = getattr(obj, "__code__", None) if name is not None else None
    if code is not None and is_users(code.co_filename):
        return f"{name} of {label(code.co_filename)}"
    return f"{name}" if name is not None else class_name(type(obj))
