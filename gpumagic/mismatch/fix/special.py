"""Errors of their own kind: NumPy, optimizers, loading, arguments for the host."""

import ast
from dataclasses import replace

from torch import Tensor, nn
from torch.optim import Optimizer

from gpumagic.mismatch.check.extend import settle
from gpumagic.mismatch.check.loops import before_loops
from gpumagic.mismatch.explanation import Explanation, Fix, Operand
from gpumagic.mismatch.fix.edits import Edit, bracketed, can_precede, in_own_scope, statement
from gpumagic.mismatch.read.expressions import Reader, arguments
from gpumagic.mismatch.read.messages import Message
from gpumagic.mismatch.read.operand import Part, bytes_of, flat
from gpumagic.mismatch.read.operand_rows import expression, named, row
from gpumagic.mismatch.read.operation import Operation, operation
from gpumagic.usercode.frames import Place
from gpumagic.usercode.values import full, of_function

_NUMPY = "NumPy works in the host's memory only, so the values must be copied there"
_COUNTERS = "an optimizer keeps its step counters on the CPU"


def for_host(place: Place, outer: list[Place], message: Message) -> Explanation | None:
    """A GPU's tensor where only the host's will do: NumPy, `lengths=`, `torch.Tensor(x)`."""
    found = _host_operation(place)
    if found is None:
        return None
    done, odd = found
    if message.kind == "host" and len(odd) > 1:
        lengths = [p for p in odd if p.text == "lengths"] or odd[-1:]
        odd = lengths if _is_packing(done) else odd
    if not all(p.device is None or _fits(p.device, message) for p in odd):
        return None
    names: dict[str, str] = {}
    site, failed, first = place, done.node, odd
    fixes = [_to_host(place, done, odd)]
    if len(outer) and not place.at_top:
        for above in outer:
            up = _host_operation(above)
            if up is None or len(odd) != 1 or odd[0].text not in site.parameters:
                break
            same = [p for p in up[1] if p.value is odd[0].value and p.value is not None]
            if len(same) != 1:
                break
            names[odd[0].key] = same[0].text
            done, odd, site = up[0], same, above
            fixes.insert(0, _to_host(site, done, odd))
    sure = (settle(fix, [place, *outer], first, "cpu") for fix in fixes)
    reason = _NUMPY if message.kind == "numpy" else "it is read on the host, before the work starts"
    reader = Reader(place.scope, place.text)
    rows = tuple(
        replace(row(shown, is_odd), also=names.get(p.key))
        for p in first
        for shown, is_odd in named(p, reader, True)
    )
    return Explanation(
        *expression(place, failed),
        rows,
        next((fix for fix in sure if fix is not None), None),
        reason,
    )


def _to_host(place: Place, done: Operation, odd: list[Part]) -> Fix | None:
    stmt = statement(done.node)
    if stmt is None:
        return None
    edit = Edit(place, stmt, replaced=[(p.node, _copied(p, place)) for p in odd])
    count = [p.nbytes for p in odd]
    return edit.fix(None if None in count else sum(c for c in count if c is not None), None)


def _fits(device: str, message: Message) -> bool:
    named = {d for d in message.devices if d != "cpu"}
    return not named or device in named or device.split(":")[0] in named


def _is_packing(done: Operation) -> bool:
    return isinstance(done.node, ast.Call) and "pack" in ast.unparse(done.node.func)


def _host_operation(place: Place) -> tuple[Operation, list[Part]] | None:
    nodes = place.nodes()
    if len(nodes) != 1:
        return None
    done = operation(nodes[0], Reader(place.scope, place.text))
    if done is None:
        return None
    odd: list[Part] = []
    for part in done.parts:
        if part.kind == "group" and part.items and isinstance(part.node, (ast.Name, ast.Attribute)):
            if any(p.device != "cpu" for p in flat(part.items)):
                odd.append(part)
        else:
            odd += [p for p in flat([part]) if p.devices and p.device != "cpu"]
    odd = [p for p in odd if p.kind in ("tensor", "made", "group")]
    unknown = [p for p in done.parts if p.kind == "unknown"]
    return (done, odd) if odd and not unknown else None


def _copied(part: Part, place: Place) -> str:
    if part.kind == "group":
        several = in_own_scope(part.node) or part.text in place.parameters
        guard = ' if hasattr(t, "detach") else t' if several else ""
        return f"[t.detach().cpu(){guard} for t in {part.text}]"
    text = bracketed(part.node, part.text)
    tracked = part.value.requires_grad if part.value is not None else "detach(" not in part.text
    return f"{text}.detach().cpu()" if tracked else f"{text}.cpu()"


