"""Find the caller that passed an operand, and lines that moved, stored or lost a copy of it.

An operand is a value that the failed operation uses, such as a tensor. The line ``x.to(device)``
*loses a copy* of `x`, because no variable refers to the copy. Such a line may be in a failed frame,
in a function that the frame called before, or in an earlier cell.
"""

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import Tensor, nn

from gpumagic.mismatch.explanation import Fix, around, total
from gpumagic.mismatch.operand import NAMED, TRANSFERS, Part, Reader
from gpumagic.mismatch.operation import (
    Operation,
    named_in,
    nodes_around,
    operation,
    ran_mixed,
    storages,
)
from gpumagic.mismatch.sources import body_of, in_method, only_assignment
from gpumagic.usercode.files import label, parsed, shell
from gpumagic.usercode.frames import (
    FailedFrame,
    first_name,
    function_of,
    in_own_scope,
    loops_around,
    parents,
    statement,
    stored,
    uses,
)


@dataclass(frozen=True)
class Site:
    """Record an operation and the operands to move, as written in the code of one frame."""

    at: Operation
    odd: list[Part]  # the operands to move
    extra: list[Part]  # other values to move, which later code combines with the result

    @property
    def frame(self) -> FailedFrame:
        return self.at.reader.frame


def climb(site: Site, outer: list[FailedFrame]) -> tuple[Site, dict[str, str]]:
    """Return the site in the outermost caller that passed the operands, and their names there."""
    # The names map an operand's text at `site` to its text in that caller, if the texts differ.
    first = moved = [*site.odd, *site.extra]
    for frame in outer:
        done = operation(frame.failed, Reader(frame)) if frame.failed is not None else None
        made = _made_for(moved, site.frame, frame) if done else []
        above = _given(moved, site.frame, [*done.parts, *made] if done else ())
        if done is None or above is None:
            break
        moved, count = above, len(site.odd)
        site = Site(done, moved[:count], moved[count:])
    names = {a.key: b.text for a, b in zip(first, moved, strict=True) if a.text != b.text}
    return _at_notebook(site, outer), names


def _at_notebook(site: Site, outer: list[FailedFrame]) -> Site:
    """Return a site in the cell if functions read the operands as globals; otherwise, `site`."""
    frame = next(filter(lambda each: each.at_top, outer), site.frame)
    moved = [_made_of(part, site.frame) for part in [*site.odd, *site.extra]]
    local = {*site.frame.code.co_varnames, *site.frame.code.co_freevars}
    names = {part.text for part in moved if frame.scope.name(part.text) is part.value}
    own_cell = frame.filename == site.frame.filename
    own_cell |= isinstance(function_of(site.at.node), (ast.Module, type(None)))
    if frame is site.frame or frame.failed is None:
        return site
    if own_cell and not loops_around(frame.failed):  # edit the function, or the code of `%time`
        return site
    if len(names) < len(moved) or names & local or any(map(in_own_scope, (p.node for p in moved))):
        return site
    # A fix in the cell cannot edit the function's code, so give the parts nodes without `lineno`.
    moved, odd = [replace(p, node=ast.Name(p.text, ast.Load())) for p in moved], len(site.odd)
    return Site(Operation(Reader(frame), frame.failed, ()), moved[:odd], moved[odd:])


def _made_for(moved: list[Part], within: FailedFrame, frame: FailedFrame) -> list[Part]:
    """For a caller's ``x.f(g(y))``, return `x`, and `g(y)` if `f` failed on the result of `g`."""
    node: Any = frame.failed
    if not isinstance(node, ast.Call):
        return []
    given = dict(_arguments(node, within.parameters))
    kept = given.keys() - stored(function_of(within.failed or node) or node)
    calls = ((p, given[p.text]) for p in moved if p.text in kept and within.direct)
    made = (replace(p, node=call, text=frame.text(call), kind="made") for p, call in calls)
    of = [node.func.value] if isinstance(node.func, ast.Attribute) else []
    called = [Part(n, frame.text(n), "object", value=frame.scope.value(n)) for n in of]
    return [*called, *(part for part in made if isinstance(part.node, ast.Call))]


