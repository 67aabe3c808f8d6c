"""Explain an out-of-memory error of any framework, and propose changes.

A lever is a proposed change, such as the deletion of a variable. If possible, a dry run tests it.
Only dry runs execute the user's code. The result refers to no tensor or frame. `s` is the state of
memory at the error. `t` has a trial for each frame, which measures the need of the frame's code.
"""

import ast
import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain, product
from operator import methodcaller
from typing import Any

from gpumagic import faults
from gpumagic.display.progress_line import ProgressLine
from gpumagic.display.units import size
from gpumagic.errors import check_exception
from gpumagic.memory import changed_code, holders_by_name
from gpumagic.memory.memory_report import TEMPORARY
from gpumagic.memory.object_graph import GRAPH
from gpumagic.memory.oom_state import TORCH, OutOfMemoryState, read
from gpumagic.memory.oom_trials import CodeTrial, Trials, helps
from gpumagic.memory.out_of_memory import Lever, OutOfMemory
from gpumagic.memory.smaller_batch import shorter_history, smaller
from gpumagic.usercode import frames
from gpumagic.usercode.files import UserLine, innermost_of, label, shell, user_namespace
from gpumagic.usercode.values import is_module, is_tensor, own, torch_here

_LARGE = 0.1  # a weight is named if it takes more than this share of the GPU's memory
_MOST = 4  # maximum number of levers to show if none lets the cell fit


def explain_out_of_memory(
    error: BaseException, *, earlier: Iterable[BaseException] = ()
) -> OutOfMemory | None:
    """Explain a caught error of torch, JAX, TensorFlow or CuPy; None for other errors.
    `earlier` are exceptions that held memory when the error was raised."""
    check_exception("explain_out_of_memory", error)
    with faults.kept("explaining an out-of-memory error"):
        found = read(error)
        if found is not None:
            said, shortage = found
            every = frames.failed_frames(said.__traceback__)
            if error is not said and not any(frame.at_top for frame in every):
                # `said` was caught inside a function, so its traceback does not reach the cell.
                every += [each for each in frames.failed_frames(error.__traceback__) if each.at_top]
            where = innermost_of(said.__traceback__) or innermost_of(error.__traceback__)
            here = [each.device for each in holders_by_name.figures()]
            if every and where is not None and f"cuda:{shortage.ordinal}" in here:
                state = OutOfMemoryState(shortage, said, error, every, user_namespace(), earlier)
                with ProgressLine(shell()) as line:
                    return _explained(state, where, Trials(state, line))
    return None


def _explained(s: OutOfMemoryState, where: UserLine, t: Trials) -> OutOfMemory:
    failed = s.frames[0].failed
    reason, found = by_figures(s, t) or (
        _reason(s, t),
        levers(s, t, (free_kept, free_handled, delete)),
    )
    loop, top = t.loop, t.every[-1]
    stale = top.rest.remade() | (top.stale if top.frame.at_top else set())
    # Several names may hold one graph, so count what each name frees if it is deleted last.
    pairs = [(g, s.alone(g)) for g in (stale, stale | top.rest.remade(empty=True))]
    much = {n for n in stale for g, j in pairs if s.worth(8 * (j - s.alone(g - {n})) - j)}
    return OutOfMemory(
        expression=where.source if failed is None else s.frames[0].text(failed),
        line=where.line,
        label=where.label,
        wanted=s.shortage.wanted,
        device=s.device,
        reason=reason,
        levers=tuple(found),
        traceback_holds=s.traceback_holds,
        adds=loop.need.grows if loop is not None and loop.need is not None else None,
        adds_to=loop.adds_to[0] if loop is not None else "",
        stale=tuple(sorted(much)),
        clear=f"{s.optimizer_name}.state.clear()" * (s.incomplete > 0),
        ended_early=t.ended_early,
    )


