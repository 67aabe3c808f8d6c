"""Programs without a mistake compute the same, bit for bit, with a check and without."""

import warnings

import pytest
import torch
from clean_programs import PROGRAMS, SETUP
from torch.utils._pytree import tree_leaves

import gpumagic
from gpumagic import faults


def as_numbers(value):
    """A tensor of real numbers, for comparison."""
    if not isinstance(value, torch.Tensor) or not value.is_complex():
        return value.detach() if isinstance(value, torch.Tensor) else value
    return torch.view_as_real(value.detach().resolve_conj().resolve_neg())


def same(one, other):
    """Whether two results are the same, bit for bit."""
    one, other = ([*map(as_numbers, tree_leaves(each))] for each in (one, other))
    assert len(one) == len(other)
    return all(
        a.shape == b.shape
        and torch.equal(a.nan_to_num(), b.nan_to_num())
        and torch.equal(a.isnan(), b.isnan())
        for a, b in zip(one, other, strict=True)
        if isinstance(a, torch.Tensor) and not a.is_meta and a.layout == torch.strided
    )


def results(code, **options):
    """Run a program, checked if there are options; return its tensors and the random state."""
    names = {}
    exec(SETUP, names)
    checked = gpumagic.check(**options) if options else torch.enable_grad()
    with checked, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(code, names)
    kept = {n: v for n, v in names.items() if isinstance(v, (torch.Tensor, list))}
    return kept, torch.get_rng_state()


@pytest.mark.parametrize("nan", [False, True], ids=["--check", "--check nan"])
def test_clean_programs_are_undisturbed(nan):
    for code in PROGRAMS:
        assert same(results(code), results(code, nan=nan)), code
    assert faults.all_kept() == []


def test_clean_programs_on_a_virtual_gpu(gpus):
    with gpumagic.on(1):
        for code in PROGRAMS[:13]:
            assert same(results(code), results(code, nan=True)), code
    assert faults.all_kept() == []


def run_sample(op, sample, check):
    torch.manual_seed(0)
    args = [
        each.detach().clone() if isinstance(each, torch.Tensor) else each for each in sample.args
    ]
    grad = op.supports_autograd and isinstance(sample.input, torch.Tensor)
    start = sample.input.detach().clone() if grad else sample.input
    if grad and start.is_floating_point():
        start.requires_grad_()
    with check:
        made = op(start, *args, **sample.kwargs)
        first = next((m for m in tree_leaves(made) if getattr(m, "requires_grad", False)), None)
        if first is not None and first.is_floating_point():
            first.sum().backward()
    return made, getattr(start, "grad", None)


@pytest.mark.slow
def test_compiled_functions_are_not_checked():
    """A check would break their graph."""
    x, labels = torch.randn(3, 4), torch.tensor([0, 1, 2])

    def loss(x, labels):
        return torch.nn.functional.cross_entropy(2 * x, labels)

    compiled = torch.compile(loss, backend="eager", fullgraph=True)
    with gpumagic.check(nan=True):
        assert torch.equal(compiled(x, labels), loss(x, labels))


@pytest.mark.slow
def test_operators_are_undisturbed(monkeypatch):
    """torch's own samples of each operator, with their gradients."""
    # The import forbids this process to set flags of a backend, for good.
    names = torch.backends.disable_global_flags.__globals__
    monkeypatch.setitem(names, "__allow_nonbracketed_mutation_flag", True)
    from torch.testing._internal.common_methods_invocations import op_db

    done = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for op in op_db:
            if torch.float32 not in op.supported_dtypes("cpu"):
                continue
            sample = next(iter(op.sample_inputs("cpu", torch.float32, requires_grad=False)), None)
            if sample is None or "empty" in op.name:
                continue
            try:
                bare = run_sample(op, sample, torch.enable_grad())
            except Exception:  # noqa: BLE001  a sample that is meant for torch's own harness
                continue
            assert same(bare, run_sample(op, sample, gpumagic.check())), op.name
            done += 1
    assert done > 400
    assert faults.all_kept() == []