def _given(moved: list[Part], frame: FailedFrame, parts: Iterable[Part]) -> list[Part] | None:
    """Return the caller's expression for each operand; None if any was not passed or must stay."""
    above = {id(part.value): part for part in reversed([*parts])}
    above.pop(id(None), None)
    found: list[Part] = []
    for part in moved:
        part = _made_of(part, frame)
        name, _, attribute = part.text.partition(".")
        value = frame.scope.name(name) if attribute else part.value
        owner = above.get(id(value))
        if owner is None or name not in frame.parameters or ran_mixed(frame, name):
            return None
        if attribute and (owner.kind != "object" or not attribute.isidentifier()):
            return None
        node: Any = ast.Attribute(owner.node, attribute, ast.Load())
        node.parent = getattr(owner.node, "parent", None)
        inner = replace(part, node=node, text=f"{owner.text}.{attribute}")
        found.append(inner if attribute else owner)
    return found


def _made_of(part: Part, frame: FailedFrame) -> Part:
    """Return the argument from which a function computed an operand; if unknown, the operand."""
    made = only_assignment(part.text, frame.failed or part.node)
    value = Reader(frame).part(made.value) if made and part.text not in frame.parameters else None
    named = named_in(replace(value, devices=part.devices) if value else part, Reader(frame))
    # For example, `x` for the operand `x[0]`.
    return named[0] if len(named) == 1 and named[0].kind == "tensor" else part


_SEVERAL = (ast.Tuple, ast.List)
_COPY = "{} returns a copy of a tensor, and nothing keeps this copy"


class _Lost(NamedTuple):
    node: Any  # the code that loses a copy
    code: str  # new code that keeps the copy
    why: str  # the reason to show


@dataclass(frozen=True)
class _Written:
    """Describe code that ran without an error. An `Edit` accepts it or a `FailedFrame`."""

    filename: str
    source: str
    nodes: list[Any]  # syntax nodes of a function or cell, without nested functions
    parameters: tuple[str, ...] = ()
    earlier: bool = False  # whether an earlier cell ran this code


def keep_copies(
    parts: list[Part], frames: list[FailedFrame], target: str
) -> tuple[Fix | None, str]:
    """Return the fix that keeps the operands' lost copies, and the reason why the copies were lost.
    The fix is None unless it keeps a copy of each operand. The reason is "" if no copy was lost."""
    each = [_names_of(part, frames[0]) for part in parts]
    for frame, outer in zip(frames, [*frames[1:], None], strict=True):
        if frame.failed is None:
            break
        reader = Reader(frame)
        for code, every in _places(frame, set[str]().union(*each)):
            lost = {name: one for name, one in every.items() if _is_sent(one, reader, target)}
            if found := [n for names in each for n in [n for n in lost if n in names][:1]]:
                cell = "" if code is frame else f"{label(code.filename)}, "
                why = f"{cell}line {lost[found[0]].node.lineno}: {lost[found[0]].why}"
                nbytes = total(part.nbytes for part in parts)
                return _fix(code, lost, found, nbytes) if len(found) == len(each) else None, why
        each = [_passed(names, frame, outer) for names in each] if outer else []
    return None, ""


def made_by_call(wanted: list[set[Any]], at: Operation, target: str) -> Fix | None:
    """Return a fix of the module's method that created these storages; None if there is none."""
    frame = at.reader.frame
    for made in nodes_around(at.node, ast.Assign):
        held = storages(frame.scope.value(made.targets[0]))
        fix = in_method(getattr(made.value, "func", made), frame, target)
        if fix and any(each and each <= held for each in wanted):
            return fix
    return None


def left_behind(part: Part, frame: FailedFrame) -> tuple[Fix | None, str]:
    """Return a fix and the reason if a class's own method `to` does not move an attribute."""
    node: Any = part.node
    kind: Any = type(frame.scope.value(node.value)) if isinstance(node, ast.Attribute) else object
    code, body = body_of(vars(kind).get("to"))
    sent = {ast.unparse(n.func.value): n for n in own_nodes(body) if is_transfer(n)}
    text, owner = f"self.{getattr(node, 'attr', '')}", frame.text(getattr(node, "value", node))
    read = [name.replace("self", owner, 1) for name in sent if name.startswith("self.")]
    parts = [Reader(frame).part(ast.parse(each, mode="eval").body) for each in read]
    away = {getattr(each, "device", None) for each in parts}
    if not parts or text in sent or part.device in away:
        return None, ""
    other, call = sent.popitem()
    new, plain = ast.unparse(call).replace(other, text, 1), uses(body, text)
    simple = len(plain) == len(call.args) == 1 and isinstance(statement(plain[0]), ast.Return)
    where, why = frame.in_file(code.co_filename), f"{kind.__name__}.to() leaves {node.attr} behind"
    return around(where, [(plain[0], new)], part.nbytes) if simple else None, why