def _reason(s: OutOfMemoryState, t: Trials) -> str:
    trial = t.best
    if trial is None or trial.need is None:
        rows = [row for row in s.device.holders if row.kind != TEMPORARY][:1]
        most = "".join(f", the most by {row.path} ({size(row.nbytes)})" for row in rows)
        left = f"; {size(s.wanted)} at once is {size(s.short_by)} more than is left"
        return f"{size(s.device.allocated)} are in use{most}{left if s.short_by > 0 else ''}"
    if trial.grows_much and trial.need.first <= trial.room + trial.holds:
        loop = f"the loop in {label(trial.frame.filename)}, line {trial.rest.loops[0].lineno}"
        return f"each pass of {loop} keeps {size(trial.need.grows)} more"
    left = f"{size(trial.need.first)} more, but only {size(max(trial.room, 0))} is free"
    if trial.grows_much:
        return f"a pass needs {left}; each pass keeps {size(trial.need.grows)}"
    state = "an optimizer makes its state in its first step: " * (s.optimizer is not None)
    return f"{state}the code needs {left}{_large_weight(s)}"


def _large_weight(s: OutOfMemoryState) -> str:
    """Return a clause on a weight that takes much of the GPU's memory in training, or ""."""
    modules = {name: s.namespace[name] for name in s.read if is_module(s.namespace.get(name))}
    trained = changed_code.trained_by(s)
    every = [(p, f"{m}.{n}") for m in modules for n, p in modules[m].named_parameters()]
    sizes = [(p.nbytes, name) for p, name in every if id(p) in trained and str(p.device) == s.name]
    nbytes, name = max(sizes, default=(0, ""))
    if nbytes < _LARGE * s.capacity or not any(rest.backward for rest in s.rests):
        return ""
    return f"; {name} takes {size(nbytes)}, and so do its gradient and each of its optimizer states"


def by_figures(s: OutOfMemoryState, t: Trials) -> tuple[str, list[Lever]] | None:
    """Return the reason and levers if the GPU's figures alone explain the error; else None."""
    if s.device.total is not None and s.wanted > s.device.total:
        most = f"more than the {size(s.device.total)} that {s.name} has in all"
        # Freed memory does not help a request for more than the GPU has.
        return f"{size(s.wanted)} at once is {most}", levers(s, t, ())
    for nbytes, why, do in s.unavailable():
        if nbytes >= max(s.short_by, 1):
            return why, [Lever(do, nbytes)] if do else [*other_gpu(s, t)]
    return None


def levers(s: OutOfMemoryState, t: Trials, free: tuple[Any, ...]) -> list[Lever]:
    """Return the cheapest levers that let the cell fit; if there are none, levers that help."""
    less: tuple[Any, ...] = changed_code.other_form, changed_code.other_values
    less += changed_code.on_host, keep_less
    less += changed_code.frozen, changed_code.no_graph, changed_code.sparse
    # If each pass of a loop keeps memory, freeing other memory only delays the error.
    first = (free, less) if t.loop is None else (less, free)
    found, enough = dict[str, Lever](), dict[str, Lever]()
    last: tuple[Any, ...] = changed_code.recomputed, smaller
    last += changed_code.other_optimizer, shorter_history, changed_code.autocast, other_gpu
    for group in (*first, (changed_code.by_rows,), last):
        for lever in chain.from_iterable(find(s, t) for find in group):
            found.setdefault(lever.do, lever)
            if _suffices(s, lever):
                enough.setdefault(lever.do, lever)
            # Stop after one sufficient lever from `free`, or after two other sufficient levers.
            if len(enough) == (1 if group is free else 2):
                break
        if enough:
            # If freeing memory suffices, also propose `torch.no_grad()` to avoid unused graphs.
            also = changed_code.no_graph(s, t) if group is free else ()
            offered = [*enough.values(), *(lever for lever in also if lever.fits)]
            return sorted(offered, key=lambda lever: not lever.fits)
    return [*two_levers(s, t)] or [*found.values()][:_MOST]


def two_levers(s: OutOfMemoryState, t: Trials) -> Iterator[Lever]:
    """Propose code without graphs or with 16 bits, together with another lever that fits then."""
    torch = torch_here()
    within = [torch.no_grad, partial(torch.autocast, "cuda", torch.bfloat16)] if torch else []
    for find, context in zip((changed_code.no_graph, changed_code.autocast), within, strict=False):
        for lever in [*find(s, t)][:1]:
            u = t.under(context)
            more = chain(changed_code.recomputed(s, u), changed_code.by_rows(s, u), smaller(s, u))
            fitting = next((each for each in more if each.fits), None)
            if fitting is not None:
                yield Lever(f"{lever.do}; and {fitting.do}", fitting.gives, True)
                return


