"""Stand-ins in the places of the user's variables while a dry run lasts, and the variables back.

Guarantees: afterwards every name of the namespaces, the classes and the modules that were touched
refers to the very object that it did before, in the same order, whatever happened in between; an
interrupt does not leave half of it.
"""

import os
import sys
import threading
import types
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from gpumagic.dryrun.doubles import Doubles
from gpumagic.dryrun.running_line import is_users
from gpumagic.errors import GpuError

_OF_A_CLASS = {"__dict__", "__weakref__", "__module__", "__qualname__", "__doc__"}


def check_threads(namespace: dict[str, Any]) -> None:
    """Refuse while another thread runs the notebook's code: it would meet the stand-ins.

    Raises
    ------
    GpuError
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, frame in sys._current_frames().items():
        if ident == threading.get_ident():
            continue
        here: types.FrameType | None = frame
        while here is not None:
            if here.f_globals is namespace:
                raise GpuError(
                    f"a dry run cannot begin while the thread {names.get(ident, ident)} runs code "
                    "of the notebook; wait until it has ended"
                )
            here = here.f_back


class StandingIn:
    """Puts stand-ins in place.

    Parameters
    ----------
    namespace : dict
        The variables of the code that will run.
    doubles : Doubles
    """

    def __init__(self, namespace: dict[str, Any], doubles: Doubles) -> None:
        self._namespace, self._doubles = namespace, doubles
        self._kept: list[tuple[Any, dict[str, Any]]] = []
        self._placed: dict[str, tuple[int, Any]] = {}

    @contextmanager
    def place(self, roots: Iterable[tuple[str, Any]]) -> Iterator[None]:
        """Stand-ins of `roots`, and of what their classes and modules hold, until it ends."""
        try:
            self._keep(self._namespace)
            self._put_in(roots)
            yield
        finally:
            self._put_back()

    def _put_in(self, roots: Iterable[tuple[str, Any]]) -> None:
        # Apart from `place`, whose variables live on and would keep the last one's memory.
        for name, value in roots:
            self._owners(value)
            double = self._doubles.of(value)
            if name in self._namespace and self._namespace[name] is value:
                self._namespace[name] = double

    def begin(self) -> None:
        """What each name refers to now is what it refers to before the code."""
        # Not held: what the code lets go must be free.
        self._placed = {name: (id(v), _reference(v)) for name, v in self._namespace.items()}

    def assigned(self) -> Iterator[tuple[str, Any]]:
        """The names that refer to something else since, and to what."""
        for name, value in self._namespace.items():
            number, reference = self._placed.get(name, (None, None))
            same = number == id(value) and (reference is None or reference() is value)
            if not same and not name.startswith("_"):
                yield name, value

    def _keep(self, owner: Any) -> bool:
        if any(known is owner for known, _ in self._kept):
            return False
        self._kept.append((owner, dict(owner if isinstance(owner, dict) else vars(owner))))
        return True

    def _owners(self, value: Any) -> None:
        """What a value leads to and is no part of: its class, and the file it comes from."""
        if isinstance(value, types.ModuleType):
            self._module(value)
            return
        kind = value if isinstance(value, type) else type(value)
        for base in kind.__mro__:
            module = sys.modules.get(base.__module__)
            if not _may_change(module) or not self._keep(base):
                continue
            for name, item in list(vars(base).items()):
                if name not in _OF_A_CLASS and not name.startswith("__"):
                    self._set(base, name, item)
            self._module(module)
        if isinstance(value, types.FunctionType):
            self._module(sys.modules.get(value.__module__))

    def _module(self, module: types.ModuleType | None) -> None:
        if module is None or not _may_change(module) or vars(module) is self._namespace:
            return
        if getattr(module, "__name__", "") == "__main__" or not self._keep(module):
            return
        for name, item in list(vars(module).items()):
            if not name.startswith("__"):
                self._set(module, name, item)

    def _set(self, owner: Any, name: str, item: Any) -> None:
        double = self._doubles.of(item)
        if double is not item:
            with suppress(AttributeError, TypeError):  # a class that guards its attributes
                setattr(owner, name, double)

    def _put_back(self) -> None:
        interrupted: KeyboardInterrupt | None = None
        while self._kept:
            owner, before = self._kept[-1]
            try:
                if isinstance(owner, dict):
                    owner.clear()
                    owner.update(before)
                else:
                    _restore(owner, before)
                self._kept.pop()
            except KeyboardInterrupt as error:
                interrupted = error
        if interrupted is not None:
            raise interrupted


def _reference(value: Any) -> Any:
    try:
        return weakref.ref(value)
    except TypeError:
        return None


def _restore(owner: Any, before: dict[str, Any]) -> None:
    now = dict(vars(owner))
    for name in now.keys() - before.keys():
        delattr(owner, name)
    for name, value in before.items():
        if now.get(name) is not value and name not in _OF_A_CLASS:
            setattr(owner, name, value)


def _may_change(module: types.ModuleType | None) -> bool:
    """Whether a module is the user's own: the notebook, or a file that is no installed library."""
    if module is None:
        return False
    path = getattr(module, "__file__", None)
    return module.__name__ == "__main__" or (
        path is not None and os.path.exists(path) and is_users(path)
    )
