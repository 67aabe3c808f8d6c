"""Propose changes of the user's code, after which the code runs with less memory.

A lever is a proposed change. A `Form` replaces statements of the code. A trial measures in dry runs
how much memory one frame's code needs. `s` is the state of memory at the error. `t` has a trial for
each frame; changes are tested in `t.best`. `rest` is the code that a frame had yet to run.
"""

import ast
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import takewhile
from typing import Any

from gpumagic.memory.oom_state import OutOfMemoryState
from gpumagic.memory.oom_trials import CodeTrial, Trials, helps
from gpumagic.memory.out_of_memory import Lever
from gpumagic.memory.smaller_batch import models, padded
from gpumagic.memory.split_rows import split
from gpumagic.memory.written_forms import Form, checkpointed, expression, forms, one_shape
from gpumagic.usercode import frames
from gpumagic.usercode.files import label
from gpumagic.usercode.values import comes_from, is_module, is_tensor, own, torch_here


def other_form(s: OutOfMemoryState, t: Trials) -> Iterator[Lever]:
    """Propose a replacement that computes the same result with less memory."""
    # Dry runs do not count what `torch.load` reads, so `t.best` is None if memory ran out in it.
    trial = t.best or t.every[-1]
    learns = any(rest.backward for rest in s.rests)
    found = ((rest, form) for rest in s.rests for form in forms(rest, learns=learns))
    for rest, form in found:
        for lever in helps(trial, _with_place(s, rest, form), form=form):
            if t.best is not None or "map_location" in form.new:
                yield lever
                if lever.fits is not False:
                    return


def by_rows(s: OutOfMemoryState, t: Trials) -> Iterator[Lever]:
    """Propose to compute the failed code in groups of rows, in the outermost frame possible."""
    for rest in reversed(s.rests if t.best is not None else []):
        for form in split(rest, t):
            levers = [*helps(t.best, _with_place(s, rest, form), form=form)]
            least = 1.05 * max((lever.gives or 0 for lever in levers), default=0)
            without = _without_autograd(s, t, rest, form)
            levers += [lever for lever in without if (lever.gives or 0) > least]
            if fitting := [lever for lever in levers if lever.fits is not False][-1:]:
                yield from fitting
                return


def _without_autograd(
    s: OutOfMemoryState, t: Trials, rest: frames.RestOfCode, form: Form
) -> Iterator[Lever]:
    """Propose the same form under `torch.no_grad()`, if no backward pass follows."""
    learns = any(each.backward for each in s.rests) or not torch_here().is_grad_enabled()
    if not learns and form.do.startswith(f"`{form.new}"):  # not in a one-line `with` already
        new = f"with torch.no_grad(): {form.new}"
        form = form._replace(new=new, do=form.do.replace(form.new, new, 1))
        yield from helps(t.best, _with_place(s, rest, form), form=form)


def _with_place(s: OutOfMemoryState, rest: frames.RestOfCode, form: Form) -> str:
    """Return a form's advice. Name the cell or file of the code, unless the error arose there."""
    here = rest.frame.filename == s.frames[0].filename
    there = f"` for {label(rest.frame.filename)}, line"
    return form.do if here else form.do.replace("` for line", there, 1)


def other_values(s: OutOfMemoryState, t: Trials) -> Iterator[Lever]:
    """Propose equal shapes for two operands, less padding, or float32 instead of float64."""
    same = one_shape(s.rests[0], s.operands)
    for form in {form.do: form for form in same}.values():
        yield from helps(t.best, form.do, form=form)
    for trial in (trial for trial in t.every if trial.lacking > 0):
        for do, names in padded(trial.names):
            yield from helps(trial, do, names=names)
    if t.best is not None:
        yield from _as_float32(s, t.best)
        yield from _converted(s, t.best)