def for_load(place: Place) -> Explanation | None:
    """`torch.load` of a file from a machine with other GPUs."""
    for node in place.nodes():
        if not isinstance(node, ast.Call):
            continue
        function = place.scope.value(node.func)
        module = str(of_function(function, "__module__"))
        if of_function(function, "__name__") != "load":
            continue
        if not module.startswith("torch") or any(k.arg == "map_location" for k in node.keywords):
            continue
        stmt = statement(node)
        text = place.text(node)
        if stmt is None or not node.args or len(node.args) > 1:
            continue
        edit = Edit(place, stmt)
        new = f'{text[:-1].rstrip().rstrip(",")}, map_location="cpu")'
        edit.replaced.append((node, new))
        why = "the file holds tensors of a GPU that is not here; load them to the CPU, then move"
        return Explanation(*expression(place, node), (), edit.fix(None, None), why)
    return None


def for_optimizer(place: Place, message: Message) -> Explanation | None:
    """An optimizer whose state is where its parameters were."""
    nodes = place.nodes()
    if len(nodes) != 1 or not isinstance(nodes[0], ast.Call):
        return None
    node = nodes[0]
    candidates = [*arguments(node)]
    if isinstance(node.func, ast.Attribute):
        candidates.insert(0, node.func.value)
    found = [(c, place.scope.value(c)) for c in candidates]
    optimizers = [(c, v) for c, v in found if issubclass(type(v), Optimizer)]
    stmt = statement(node)
    if len(optimizers) != 1 or stmt is None or not can_precede(place, stmt, node):
        return None
    name, optimizer = optimizers[0]
    text = place.text(name)
    parameters: list[Tensor] = [p for g in optimizer.param_groups for p in g["params"]]
    away: dict[str, list[Tensor]] = {}
    for parameter in parameters:
        for key, held in dict(optimizer.state.get(parameter, {})).items():
            counter = key == "step"
            if not issubclass(type(held), Tensor):
                continue
            wrong = held.is_cuda if counter else held.device != parameter.device
            if wrong and counter == (message.kind == "steps"):
                away.setdefault(full(held.device), []).append(held)
    homes = {full(p.device) for p in parameters}
    if len(away) != 1 or len(homes) != 1:
        return None
    (device, tensors), (home,) = next(iter(away.items())), homes
    edit = Edit(place, stmt if message.kind == "steps" else before_loops(stmt, place.scope))
    if message.kind == "steps":
        loop = f"for state in {text}.state.values():"
        edit.before.append(f'{loop} state["step"] = state["step"].cpu()')
    else:
        # It brings each state to its parameter, whatever the optimizer.
        edit.before.append(f"{text}.load_state_dict({text}.state_dict())")
    nbytes = sum(bytes_of(t) or 0 for t in tensors)
    total = sum(bytes_of(p) or 0 for p in parameters)
    rows = (
        Operand(
            f"{text}.param_groups", (home,), total, None, None, f"{len(parameters)} parameters"
        ),
        Operand(
            f"{text}.state", (device,), nbytes, None, None, f"{len(tensors)} tensors", odd=True
        ),
    )
    why = (
        "the optimizer took its state on before the model moved; move the model first, then make "
        "the optimizer or load its state"
    )
    why = _COUNTERS if message.kind == "steps" else why
    return Explanation(*expression(place, node), rows, edit.fix(nbytes, None), why)


def for_parallel(place: Place, error: BaseException) -> Explanation | None:
    """`DataParallel` over a module that is not on its first device."""
    nodes = place.nodes()
    done = operation(nodes[0], Reader(place.scope, place.text)) if len(nodes) == 1 else None
    text = str(error)
    if done is None or "device_ids[0]" not in text:
        return None
    target = text.partition("on device ")[2].split(" ")[0]
    modules = [p for p in done.parts if isinstance(p.value, nn.DataParallel)]
    stmt = statement(done.node)
    if len(modules) != 1 or stmt is None or not can_precede(place, stmt, done.node):
        return None
    edit = Edit(place, stmt)
    edit.before.append(f'{modules[0].text}.to("{target}")')
    rows = tuple(row(p, p is modules[0]) for p in flat(done.parts) if p.devices)
    why = "DataParallel copies the module from the first of its devices, so it must be there"
    return Explanation(*expression(place, done.node), rows, edit.fix(modules[0].nbytes, None), why)
