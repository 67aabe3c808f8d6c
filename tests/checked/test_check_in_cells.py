"""`--check` in cells, `%gpuwatch on --check`, `gpumagic.check()`: when it checks, and when not."""

import threading

import pytest
import torch
from torch.nn import functional as F

import gpumagic
from gpumagic import faults
from gpumagic.magics.arguments import placing_request

BAD = "torch.zeros(3)[torch.tensor([0, 5])]"


def checked(shell, cell):
    return type(shell.run(cell).error).__name__


def modes():
    return torch._C._len_torch_function_stack()


def test_it_is_on_for_its_cell_alone(ip):
    assert checked(ip, f"%%ongpu 1 --check\n{BAD}") == "CheckedIndexError"
    assert checked(ip, f"%%ongpu 1\n{BAD}") == "IndexError"  # of the CPU's kernel
    assert checked(ip, "%%ongpu 1 --check\ntorch.zeros(2).log()") == "NoneType"
    assert checked(ip, "%%ongpu 1 --check nan\ntorch.zeros(2).log()") == "MadeNanError"
    assert modes() == 0


@pytest.mark.parametrize(
    ("line", "check"),
    [
        ("1", None),
        ("1 --check", ""),
        ("--check 1", ""),
        ("1 --check nan", "nan"),
        ("--check nan 1", "nan"),
        ("--check -q 1", ""),
        ("1 --check=nan", "nan"),
    ],
)
def test_what_is_typed(line, check):
    asked = placing_request(line)
    assert (asked.where, asked.check) == ("1", check)


@pytest.mark.parametrize("line", ["0,1 --split x --check", "1 --dry-run --check", "1 --check inf"])
def test_what_does_not_combine(ip, line):
    assert "UsageError: %%ongpu: " in ip.run(f"%%ongpu {line}\n1").text


def test_gpuwatch_checks_every_cell_until_it_is_off(ip):
    said = ip.run("%gpuwatch on --check").text
    assert "and values are checked; %gpuwatch off ends it" in said
    assert [checked(ip, BAD), checked(ip, BAD)] == ["CheckedIndexError"] * 2
    ip.run("%gpuwatch on --check nan")
    assert checked(ip, "torch.zeros(2).log()") == "MadeNanError"
    ip.run("%gpuwatch off")
    assert checked(ip, BAD) == "IndexError"
    assert modes() == 0


def test_it_reads_what_the_ledger_does_not_count(ip):
    ip.run("x, i = torch.randn(3, 4, device='cuda:1'), torch.tensor([0, 2], device='cuda:1')")
    said = ip.run("%%ongpu 1 --check nan --report --strict\ny = (x[i] * 2).sum()").text
    assert "no copies between devices, no waits for a GPU" in said


def test_it_can_be_left_in_any_order_and_entered_again():
    one, other = gpumagic.check(), gpumagic.check(nan=True)
    one.start()
    other.start()
    one.stop()
    with pytest.raises(IndexError, match=r"has 3 elements"):
        torch.zeros(3)[torch.tensor([3])]
    other.stop()
    other.stop()
    with one, one, pytest.raises(IndexError, match=r"has 3 elements"):
        torch.zeros(3)[torch.tensor([3])]
    assert modes() == 0


def halves_of_scaled(loss, scale):
    """The gradient of a scaled loss, by way of float16."""
    x = torch.ones(2, requires_grad=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, enabled=scale > 1)
    with gpumagic.check(nan=True):
        scaler.scale(loss(x.half() * 2)).backward()
    return x.grad


def test_an_overflow_of_a_scaled_loss_is_the_scalers():
    assert halves_of_scaled(lambda x: x.float().sum(), 2.0**20).isinf().all()
    with pytest.raises(FloatingPointError, match="backward pass makes inf"):
        halves_of_scaled(lambda x: x.float().sum() * 2**20, 1.0)
    with pytest.raises(FloatingPointError, match=r"sqrt\(\) .*backward pass makes inf"):
        halves_of_scaled(lambda x: (x.float() - 2).sqrt().sum(), 2.0)


def test_infinity_of_a_library_is_its_own_and_nan_is_named_with_its_place(tmp_path):
    file = tmp_path / "site-packages" / "models" / "bert.py"
    file.parent.mkdir(parents=True)
    file.write_text(
        "import torch\n"
        "def distances(x): return torch.where(x > 0, torch.log(x), x)\n"  # as T5 has them
        "def bias(x):\n"
        "    low = torch.log(x)\n"
        "    return low - low\n"
    )
    library = {}
    exec(compile(file.read_text(), str(file), "exec"), library)
    with gpumagic.check(nan=True):
        assert library["distances"](torch.arange(3.0)).isfinite().all()
        with pytest.raises(FloatingPointError) as failed:
            library["bias"](torch.zeros(2))
    said = 'library["bias"](torch.zeros(2)): low - low in models.bert, line 5, makes nan at [0] (2'
    assert str(failed.value).startswith(said)


def test_other_threads_are_not_checked():
    said = []

    def work():
        try:
            torch.zeros(3)[torch.tensor([5])]
        except IndexError as error:
            said.append(type(error))

    with gpumagic.check():
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert said == [IndexError]


def test_a_backward_pass_after_the_check_is_not_checked():
    weights = torch.zeros(3, requires_grad=True)
    with gpumagic.check(nan=True):
        norm = weights.norm() + weights.abs().sqrt().sum()
    norm.backward()
    assert not weights.grad.isfinite().all()


def test_a_backward_pass_is_checked_if_the_forward_pass_was_in_an_earlier_check():
    weights = torch.zeros(3, requires_grad=True)
    with gpumagic.check(nan=True):
        norm = weights.abs().sqrt().sum()
    with gpumagic.check(nan=True), pytest.raises(FloatingPointError, match=r"Sqrt.* makes inf"):
        norm.backward()


def test_arguments_that_torch_refuses_are_no_fault_of_ours():
    x = torch.zeros(3, 4)
    with gpumagic.check():
        for wrong in (
            lambda: x.gather(5, torch.tensor([[0]])),
            lambda: F.cross_entropy(x, None),
            lambda: x[0, 0, torch.tensor([0])],
        ):
            with pytest.raises((IndexError, TypeError)) as failed:
                wrong()
            assert "gpumagic" not in type(failed.value).__module__
    assert faults.all_kept() == []


def test_a_failure_of_the_check_stops_nothing_and_is_kept(monkeypatch):
    def fail(*args):
        raise RuntimeError("planted")

    monkeypatch.setattr("gpumagic.checked.check_mode.find_bad_value", fail)
    with gpumagic.check():
        assert torch.zeros(3)[torch.tensor([2])] == 0
    assert [fault.error for fault in faults.all_kept()] == ["RuntimeError: planted"]


def test_the_error_keeps_no_tensor_and_needs_no_user_frame():
    with gpumagic.check(), pytest.raises(IndexError) as failed:
        eval(compile("x[i]", "/nowhere/site-packages/a.py", "eval"),
             {"x": torch.zeros(3), "i": torch.tensor([5])})  # fmt: skip
    assert "[0] = 5" in str(failed.value)
    assert all(isinstance(each, str) for each in failed.value.args)
