"""Propose changes of a model's training, after which it needs less memory.

The terms are those of changed_code.py.
"""

from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

from gpumagic.memory.changed_code import converted, with_place
from gpumagic.memory.oom_state import OutOfMemoryState
from gpumagic.memory.oom_trials import Trials, helps
from gpumagic.memory.out_of_memory import Lever
from gpumagic.memory.smaller_batch import models
from gpumagic.memory.written_forms import checkpointed
from gpumagic.usercode.values import is_module, own, torch_here


def frozen(s: OutOfMemoryState, t: Trials) -> Iterator[Lever]:
    """Propose `requires_grad_(False)` for models or layers that no optimizer trains."""
    for name in sorted(s.read | s.rests[-1].read_anywhere) if t.best is not None else ():
        idle = _idle(s, name)
        meant = any(own(part).get("requires_grad") is False for part in idle.values())
        why = "`.requires_grad = False` freezes nothing" if meant else "no optimizer trains it"
        code = "; ".join(f"{path}.requires_grad_(False)" for path in idle)
        within = lambda idle=idle: nullcontext([p.requires_grad_(False) for p in idle.values()])  # noqa: E731
        if idle:
            yield from helps(t.best, f"`{code}`: {why}", within=within)


def _idle(s: OutOfMemoryState, name: str) -> dict[str, Any]:
    """Return the largest parts of a model that no optimizer trains, by path."""
    model: Any = s.namespace.get(name)
    trained = trained_by(s)
    found = dict[str, Any]()
    for path, part in model.named_modules(prefix=name) if trained and is_module(model) else ():
        learns = {id(p) for p in part.parameters() if p.requires_grad}
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
    """Propose checkpointing: do not save the failed call's tensors, but repeat it in backward."""
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
    every = {with_place(s, rest, form): form for rest in s.rests for form in checkpointed(rest)}
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
            do = f"`{code}`: gradients of only the rows read"
            yield from helps(t.best, do, within=partial(_with_sparse, large.values()))


def _with_sparse(tables: Iterable[Any]) -> Any:
    for each in tables:
        each.sparse = True
    return nullcontext()


def autocast(s: OutOfMemoryState, t: Trials) -> Iterator[Lever]:
    """Propose 16 bits for a model's results, where torch finds that safe; else for all data."""
    torch = torch_here()
    if t.best is not None and models(s, t.best) and not torch.is_autocast_enabled("cuda"):
        code = '`with torch.autocast("cuda", torch.bfloat16):`'
        do = f"{code} around the forward pass and the loss: numbers have 3 digits then"
        levers = [*helps(t.best, do, within=partial(torch.autocast, "cuda", torch.bfloat16))]
        yield from levers
        if not any(lever.fits for lever in levers):
            yield from converted(s, t.best, "float32", "bfloat16", "numbers have 3 digits then")


def other_optimizer(s: OutOfMemoryState, t: Trials) -> Iterator[Lever]:
    """Propose an optimizer with small state, if the state of the code's optimizer does not fit."""
    modules = {name: value for name, value in s.namespace.items() if is_module(value)}
    weights = {name: {id(p) for p in modules[name].parameters()} for name in modules}
    old, trained = optimizer_of(s), trained_by(s)
    fits = [name for name in weights if weights[name] == trained and s.optimizer is not None]
    for name in fits[: old in s.read and t.best is not None]:
        new = torch_here().optim.Adafactor(modules[name].parameters())
        do = f"`{old} = torch.optim.Adafactor({name}.parameters())`: its state is small"
        yield from helps(t.best, f"{do}; the training changes", names={old: new})


def optimizer_of(s: OutOfMemoryState) -> str:
    """Return the name of the optimizer whose first step failed; `optimizer` if it has no name."""
    every = (n for n in sorted(s.read) if s.namespace.get(n) is s.optimizer)
    return next(every, "optimizer")
