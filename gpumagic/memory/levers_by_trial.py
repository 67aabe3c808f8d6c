"""Find another way to compute the same with less memory: each is tried by a dry run.

A dry run with all rewrites of torch's calls notes which the code has a use for; each is then tried
alone.
"""

import ast
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from gpumagic.display.units import some
from gpumagic.fitting.fit_search import largest
from gpumagic.memory.oom_state import OutOfMemoryState
from gpumagic.memory.oom_trials import CodeTrial, Need, Note, Trials, Within
from gpumagic.memory.out_of_memory import Lever
from gpumagic.memory.rewritten_calls import Rewrites
from gpumagic.usercode.frames import stored
from gpumagic.usercode.values import contents, own
from gpumagic.usercode.variables import names_read

# A lever that saves less than this part of the need is not worth a line.
_WORTH = 0.05
# Half a batch needs about half of the memory. If it needs more, it does not decide; if less,
# samples are paired with each other, and a smaller batch computes something else.
_PAIRED, _DECIDES = 0.4, 0.8
# The reported number is at most this far below the largest that fits. A closer one would cost dry
# runs, and depends on fragmentation. On a real GPU there is a margin besides.
_NEAR, _NEAR_REAL = 0.05, 0.1
# A recomputed part of a Sequential has as many layers as there are parts kept.
_LEAST_LAYERS = 4
_CUTS = {"split", "chunk", "narrow", "select", "index_select", "unbind"}
_KEEP, _DEPTH = "_gpumagic_keep", 4


# -- what each pass of a loop keeps
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
    made = {s.local(frame, n) for n in stored(trial.rest.loops[0])} | {path}
    graphs = s.alone(made, in_frames=inside, graph_of=path)
    whole = s.alone([path], in_frames=inside)
    whole = whole or sum(row.nbytes for row in s.device.holders if row.path == path)
    # Before a backward pass after the loop the graphs are needed.
    later = any(r.backward for r in s.rests) and "backward" not in ast.unparse(trial.rest.loops[0])
    detached = "keep `.item()` of a number or `.detach()` in `{}`, not results with their graphs"
    host = "keep `.cpu()` of the tensors in `{}`"
    # A name that each pass makes from its value before, such as a state, may keep all graphs.
    passed_on = [n for n in sorted(trial.rest.added_up) if n != name and not later]
    for do, keep, gives, kept_in in (
        *((detached, _without_graph, 0 if later else graphs, n) for n in (name, *passed_on)),
        (host, _on_host, 0 if later else whole, name),
    ):
        if not kept_in or not gives:
            continue
        names = {kept_in: _emptied(frame.scope.name(kept_in)), _KEEP: keep}
        within = Rewrites.only("cat") if keep is _on_host else _as_it_is
        need = trial.tried(names=names, after=f"{kept_in} = {_KEEP}({kept_in})", within=within)
        if need is not None and _slower(trial, need):
            lever = Lever(do.format(kept_in), gives, trial.fits(need, whole))
            yield lever
            if lever.fits:
                return


def _as_it_is(_: Note) -> AbstractContextManager[Any]:
    return nullcontext()


def _slower(trial: CodeTrial, need: Need) -> bool:
    """Whether each pass then keeps clearly less."""
    before = trial.need.grows if trial.need is not None and trial.grows_much else None
    return need.grows is not None and before is not None and 4 * need.grows <= 3 * before


def _emptied(value: Any) -> Any:
    """Return a container without its tensors, as before the loop; for a tensor its value alone."""
    if type(value) is dict:
        return {k: _emptied(v) for k, v in value.items() if not isinstance(v, Tensor)}
    if type(value) is list:
        return [_emptied(v) for v in value if not isinstance(v, Tensor)]
    return _without_graph(value) if isinstance(value, Tensor) else value


def _without_graph(value: Any) -> Any:
    return _each_tensor(value, lambda t: 0.0 if t.numel() == 1 else t.detach())


def _on_host(value: Any) -> Any:
    return _each_tensor(value, lambda t: t.detach().cpu())


def _each_tensor(value: Any, change: Callable[[Tensor], Any], depth: int = _DEPTH) -> Any:
    """Change the tensors in a value: in a list, a dict or an object in place."""
    if isinstance(value, Tensor):
        return change(value) if value.device.type != "cpu" else value
    if type(value) is tuple and depth:
        return tuple(_each_tensor(item, change, depth - 1) for item in value)
    into = value if isinstance(value, (list, dict)) else own(value)
    into = dict(into) if isinstance(value, type) else into
    if depth and not isinstance(value, nn.Module):
        for key, item in contents(into):
            if isinstance(item, (Tensor, list, dict, tuple)) or own(item):
                into[key] = _each_tensor(item, change, depth - 1)
    return value


