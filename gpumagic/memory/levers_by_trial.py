"""Find another way to compute the same with less memory: each is tried by a dry run."""

import ast
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import _lru_cache_wrapper, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from gpumagic.display.units import some
from gpumagic.fitting.fit_search import largest
from gpumagic.memory.oom_state import OutOfMemoryState
from gpumagic.memory.oom_trials import CodeTrial, Trials, Within
from gpumagic.memory.out_of_memory import Lever
from gpumagic.usercode.syntax import stored
from gpumagic.usercode.values import contents, own
from gpumagic.usercode.variables import names_read

# A lever that saves less than this part of the need is not worth a line.
_WORTH = 0.05
# A number decides if with half of it so much less is needed.
_DECIDES = 0.2
# Half a batch needs half of the memory. If it needs less than this part, samples are paired with
# each other, and a smaller batch computes something else.
_PAIRED = 0.4
# The reported number is at most this far below the largest that fits. A closer one would cost dry
# runs, and depends on fragmentation. On a real GPU there is a margin besides.
_NEAR, _NEAR_REAL = 0.05, 0.1
# A smaller number is hardly that of samples.
_LEAST = 10
# A recomputed part of a Sequential has as many layers as there are parts kept.
_LEAST_LAYERS = 4
_CUTS = {"split", "chunk", "narrow", "select", "index_select", "unbind"}
_MAKES = {"empty", "full", "ones", "rand", "randint", "randn", "zeros"}
_KEEP, _DEPTH = "_gpumagic_keep", 4


def keep_less(s: OutOfMemoryState, t: Trials) -> Iterator[Lever]:
    """Propose that each pass of a loop keeps less: without its graph, or on the CPU."""
    trial = t.loop
    path = s.adds_to(trial.rest) if trial is not None else ""
    if trial is None or not path:
        return
    frame, inside = trial.frame, not trial.frame.at_top
    local = (n for n in frame.scope.local if s.local(frame, n) == path)
    name = next(local, path if path in s.namespace else "")
    # The results of a pass, which the next one makes again, hold the same graphs.
    made = {s.local(frame, n) for n in stored(trial.rest.loops[0])}
    graphs, whole = s.in_graphs(path, made, in_frames=inside), s.alone([path], in_frames=inside)
    whole = whole or sum(row.nbytes for row in s.device.holders if row.path == path)
    # Before a backward pass after the loop the graphs are needed.
    later = any(r.backward for r in s.rests) and "backward" not in ast.unparse(trial.rest.loops[0])
    value = frame.scope.name(name)
    single = isinstance(value, Tensor) and value.numel() == 1
    cached = isinstance(value, _lru_cache_wrapper)
    detached = f"keep `.item()` or `.detach()` in `{name}`, not results with their graphs"
    stepwise = f"`{name}.backward(); {name} = {name}.detach()` in each pass, no backward after it"
    for do, keep, gives in (
        (detached, _without_graph, 0 if later else graphs),
        (stepwise, _backward, graphs if later and single else 0),
        (f"keep `.cpu()` of the tensors in `{name}`", _on_host, 0 if graphs else whole),
        (f"`{name}.cache_clear()` in each pass", _cleared, whole if cached else 0),
    ):
        if name and gives:
            names = {name: _emptied(frame.scope.name(name)), _KEEP: keep}
            needs, grows = trial.needed_and_grows(names=names, after=f"{name} = {_KEEP}({name})")
            if needs is not None and _slower(trial, grows):
                yield Lever(do, gives, trial.fits(needs, whole, grows))


def _slower(trial: CodeTrial, grows: int | None) -> bool:
    """Whether each pass then keeps clearly less."""
    return grows is not None and trial.grows_much and 4 * grows <= 3 * (trial.grows or 0)


def _emptied(value: Any) -> Any:
    """Return a container without its tensors, as before the loop; for a tensor its value alone."""
    if type(value) is dict:
        return {k: _emptied(v) for k, v in value.items() if not isinstance(v, Tensor)}
    if type(value) is list:
        return [_emptied(v) for v in value if not isinstance(v, Tensor)]
    return _without_graph(value) if isinstance(value, Tensor) else value