def _is_sent(lost: _Lost, reader: Reader, target: str) -> bool:
    """Whether a lost copy was on the device `target`; True if the copy's device is unknown."""
    calls: list[Any] = [node for node in ast.walk(lost.node) if is_transfer(node)]
    return all(reader.sent_to(call, call.func.attr) in (target, None) for call in calls)


def _fix(code: Any, lost: dict[str, _Lost], found: list[str], nbytes: int | None) -> Fix | None:
    """Return an edit that keeps all copies in `lost`; if impossible, only the copies in `found`."""
    for names in (lost, found):
        edits = [lost[name][:2] for name in names]
        if fix := around(code, edits, nbytes):
            return replace(fix, earlier=getattr(code, "earlier", False))
    return None


def _names_of(part: Part, frame: FailedFrame) -> set[str]:
    """Return the names in an operand's expression, and in the assignments that computed them."""
    texts = {named.text for named in named_in(part, Reader(frame)) if named.kind == "tensor"}
    made = [only_assignment(text, frame.failed or part.node) for text in texts]
    nodes = [node for stmt in made if stmt for node in ast.walk(stmt.value)]
    return texts | set(map(first_name, texts)) | {n.id for n in nodes if isinstance(n, ast.Name)}


def _passed(names: set[str], frame: FailedFrame, outer: FailedFrame) -> set[str]:
    """Return the caller's names for the parameters in `names`, and the globals in `names`."""
    call: Any = outer.failed
    found = names - {*frame.code.co_varnames}
    for name, value in _arguments(call, frame.parameters) if isinstance(call, ast.Call) else ():
        read = {n.id for n in ast.walk(value) if isinstance(n, ast.Name)}
        found |= {ast.unparse(value)} | read if name in names else set()
    return found


def _arguments(call: ast.Call, parameters: tuple[str, ...]) -> Iterator[tuple[str, ast.expr]]:
    """Yield (parameter, value) for each argument. Pair the value of ``*x`` with every parameter."""
    names = [name for name in parameters if name != "self"]
    for name, value in zip(names, call.args, strict=False):
        if isinstance(value, ast.Starred):
            yield from ((each, value.value) for each in names)
        else:
            yield name, value
    for word in call.keywords:
        yield from ((each, word.value) for each in ([word.arg] if word.arg else names))


def _places(frame: FailedFrame, names: set[str]) -> Iterator[tuple[Any, dict[str, _Lost]]]:
    """Yield code that ran before the failure, with the copies of `names` that the code lost."""
    scope: Any = function_of(frame.failed or ast.Pass())
    value = frame.scope.value
    names -= {
        n for n in names if issubclass(type(value(ast.parse(n, mode="eval").body)), nn.Module)
    }
    ran = [node for node in own_nodes(scope) if node.lineno < frame.line]
    yield from _in_code(frame, ran, frame, names)
    attributes = {name for name in names if name.startswith("self.")}
    within = next(parents(scope), None) if attributes else None
    yield frame, _lost_in([*ast.walk(within or ast.Pass())], attributes)
    for cell in earlier_cells(frame) if frame.at_top else ():
        if names := names - set[str]().union(*map(stored, ran)):
            yield from _in_code(cell, ran := cell.nodes, frame, names)


def _in_code(
    code: Any, nodes: list[Any], frame: FailedFrame, names: set[str]
) -> Iterator[tuple[Any, dict[str, _Lost]]]:
    """Yield the lost copies in a scope's nodes, and in the functions that the nodes call."""
    # Add other tensors of which this code lost a copy, except the variables of loops.
    alone: Any = [n.value for n in nodes if isinstance(n, ast.Expr) and is_transfer(n.value)]
    owners = {ast.unparse(call.func.value): frame.scope.value(call.func.value) for call in alone}
    items = set[str]().union(*(stored(n.target) for n in nodes if isinstance(n, ast.For)))
    tensors = {name for name, value in owners.items() if issubclass(type(value), Tensor)} - items
    yield code, _lost_in(nodes, names | tensors)
    for stmt in reversed(nodes):
        call = getattr(stmt, "value", None)
        if isinstance(stmt, (ast.Assign, ast.Expr)) and isinstance(call, ast.Call):
            yield from _in_function(stmt, call, frame, names, code)