# -- the same in another way
def rewritten(s: OutOfMemoryState, t: Trials) -> Iterator[Lever]:
    """Try what a rewrite finds in the code: shapes that broadcast by mistake, attention, …"""
    trial = t.loop or t.whole
    need = trial.needed(within=Rewrites) if trial is not None else None
    for note in dict.fromkeys(need.notes if need is not None else ()):
        name, _, do = note.partition(Rewrites.MARK)
        if do and trial is not None:
            yield from _saves(trial, do, Rewrites.only(name))


def no_graph(s: OutOfMemoryState, t: Trials) -> Iterator[Lever]:
    """`torch.no_grad()` where no backward pass follows."""
    trial = t.loop or t.whole
    if trial is not None and torch.is_grad_enabled() and not any(r.backward for r in s.rests):
        do = "`with torch.no_grad():` around it: no backward pass follows"
        yield from _saves(trial, do, lambda _: torch.no_grad())


def otherwise(s: OutOfMemoryState, t: Trials) -> Iterator[Lever]:
    """Try 16-bit numbers, layers that recompute what they keep, and one parameter at a time."""
    if t.whole is not None and t.loop is None:
        for do, within in _ways(s, t.whole):
            yield from _saves(t.whole, do, within)


def _saves(trial: CodeTrial, do: str, within: Within) -> Iterator[Lever]:
    """Try another way to compute the same; yield it if it needs less."""
    need = trial.tried(within=within)
    if need is not None and trial.need is not None:
        saved = trial.need.most - need.most
        if saved >= _WORTH * trial.need.most or _slower(trial, need):
            yield Lever(do, max(saved, 0) or None, trial.fits(need))


def _ways(s: OutOfMemoryState, trial: CodeTrial) -> Iterator[tuple[str, Within]]:
    yield '`with torch.autocast("cuda", torch.bfloat16):` around it', _autocast
    yield "`dtype=torch.bfloat16` for the tensors that it makes", _made_narrow
    path, layers = _layers(s, trial)
    if len(layers):
        parts, do = 0, f"`checkpoint(layer, …)` for each layer of `{path}`"
        if type(layers) is nn.Sequential:
            parts = max(int(len(layers) ** 0.5), 2)
            do = f"`checkpoint_sequential({path}, {parts}, …)`"
        yield f"{do}, which computes again what lies between", _checkpointed(layers, parts)


def _autocast(_: Note) -> Any:
    return torch.autocast("cuda", dtype=torch.bfloat16)


# Within a dry run's process nothing needs to be put back.
@contextmanager
def _made_narrow(_: Note) -> Iterator[None]:
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


def _checkpointed(module: Any, parts: int) -> Within:
    @contextmanager
    def within(_: Note) -> Iterator[None]:
        def sequence(x: Any) -> Any:
            return checkpoint_sequential([*module], parts, x, use_reentrant=False)

        if parts:
            module.forward = sequence
        for layer in () if parts else module:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
        yield

    return within


# -- a smaller number
def smaller(s: OutOfMemoryState, t: Trials) -> Iterator[Lever]:
    """Propose the largest batch that fits, in the innermost frame that makes a whole step."""
    for trial in t.every if t.loop is None else ():
        names = _batch(trial) if trial.is_short else ()
        if names and trial.need is not None:
            yield from _smaller(s, trial, trial.need, names)
            return


def _smaller(
    s: OutOfMemoryState, trial: CodeTrial, need: Need, names: tuple[str, ...]
) -> Iterator[Lever]:
    count = len(trial.names[names[0]])
    # A number that is the batch's size, as in `torch.zeros(batch_size)`.
    sizes = {name for name, value in trial.names.items() if type(value) is int and value == count}

    @cache
    def needed(number: float) -> float:
        cut = {name: trial.names[name][: int(number)] for name in names}
        for changed in (cut, cut | dict.fromkeys(sizes, int(number))):
            if (found := trial.needed(changed)) is not None:
                return found.most
        return math.inf

    near = _NEAR if s.device.virtual else _NEAR_REAL
    if not _PAIRED <= needed(count // 2) / max(need.most, 1) <= _DECIDES:
        return
    # One sample alone is refused by a layer that normalizes over them.
    values = range(1 if math.isfinite(needed(1)) else 2, count)
    fits = largest(values, needed, trial.room, near=near / 2)
    if fits is not None:
        steps, then = -(-count // int(fits)), int(needed(fits))
        added = f", the gradients of {steps} added up" if any(r.backward for r in s.rests) else ""
        do = f"{some(f'`{name}`' for name in names)}: a batch of {int(fits):,} instead of {count:,}"
        do = f"{do}{added} (at most {100 * near:.0f} % less than would fit)"
        yield Lever(do, need.most - then, trial.fits(Need(then, need.grows)))


def _batch(trial: CodeTrial) -> tuple[str, ...]:
    """Return the largest tensor that the code reads as a whole, and others with as many samples."""
    found = ((name, trial.names.get(name)) for name in names_read(ast.Module(trial.code, [])))
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
