"""Say in place of `input()` and `getpass()` that a rank has no keyboard."""

import builtins
import getpass
from typing import Any, NoReturn


def _no_keyboard(*_: Any, **__: Any) -> NoReturn:
    raise EOFError("a rank has no keyboard; ask in a cell of the notebook, and read the variable")


def put_in_place() -> None:
    """Have both say so, from now on."""
    builtins.input = _no_keyboard
    getpass.getpass = _no_keyboard