def earlier_cells(frame: FailedFrame) -> Iterator[_Written]:
    """Yield the code of the cells that ran before this one, the latest first."""
    numbers: dict[str, int] = getattr(getattr(shell(), "compile", None), "_filename_map", {})
    # An editor's silent code has the running cell's number, so skip all code with this number.
    last = max(numbers.values(), default=0)
    now = {file for file, number in numbers.items() if number == last} | {frame.filename}
    for file in sorted(numbers.keys() - now, key=lambda file: -numbers[file]):
        read = parsed(file)
        yield _Written(file, read.text, own_nodes(read.tree), earlier=True)


def own_nodes(scope: Any) -> list[Any]:
    """Return the syntax nodes of a function or cell, sorted by line, without nested functions."""
    nodes = [n for n in ast.walk(scope or ast.Pass()) if hasattr(n, "lineno")]
    return sorted((n for n in nodes if function_of(n) is scope), key=lambda node: node.lineno)


def _called(call: ast.Call, frame: FailedFrame, caller: Any) -> _Written | None:
    """Return the code of the user's function that a call runs; None for other calls."""
    code, body = body_of(frame.scope.value(call.func))
    if body is None:
        return None
    parameters, earlier = code.co_varnames[: code.co_argcount], getattr(caller, "earlier", False)
    text, nodes = parsed(code.co_filename).text, own_nodes(body)
    return _Written(code.co_filename, text, nodes, parameters, earlier)


def moved_itself(part: Part, frame: FailedFrame) -> tuple[str, bool]:
    """Return the call, such as ``model.cpu()``, that moved a module, as text for the user; or "".
    The second value is True if a loop around the failed code repeats the call."""
    if part.device != "cpu":
        return "", False
    loops: list[Any] = loops_around(frame.failed or part.node)[-1:]
    last = loops[0].end_lineno if loops else frame.line - 1
    ran = [n for n in own_nodes(function_of(frame.failed or part.node)) if n.lineno <= last]
    of_notebook = frame.at_top or first_name(part.text) not in frame.code.co_varnames
    cells = earlier_cells(frame) if of_notebook else ()
    for code in [_Written(frame.filename, "", ran), *cells]:
        for node in reversed(code.nodes):
            for file, call in _sent(node, part.text, frame, code):
                why = f"{label(file)}, line {call.lineno}: {ast.unparse(call)}"
                again = any(code.nodes is ran and node.lineno >= loop.lineno for loop in loops)
                return f"{why} moves the module itself", again
            if part.text in stored(node):
                return "", False
    return "", False


def _sent(node: Any, text: str, frame: FailedFrame, code: _Written) -> Iterator[tuple[str, Any]]:
    """Yield the calls by which a node, or a function that it calls, sends a value to the CPU."""
    found: list[tuple[str, Any, str, dict[str, ast.expr]]] = [(code.filename, node, text, {})]
    given = [*node.args, *(k.value for k in node.keywords)] if isinstance(node, ast.Call) else []
    if text in map(ast.unparse, given) and (at := _called(node, frame, code)):
        values = dict(_arguments(node, at.parameters))
        names = [name for name, value in values.items() if ast.unparse(value) == text]
        found += [(at.filename, each, name, values) for each in at.nodes for name in names]
    for file, each, name, values in found:
        its: Any = each.func if is_transfer(each) else None
        if its is not None and ast.unparse(its.value) == name:
            args = [values.get(getattr(arg, "id", ""), arg) for arg in each.args]
            if Reader(frame).sent_to(ast.Call(its, args, each.keywords), its.attr) == "cpu":
                yield file, each


