"""Find the variables that a cell reads, also through the notebook's own functions; run nothing.

A name counts when its value from *before* the cell can reach an expression: `x = 1; print(x)` does
not read the old `x`, `if c: x = 1` followed by `print(x)` does. A cell that says only `train()`
reads what `train` reads.
"""

import ast
import re
import symtable
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import CodeType
from typing import Any

from gpumagic.usercode.functions import functions_in, globals_of
from gpumagic.usercode.names_reader import BY_NAME, NO_VALUES, NamesReader
from gpumagic.usercode.values import is_array

# IPython's own names for what it keeps: every output of the notebook is no variable of the cell.
NOT_VARIABLES = {"In", "Out", "_ih", "_oh", "_dh", "get_ipython", "exit", "quit"}


# `transform` makes Python of the text of a nested magic, as `InteractiveShell.transform_cell` does.
def names_read(
    tree: ast.AST, transform: Callable[[str], str] = str, values: Mapping[str, Any] = NO_VALUES
) -> list[str]:
    """The global names that the code of `tree` reads, in the order of their first use.

    Not those of tensors, by their `values`, of which is only asked what they are: `x.shape`.
    """
    assigned: list[list[str]] = []

    def rebound() -> list[str]:
        if not assigned:
            assigned.append(names_assigned(tree))
        return assigned[0]

    reader = NamesReader(transform, values, rebound)
    reader.visit(tree)
    if BY_NAME & reader.read.keys():
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                reader.read.update(dict.fromkeys(re.findall(r"\w+", node.value)))
    return [name for name in reader.read if name not in NOT_VARIABLES]


def names_assigned(tree: ast.AST) -> list[str]:
    """The global names that the code of `tree` binds, also in its functions."""
    symbols = symtable.symtable(ast.unparse(tree), "<cell>", "exec").get_symbols()
    bound = (s for s in symbols if s.is_assigned() or s.is_imported() or s.is_declared_global())
    return [symbol.get_name() for symbol in bound]


def variables_read(
    names: Iterable[str], namespace: Mapping[str, Any], module: str = "__main__"
) -> Iterator[tuple[str, Any]]:
    """Yield `(name, value)` for each name, and for those that functions of `module` read."""
    queue = deque(names)
    seen: set[str] = set()
    followed: set[CodeType] = set()
    while queue:
        name = queue.popleft()
        if name in seen or name not in namespace:
            continue
        seen.add(name)
        value = namespace[name]
        yield name, value
        functions = deque([] if is_array(value) else functions_in(value, module))
        while functions:
            function = functions.popleft()
            if function.__code__ in followed:
                continue
            followed.add(function.__code__)
            queue.extend(globals_of(function.__code__))
            for free, cell in zip(
                function.__code__.co_freevars, function.__closure__ or (), strict=True
            ):
                try:
                    held = cell.cell_contents
                except ValueError:  # a closure variable that is not bound yet
                    continue
                yield f"{name}.{free}", held
                functions.extend(functions_in(held, module))