def _converted(s: OutOfMemoryState, trial: CodeTrial) -> Iterator[Lever]:
    """Propose to convert all float64 tensors, models and arrays to float32."""
    known, room = trial.names, s.capacity - s.held + s.kept  # after `%gpufree`
    code, arrays = _of_float64(known, s.read | s.rests[-1].read_anywhere, room)

    def first(into: dict[str, Any]) -> None:
        known.clear()  # otherwise, `known` would keep the float64 tensors alive
        exec("\n".join(code), into)

    # Convert all at once, because most torch functions refuse mixed dtypes.
    every = [*(f'{name} = {name}.astype("float32")' for name in arrays), *code]
    if every:
        do = f"`{'` and `'.join(every)}` first: float64 takes twice the memory"
        yield from helps(trial, do, names=arrays, first=first)


def _as_float32(s: OutOfMemoryState, trial: CodeTrial) -> Iterator[Lever]:
    """Propose float32 where the code makes tensors of NumPy's float64 arrays."""
    nodes = [node for each in trial.code for node in ast.walk(each) if isinstance(node, ast.Call)]
    found = ((node, _float32(node, trial.frame.scope.value)) for node in nodes)
    new: dict[ast.expr, ast.expr] = {node: expression(text) for node, text in found if text}
    cell = f"{label(trial.frame.filename)}, " * (trial.frame.filename != s.frames[0].filename)
    # Change all these calls together. If that does not help, change only one of them.
    for uses in [new, *({node: new[node]} for node in new)] if new else []:
        edits = (f"`{ast.unparse(uses[node])}` for {cell}line {node.lineno}" for node in uses)
        do = f"{' and '.join(edits)}: float64 takes twice the memory"
        if levers := [*helps(trial, do, form=Form(do, "", [], trial.code, uses))]:
            yield from levers
            return


def _float32(call: ast.Call, value: Callable[[ast.AST], Any]) -> str:
    """Return a call that makes a float32 tensor of a float64 array, or ""."""
    array, text, torch = value(next(iter(call.args), call)), ast.unparse(call), torch_here()
    if "dtype" in text or str(getattr(array, "dtype", "")) != "float64":
        return ""
    function = value(call.func)
    if function is torch.from_numpy:
        return f"{text}.float()"
    return f"{text[:-1]}, dtype=torch.float32)" if function is torch.tensor else ""


def _of_float64(
    known: dict[str, Any], read: Iterable[str], room: int
) -> tuple[list[str], dict[str, Any]]:
    """Return code that converts tensors and models, and a dict of float32 arrays by variable."""
    code, arrays = list[str](), dict[str, Any]()
    for name in sorted(known.keys() & read):
        value = known[name]
        if type(value).__name__ == "ndarray" and str(value.dtype) == "float64":
            arrays[name] = type(value)(value.shape, "float32")
            continue
        tensors = value.parameters() if is_module(value) else [value] * is_tensor(value)
        if any(each.dtype == torch_here().float64 for each in tensors):
            code.append(f"{name} = {name}.float()")
            if is_tensor(value) and value.is_cuda and value.nbytes // 2 > room:  # no room to copy
                code[-1:] = [f"{name} = {name}.cpu().float()", f"{name} = {name}.cuda()"]
    return code, arrays