def _without_graph(value: Any) -> Any:
    return _each_tensor(value, lambda t: 0.0 if t.numel() == 1 else t.detach())


def _backward(value: Tensor) -> Tensor:
    value.backward()
    return value.detach()


def _cleared(value: Any) -> Any:
    value.cache_clear()
    return value


def _on_host(value: Any) -> Any:
    return _each_tensor(value, lambda t: t.detach().cpu())


def _each_tensor(value: Any, change: Callable[[Tensor], Any], depth: int = _DEPTH) -> Any:
    """Change the tensors in a value: in a list, a dict or an object in place."""
    if isinstance(value, Tensor):
        return change(value) if value.device.type != "cpu" else value
    into = value if isinstance(value, (list, dict)) else own(value)
    into = dict(into) if isinstance(value, type) else into
    if depth and not isinstance(value, nn.Module):
        for key, item in contents(into):
            if isinstance(item, (Tensor, list, dict)) or own(item):
                into[key] = _each_tensor(item, change, depth - 1)
    return value


def no_graph(s: OutOfMemoryState, t: Trials) -> Iterator[Lever]:
    """`torch.no_grad()` where no backward pass follows."""
    trial = t.whole if t.loop is None or t.whole is not t.loop else t.loop
    if trial is None or not torch.is_grad_enabled() or any(r.backward for r in s.rests):
        return
    yield from _saves(
        trial, "`with torch.no_grad():` around it: no backward pass follows", torch.no_grad
    )


def _saves(trial: CodeTrial, do: str, within: Within) -> Iterator[Lever]:
    """Try another way to compute the same; yield it if it needs less."""
    needs, grows = trial.needed_and_grows(within=within)
    if needs is None or trial.needs is None:
        return
    saved = trial.needs - needs
    if saved >= _WORTH * trial.needs or _slower(trial, grows):
        yield Lever(do, max(saved, 0) or None, trial.fits(needs, 0, grows))


def aligned(s: OutOfMemoryState, t: Trials) -> Iterator[Lever]:
    """Propose one shape for two operands with as many numbers, which broadcast to far more."""
    trial, failed = t.every[0], s.rests[0].failed
    for node in ast.walk(failed) if failed is not None and trial.is_short else ():
        two = [node.left, node.right] if isinstance(node, ast.BinOp) else []
        shapes: list[Any] = [getattr(trial.frame.scope.value(each), "shape", None) for each in two]
        if not two or not all(type(shape) is torch.Size for shape in shapes):
            continue
        (left, right), (x, y) = two, shapes
        if x == y or x.numel() != y.numel() or not isinstance(right, ast.Name):
            continue
        change = f"{right.id} = {right.id}.view_as({ast.unparse(left)})"
        needs, before = trial.needed(before=change), trial.needs or 0
        if needs is not None and before - needs >= _WORTH * before:
            do = f"`{change}` before line {right.lineno}, since {[*x]} and {[*y]} broadcast"
            yield Lever(do, before - needs, trial.fits(needs))


# -- a smaller number
@dataclass
class _Size:
    """Represent a number that decides the need: a batch's samples, or a number in the code."""

    trial: CodeTrial
    value: int
    words: str
    names: tuple[str, ...] = ()
    nodes: tuple[ast.Constant, ...] = ()
    known: dict[int, float] = field(default_factory=dict)

    def needed(self, value: float) -> float:
        """Return the bytes that the code needs with another value; infinite if not followed."""
        value = int(value)
        if value not in self.known:
            try:
                for node in self.nodes:
                    node.value = value
                needs = self.trial.needed({name: self._cut(name, value) for name in self.names})
            finally:
                for node in self.nodes:
                    node.value = self.value
            self.known[value] = math.inf if needs is None else needs
        return self.known[value]

    def _cut(self, name: str, value: int) -> Any:
        whole = self.trial.names.get(name, value)
        return whole[:value] if type(whole) is Tensor else value


