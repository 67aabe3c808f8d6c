"""Say in the user's own names how a value that a loop reads again and again stays on the device."""

import ast
from functools import lru_cache

_READS = ("cpu", "item", "numpy", "tolist")
_NUMBERS = ("bool", "float", "int")
# How several values are put together and read, and one, by the framework whose they are.
_TOGETHER = {
    "": "torch.stack({}).cpu()",
    "JAX": "jax.device_get(jnp.stack({}))",
    "TensorFlow": "tf.stack({}).numpy()",
}
_ONE = {"": "{}.item()", "JAX": "float({})", "TensorFlow": "{}.numpy()"}
_LONG = 40  # characters of an expression that a sentence still bears


@lru_cache(maxsize=256)
def keep(code: str, line: str, framework: str = "") -> str:
    """What to write instead, for the expression `code` in a `line` of the source."""
    read = _tree(code, "eval")
    value = _value(read.body) if isinstance(read, ast.Expression) else None
    name = "x" if value is None or len(ast.unparse(value)) > _LONG else ast.unparse(value)
    detached = name
    if not framework:
        whole = value if value is not None and name != "x" else ast.Name("x", ast.Load())
        detached = ast.unparse(ast.Call(ast.Attribute(whole, "detach", ast.Load()), [], []))
    every, summed = _collected(line, read)
    if every:
        return (
            f"keep {every} on the device, {every}.append({detached}), and read it once after the "
            f"loop: {_TOGETHER[framework].format(every)}"
        )
    if summed:
        return (
            f"keep {summed} on the device, {summed} += {detached}, and read it once after the "
            f"loop: {_ONE[framework].format(summed)}"
        )
    kept = "what it reads" if name == "x" else name
    return f"keep {kept} on the device, and read it once after the loop"


def _tree(text: str, mode: str) -> ast.AST | None:
    try:
        made: ast.AST = ast.parse(text.strip(), mode=mode)
    except (SyntaxError, ValueError, RecursionError):
        return None
    return made


def _value(read: ast.expr) -> ast.expr | None:
    """The tensor that is read: ``loss`` of ``loss.item()`` and of ``float(loss)``."""
    if not isinstance(read, ast.Call):
        return None
    if isinstance(read.func, ast.Attribute) and read.func.attr in _READS and not read.args:
        return _value(read.func.value) or read.func.value
    if isinstance(read.func, ast.Name) and read.func.id in _NUMBERS and len(read.args) == 1:
        return _value(read.args[0]) or read.args[0]
    return None


def _collected(line: str, read: ast.AST | None) -> tuple[str, str]:
    """The names of a list that it is appended to, and of a sum that it is added to."""
    every = summed = ""
    wanted = _about(read.body) if isinstance(read, ast.Expression) else None
    for node in ast.walk(_tree(line, "exec") or ast.Pass()):
        if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add):
            summed = ast.unparse(node.target) if _about(node.value) == wanted else summed
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "append":
            name = ast.unparse(node.func).removesuffix(".append")
            every = name if wanted in [_about(argument) for argument in node.args] else every
    return every, summed


def _about(node: ast.expr) -> str:
    """The tensor that is read, or else the expression itself."""
    return ast.unparse(_value(node) or node)