def _suffices(s: OutOfMemoryState, lever: Lever) -> bool:
    return lever.fits or (lever.fits is None and (lever.gives or 0) >= s.short_by)


def free_kept(s: OutOfMemoryState, t: Trials) -> Iterator[Lever]:
    """Propose `%gpufree`, which releases outputs and earlier errors."""
    if s.worth(s.kept):
        yield _freeing(t.whole, "`%gpufree` frees what outputs and earlier errors hold", s.kept)


def free_handled(s: OutOfMemoryState, t: Trials) -> Iterator[Lever]:
    """Propose to retry below an `except` block, because its exception keeps its frames alive."""
    held = sum(row.nbytes for row in s.device.holders if row.path == s.handled)
    if s.worth(held):
        do = "set a flag in the `except` block and retry below the block: until its end, the "
        yield _freeing(t.whole, f"{do}exception keeps the variables of the code that failed", held)


def _freeing(trial: CodeTrial | None, do: str, gives: int) -> Lever:
    return Lever(do, gives, None if trial is None else trial.fits(trial.need, gives))


def delete(s: OutOfMemoryState, t: Trials) -> Iterator[Lever]:
    """Propose to delete the largest variables that the code does not read, as many as needed."""
    for rest, inner in zip(s.rests, t.every, strict=True):
        trial = t.whole if rest.frame.at_top else inner
        short = trial if trial is not None and trial.lacking > 0 else None
        names = _unread(s, rest, s.short_by if short is None else short.lacking)
        if names and rest.failed is not None:
            yield from _deleted(s, rest, short, names)


def _deleted(
    s: OutOfMemoryState, rest: frames.RestOfCode, trial: CodeTrial | None, names: list[str]
) -> Iterator[Lever]:
    paths = [s.local(rest.frame, name) for name in names]
    gives = s.alone(paths, in_frames=not rest.frame.at_top)
    if {*names} & (rest.overwritten | rest.read_anywhere | rest.made_before):
        code = f"{' = '.join(names)} = None" if rest.loops else f"del {', '.join(names)}"
        line = getattr(rest.failed, "lineno", 0)
        in_line = any(loop.lineno == line for loop in rest.loops)  # as in `for x in a: y = f(x)`
        do = f"`{code}` {'at the start of the body of the loop in' if in_line else 'before'} "
        do += f"line {line}"
    else:
        do = f"`%gpufree {' '.join(names)}`, which this code does not read"
        models = [f"`{name}.cpu()`" for name in names if is_module(s.namespace.get(name))]
        do += f"; to keep the trained weights instead, {' and '.join(models)}" * bool(models)
        gives = s.alone({*paths, *s.kept_roots})
    yield _freeing(trial, do, gives)


def _unread(s: OutOfMemoryState, rest: frames.RestOfCode, lacking: int) -> list[str]:
    """Return variables that the remaining code does not read, enough to free `lacking` bytes."""
    at_top = rest.frame.at_top
    # Delete a function's or a loop's variable only if the failed statement assigns that variable.
    made = set[str]().union(*map(frames.stored, rest.loops)) if at_top else rest.made_before
    needed = (s.read if at_top else rest.read) | (made - rest.made_now)
    free = {s.local(rest.frame, n): n for n in rest.frame.scope.local if n not in needed}
    kept = s.kept_roots if at_top else set[str]()

    def gives(paths: Iterable[str]) -> int:
        return s.alone({*paths, *kept}, in_frames=not at_top)

    chosen: list[str] = []
    # Prefer a single variable to a group that frees hardly more memory.
    for paths in sorted(
        _groups(s, at_top), key=lambda each: gives(each) * 0.95 ** len(each), reverse=True
    ):
        more = list(dict.fromkeys([*chosen, *paths]))
        is_free = free.keys() >= {*paths} and gives(chosen) < max(lacking, 1)
        chosen = more if is_free and s.worth(gives(more) - gives(chosen)) else chosen
    return [free[path] for path in chosen]


