"""Find the largest batch that fits, by shortening tensors or lowering numbers like `batch_size`."""

import ast
import math
import re
from collections import UserDict
from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import islice
from typing import Any

from gpumagic.display.units import some
from gpumagic.dryrun.result import Need
from gpumagic.memory.oom_state import OutOfMemoryState
from gpumagic.memory.oom_trials import CodeTrial, Trials
from gpumagic.memory.out_of_memory import Lever
from gpumagic.memory.written_forms import Form, takes_rows
from gpumagic.usercode.frames import block_of, computed_from, stored
from gpumagic.usercode.values import comes_from, is_module, is_tensor, torch_here
from gpumagic.usercode.variables import names_read

# The memory of half a batch must be between these shares of a whole batch's memory. Below the first
# share, the code combines pairs of samples. Above the second, a smaller batch hardly saves memory.
_PAIRED, _DECIDES = 0.4, 0.8
_FEWER_PAIRS = "; the loss then compares fewer pairs of samples, so its value changes"
_NEAR, _NEAR_REAL = 0.05, 0.1  # tolerance below the largest number that fits, on virtual/real GPUs
# Names of numbers to lower. Without a model, use only `_SIZE`, as a lower `B` may change results.
_SIZE = re.compile(r"(?i:batch|chunk|capacity)")
_SIZE_OF_MODELS = re.compile(rf"{_SIZE.pattern}|seq|context|bptt|^(?:bs|B|T)$")
_GROUPS = 3  # maximum number of tensor lengths that are tried as batch sizes
_CUTS = {"split", "chunk", "narrow", "select", "index_select", "unbind"}


def smaller(s: OutOfMemoryState, t: Trials) -> Iterator[Lever]:
    """Propose the largest batch that fits, in the innermost frame where a smaller batch helps."""
    for trial in (trial for trial in t.every if t.loop is None and trial.lacking > 0):
        names = _SIZE_OF_MODELS if runs_model(s, trial) else _SIZE
        lower = [*_lower_variable(s, trial, names)]
        tried = ((batch, [*_fewer_rows(s, trial, batch)]) for batch in _batches(s, trial))
        batch, rows = next((each for each in tried if each[1]), (list[str](), list[Lever]()))
        # Prefer to lower a number if the code makes the batch, as in `x = get_batch(n=64)`.
        if found := lower + rows if trial.stale.issuperset(batch) else rows + lower:
            yield from found
            return


