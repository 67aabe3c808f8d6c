"""`gpumagic.explain`: fixes for what fails next too."""

import pytest
import torch
from snippets import names_told, run
from torch import nn

import gpumagic

pytestmark = [pytest.mark.usefixtures("gpus"), pytest.mark.filterwarnings("ignore")]


def test_what_is_fixed_on_the_optimizers_counters():
    net = nn.Linear(2, 1).cuda()
    code = (
        "net(torch.ones(1, 2).cuda()).sum().backward()\nopt.step()\n"
        "for s in opt.state.values():\n    s['step'] = s['step'].cuda()\nopt.step()\n"
    )
    opt = torch.optim.Adam(net.parameters(), foreach=False)
    error = run(code, namespace={"net": net, "opt": opt})
    if error is not None:  # the assertion of a real GPU; virtual ones may let it pass
        fix = gpumagic.explain(error).fix
        assert run(fix.apply(code), namespace={"net": net, "opt": opt}) is None


NEXT = """
def f(x):
    s = torch.ones(3)
    return x * s
def g(x):
    return f(x) + {other}
other = torch.ones(3)
y = g(torch.ones(3, device="cuda"))
"""


@pytest.mark.parametrize(("other", "sure"), [("other", False), ("other.cuda()", True)])
def test_no_fix_is_proposed_that_surely_brings_the_next_error(other, sure):
    explanation = gpumagic.explain(run(NEXT.replace("{other}", other)))
    assert names_told(explanation)["s"].devices == ("cpu",)
    assert (explanation.fix is not None) is sure


def test_what_is_made_later_and_fails_next_is_explained_in_its_turn():
    code = (
        'a = torch.ones(2, device="cuda")\nm = torch.zeros(2).bool()\nb = a.masked_fill(m, 0)\n'
        "w = torch.arange(2)\nc = b * w\n"
    )
    for _ in range(2):
        code = gpumagic.explain(run(code)).fix.apply(code)
    assert run(code) is None


def test_what_exists_and_fails_next_moves_along():
    code = (
        'a, w = torch.ones(2, device="cuda"), torch.arange(2)\nm = torch.zeros(2).bool()\n'
        "b = a.masked_fill(m, 0)\nc = b * w\n"
    )
    assert run(gpumagic.explain(run(code)).fix.apply(code)) is None


def test_a_module_that_a_loop_needs_on_both_devices_is_not_moved():
    code = (
        "enc = nn.Linear(2, 2)\nfor step in range(2):\n    a = enc(torch.ones(1, 2)).sum()\n"
        '    b = enc(torch.ones(1, 2, device="cuda"))\n'
    )
    explanation = gpumagic.explain(run(code))
    assert names_told(explanation)["enc"].odd
    assert explanation.fix is None


def test_functions_that_call_each_other_do_not_keep_it_busy():
    calls = " + ".join(["f(x)"] * 12)
    code = f"def f(x):\n    return {calls}\na = torch.ones(2)\nb = a.cuda()\nc = a + b\nf(c)\n"
    error = run(code.replace("f(c)\n", ""))
    assert gpumagic.explain(error).fix is not None
    assert gpumagic.explain(run(code)).fix is not None


def test_a_file_of_another_machine_is_loaded_to_the_cpu_with_what_else_was_asked_for():
    said = "Attempting to deserialize object on CUDA device 2 but torch.cuda.device_count() is 1"
    error = run("data = torch.load('missing.pt', weights_only=True)\n")
    assert isinstance(error, FileNotFoundError)
    fix = gpumagic.explain(RuntimeError(said).with_traceback(error.__traceback__)).fix
    assert fix.code == "data = torch.load('missing.pt', weights_only=True, map_location=\"cpu\")"