def _groups(s: OutOfMemoryState, at_top: bool) -> list[list[str]]:
    """Return groups of names to delete: each holder alone, and each holder with its aliases."""
    known = s.namespace if at_top else {}
    every = [[row.path, *(a for a in row.aliases if a in known)] for row in s.device.holders]
    return [[row.path] for row in s.device.holders if row.aliases] + every


def other_gpu(s: OutOfMemoryState, t: Trials) -> Iterator[Lever]:
    """Propose another GPU with enough free memory for the cell and the variables it reads."""
    # Where code names a GPU, `%%ongpu` does not choose another one.
    if s.shortage.library != TORCH or t.loop is not None or _names_gpu(s):
        return
    needed, trial = (s.device.allocated or 0) + s.wanted, t.whole
    if trial is not None and trial.need is not None:
        moved = (each.nbytes for each in s.storages if each.roots & s.read)
        needed = trial.need.most + sum(moved)
    for gpu in holders_by_name.figures():  # not `mem_get_info`, which creates a CUDA context
        free, ordinal = gpu.free or 0, gpu.device.partition(":")[2]
        if gpu.device not in (s.name, "mps:0") and free >= max(needed, 1):
            yield _freeing(trial, f"`%%ongpu {ordinal}`, where this much is free", free)
            return


def _names_gpu(s: OutOfMemoryState) -> bool:
    values = map(s.namespace.get, s.read)
    texts = [str(value) for value in values if type(value).__name__ in ("str", "device")]
    code = "\n".join([*texts, *(rest.frame.source for rest in s.rests)])
    return re.search(r"cuda:\d|\.cuda\(\d", code) is not None


_DETACHED = "store {1} in `{0}`{2}: results keep their graphs alive"
_ROOM = "if RAM has room; not all of them fit on the GPU at once"
_READ = "; `.cuda()` what each pass reads"
_KEPT: dict[str, Callable[[Any], Any]] = {
    "store `.clone()` in `{}`: a view keeps its whole base tensor alive": methodcaller("clone"),
    f"store `.cpu()` of the tensors in `{{}}`, {_ROOM}": methodcaller("cpu"),
    f"store `.detach().cpu()` of the tensors in `{{}}`, {_ROOM}": lambda x: x.detach().cpu(),
}
_BACKWARD = (
    "in each pass, call `.backward()` on the values added to `{}`, scaled as in the final loss, "
    "and add only their `.detach()`; "
)
_AFTER_LOOP = "`.zero_grad()` before the loop, and no `.backward()` after it"
_IN_IF = "leave out the later `.backward()`, and call `.zero_grad()` after `.step()`"


def keep_less(s: OutOfMemoryState, t: Trials) -> Iterator[Lever]:
    """Propose that each pass of a loop keeps its results without graphs, or on the CPU."""
    outer = [t.loop] if t.loop is not None and t.loop not in t.every else []
    for trial in (each for each in (*t.every, *outer) if each.grows_much):
        path, name = trial.adds_to
        for lever in _kept_in(s, trial, path, name) if path else ():
            yield lever
            if lever.fits:
                return


def _kept_in(s: OutOfMemoryState, trial: CodeTrial, path: str, name: str) -> Iterator[Lever]:
    """Propose that each pass of a loop stores less in `name`; the report shows it as `path`."""
    in_frames = path not in s.namespace
    # Other names that each pass binds may hold the same graphs.
    made = {s.local(trial.frame, n) for n in frames.stored(trial.rest.loops[0])} | {path}
    graphs = s.alone(made, in_frames=in_frames, graph_of=path)
    row = next(row for row in s.device.holders if row.path == path)
    also = [s.local(trial.frame, each) for each in trial.also_adds]
    whole = s.alone([path, *also], in_frames=in_frames) or row.nbytes
    tensors = (each for each in _contents(trial, [name]) if is_tensor(each))
    carries = any(path in each.roots and GRAPH in each.path for each in s.storages)
    carries |= any(each.grad_fn is not None for each in tensors)
    yield from _kept(s, trial, name, graphs, whole, carries=carries)


