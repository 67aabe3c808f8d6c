"""Explain a GPU's tensor where only the host's will do: NumPy, `lengths=`, `torch.Tensor(x)`."""

import ast
from dataclasses import replace

from gpumagic.mismatch.explanation import Explanation, Fix
from gpumagic.mismatch.fix.callers import climb
from gpumagic.mismatch.fix.edits import Edit, bracketed
from gpumagic.mismatch.fix.site import Site
from gpumagic.mismatch.read.expressions import Reader
from gpumagic.mismatch.read.messages import Message, agree
from gpumagic.mismatch.read.operand import Part, flat
from gpumagic.mismatch.read.operand_rows import expression, named, row
from gpumagic.mismatch.read.operation import operation
from gpumagic.mismatch.read.syntax import in_own_scope, statement
from gpumagic.usercode.frames import FailedFrame

_NUMPY = "NumPy works in the host's memory only, so the values must be copied there"
_HOST = "it is read on the host, before the work starts"


def for_host(frame: FailedFrame, outer: list[FailedFrame], message: Message) -> Explanation | None:
    """The copy to the host, in the outermost frame that hands the tensor over."""
    node = frame.failed
    odd = _on_a_gpu(frame, node) if node is not None else []
    devices = frozenset(device for part in odd for device in part.devices)
    if node is None or not odd or not agree(message.devices - {"cpu"}, devices):
        return None
    if message.kind == "host" and isinstance(node, ast.Call) and "pack" in ast.unparse(node.func):
        odd = odd[-1:]  # of a packed sequence, its lengths
    climbed = climb(Site(frame, node, odd), [], outer)
    reader = Reader(frame)
    rows = [
        replace(row(shown, is_odd), also=climbed.names.get(part.key))
        for part in odd
        for shown, is_odd in named(part, reader, True)
    ]
    reason = _NUMPY if message.kind == "numpy" else _HOST
    return Explanation(*expression(frame, node), tuple(rows), _to_host(climbed.site), reason)


def _on_a_gpu(frame: FailedFrame, node: ast.AST) -> list[Part]:
    """The operands that are on a GPU, a container by its own name; none if one is not known."""
    done = operation(node, Reader(frame))
    odd: list[Part] = []
    for part in done.parts if done is not None else ():
        named = part.kind == "group" and isinstance(part.node, (ast.Name, ast.Attribute))
        odd += [p for p in ([part] if named else flat([part])) if set(p.devices) - {"cpu"}]
    unknown = done is None or any(part.kind == "unknown" for part in done.parts)
    return [] if unknown else [p for p in odd if p.kind in ("tensor", "made", "group")]


def _to_host(site: Site) -> Fix | None:
    stmt = statement(site.node)
    if stmt is None:
        return None
    edit = Edit(site.frame, stmt)
    edit.replaced += [(part.node, _copied(part, site.frame)) for part in site.odd]
    counts = [part.nbytes for part in site.odd]
    return edit.fix(None if None in counts else sum(n for n in counts if n is not None))


def _copied(part: Part, frame: FailedFrame) -> str:
    if part.kind == "group":
        several = in_own_scope(part.node) or part.text in frame.parameters
        guard = ' if hasattr(t, "detach") else t' if several else ""
        return f"[t.detach().cpu(){guard} for t in {part.text}]"
    text = bracketed(part.node, part.text)
    tracked = part.value.requires_grad if part.value is not None else "detach(" not in part.text
    return f"{text}.detach().cpu()" if tracked else f"{text}.cpu()"