def made_in(part: Part, frame: FailedFrame) -> str:
    """Return which line of the class or an earlier cell made an operand; "" if none or several."""
    of_self = part.text.startswith("self.") and frame.parameters[:1] == ("self",)
    text = first_name(part.text.removeprefix("self."))
    scope: Any = function_of(frame.failed or part.node)
    above = (stored(node) for node in own_nodes(scope) if node.lineno < frame.line)
    moved = part.device != "cpu" or is_transfer(part.node)
    if moved or (not of_self and text in set[str]().union(*above)):
        return ""
    around = (n for n in parents(frame.failed or part.node) if isinstance(n, ast.ClassDef))
    cells = earlier_cells(frame) if frame.at_top or of_self else ()
    codes = [(cell.filename, cell.nodes) for cell in cells]
    codes += [(frame.filename, [*ast.walk(next(around, ast.Pass()))])] * of_self
    for file, nodes in codes:
        bound = [n for n in nodes if isinstance(n, NAMED) and not isinstance(n.ctx, ast.Load)]
        found = [node for node in bound if ast.unparse(node) == text]
        if of_self:  # code outside the class may have assigned the attribute, as in `net.fc = …`
            of_any = [n for n in bound if isinstance(n, ast.Attribute) and n.attr == text]
            its = frame.scope.name("self")
            found = [node for node in of_any if frame.scope.value(node.value) is its]
        every: list[tuple[ast.expr, Any]] = [(node, statement(node)) for node in found]
        # A statement such as `x = None` is a placeholder that other code replaces.
        made = [n for n, by in every if not ast.unparse(by).endswith((" = None", " = 0"))]
        if len(made) == 1 and _is_origin(statement(made[0])):
            return f"{label(file)}, line {made[0].lineno} made {ast.unparse(made[0])} on the CPU"
        if found:
            return ""
    return ""


def _is_origin(stmt: Any) -> bool:
    """Whether a statement assigns a new value, without naming a device."""
    if not isinstance(stmt, ast.Assign) or isinstance(stmt.value, NAMED):
        return False
    nodes = [*ast.walk(stmt.value)]
    if stored(stmt) & {node.id for node in nodes if isinstance(node, ast.Name)}:
        return False  # `net = net.eval()` returns an existing value
    return not any(is_transfer(n) or getattr(n, "arg", "") == "device" for n in nodes)


def refilled(code: list[ast.stmt], first: int) -> list[ast.stmt]:
    """Return the statements from `first`; start earlier if they fill a list created above."""
    calls: list[Any] = [
        n for each in code[first:] for n in ast.walk(each) if isinstance(n, ast.Call)
    ]
    fills = [call for call in calls if getattr(call.func, "attr", "") in ("append", "extend")]
    lists = {first_name(ast.unparse(call.func.value)) for call in fills}
    made = (n for n, stmt in enumerate(code[:first]) if stored(stmt) & lists)
    return code[next(made, first) :]


def _in_function(
    stmt: Any, call: ast.Call, frame: FailedFrame, names: set[str], caller: Any
) -> Iterator[tuple[Any, dict[str, _Lost]]]:
    """Yield the copies of `names` that were lost in a user's function that a statement calls."""
    if (at := _called(call, frame, caller)) is None:
        return
    targets = getattr(stmt, "targets", [])
    returned = [n.value for n in at.nodes if isinstance(n, ast.Return) and n.value]
    pairs = [pair for to in targets for value in returned for pair in _pairs(value, to)]
    pairs += [(name, ast.unparse(value)) for name, value in _arguments(call, at.parameters)]
    inner = {name: our for name, our in reversed(pairs) if our in names}
    yield at, {inner[name]: lost for name, lost in _lost_in(at.nodes, {*inner}).items()}


def _pairs(value: ast.expr, target: ast.expr) -> list[tuple[str, str]]:
    """Return pairs of texts: a returned value, and the variable to which it is assigned."""
    groups = [node.elts if isinstance(node, _SEVERAL) else [node] for node in (value, target)]
    texts = [list(map(ast.unparse, group)) for group in groups]
    return [*zip(*texts, strict=True)] if len(texts[0]) == len(texts[1]) else []


def is_transfer(node: Any) -> bool:
    return isinstance(node, ast.Call) and getattr(node.func, "attr", "") in TRANSFERS


def _lost_in(nodes: list[Any], names: set[str]) -> dict[str, _Lost]:
    """Return the last copy of each name that a scope's nodes lost."""
    found: dict[str, _Lost] = {}
    for node in nodes:
        if isinstance(node, ast.Expr) and is_transfer(node.value):
            call: Any = node.value
            if (text := ast.unparse(call.func.value)) in names:
                code = ast.unparse(call)
                found[text] = _Lost(call, f"{text} = {code}", _COPY.format(code))
    return found
