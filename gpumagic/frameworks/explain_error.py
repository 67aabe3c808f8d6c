"""Explain an error between devices, whichever framework raised it; imports none of them."""

import ast
import re
import sys
from collections.abc import Mapping
from typing import Any

from gpumagic import faults
from gpumagic.frameworks.known import imported
from gpumagic.mismatch.explanation import Explanation, Operand, expression
from gpumagic.usercode.frames import errors, failed_frames


def explain(
    error: BaseException, *, namespace: Mapping[str, Any] | None = None
) -> Explanation | None:
    """Explain an error between devices, in the names of the code that raised it.

    Parameters
    ----------
    error : BaseException
        As it was caught, from torch, JAX or TensorFlow: its traceback is read.
    namespace : mapping, optional
        Names that the code could see besides those of its frames.

    Returns
    -------
    Explanation or None
        None for any other error, and wherever it is not certain. `str()` is text; IPython shows
        HTML; `.fix` is code to paste. It holds no array and no frame.

    Examples
    --------
    >>> try:
    ...     y = net(x)
    ... except RuntimeError as error:  # JAX: ValueError
    ...     print(gpumagic.explain(error))
    """
    found = None
    if sys.modules.get("torch") is not None:
        from gpumagic.mismatch.explainer import explain as explain_torch

        found = explain_torch(error, namespace=namespace)
    # In an except block an error of ours would hide the user's own.
    with faults.kept("explaining an error"):
        if found is None and sys.modules.get("jax") is not None:
            from gpumagic.frameworks.jax_mismatch import explain_jax

            found = explain_jax(error, namespace or {})
        if found is None and sys.modules.get("tensorflow") is not None:
            found = explain_tensorflow(error, namespace or {})
    return found


_SAID = re.compile(r"Trying to access resource .+ located in device (\S+) from device (\S+)")
_WHY = (
    "XLA, with which Keras compiles by itself, ran it on {ran} and reaches no variable elsewhere: "
    "run it in a cell of %%ongpu {there}, or without XLA: compile(…, jit_compile=False)"
)


def explain_tensorflow(error: BaseException, namespace: Mapping[str, Any]) -> Explanation | None:
    """Explain which variables are on another device; None for any other error, or if none is."""
    framework: Any = next(one for one in imported() if one.name == "TensorFlow")
    for each in errors(error):
        said = _SAID.search(str(each))
        frames = failed_frames(each.__traceback__) if said else []
        if said is None or not frames or (node := frames[0].failed) is None:
            continue
        there, ran = map(framework.name_of, said.groups())
        frame = frames[0]
        frame.scope.outer = {**namespace, **frame.scope.outer}
        rows: dict[str, Operand] = {}
        for part in ast.walk(node):
            if not isinstance(part, (ast.Name, ast.Attribute, ast.Subscript)):
                continue
            value, name = frame.scope.value(part), frame.text(part)
            if framework.is_array(value) and framework.where(value) == there:
                about = type(value).__name__
                nbytes = framework.nbytes(value)
                rows[name] = Operand(name, (there,), nbytes, about, odd=True)
        if rows:
            why = _WHY.format(ran=ran, there=there)
            return Explanation(*expression(frame, node), tuple(rows.values()), None, why)
    return None
