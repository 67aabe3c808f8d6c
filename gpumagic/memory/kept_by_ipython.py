"""Find what Python and IPython keep of cells that are over, and let go of it: errors, outputs."""

import sys
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any

from gpumagic.usercode.files import is_users, label, shell
from gpumagic.usercode.frames import errors

_LAST = ("last_exc", "last_value", "last_traceback", "last_type")
# What the debugger still looks at when it has ended; it sets all of it when it begins.
_LOOKED_AT = {"botframe", "stopframe", "returnframe", "cmdframe", "stack", "curframe"}
_LOOKED_AT |= {"curframe_locals", "_chained_exceptions"}
_UNDERSCORES = ("_", "__", "___")


def tracebacks(error: BaseException) -> Iterator[TracebackType]:
    """Every step of an error's traceback, and of those that it was raised from."""
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
        """Keep them no longer, and say which they were; what was printed of them stays."""
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
    """The cell or file that an error ended, or its class where it passed no code of the user's."""
    files = (trace.tb_frame.f_code.co_filename for trace in tracebacks(error))
    return next((label(file) for file in files if is_users(file)), type(error).__name__)


class KeptOutputs:
    """What cells gave: `Out[5]`, `_5` and `_`, among the variables of a notebook."""

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
        """Outputs by name: ``"Out[5]"``, and ``"_"`` and the like of what `Out` has no longer."""
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