def _kept(
    s: OutOfMemoryState, trial: CodeTrial, name: str, graphs: int, whole: int, *, carries: bool
) -> Iterator[Lever]:
    """Propose to store results without graphs (`graphs` bytes) or off the GPU (`whole` bytes)."""
    # A variable computed from its old value, as in `h = f(h)`, may keep the graphs of all passes.
    added, loop = tuple(sorted(trial.rest.accumulated)), trial.rest.loops[0]
    for names in dict.fromkeys(((name,), added)) if graphs else ():
        needed = {_needs_graph(s, trial, each) for each in names if each}
        if needed and True not in needed:
            then = _IN_IF if any(_backward_in_if(loop, each) for each in names) else _AFTER_LOOP
            do, by = (_BACKWARD + then, _backward) if None in needed else (_DETACHED, _graphless)
            keep: Any = names, by
            freed = max(whole, graphs) * trial.adds_beyond_room
            last = " at the end of each pass" * any(frames.is_chained(each, loop) for each in names)
            do = do.format("`, `".join(names), _without_graph(trial, names), last)
            kept = changed_code.again(s, trial, name, changed_code.GRAPHS)
            do += kept * (names == (name,))
            found = [*helps(trial, do, graphs, freed, keep=keep)]
            yield from found
            if any(lever.fits is not False for lever in found):
                return
    if graphs and frames.is_chained(name, loop) and frames.computes(name, [*ast.walk(loop)]):
        do = f"`{name} = {name}.detach()` after `.backward()`: the next backward pass stops there"
        yield Lever(do, graphs)
    if name and (not carries or _needs_graph(s, trial, name) is False):
        yield from _elsewhere(s, trial, name, whole)


def _elsewhere(s: OutOfMemoryState, trial: CodeTrial, name: str, whole: int) -> Iterator[Lever]:
    """Propose to store clones of the tensors in `name`, or copies on the CPU."""
    every = [name, *trial.also_adds], *([each] for each in _objects_of(s, name))
    ways = [*_KEPT.items()][_no_view(trial, name) :]
    for names, (how, by) in product(every, ways):
        do, keep = _advice(s, how, trial, names), (names, by)
        freed = whole * trial.adds_beyond_room
        for lever in helps(trial, do, grown=whole, freed=freed, keep=keep):
            if lever.fits is not False:
                yield lever
                return
    # A dry run fails if the code reads a CPU copy, so propose CPU copies untested.
    if name not in trial.rest.accumulated:  # `h = f(h)` needs `h` on the GPU
        do = _advice(s, [*_KEPT][1], trial, [name])
        yield Lever(do + _READ * ("`.cuda()`" not in do), whole)


def _contents(trial: CodeTrial, names: Iterable[str]) -> list[Any]:
    """Return the items of the containers in `names`, such as tensors. A model is no container."""
    values = (trial.frame.scope.name(name) for name in names)
    return _leaves([value for value in values if not is_module(value)])


def _leaves(value: Any) -> list[Any]:
    from torch.utils._pytree import tree_leaves

    return tree_leaves(value)


def _without_graph(trial: CodeTrial, names: tuple[str, ...]) -> str:
    """Return the calls that remove the graphs from the values of `names`, as text for advice."""
    # Prefer `.item()` for a loss, because a detached loss may keep a storage of the batch's size.
    numbers = {value.numel() == 1 for value in _contents(trial, names) if is_tensor(value)}
    state = next(iter(names)) if {*names} <= trial.rest.accumulated else ""
    if numbers == {False} and type(trial.frame.scope.name(state)) is tuple:
        return f"`tuple(x.detach() for x in {state})`"
    lists = (each for each in map(trial.frame.scope.name, names) if type(each) is list)
    if any(own(item) and not is_tensor(item) for each in lists for item in each):
        return "`.detach()` of the tensors that later code reads, not whole objects,"
    return _GRAPHLESS.get(frozenset(numbers), "`.item()` of a number or `.detach()`")


