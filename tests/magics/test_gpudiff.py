"""`%%gpudiff`: what it shows and keeps, and that nothing of the user's changes."""

import random
from traceback import walk_tb

import pytest
import torch
from IPython.core.error import UsageError

PROGRAM = """
h = net(x)
if h.is_cuda:
    h = h.half()
net.weight.grad = None
p = h.softmax(-1).sum().backward()
x.add_(torch.randn(4, 5))
torch.manual_seed(7); random.random()
"""


@pytest.fixture
def filled(ip):
    ip.run("import random\nx = torch.randn(4, 5)\nnet = nn.Linear(5, 3)")
    return ip


def test_it_shows_the_line_the_operation_and_both_values(filled):
    done = filled.run(f"%%gpudiff cpu 1 -o found{PROGRAM}")
    count = filled.ip.execution_count - 1
    assert done.text.startswith(
        f"cpu and cuda:1 differ at In [{count}], line 4: `h.half()` (aten._to"
    )
    assert "nothing on cpu, aten._to_copy on cuda:1; largest difference" in done.text
    assert filled.ns["found"].first.line == 4
    assert "<code>h.half()</code>" in filled.ns["found"]._repr_html_()
    assert done.result is None


def test_nothing_of_the_users_changes(filled):
    x, net = filled.ns["x"], filled.ns["net"]
    before = x.clone(), net.weight.clone(), torch.get_rng_state(), random.getstate()
    for sides in ("cpu 1", "float32 bfloat16", "fp32 bf16"):
        assert filled.run(f"%%gpudiff {sides} -q{PROGRAM}").error is None
    assert torch.equal(x, before[0])
    assert torch.equal(net.weight, before[1])
    assert net.weight.grad is None
    assert torch.equal(torch.get_rng_state(), before[2])
    assert random.getstate() == before[3]
    assert {"h", "p"}.isdisjoint(filled.ns)
    assert torch.get_default_dtype() is torch.float32


def test_the_line_form_agrees_and_prints_only_once(filled):
    done = filled.run("%gpudiff float64 float32 -- print(net(x).shape)")
    assert done.text.count("torch.Size") == 1
    assert "float64 and float32 agree: largest relative difference" in done.text
    assert "%gpudiff: no code" in filled.run("%gpudiff cpu 1").text


def test_names_of_a_function_are_known(filled):
    cell = "def f():\n    y = x * 2\n    %gpudiff cpu 1 -- y.exp()\nf()"
    assert "cpu and cuda:1 agree" in filled.run(cell).text


def test_functions_of_the_notebook_share_the_variables_of_the_cell(filled):
    filled.run("def double():\n    global calls\n    calls = 1\n    return new * 2")
    done = filled.run("%%gpudiff cpu 1\nnew = x + 1\ny = double()\nassert calls == 1")
    assert "cpu and cuda:1 agree" in done.text
    assert {"new", "y", "calls"}.isdisjoint(filled.ns)


def test_an_error_has_no_frame_of_the_recorder(filled):
    error = filled.run("%%gpudiff fp32 fp16\nx @ torch.ones(77, 1)").error
    names = [frame.f_locals.get("__tracebackhide__") for frame, _ in walk_tb(error.__traceback__)]
    assert True in names


def test_two_runs_on_one_device_are_not_said_to_agree(filled):
    filled.run("from torch.utils.data import TensorDataset\nds = TensorDataset(torch.ones(9, 3))")
    done = filled.run(
        "%%gpudiff cpu 1 -o r\nh = ds.tensors[0] * 2\nif h.is_cuda: h = h + 1\nh.sum()"
    )
    says = "nothing to compare: torch ran nothing on cuda:1; left ds: a dataset stays where it is"
    assert done.text.startswith(says), done.text
    assert not filled.ns["r"].agree
    assert "gm-bad" in filled.ns["r"]._repr_html_()
    done = filled.run("%%gpudiff cpu 1\ntorch.ones(3, device='cuda:0') * 2")
    assert done.text.startswith("nothing to compare: torch ran nothing on cpu and cuda:1")
    assert "cpu and cuda:1 agree" in filled.run("%%gpudiff cpu 1\nx.add_(1)").text


def test_code_that_runs_no_operation_of_torchs_is_not_said_to_agree(filled):
    said = filled.run("%%gpudiff cpu 1\nn = sum(range(9))").text
    assert said == "UsageError: %%gpudiff: nothing to compare: the code ran no operation of torch\n"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("cpu", "two devices or two dtypes are needed; type cpu 1, or float32 bfloat16"),
        ("cpu 0 1", "two devices"),
        ("cpu cpu", "two devices"),
        ("cpu float32", "two devices"),
        ("float32 int32", "two devices"),
        ("cpu 7", "no GPU 7: there are cuda:0 and cuda:1 (virtual); type 0"),
        ("float33 float32", "did you mean float32? two devices"),
        ("cpu 1 --nope", "--nope"),
    ],
)
def test_bad_input_is_one_line_and_nothing_runs(filled, line, says):
    done = filled.run(f"%%gpudiff {line}\nprint('ran')")
    assert isinstance(done.error, UsageError)
    assert done.text.startswith("UsageError: %%gpudiff")
    assert says in done.text
    assert done.text.count("\n") == 1


def test_an_error_is_the_users_with_the_side(filled):
    done = filled.run("%%gpudiff cpu 1\ny = x * 2\nif y.is_cuda:\n    1 / 0")
    assert isinstance(done.error, ZeroDivisionError)
    assert "1 / 0" in done.text
    assert "gpumagic" not in done.text
    assert "run on cuda:1" in str(getattr(done.error, "__notes__", "run on cuda:1"))


def test_ctrl_c_ends_it_and_all_is_as_before(filled):
    filled.run("import os, signal")
    before = torch.get_rng_state()
    cell = "y = torch.randn(3, device=x.device)\nif x.is_cuda: os.kill(os.getpid(), signal.SIGINT)"
    done = filled.run(f"%%gpudiff cpu 1\n{cell}\ny + 1")
    assert isinstance(done.error, KeyboardInterrupt)
    assert torch.equal(torch.get_rng_state(), before)
    assert "cpu and cuda:1 agree" in filled.run("%gpudiff cpu 1 -- x + 1").text