def on_host(s: OutOfMemoryState, t: Trials) -> Iterator[Lever]:
    """Propose to keep data on the CPU, and to move only the parts that the code reads."""
    if (trial := t.best) is None:
        return
    from gpumagic.dryrun.answers import DataOnHost  # needs torch

    moves = getattr(getattr(s.frames[0].failed, "func", None), "attr", "") in _MOVES
    data, names = _data(s, trial)
    if moves or data:
        line = range(s.frames[0].line, s.frames[0].line + moves)
        at, least = (s.frames[0].filename, line), max(s.capacity // _PART_OF_GPU, 1)
        need = trial.tried(within=lambda: DataOnHost(data, at, least, trial.note))
        if need is not None and (do := _on_host(s, need.noted, names)):
            yield from helps(trial, do, s.alone(names), grown=trial.grown, then=need)


_MOVES = ("to", "cuda", "tensor", "as_tensor")  # functions that move data to the GPU
_LARGEST = 3  # number of holders that may be data
_PART_OF_GPU = 20  # a tensor is treated as data if it is larger than 1/20 of the GPU's memory


def _data(s: OutOfMemoryState, trial: CodeTrial) -> tuple[list[Any], list[str]]:
    """Return large tensors on the GPU that need no gradient, and the names of their holders."""
    from torch.utils._pytree import tree_leaves

    local = {s.local(f, n): v for f in s.frames for n, v in f.scope.local.items()}
    gone = {s.local(trial.frame, name) for name in trial.stale}  # the code makes these again
    data, names = list[Any](), list[str]()
    for row in s.device.holders[:_LARGEST]:
        value: Any = None if row.path in gone else (s.namespace | local).get(row.path)
        held = [row.path, *row.aliases]
        unread = {*held} & s.namespace.keys() and s.read.isdisjoint(held)
        if comes_from(type(value), "torch.utils.data.DataLoader"):
            value = [value.dataset, *own(value.dataset).values()]
        elif comes_from(type(value), "torch.utils.data.Dataset") and {*held} & s.read:
            value = [value, *own(value).values()]
        found = [each for each in tree_leaves(value) if is_tensor(each) and each.is_cuda]
        large = s.worth(s.alone(held)) and s.alone(names) < max(trial.lacking, 1)
        is_data = found and not unread and not any(each.requires_grad for each in found)
        if large and is_data:
            data, names = [*data, *found], [*names, *held]
    return data, names


def _of_part(text: str, gpu: str) -> str:
    """Return advice on the code that reads a part of the data, such as ``X[rows]``."""
    where = f"in `{text}`" if text.endswith(":") else f'`{text}.to("{gpu}")`'
    return f"each part of `{text}`" if re.search(r"\.(\w*split|chunk|unbind)\(", text) else where


def _on_host(s: OutOfMemoryState, noted: Sequence[Any], names: list[str]) -> str:
    """Return advice with the lines that a dry run noted; empty if code needs all data at once."""
    from gpumagic.dryrun.answers import MOVED, PART, WHOLE

    def at(reason: str) -> list[Any]:
        return [each.where for each in noted if each.reason == reason]

    lines = dict.fromkeys((where.label, where.line) for where in at(MOVED))
    data = [f"`{names[0]}`"] if {*names} & s.read else []
    data += [f"the data of {cell}, line {line}" for cell, line in lines]
    parts = dict.fromkeys(where.source for where in at(PART))
    code = [_of_part(text, s.name) for text in parts]
    do = f"keep {' and '.join(data)} on the CPU, made without `.to(…)`, `.cuda()` or `device=`"
    do = f"{do}, and move each batch{': ' * bool(code)}{', '.join(code)}"
    return do if data and not at(WHOLE) and (parts or not names or not lines) else ""


def no_graph(s: OutOfMemoryState, t: Trials) -> Iterator[Lever]:
    """Propose `torch.no_grad()` for code whose results no backward pass uses."""
    inner = [*takewhile(lambda each: not each.rest.backward, t.every)]
    if t.best is None:
        return
    if inner == t.every:
        yield from _no_grad(s, t.best, "no backward pass follows")
    elif inner and inner[-1].frame.code.co_name != "forward":
        yield from _in_function(s, t, inner)
    else:
        trial = t.every[len(inner)]
        loop = next(iter(trial.rest.loops), None)
        if loop is not None and not (frames.is_trained(loop) or frames.backward_of(ast.walk(loop))):
            yield from _no_grad(s, trial, _USED)


_USED = "no backward pass uses its results"
GRAPHS = "its tensors keep their graphs"


def _no_grad(s: OutOfMemoryState, trial: CodeTrial, why: str) -> Iterator[Lever]:
    cell, loops = label(trial.frame.filename), trial.rest.loops
    place = f"the loop in {cell}, line {loops[0].lineno}" if loops else "the code"
    do, grown = f"`with torch.no_grad():` around {place}: {why}", trial.grown * trial.grows_much
    do += again(s, trial, trial.adds_to[1], GRAPHS) if grown else ""
    yield from helps(trial, do, grown=grown, freed=grown, within=torch_here().no_grad)


def again(s: OutOfMemoryState, trial: CodeTrial, name: str, why: str) -> str:
    """Return advice to recreate `name`, and models whose old hooks stay registered; or ""."""
    read = {n: s.namespace[n] for n in sorted(s.read) if is_module(s.namespace.get(n))}
    parts = {n: torch_here().nn.Module.modules(module) for n, module in read.items()}
    hooked = (n for n in parts if any(own(p).get("_forward_hooks") for p in parts[n]))
    models = "".join(f"; recreate `{n}` too: its old hooks stay registered" for n in hooked)
    first = f"; `%gpufree {name}` and recreate it: {why}" * trial.adds_beyond_room
    return (first + models) * trial.outlives


def _in_function(s: OutOfMemoryState, t: Trials, inner: list[CodeTrial]) -> Iterator[Lever]:
    """Propose `@torch.no_grad()` for the outermost function among the frames in `inner`."""
    body: list[Any] = getattr(frames.function_of(inner[-1].rest.failed or ast.Pass()), "body", [])
    code = textwrap.indent("\n".join(map(ast.unparse, body)), "    ")
    form = Form("", f"with torch.no_grad():\n{code}", [*body], body)
    # If the function stores values in a notebook variable, a later backward pass may need them.
    stores = t.loop is not None and t.loop in inner and t.loop.adds_to[0] in s.namespace
    # This dry run tests that the caller's backward pass still works after the change.
    if not stores and body and t.every[len(inner)].tried(form=form) is not None:
        do = f"`@torch.no_grad()` above `def {inner[-1].frame.code.co_name}`: {_USED}"
        change = {"within": torch_here().no_grad} if t.best in inner else {"form": form}
        yield from helps(t.best, do, grown=t.loop.grown if t.loop else 0, **change)


def frozen(s: OutOfMemoryState, t: Trials) -> Iterator[Lever]:
    """Propose `requires_grad_(False)` for models or layers that no optimizer trains."""
    names = sorted(s.read | s.rests[-1].read_anywhere) if t.best is not None else []
    used = {id(p) for n in names for p in _parameters(s.namespace.get(n))}
    for name in names if used and used & trained_by(s) else ():  # else, no optimizer exists yet
        idle = _idle(s, name)
        meant = any(own(part).get("requires_grad") is False for part in idle.values())
        why = "`.requires_grad = False` freezes nothing" if meant else "no optimizer trains it"
        code = "; ".join(f"{path}.requires_grad_(False)" for path in idle)
        within = lambda idle=idle: nullcontext([p.requires_grad_(False) for p in idle.values()])  # noqa: E731
        if idle:
            yield from helps(t.best, f"`{code}`: {why}", within=within)


def _parameters(value: Any) -> Iterable[Any]:
    return torch_here().nn.Module.parameters(value) if is_module(value) else ()


def _idle(s: OutOfMemoryState, name: str) -> dict[str, Any]:
    """Return the largest parts of a model that no optimizer trains, by path."""
    model: Any = s.namespace.get(name)
    trained = trained_by(s)
    found = dict[str, Any]()
    for path, part in model.named_modules(prefix=name) if is_module(model) else ():
        learns = {id(p) for p in _parameters(part) if p.requires_grad}
        meant = own(part).get("requires_grad") is False  # this module attribute freezes nothing
        within = path.startswith(tuple(f"{each}." for each in found))
        if learns and (meant or trained.isdisjoint(learns)) and not within:
            found[path] = part
    return found


def trained_by(s: OutOfMemoryState) -> set[int]:
    """Return the ids of the parameters that an optimizer trains."""
    from gpumagic.moving.move import instances_in

    optimizers = instances_in(s.namespace, torch_here().optim.Optimizer)
    groups = (group for _, each in optimizers for group in each.param_groups)
    return {id(parameter) for group in groups for parameter in group["params"]}


def recomputed(s: OutOfMemoryState, t: Trials) -> Iterator[Lever]:
    """Propose checkpointing: repeat the failed call in backward instead of saving its tensors."""
    trial = t.whole or t.best
    # A second forward pass would update running statistics, such as BatchNorm's, twice.
    read = models(s, trial) if trial is not None else []
    parts = (module for each in read for module in each.modules() if module.training)
    running = any("running_mean" in own(module).get("_buffers", ()) for module in parts)
    if not any(rest.backward for rest in s.rests) or running:
        return
    for name in sorted(s.read | s.rests[-1].read_anywhere):
        model = s.namespace.get(name)
        methods = [each for each in _METHODS if is_module(model) and hasattr(type(model), each)]
        for method in methods[:1]:
            within = lambda on=getattr(model, method): nullcontext(on())  # noqa: E731, B008
            yield from helps(trial, f"`{name}.{method}()`{_SLOWER}", within=within)
    every = {_with_place(s, rest, form): form for rest in s.rests for form in checkpointed(rest)}
    for do, form in every.items():
        for lever in helps(trial, f"{do}{_SLOWER}", form=form):
            yield lever
            if lever.fits:
                return


_SLOWER = ": slower, less memory"
_METHODS = "activation_checkpointing_enable", "gradient_checkpointing_enable"  # of transformers


def sparse(s: OutOfMemoryState, t: Trials) -> Iterator[Lever]:
    """Propose sparse gradients for embeddings, if the optimizer accepts them."""
    for name in sorted(s.read | s.rests[-1].read_anywhere) if t.best is not None else ():
        model: Any = s.namespace.get(name)
        every = model.named_modules(prefix=name) if is_module(model) else ()
        kinds = torch_here().nn.Embedding, torch_here().nn.EmbeddingBag
        tables = ((p, part) for p, part in every if isinstance(part, kinds) and not part.sparse)
        large = {path: part for path, part in tables if s.worth(part.weight.nbytes)}
        code = "; ".join(f"{path}.sparse = True" for path in large)
        if large and any(rest.backward for rest in s.rests):
            do = f"`{code}`: its gradients have only the rows that are read"
            yield from helps(t.best, do, within=partial(_with_sparse, large.values()))


def _with_sparse(tables: Iterable[Any]) -> Any:
    for each in tables:
        each.sparse = True
    return nullcontext()


def autocast(s: OutOfMemoryState, t: Trials) -> Iterator[Lever]:
    """Propose to compute a model's results with 16 bits where torch finds that safe."""
    torch = torch_here()
    if t.best is not None and models(s, t.best) and not torch.is_autocast_enabled("cuda"):
        code = '`with torch.autocast("cuda", torch.bfloat16):`'
        do = f"{code} around the forward pass and the loss: numbers have 3 digits then"
        yield from helps(t.best, do, within=partial(torch.autocast, "cuda", torch.bfloat16))


def other_optimizer(s: OutOfMemoryState, t: Trials) -> Iterator[Lever]:
    """Propose an optimizer with small state, if the state of the code's optimizer does not fit."""
    torch, old = torch_here(), s.optimizer_name
    scheduler = "torch.optim.lr_scheduler.LRScheduler"
    scheduled = any(comes_from(type(value), scheduler) for value in s.namespace.values())
    if t.best is None or not old or scheduled or len(s.optimizer.param_groups) > 1:
        return
    trained = {*map(id, s.optimizer.param_groups[0]["params"])}
    models = {name: value for name, value in s.namespace.items() if is_module(value)}
    for name in [n for n in models if {*map(id, _parameters(models[n]))} == trained][:1]:
        do = f"`{old} = torch.optim.Adafactor({name}.parameters())`: its state is small; set its "
        do += "learning rate, as the training changes"
        yield from helps(t.best, do, names={old: torch.optim.Adafactor(_parameters(models[name]))})
