"""Bad input is one clear line, and nothing runs or moves."""

import pytest
from IPython.core.error import UsageError

from gpumagic.magics.arguments import on_cluster, on_several, placing_request


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("%%ongpu 7", "no GPU 7"),
        ("%%ongpu gpu:x", "gpu:x"),
        ("%%ongpu 0,,1", "0,,1"),
        ("%%ongpu 0,1", "0,1"),
        ("%%ongpu all", "all"),
        (
            "%%ongpu 0,1 --gather y",
            "0,1 needs --split, the variables to divide among these GPUs; type %%ongpu 0,1 --split",
        ),
        ("%%ongpu 1 --on h100", "--on needs --dry-run; type %%ongpu --dry-run --on h100"),
        ("%%ongpu 1 --dry-run --on h100", "--on and 1 do not combine; leave out one of them"),
        ("%%ongpu --dry-run --on h9000", "h9000"),
        ("%%ongpu 1 --memory --profile", "--memory and --profile do not combine; leave out one"),
        ("%%ongpu 1 --check=nam", "--check: nam is not nan; type --check nan"),
        ("%%ongpu 1 --check trace.json", "--check: trace.json is not nan"),
        ("%%ongpu 1 --split X", "--split is for several GPUs"),
        ("%%ongpu 1 --reduce X=mean", "--reduce is for several GPUs"),
        ("%%ongpu @all --chunk 4", "--chunk needs --split; type --split x,y --chunk 4"),
        ("%%ongpu 0,1 --split X --strict", "--strict is for one device"),
        ("%%ongpu @1 --no-move", "--no-move is for one device"),
        ("%%ongpu 0,1 --split X --dry-run", "--dry-run is for one device"),
        ("%%ongpu @all --dry-run", "--dry-run is for one device; leave it out, or type one"),
        ("%%ongpu 0,1 --split 1X", "1X cannot be the name of a variable"),
        ("%%ongpu 0,1 --split X,", "an empty word cannot be the name of a variable"),
        ("%%ongpu 0,1 --split X,X", "X is named twice"),
        ("%%ongpu 0,1 --split X --chunk 0", "0 is not a whole number above 0"),
        ("%%ongpu 0,1 --split X --gather y --reduce y=mean", "y is in --gather and in"),
        ("%%ongpu 0,1 --split X --reduce y", "y has no reduction"),
        ("%%ongpu", "which device?"),
        ("%%ongpu 1 --nope", "--nope"),
        ("%%ongpu 1 0", "unexpected 0; did you mean 0,1?"),
        ("%%ongpu gpu 1", "unexpected 1; did you mean gpu:1?"),
        ("%%ongpu 1 --memory=yes", "--memory takes no value; type --memory\n"),
        ("%%ongpu 1 report", "unexpected report; did you mean --report?"),
        ("%%ongpu report", "unexpected report; did you mean --report?"),
        ("%%ongpu --dry-run --on A100", "may be 'A100 80GB' or 'A100 40GB'; type one of them"),
        ("%%ongpu --dry-run --on L4 0", "--on and 0 do not combine; leave out one of them"),
        ("%%ongpu '1", "quotation"),
        ("%%ongpu mps", "mps"),
        ("%%ongpu GPU-0000", "GPU-0000"),
        ("%%ongpu -1", "-1"),
    ],
)
def test_bad_input_is_one_line_and_nothing_runs_or_moves(ip, line, says):
    ip.run("X = torch.ones(2); ran = False")
    done = ip.run(f"{line}\nran = True\nX + 1")
    assert isinstance(done.error, UsageError)
    assert done.text.startswith("UsageError: %%ongpu")
    assert done.text.count("\n") == 1
    assert says in done.text
    assert any(word in done.text for word in ("type", "leave out", "did you mean"))
    assert ip.ns["ran"] is False
    assert ip.ns["X"].device.type == "cpu"


@pytest.mark.parametrize(
    ("cell", "meant"),
    [
        ("%%ongpu 1 --raport\n1", "--report"),
        ("%gpus --virtul 2", "--virtual"),
        ("%%gputime cpu 0 --swep n=1,2\n1", "--sweep"),
        ("%%ongpu 1 --check nans\n1", "nan"),
        ("%ongpu hme", "home"),
        ("%%ongpu 1 --zzz\n1", None),
    ],
)
def test_a_misspelled_option_asks_what_was_meant(ip, cell, meant):
    text = ip.run(cell).text
    asked = f"; did you mean {meant}?\n" if meant else "unexpected --zzz; type %"
    assert asked in text
    assert text.count("\n") == 1


