"""Describe one setting of the process or of a thread: how it is read, and how it is written."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple


class Setting(NamedTuple):
    """One line of the list of what is put back."""

    name: str
    # Its value now; a copy, where the value is changed in place.
    read: Callable[[], Any]
    write: Callable[[Any], object]
    # A program that runs ten thousand times may add to it ten thousand times.
    grows: bool = False
    # From the value before, the value now and the names of the libraries that were imported
    # meanwhile, what to keep: what those have set for themselves is their own.
    adopt: Callable[[Any, Any, set[str]], Any] | None = None


def pairs(owner: Any, *names: tuple[str, str]) -> list[Setting]:
    """A function that reads and one that writes; those that this version of `owner` has."""
    return [
        Setting(f"{owner.__name__}.{write}", getattr(owner, read), getattr(owner, write))
        for read, write in names
        if hasattr(owner, read) and hasattr(owner, write)
    ]


def accessors(owner: Any, *names: str) -> list[Setting]:
    """The same for functions that are called ``get…`` and ``set…``."""
    return pairs(owner, *((f"get{name}", f"set{name}") for name in names))


def attributes(owner: Any, *names: str) -> list[Setting]:
    """Attributes of a module."""
    called = getattr(owner, "__name__", type(owner).__name__)
    return [
        Setting(f"{called}.{name}", partial(getattr, owner, name), partial(setattr, owner, name))
        for name in names
    ]


def sequence(owner: Any, name: str) -> Setting:
    """A list that code adds to, put back in place."""

    def write(before: tuple[list[Any], list[Any]]) -> None:
        kept, items = before
        kept[:] = items
        setattr(owner, name, kept)

    def read() -> tuple[list[Any], list[Any]]:
        now = getattr(owner, name)
        return now, list(now)

    return Setting(f"{owner.__name__}.{name}", read, write, grows=True)


def mapping(name: str, held: Any, *, grows: bool = False) -> Setting:
    """A mapping, put back in place; what did not change is not written again."""

    def write(before: dict[Any, Any]) -> None:
        for key in held.keys() - before.keys():
            del held[key]
        for key, value in before.items():
            if key not in held or held[key] is not value:
                held[key] = value

    return Setting(name, held.copy, write, grows)
