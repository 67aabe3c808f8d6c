"""Explain TensorFlow's error where a function that XLA compiled reaches a variable elsewhere."""

import ast
import re
from collections.abc import Mapping
from typing import Any

from gpumagic.frameworks.known import imported
from gpumagic.mismatch.explanation import Explanation, Operand
from gpumagic.usercode.files import label
from gpumagic.usercode.frames import errors, failed_frames

_SAID = re.compile(r"Trying to access resource .+ located in device (\S+) from device (\S+)")
_WHY = (
    "XLA, with which Keras compiles by itself, ran it on {ran} and reaches no variable elsewhere: "
    "run it in a cell of %%ongpu {there}, or without XLA: compile(…, jit_compile=False)"
)


def explain_tensorflow(error: BaseException, namespace: Mapping[str, Any]) -> Explanation | None:
    """Say whose variables are elsewhere; None for any other error, and where none is in sight."""
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
                rows[name] = Operand(name, (there,), nbytes, None, None, about, odd=True)
        if rows:
            line = getattr(node, "lineno", frame.line)
            place = frame.filename, label(frame.filename)
            why = _WHY.format(ran=ran, there=there)
            return Explanation(frame.text(node), line, *place, tuple(rows.values()), None, why)
    return None
