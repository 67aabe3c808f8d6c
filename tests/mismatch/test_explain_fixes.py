"""`gpumagic.explain`: fixes for what fails next too."""

import pytest
from snippets import run

import gpumagic

pytestmark = [pytest.mark.usefixtures("gpus"), pytest.mark.filterwarnings("ignore")]


def test_three_devices_of_which_one_is_known_from_the_text_alone():
    code = (
        "torch.where(torch.tensor([True, False]), torch.ones(2, device='cuda:0'), "
        "torch.zeros(2, device='cuda:1'))\n"
    )
    explanation = gpumagic.explain(run(code))
    assert [o.devices for o in explanation.operands] == [("cpu",), ("cuda:0",), ("cuda:1",)]
    assert run(explanation.fix.apply(code)) is None


@pytest.mark.parametrize(
    ("written", "fixed"), [("a.cpu() + b", "a + b"), ("b + a.cpu().abs()", "b + a.abs()")]
)
def test_a_transfer_that_took_an_operand_away_goes(written, fixed):
    code = f"a, b = torch.ones(2).cuda(), torch.ones(2).cuda()\nc = {written}\n"
    fix = gpumagic.explain(run(code)).fix
    assert fix.apply(code) == code.replace(written, fixed)
    assert fix.nbytes == 0
    assert run(fix.apply(code)) is None


def test_lengths_that_are_not_on_the_host_and_no_other_tensor():
    code = (
        "s, lens = torch.ones(2, 3, 4).cuda(), torch.tensor([3, 2]).cuda()\n"
        "nn.utils.rnn.pack_padded_sequence(s, {}, batch_first=True)\n"
    )
    for given in ("lens", "lengths=lens"):
        fix = gpumagic.explain(run(code.format(given))).fix
        assert run(fix.apply(code.format(given))) is None
    with gpumagic.on(0):
        made = run(code.format("torch.tensor([3, 2])"))
    assert gpumagic.explain(made) is None


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


def test_functions_that_call_each_other_do_not_keep_it_busy():
    calls = " + ".join(["f(x)"] * 12)
    code = f"def f(x):\n    return {calls}\na = torch.ones(2)\nb = a.cuda()\nc = a + b\nf(c)\n"
    error = run(code.replace("f(c)\n", ""))
    assert gpumagic.explain(error).fix is not None
    assert gpumagic.explain(run(code)).fix is not None


MADE = [
    (
        "total = torch.zeros(3)\nfor _ in range(3):\n    loss = torch.rand(3, device='cuda')\n"
        "    total += loss\n",
        'total = torch.zeros(3, device="cuda:0")',
    ),
    (
        "def noisy(x):\n    noise = torch.randn(x.shape)\n    return x + 0.1 * noise\n"
        "noisy(torch.ones(3, device='cuda'))\n",
        "    noise = torch.randn_like(x)",
    ),
    (
        "x = torch.ones(3, device='cuda')\ny = x + 0.1 * torch.rand(x.size())\n",
        "y = x + 0.1 * torch.rand_like(x)",
    ),
    # Another dtype, or another size: the likes of `x` would not do.
    (
        "x = torch.ones(3, device='cuda').half()\ny = x + torch.rand(x.shape)\n",
        "y = x + torch.rand(x.shape, device=x.device)",
    ),
]


@pytest.mark.parametrize(("code", "fixed"), MADE)
def test_what_is_made_at_home_is_made_there_rather_than_moved_each_time(code, fixed):
    fix = gpumagic.explain(run(code)).fix
    assert fix.code == fixed
    assert run(fix.apply(code)) is None


def test_an_accumulator_that_the_host_reads_stays():
    code = (
        "total = torch.zeros(3)\nfor _ in range(2):\n    total += torch.ones(3, device='cuda')\n"
        "total.numpy()\n"
    )
    fix = gpumagic.explain(run(code)).fix
    assert fix.line == 3
    assert run(fix.apply(code)) is None