def _fewer_rows(s: OutOfMemoryState, trial: CodeTrial, names: list[str]) -> Iterator[Lever]:
    count = len(_tensor_in(trial.frame.scope.name(names[0])))
    # Numbers equal to the batch size may need lowering too, as in `torch.zeros(batch_size)`.
    sizes = [name for name, value in trial.names.items() if type(value) is int and value == count]
    sizes = [name for name in sizes if _SIZE_OF_MODELS.search(name)] or sizes
    learns = any(rest.backward for rest in s.rests)
    loader = _loader(trial, count)
    # A smaller batch size of the loader also shrinks this batch, so subtract the bytes saved.
    batch = [s.local(trial.frame, name) for name in names if loader]
    held = s.alone(batch, in_frames=not trial.frame.at_top)

    def tried(number: int, also: list[str]) -> Need | None:
        first = partial(_keep_gradients, models(s, trial) if learns else [])
        cut = {n: _cut(trial.names[n], number) for n in names if n in trial.names}
        read = {n: f"{n}[:{number}]" for n in names if n not in cut}
        form = Form("", "", [], trial.code, trial.reads(read)) if read else None
        cut |= dict.fromkeys(also, number)
        # While a second part of the batch is computed, names still hold the first part's results.
        need = trial.tried(cut, first=first, form=form, twice=not loader)
        return need and need._replace(most=need.most - int(held * (1 - number / count)))

    half = tried(count // 2, [])
    sizes = sizes if half is None else []
    values = (s.namespace.get(name) for name in s.read)
    # In a GAN, a model also has gradients of the other model's loss, which must not accumulate.
    is_gan = sum(isinstance(value, torch_here().optim.Optimizer) for value in values) > 1
    added = ", accumulating the gradients of {}" if learns and not is_gan else ""
    added = added or ", part by part" * (not learns and not trial.rest.loops)
    # In training with a smaller batch, a loss over pairs of samples has fewer pairs.
    paired = learns and half is not None and half.most < _PAIRED * getattr(trial.need, "most", 0)
    added, least = (_FEWER_PAIRS, 0.0) if paired else (added, _PAIRED)
    cuts = some(f"`{name}`" for name in loader or (*names, *sizes))
    do = f"{cuts}: a batch of {{:,}} instead of {count:,}{added}"
    yield from _largest(s, trial, do, count, partial(tried, also=sizes), least, divides=learns)


def _loader(trial: CodeTrial, count: int) -> list[str]:
    """Return the code of the data loader that the loop reads, if its batch size is `count`."""
    made_of = ast.walk(getattr(next(iter(trial.rest.loops), None), "iter", ast.Pass()))
    batched = (n for n in made_of if getattr(trial.frame.scope.value(n), "batch_size", 0) == count)
    return [ast.unparse(node) for node in batched][:1]


def _keep_gradients(trained: list[Any], into: object) -> None:
    """In a dry run, give models the gradients that accumulate over the parts of a batch."""
    torch = torch_here()
    for parameter in {p for model in trained for p in torch.nn.Module.parameters(model)}:
        if parameter.is_cuda and parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    for kind in (torch.optim.Optimizer, torch.nn.Module) if trained else ():
        kind.zero_grad = lambda *args, **kwargs: None


def _lower_variable(s: OutOfMemoryState, trial: CodeTrial, names: Any) -> Iterator[Lever]:
    """Propose a lower number for a variable whose name matches `names`."""
    made = {name: each for each in trial.code for name in stored(each)}
    for name in dict.fromkeys((*names_read(ast.Module(trial.code, [])), *made, *sorted(s.read))):
        value = trial.names.get(name, getattr(getattr(made.get(name), "value", None), "value", 0))
        if names.search(name) and type(value) is int and value > 1:
            tried = partial(_with_number, trial, name, made.get(name))
            do = f"`{name} = {{}}` instead of {value:,}"
            yield from _largest(s, trial, do, value, tried, 0.0)


def _with_number(trial: CodeTrial, name: str, made: ast.stmt | None, number: int) -> Need | None:
    if made is None:
        return trial.tried({name: number})
    return trial.tried(form=Form("", f"{name} = {number}", [made], block_of(made)))


def _largest(
    s: OutOfMemoryState,
    trial: CodeTrial,
    do: str,
    count: int,
    tried: Callable[[int], Need | None],
    least: float,
    divides: bool = False,  # whether only divisors of `count` leave the training unchanged
) -> Iterator[Lever]:
    """Yield a lever with the largest number below `count` that fits, or nothing."""
    from gpumagic.fitting.fit_search import largest

    unfinished = list[float]()  # numbers whose dry runs did not end in time

    @cache
    def needed(number: float) -> float:
        need = tried(int(number))
        if need is None or not need.whole:
            unfinished.append(number)
        return math.inf if need is None else need.most

    need = trial.need
    if need is None or not least <= needed(count // 2) / max(need.most, 1) <= _DECIDES:
        return
    near = _NEAR if s.device.virtual else _NEAR_REAL
    # Start at 2 if a batch of one fails, as in a layer that normalizes over samples.
    values = range(1 if math.isfinite(needed(1)) else 2, count)
    fits = largest(values, needed, trial.room, near=near / 2)
    if fits is not None:
        most, whole = int(fits), (n for n in range(int(fits), int(fits) // 2, -1) if count % n == 0)
        parts = -(-count // most)
        number = next(whole, -(-count // parts)) if divides else most  # parts of about equal size
        then, words = int(needed(number)), do.format(number, -(-count // number))
        exact = not divides and not any(other > number for other in unfinished)
        words += f" (within {100 * near:.0f} % of the largest that fits)" * exact
        yield Lever(words, need.most - then, trial.fits(need._replace(most=then)))


def padded(known: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield advice and shorter tensors, if tokens at the end are padding in all samples."""
    for name, batch in known.items():
        for _, cut, why in _without_padding(batch) if isinstance(batch, (dict, UserDict)) else ():
            do = f"pad each batch to its longest sample: {why} in `{name}`"
            yield do, {name: type(batch)({**batch, **cut})}
    for mask, cut, why in _without_padding(known):
        if len(cut) > 1:
            code = ", ".join(cut)
            do = f"`{code} = (x[:, :{mask}.sum(1).max()] for x in ({code}))` in each pass"
            yield f"{do}: {why}", cut


def _without_padding(batch: Any) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield each mask's name, the tensors of the mask's shape without padding, and the reason."""
    tensors = {k: v for k, v in batch.items() if is_tensor(v) and v.dim() == 2}
    alike = {k: v for k, v in tensors.items() if not v.is_floating_point()}
    for key, mask in alike.items():
        if type(key) is str and "mask" in key.lower():
            used = max(mask.cpu().any(0).nonzero().flatten().tolist(), default=0) + 1
            cut = {k: v[:, :used] for k, v in alike.items() if v.shape == mask.shape}
            yield key, cut, f"only {used} of {len(mask[0])} tokens are not padding"


def _batches(s: OutOfMemoryState, trial: CodeTrial) -> Iterator[list[str]]:
    """Yield names of tensors that may be a batch: the largest tensor, and others of its length."""
    found = _tensors(trial) if runs_model(s, trial) else {}
    names = sorted(found, key=lambda name: -found[name].nbytes)
    counts = dict.fromkeys(len(found[name]) for name in names)
    for count in islice((n for n in counts if n > 1), _GROUPS):
        alike = {name for name in names if len(found[name]) == count}
        # Skip tensors computed from the others, such as outputs of the loop's previous pass.
        made = {n for n in trial.stale if n in computed_from([*alike - {n}], trial.code)}
        batch = [name for name in names if name in alike - made][:9]  # a batch has few tensors
        tensors = [name for name in batch if is_tensor(trial.frame.scope.local.get(name))]
        # Ignore `z1, z2 = z.chunk(2)`, which makes two parts of a batch of any size.
        into = {stmt: getattr(stmt, "targets", [None])[0] for stmt in trial.code}
        code = [stmt for stmt, target in into.items() if not isinstance(target, ast.Tuple)]
        if batch and not _is_cut(code, batch, tensors):
            yield batch


def _tensors(trial: CodeTrial) -> dict[str, Any]:
    """Return the tensors that the code reads or makes. For a dict, return its largest tensor."""
    read = (*names_read(ast.Module(trial.code, [])), *sorted(trial.stale))
    first = {name: _tensor_in(trial.frame.scope.local.get(name)) for name in read}
    found = ((name, tensor) for name, tensor in first.items() if is_tensor(tensor))
    strided = torch_here().strided  # the bytes of a sparse tensor are not defined
    return {name: each for name, each in found if each.layout is strided and each.dim()}


def _tensor_in(value: Any) -> Any:
    """Return a tensor, or the largest tensor of a batch that is a dict; else None."""
    held = [each for each in value.values() if is_tensor(each)] if _is_batch(value) else []
    return max(held, key=lambda each: each.nbytes, default=value if is_tensor(value) else None)


def _cut(batch: Any, number: int) -> Any:
    new = {k: v[:number] for k, v in batch.items()} if _is_batch(batch) else {}
    return type(batch)(new) if new else batch[:number]


def _is_batch(value: Any) -> bool:
    return type(value) is dict or isinstance(value, UserDict)  # such as `BatchEncoding`


def runs_model(s: OutOfMemoryState, trial: CodeTrial) -> bool:
    """Whether the code reads a model, or is followed by a backward pass."""
    return bool(models(s, trial)) or any(rest.backward for rest in s.rests)


def models(s: OutOfMemoryState, trial: CodeTrial) -> list[Any]:
    """Return the modules that the code reads."""
    every = {**s.namespace, **trial.names}
    read = s.read.union(names_read(ast.Module(trial.code, [])))
    return [every[name] for name in read if is_module(every.get(name))]


def _is_cut(code: list[ast.stmt], names: list[str], tensors: list[str]) -> bool:
    """Whether code takes parts of a batch in `names`, or has a slice such as `[i : i + n]`."""
    results = computed_from(names, code)
    for node in (node for stmt in code for node in ast.walk(stmt)):
        is_cut = getattr(node, "attr", "") in _CUTS
        is_part = is_cut or isinstance(node, ast.Subscript)
        part = getattr(node, "value" if is_part else "iter", None)
        cut = getattr(node, "slice", None)
        sliced = isinstance(cut, ast.Slice) and names_read(ast.Expression(cut))
        rows = takes_rows(node) or not isinstance(node, ast.Subscript)
        if sliced or (rows and getattr(part, "id", "") in (results if is_cut else tensors)):
            return True
    return False


def shorter_history(s: OutOfMemoryState, t: Trials) -> Iterator[Lever]:
    """Propose a smaller `history_size` of `torch.optim.LBFGS`, which keeps two vectors a step."""
    known: dict[str, Any] = {n: s.namespace.get(n) for n in sorted(s.read)}
    for name in (n for n in known if comes_from(type(known[n]), "torch.optim.LBFGS")):
        optimizer = known[name]
        (group,), (*states,) = optimizer.param_groups, optimizer.state.values()
        kept = [*states, *(frame.f_locals for frame in s.library_frames)]
        steps = max((len(each.get("old_dirs") or ()) for each in kept), default=0)
        fewer, pair = min(10, steps // 2) or 1, 2 * sum(p.nbytes for p in group["params"])
        if s.worth(gives := (steps - fewer) * pair):
            do = f"`history_size={fewer}` for `{name}`: LBFGS keeps two vectors of all parameters "
            do += f"for each of its last {group['history_size']} steps; the result may differ"
            yield Lever(do, gives)
