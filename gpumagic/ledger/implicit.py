"""Whether a copy was asked for: explicit where the code names a device, implicit where it does not.

Where it cannot be told, a copy counts as explicit: torch makes few others by itself.
"""

import dis
from types import CodeType

from gpumagic.ledger.via import ENGINE, FIX, LOADER, PRINT
from gpumagic.usercode.lines import called

# Expressions that are no call: a subscript, an operator, a comparison.
_NO_CALL = ("BINARY_", "INPLACE_", "COMPARE_", "STORE_SUBSCR", "STORE_SLICE", "UNARY_", "CONTAINS_")
_READING = frozenset(
    {
        "__contains__",
        "__getitem__",
        "__setitem__",
        "bool",
        "float",
        "format",
        "index_put",
        "index_put_",
        "int",
        "item",
        "print",
        "repr",
        "setitem",
        "getitem",
        "str",
        "tolist",
    }
)


def is_implicit(operator: str, how: int, code: CodeType | None, at: int) -> bool:
    """Whether the innermost Python code called an operator without a device being named."""
    if operator == "synchronize" or how in (LOADER, ENGINE, FIX):
        return False
    if operator != "copy_" or how >= PRINT:
        return True
    if code is None:  # a thread of autograd's, where no Python runs
        return False
    name = dis.opname[code.co_code[at]] if 0 <= at < len(code.co_code) else ""
    return name.startswith(_NO_CALL) or called(code, at) in _READING
