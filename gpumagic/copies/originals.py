"""Know which of the originals stand for themselves in the copies, and which copy each other has.

The copier writes a number for what is shared; what makes an object anew asks here for its original,
and for the copy that a cycle has led to before.
"""

import types
from collections.abc import Callable
from typing import Any

from gpumagic.copies import shared_objects
from gpumagic.usercode.values import is_tensor


class Originals:
    """The originals of one copying, by number.

    `fresh` becomes the globals of the copies of the notebook's functions.
    """

    def __init__(
        self,
        namespace: dict[str, Any],
        fresh: dict[str, Any],
        stays: Callable[[type], bool] = lambda kind: False,
    ) -> None:
        self.namespace = namespace
        self._stays = stays  # whether a class of the notebook stands for itself
        # The variables that were met, by name: those asked for, and those that functions read.
        self.met: dict[str, Any] = {}
        self.notes: dict[str, None] = {}  # lines for the user, in order
        self.later: list[Callable[[], Any]] = []  # done when all copies are there
        self.alive: list[Any] = []  # what nothing but a weak reference holds
        self.marked: list[type] = []  # classes that pickling leaves a mark in
        self.finalized = False  # whether an object with a `__del__` of the notebook was met
        self._modules = {"__main__", namespace.get("__name__", "__main__")} - {"builtins"}
        self._spaces = {id(namespace): (namespace, fresh)}
        self._table: list[Any] = []
        self._numbers: dict[int, int] = {}
        self.copies: dict[int, Any] = {}
        self._ours: dict[type, bool] = {}
        self._kinds: dict[type, tuple[bool, bool, frozenset[int]]] = {}

    def __getitem__(self, number: int) -> Any:
        return self._table[number]

    def clear(self) -> None:
        """Hold nothing any more."""
        for name, held in vars(self).items():
            if name != "namespace" and isinstance(held, (dict, list)):
                held.clear()

    def number(self, value: Any) -> int:
        """The number by which ``originals[number]`` gives the value back."""
        number = self._numbers.setdefault(id(value), len(self._table))
        if number == len(self._table):
            self._table.append(value)
        return number

    def anew(self, original: Any, make: Callable[..., Any], *args: Any) -> tuple[Any, ...]:
        """What a pickle calls for a copy: ``make(original, *args)``."""
        return _once, (self, self.number(original), make, *args)

    # -- what is the notebook's
    def space(self, original: dict[str, Any]) -> dict[str, Any]:
        """The globals of the copies of functions whose globals are `original`."""
        if not self.is_space(original):
            return original
        return self._spaces.setdefault(id(original), (original, dict(original)))[1]

    def is_known(self, space: dict[str, Any]) -> bool:
        """Whether functions with these globals were met."""
        return id(space) in self._spaces

    def is_space(self, space: dict[str, Any]) -> bool:
        """Whether globals are the notebook's, or a script's that %run ran: those keep their own."""
        return self.is_known(space) or space.get("__name__") == "__main__"

    def is_notebooks(self, function: Any) -> bool:
        """Whether it is a function that was defined in the notebook."""
        return type(function) is types.FunctionType and self.is_space(function.__globals__)

    def is_ours(self, kind: type) -> bool:
        """Whether a class, or one that it comes from, was defined in the notebook."""
        if kind not in self._ours:
            ours = any(self._is_from_here(base) for base in kind.__mro__)
            self._ours[kind] = ours and not self._stays(kind)
            self.finalized |= self._ours[kind] and shared_objects.defines(kind, "__del__")
        return self._ours[kind]

    def _is_from_here(self, kind: type) -> bool:
        if not kind.__flags__ & shared_objects.MADE_IN_PYTHON:
            return False
        if kind.__module__ in self._modules:
            return True
        held = list(vars(kind).values())
        if any(self.is_notebooks(item) for item in held):
            return True
        # As the backward class that torch makes for an autograd.Function of the notebook.
        refers = any(
            issubclass(type(item), type) and item.__module__ in self._modules for item in held
        )
        return refers and not shared_objects.is_importable(kind)

    # -- what is shared
    def shares(self, value: Any) -> bool:
        """Whether an object stands for itself in the copies; Uncopied for the notebook itself."""
        kind = type(value)
        if kind is str or kind is bytes:
            return len(value) >= shared_objects.LONG
        if kind is types.FunctionType:
            return not self.is_notebooks(value) and self._is_library_function(value)
        if kind is shared_objects.CACHED:
            return not self.is_notebooks(vars(value).get("__wrapped__"))
        if shared_objects.is_jitted(kind):
            of_library = value.__module__ not in self._modules
            return of_library and shared_objects.is_importable(value)
        if issubclass(kind, type):
            return not self.is_ours(value)
        if kind is types.ModuleType and vars(value) is self.namespace:
            raise shared_objects.Uncopied("the notebook's own module", value)
        return self._shares_instance(value, kind)

    def _is_library_function(self, function: types.FunctionType) -> bool:
        held = function.__closure__ or function.__defaults__ or function.__kwdefaults__
        # What a library's decorator made of a notebook's function is found there by its name.
        of_library = function.__module__ not in self._modules
        return not (held or vars(function)) or (
            of_library and shared_objects.is_importable(function)
        )

    def _shares_instance(self, value: Any, kind: type) -> bool:
        if kind not in self._kinds:
            copied = is_tensor(value) or self.is_ours(kind)
            shared = not copied and shared_objects.is_shared_kind(kind)
            self._kinds[kind] = copied, shared, shared_objects.of_its_module(kind)
        copied, shared, of_modules = self._kinds[kind]
        if copied or not (shared or shared_objects.is_shared(value, kind, of_modules)):
            return False
        if shared_objects.is_aloud(kind):
            name = shared_objects.with_article(kind.__name__)
            self.notes[f"{name} is shared with the notebook, not copied"] = None
        return True


def _once(originals: Originals, number: int, make: Callable[..., Any], *args: Any) -> Any:
    """What `make` gave the first time: a cycle makes a pickle build an object twice."""
    if number not in originals.copies:
        originals.copies[number] = make(originals[number], *args)
    return originals.copies[number]