def smaller(s: OutOfMemoryState, t: Trials) -> Iterator[Lever]:
    """Propose the largest batch that fits, or the largest first size of a created tensor."""
    if t.loop is not None:
        return
    near = _NEAR if s.device.virtual else _NEAR_REAL
    for number in (*_batches(t), *_numbers(t)):
        needs, half = number.trial.needs or 0, number.needed(number.value // 2)
        if needs - half < _DECIDES * needs:
            continue
        number.known[number.value] = needs
        # One sample alone is refused by a layer that normalizes over them.
        least = 1 if math.isfinite(number.needed(1)) else 2
        values = range(least, number.value + 1)
        fits = largest(values, number.needed, number.trial.room, near=near / 2)
        if fits is None:
            continue
        steps = -(-number.value // int(fits))
        added = f", the gradients of {steps} added up" if any(r.backward for r in s.rests) else ""
        do = number.words.format(f"{int(fits):,}")
        do = f"{do}{added} (at most {100 * near:.0f} % less than would fit)"
        then = int(number.needed(fits))
        yield Lever(do, needs - then, number.trial.fits(then))
        return


def _batches(t: Trials) -> Iterator[_Size]:
    """Yield the batch in the innermost frame that makes a whole step."""
    for trial in t.every:
        if not trial.is_short or not (names := _batch(trial)):
            continue
        count = len(trial.names[names[0]])
        words = f"{some(f'`{name}`' for name in names)}: a batch of {{}} instead of {count:,}"
        found = _Size(trial, count, words, names)
        if math.isinf(found.needed(count // 2)):  # `torch.zeros(batch_size)` for each batch
            numbers = (n for n, v in trial.names.items() if type(v) is int and v == count)
            found = _Size(trial, count, words, (*names, *numbers))
        if found.needed(count // 2) >= _PAIRED * (trial.needs or 0):
            yield found
        return


def _batch(trial: CodeTrial) -> tuple[str, ...]:
    """Return the largest tensor that the code reads as a whole, and others with as many samples."""
    read = names_read(ast.Module(trial.code, []))
    known = trial.names
    found = ((name, known.get(name)) for name in read)
    tensors = {n: v for n, v in found if type(v) is Tensor and v.dim() and len(v) > 1}
    most = max(tensors, key=lambda name: tensors[name].nbytes, default="")
    if not most or _is_cut(trial.code, most):
        return ()
    passes = [n for stmt in trial.code for n in ast.walk(stmt) if isinstance(n, ast.For)]
    if any(_is_cut(passes, name) for name in _moved(trial.code, most)):
        return ()  # a loop cuts batches from a copy of all the data
    alike = [name for name in tensors if len(tensors[name]) == len(tensors[most])]
    return (most, *(name for name in alike if name != most))


def _moved(code: list[ast.stmt], name: str) -> set[str]:
    """Return a variable and the names that code gives to its copies on a device."""
    found = {name}
    for stmt in code:
        call = getattr(stmt, "value", None)
        moves = getattr(getattr(call, "func", None), "attr", "") in ("to", "cuda")
        if moves and found & {*names_read(ast.Module([stmt], []))}:
            found |= stored(stmt)
    return found


def _is_cut(code: Iterable[ast.stmt], name: str) -> bool:
    """Whether code reads a part of a tensor, of which the whole says nothing."""
    nodes = [node for stmt in code for node in ast.walk(stmt)]
    parts = [n.value for n in nodes if isinstance(n, ast.Subscript)]
    parts += [n.value for n in nodes if isinstance(n, ast.Attribute) and n.attr in _CUTS]
    parts += [n.iter for n in nodes if isinstance(n, (ast.For, ast.comprehension))]
    return any(getattr(part, "id", "") == name for part in parts)


def _numbers(t: Trials) -> Iterator[_Size]:
    """Return numbers that are the first size of a tensor made by the code, the largest first.

    Others may be known to the data, as the number of classes is.
    """
    trial = t.whole
    if trial is None:
        return
    found: list[_Size] = []
    bound = set().union(*map(stored, trial.rest.loops))
    for node in _first_sizes(trial.code):
        if isinstance(node, ast.Constant) and type(node.value) is int:
            words = f"{{}} instead of {node.value:,} in line {node.lineno}"
            found.append(_Size(trial, node.value, words, nodes=(node,)))
        elif isinstance(node, ast.Name) and node.id not in bound:
            value = trial.frame.scope.name(node.id)
            if type(value) is int and all(node.id not in each.names for each in found):
                words = f"`{node.id} = {{}}` instead of {value:,}"
                found.append(_Size(trial, value, words, (node.id,)))
    yield from sorted((n for n in found if n.value >= _LEAST), key=lambda n: -n.value)[:2]


def _first_sizes(code: Iterable[ast.stmt]) -> Iterator[ast.expr]:
    for call in (node for stmt in code for node in ast.walk(stmt)):
        if isinstance(call, ast.Call):
            named = {each.arg: each.value for each in call.keywords}
            if "batch_size" in named:
                yield named["batch_size"]
            if getattr(call.func, "attr", "") in _MAKES and call.args:
                first = call.args[0]
                sequence = isinstance(first, (ast.Tuple, ast.List)) and first.elts
                yield sequence[0] if sequence else first


# -- the same in another way
def otherwise(s: OutOfMemoryState, t: Trials) -> Iterator[Lever]:
    """Try 16-bit numbers, layers that recompute what they keep, and one parameter at a time."""
    if t.whole is not None and t.loop is None:
        for do, within in _ways(s, t.whole):
            yield from _saves(t.whole, do, within)


def _ways(s: OutOfMemoryState, trial: CodeTrial) -> Iterator[tuple[str, Within]]:
    yield '`with torch.autocast("cuda", torch.bfloat16):` around it', _autocast
    yield "`dtype=torch.bfloat16` for the tensors that it makes", _made_narrow
    path, layers = _layers(s, trial)
    if len(layers):
        parts, do = 0, f"`checkpoint(layer, …)` for each layer of `{path}`"
        if type(layers) is nn.Sequential:
            parts = max(int(len(layers) ** 0.5), 2)
            do = f"`checkpoint_sequential({path}, {parts}, …)`"
        do = f"{do}, which computes again what lies between"
        yield do, partial(_checkpointed, layers, parts)
    for optimizer in _stepping(s):
        do = f"`{type(optimizer).__name__}(…, foreach=False)`: a parameter at a time"
        yield do, partial(_one_by_one, optimizer)


def _autocast() -> Any:
    return torch.autocast("cuda", dtype=torch.bfloat16)


@contextmanager
def _made_narrow() -> Iterator[None]:
    torch.set_default_dtype(torch.bfloat16)
    yield


def _layers(s: OutOfMemoryState, trial: CodeTrial) -> tuple[str, Any]:
    """Return the sequence of layers with the most modules that the code reads, and its path."""
    found: list[tuple[str, Any]] = [("", nn.Sequential())]
    for name, value in trial.names.items():
        if isinstance(value, nn.Module) and name in s.read:
            every = nn.Module.named_modules(value, prefix=name)
            rows = [each for each in every if type(each[1]) in (nn.Sequential, nn.ModuleList)]
            found += [each for each in rows if len(each[1]) >= _LEAST_LAYERS]
    return max(found, key=lambda each: len([*nn.Module.modules(each[1])]))


@contextmanager
def _checkpointed(module: Any, parts: int) -> Iterator[None]:
    """Checkpoint layers within a dry run's process, where nothing needs to be put back."""

    def sequence(x: Any) -> Any:
        return checkpoint_sequential([*module], parts, x, use_reentrant=False)

    if parts:
        module.forward = sequence
    else:
        for layer in module:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    yield


def _stepping(s: OutOfMemoryState) -> list[Optimizer]:
    """Return the optimizer whose step failed on lists of all parameters."""
    names = {frame.f_code.co_name for _, frame in s.beyond}
    every = [f.f_locals.get("self") for module, f in s.beyond if module.startswith("torch.optim")]
    several = any(name.startswith("_multi_tensor") for name in names)
    return [o for o in every if isinstance(o, Optimizer)][:1] if several else []


@contextmanager
def _one_by_one(optimizer: Optimizer) -> Iterator[None]:
    for group in optimizer.param_groups:
        group["foreach"] = False
    yield