def test_what_a_line_for_several_devices_asks_for():
    asked = placing_request("@0, 1 --split x, y --gather z --reduce loss = mean, acc=max --chunk 4")
    assert (asked.where, on_cluster(asked.where), on_several(asked.where)) == ("@0,1", True, False)
    assert (asked.split, asked.gather, asked.chunk) == (("x", "y"), ("z",), 4)
    assert asked.reduce == (("loss", "mean"), ("acc", "max"))
    for where, several in (("0,1", True), ("all", True), ("1 --dry-run", False)):
        asked = placing_request(where + " --split x" * several)
        assert (asked.elsewhere, on_several(asked.where)) == (True, several)
    assert not placing_request("1").elsewhere


def test_a_standing_placement_is_on_one_device(ip):
    done = ip.run("%ongpu @all")
    assert "%ongpu: @all works for one cell only; type %%ongpu @all --split NAME" in done.text


def test_empty_cells(ip):
    for cell in ("%%ongpu 1", "%%ongpu 1\n\n"):
        done = ip.run(cell)
        assert done.text.startswith("UsageError: ")
        assert done.text.count("\n") == 1
        assert "empty" in done.text


def test_only_comments(ip):
    assert ip.run("%%ongpu 1\n# nothing").success


def test_no_room(ip):
    ip.run("big = torch.empty(2**28 + 1); small = torch.ones(2)")
    done = ip.run("%%ongpu 1\nran = big, small")
    assert "nothing was moved" in done.text
    assert done.text.count("\n") == 1
    assert "ran" not in ip.ns
    assert ip.ns["small"].device.type == "cpu"


def test_code_that_ipython_runs_silently_is_refused(ip):
    done = ip.run("%%ongpu 1\nx = 5", silent=True, store_history=False)
    assert isinstance(done.error, UsageError)
    assert "x" not in ip.ns


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("%gpus doctor", "%gpus: unexpected doctor; did you mean --doctor?"),
        ("%gpus 1 0", "%gpus: unexpected 0; did you mean 0,1?"),
        ("%ongpu of", "%ongpu: unexpected of; did you mean off?"),
        ("%ongpu xx", "%ongpu: unexpected xx; type 1, cuda:1, cpu, free, off or home"),
        (
            "%ongpu 1 print(2)",
            "%ongpu: unexpected print(2); for this code only, type %%ongpu 1",
        ),
        (
            "%ongpu 1 net(images)",  # `images` is an example of a value that --split needs
            "%ongpu: unexpected net(images); for this code only, type %%ongpu 1",
        ),
        ("%gpumem $nowhere", "%gpumem: $nowhere is neither"),
        ("%%ongpu 0\n%%ongpu 1\n1", "%%ongpu: the cell says %%ongpu 0 too; leave that line out"),
    ],
)
def test_a_line_that_means_another_one_says_which(ip, line, says):
    assert ip.run(line).text.startswith(f"UsageError: {says}")


def test_names_of_cards_need_no_quotes():
    for line, on in (
        ("--dry-run --on A100 80GB", "A100 80GB"),
        ("--on RTX 4090, h100 80gb --dry-run", "RTX 4090,h100 80gb"),
        ("--on rtx 4070 ti super --dry-run", "rtx 4070 ti super"),
    ):
        assert placing_request(line).on == on


def test_gpumem_takes_a_device_from_a_variable(ip):
    ip.run("here = 'cuda:1'")
    assert ip.run("%gpumem $here").text.startswith("cuda:1 (virtual)")


@pytest.mark.parametrize("magic", ["%%gputime cpu 0 --max-time 0.1", "%%gpufit n=1..4"])
def test_a_comment_may_be_above_a_magic_that_runs_the_cell_itself(ip, magic):
    ip.ns["n"] = 1
    done = ip.run(f"# what it is for\n{magic}\nn + 3\n1 / 0")
    assert "Cell In[2], line 4\n    1 / 0\nZeroDivisionError" in done.text
