"""Make a method a magic: parse its line, complete its help, and put its errors in one line."""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

from IPython.core.magic import no_var_expand

from gpumagic.magics.options import options


def magic(kind: Callable[[Any], Any], *, parsed: bool = True) -> Callable[[Any], Any]:
    """Make a method a magic; `kind` is IPython's `line_magic`, `cell_magic` or `line_cell_magic`.

    If `parsed`, the method gets the parsed line, and its GpuError becomes an error of one line. A
    line of only `-h`, `--help` or `help` prints what `%magic?` shows. ``{options}`` in the method's
    docstring is replaced by the options.
    """

    def decorate(method: Any) -> Any:
        name = method.__name__
        method.__doc__ = _with_options(method.__doc__, name)

        @wraps(method)
        def run(self: Any, line: str, *cell: Any, **scope: Any) -> Any:
            if line.strip() in ("-h", "--help", "help"):
                return print(inspect.getdoc(method))
            if not parsed:
                return method(self, line, *cell, **scope)
            from gpumagic.magics.arguments import in_one_line, parse

            typed = f"%%{name}" if cell else f"%{name}"
            asked = parse(typed, line)
            asked.line = line
            with in_one_line(typed):
                return method(self, asked, *cell, **scope)

        return no_var_expand(kind(run))

    return decorate


def _with_options(text: str, magic: str) -> str:
    """Return a docstring with the options of its magic in place of ``{options}``."""
    before, _, after = text.partition("{options}")
    indent = before[before.rindex("\n") :]
    return (
        before
        + indent.join(f"{', '.join([*o.flags[:-1], o.usage]):24} {o.does}" for o in options(magic))
        + after
    )
