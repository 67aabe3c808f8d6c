"""`%%gpufit`: the largest batch with which a cell fits, shown, bound and refused in one line."""

import pytest
import torch
from ours import OURS

from gpumagic import Fit
from gpumagic.telemetry.history import board

CELL = "X = torch.ones(n, 2**18)\nY = X * weights.sum()"  # 2 MiB each


@pytest.fixture
def notebook(ip):
    ip.ns["weights"] = torch.ones(4)
    return ip


def test_a_cell_is_fitted_and_nothing_of_it_is_left(notebook):
    done = notebook.run(f"%%gpufit 1 n = 1..10_000 --margin 10% -o found\n{CELL}")
    assert done.success, done.text
    found = notebook.ns["found"]
    assert isinstance(found, Fit)
    assert (found.value, found.confirmed, found.trains) == (460, True, False)
    said = "n = 460 is the largest that fits on cuda:1 (virtual), without a backward pass: it needs"
    assert said in done.text
    assert not {"n", "X", "Y"} & set(notebook.ns)
    assert board.entries[0]["title"] == "X = torch.ones(n, 2**18)"
    assert board.entries[0]["text"] == str(found)


def test_it_says_what_an_error_of_before_holds(notebook):
    notebook.run("def fails():\n    x = torch.ones(2**21, device='cuda:1')\n    1 / 0\nfails()")
    done = notebook.run(f"%%gpufit 1 n=1..9 --dry\n{CELL}")
    assert "→ `%gpufree` gives back 8.0 MiB: what outputs and errors hold" in done.text
    notebook.run("%gpufree")
    assert "%gpufree" not in notebook.run(f"%%gpufit 1 n=1..9 --dry\n{CELL}").text


def test_the_largest_of_a_range_may_be_typed_as_a_power_of_ten(notebook):
    done = notebook.run(f"%%gpufit 1 n=1..1e9 -q -o found\n{CELL}")
    assert done.success, done.text
    assert notebook.ns["found"].value == 486


def test_magics_in_it_are_left_out_of_the_foretelling(notebook):
    done = notebook.run(f"%%gpufit 1 n=1,2,3 -q -o found\n%time {CELL}".replace("\nY", "\n%time Y"))
    assert done.success, done.text
    assert "is the largest" not in done.text
    assert notebook.ns["found"].value == 3


def test_an_error_of_the_cell_s_is_its_own(notebook):
    done = notebook.run("%%gpufit 1 n=1..9\nX = n\nX.missing()")
    assert "line 3" in done.text
    assert "X.missing()" in done.text
    assert "AttributeError" in done.text
    assert OURS not in done.text


def test_ctrl_c_shows_what_is_known(notebook):
    notebook.ns["calls"] = []
    cell = "calls.append(n)\nif len(calls) and torch.cuda.is_initialized(): raise KeyboardInterrupt"
    done = notebook.run(f"%%gpufit 1 n=1..9\n{cell}")
    assert done.text.rstrip().endswith("KeyboardInterrupt")
    assert "interrupted: results so far" in done.text
    assert notebook.ns["calls"] == []


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("1", "one variable with its values is needed; type batch=1..4096"),
        ("1 n=1,2 m=3", "one variable with its values is needed; type batch=1..4096"),
        ("0 1 n=1,2", "name one GPU: leave out 1; for cards, type only --on CARD, CARD"),
        ("1 n=1..9 --on t4", "name one GPU: leave out 1; for cards, type only --on"),
        ("1 n=0..4", "n: the values must be numbers above 0, such as 16, 32"),
        ("1 batch=9..1", "batch=9..1: steps of 1 do not reach 1 from 9; type batch=1..9"),
        ("1 n=a,b", "n: the values must be numbers above 0"),
        ("1 text=1..4", "text is an option of gpumagic.fit; give the variable another name"),
        ("1 class=1..4", "'class' cannot be a variable's name"),
        (
            "1 n=1..9 --margin 200",
            "--margin: 200 is not a number from 0 to below 100; type",
        ),
        ("cpu n=1..9", "torch cannot limit the memory of cpu; type a GPU, or a card's name"),
        ("1 k=1..9", "k makes no difference: the code does not read it"),
        ("--on 4091 n=1..9", "no card '4091' is known; did you mean 'RTX 4090 24GB'"),
    ],
)
def test_what_is_typed_wrong_is_one_line(notebook, line, said):
    text = notebook.run(f"%%gpufit {line}\nX = torch.ones(n)").text
    assert text.startswith(f"UsageError: %%gpufit: {said}")
    assert text.count("\n") == 1