_GRAPHLESS = {frozenset((True,)): "`.item()`", frozenset((False,)): "`.detach()`"}


def _advice(s: OutOfMemoryState, how: str, trial: CodeTrial, names: list[str]) -> str:
    """Return the advice `how` for `names`, and how to use the CPU copies in later code."""
    do, held = how.format("`, `".join(names)), _contents(trial, names)
    if not any(map(is_module, held)):
        loops: list[Any] = [trial.rest.loops[0]]
        loops += (n.iter for n in trial.rest.nodes if isinstance(n, ast.For))
        code = ast.Tuple(loops, ast.Load())
        reads = any(len(frames.uses(code, each)) > 1 for each in names)
        values = map(trial.frame.scope.name, names)
        reads |= any(own(value) for value in values if not is_tensor(value))
        do += _READ * ("cpu" in how and reads)
        return do + changed_code.again(s, trial, names[0], "old items stay on the GPU")
    end = getattr(next(iter(trial.rest.loops), None), "end_lineno", 0)
    below = [n for n in trial.rest.nodes if getattr(n, "lineno", 0) > end]
    used = {n.id for n in below if isinstance(n, ast.Name)} & {*map(frames.first_name, names)}
    then = "; `.cuda()` each before its later call, and `.cpu()` after it" * bool(used)
    optimizers = any(issubclass(type(each), torch_here().optim.Optimizer) for each in held)
    do = do.replace("store `.cpu()` of the tensors", "after each pass, call `.cpu()` of the models")
    return f"keep no optimizer in `{names[0]}`; " * optimizers + do + then


def _no_view(trial: CodeTrial, name: str) -> bool:
    """Whether `name` has tensors, and none of them is a view of a part of a larger tensor."""
    # A loss is no view, although its storage may have the size of its batch.
    held = [*_contents(trial, [name]), *_leaves([*own(trial.frame.scope.name(name)).values()])]
    tensors = [t for t in held if is_tensor(t) and t.layout is torch_here().strided]
    partly = (t for t in tensors if t.untyped_storage().nbytes() > t.nbytes)
    return bool(tensors) and not any(t.numel() > 1 or t._is_view() for t in partly)


def _objects_of(s: OutOfMemoryState, name: str) -> list[str]:
    """Return the names of other objects that hold the memory of `name`, such as a hook's owner."""
    also = next((row.aliases for row in s.device.holders if row.path == name), ())
    return [n for n in also if own(s.namespace.get(n)) and not is_tensor(s.namespace[n])]


def _needs_graph(s: OutOfMemoryState, trial: CodeTrial, name: str) -> bool | None:
    """Whether passes need `name`'s graph; None if a `.backward()` per pass could free the graph."""
    at, loop = trial.at, trial.rest.loops[0]
    in_loop = frames.backward_of(ast.walk(loop))
    if _backward_in_if(loop, name) or frames.has_backward_below(name, loop, trial.rest):
        return frames.is_chained(name, loop) or None
    if in_loop or any(rest.backward for rest in s.rests[:at]):  # the loop calls `rests[:at]`
        return name in in_loop
    # A caller that discards this function's result calls no `.backward()` on it.
    discarded = any(isinstance(rest.failed, ast.Expr) for rest in s.rests[at + 1 : at + 2])
    return not discarded and any(rest.backward for rest in s.rests)


def _backward_in_if(loop: ast.AST, name: str) -> bool:
    """Whether a loop calls `.backward()` in an `if`, on a value computed from `name`."""
    some = [n for each in ast.walk(loop) if isinstance(each, ast.If) for n in ast.walk(each)]
    return frames.computes(name, some)


def _graphless(tensor: Any) -> Any:
    """Return the detached tensor, or 0.0 in place of a tensor with one element."""
    return 0.0 if tensor.numel() == 1 else tensor.detach()


def _backward(tensor: Any) -> Any:
    """Call `.backward()` on the sum, if possible; return the tensor without its graph."""
    if tensor.requires_grad:
        tensor.sum().backward()
    return _graphless(tensor)
