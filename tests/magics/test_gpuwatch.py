"""The ledger in a notebook: the report's line, `--report`, `--strict`, `--fix`, `%gpuwatch`."""

import gc
import sys
import warnings

import pytest
import torch

import gpumagic
from gpumagic.ledger import attribute

LOOP = "log = []\nfor i in range(1000):\n    log.append((X * i).sum().item())"


@pytest.fixture
def ip(ip):
    ip.run("X = torch.ones(10, 4)")
    yield ip
    assert attribute.running == ()


def test_the_line_of_the_report(ip):
    with warnings.catch_warnings(record=True) as caught:  # advice is no error, and not red
        warnings.simplefilter("always")
        done = ip.run("%%ongpu 1\n" + LOOP)
    assert not caught
    assert done.success
    assert done.text.count("read it once after the loop") == 1
    assert (
        "→ line 4: leave log on the device, with (X * i).sum().detach().clone() in place of (X * i)"
        in done.text
    )
    assert "1,000 waits at line 4: `(X * i).sum().item()`" in done.text
    html = gpumagic.last_report()._repr_html_()
    assert "<code>(X * i).sum().item()</code>" in html
    assert "`" not in html
    ledger = gpumagic.last_report().ledger
    assert (ledger.waits, ledger.transfers, ledger.virtual) == (1000, 0, True)
    (entry,) = ledger
    assert (entry.line, entry.file, entry.nbytes) == (4, "In [3]", 4000)
    # What was moved before the cell is said as moved, and not again.
    assert "moved X: 160 B" in done.text


def test_a_line_of_another_cell_is_named_as_errors_name_it(ip):
    ip.run("def f():\n    return [X.sum().item() for _ in range(20)]")
    assert "20 waits at In [3], line 2: `X.sum().item()`" in ip.run("%%ongpu 1\nf(); None").text
    error = ip.run("%%ongpu 1 --strict\nf()").error
    assert str(error).startswith("In [3], line 2: `X.sum().item()` makes the host wait")
    ip.run("%gpuwatch on")
    text = ip.run("f(); None").text
    assert "In [3], line 2" in text
    assert text.count("read it once after the loop") == 1
    ip.run("%gpuwatch off")


def test_copies_in_the_line(ip):
    done = ip.run("%%ongpu 1\nY = X.cpu()\nZ = Y.to('cuda:0')\nW = X.to('cuda:0')")
    assert "3 transfers: 160 B to cpu, 320 B to cuda:0" in done.text


def test_a_cell_that_copies_nothing_says_nothing(ip):
    text = ip.run("%%ongpu 1\nY = X + 1").text
    assert "transfer" not in text
    assert "wait" not in text
    assert "wait" not in ip.run("%%ongpu cpu\nX.cpu().sum().item()").text


def test_a_value_that_is_shown_is_no_news(ip):
    done = ip.run("%%ongpu 1 --strict\nX")
    assert done.success
    assert "wait" not in done.text
    assert {e.via for e in gpumagic.last_report().ledger} == {"display"}


def test_batches_are_said_once_and_are_in_the_ledger(ip):
    ip.run(
        "from torch.utils.data import DataLoader, TensorDataset\n"
        "data = TensorDataset(torch.arange(10.0))"
    )
    done = ip.run("%%ongpu 1\nfor (b,) in DataLoader(data, batch_size=5):\n    b + 1")
    assert "2 batches: 40 B copied" in done.text
    assert "transfer" not in done.text
    (entry,) = gpumagic.last_report().ledger
    assert (entry.via, entry.count, entry.nbytes, entry.line) == ("loader", 2, 40, 2)
    assert entry.implicit is False


def test_the_table(ip):
    done = ip.run("%%ongpu 1 --report\n" + LOOP)
    assert "log.append((X * i).sum().item())" in done.text
    assert "waits for cuda:1 (item, implicit)" in done.text
    assert "leave log on the device" in done.text
    assert "saves 999 of 1,000" in done.text
    html = gpumagic.last_report()._repr_html_()
    assert '<th scope="col"' in html
    assert "leave log on the device" in html


def test_strict_is_an_error_at_the_users_line(ip):
    done = ip.run("%%ongpu 1 --strict\nok = 1\nif X.sum() > 3:\n    never = 1")
    assert isinstance(done.error, gpumagic.ImplicitCopyError)
    assert "line 3: `X.sum() > 3` makes the host wait for cuda:1" in done.text
    assert "gpumagic" not in done.text.split("ImplicitCopyError")[0]
    assert "never" not in ip.ns
    assert ip.run("%%ongpu 1 --strict\nX.cpu().sum().item()").success


def test_fix(ip):
    done = ip.run(
        "%%ongpu 1 --fix\nW = torch.ones(4, 4, device='cpu')\nfor _ in range(3): Y = X @ W"
    )
    assert done.success
    assert "3 transfers: 192 B to cuda:1 at line 3: `X @ W`" in done.text
    assert ip.ns["W"].device == torch.device("cpu")
    assert ip.ns["Y"].device == torch.device("cuda:1")
    assert not ip.run("%%ongpu 1\nX @ torch.ones(4, 4, device='cpu')").success


def test_an_error_and_an_interrupt_leave_a_ledger(ip):
    done = ip.run("%%ongpu 1\nY = X.cpu()\n1 / 0")
    assert "1 transfer: 160 B to cpu" in done.text
    done = ip.run("%%ongpu 1\nY = X.cpu()\nraise KeyboardInterrupt")
    assert "1 transfer: 160 B to cpu" in done.text


@pytest.mark.parametrize(
    ("cell", "line", "code"),
    [
        ("%%ongpu 1 -q\n%%time\nfor _ in range(3):\n    X.sum().item()", 4, "X.sum().item()"),
        ("%%ongpu 1 -q\n\n%%time\ndef f():\n    return X.sum().item()\nf()", 5, "X.sum().item()"),
        ("%%ongpu 1 -q\n%%timeit -n 2 -r 1\nX.sum().item()", 3, "X.sum().item()"),
        ("%%ongpu 1 -q\n%time X.sum().item()", 2, "X.sum().item()"),
    ],
)
def test_timed_code_has_the_lines_of_its_cell(ip, cell, line, code):
    assert ip.run(cell).success
    (entry,) = gpumagic.last_report().ledger
    assert (entry.file, entry.line, entry.code) == ("In [3]", line, code)
    assert entry.where.source in cell
    assert entry.where.source


def test_a_list_that_timed_code_reads_is_implicit(ip):
    ip.run("%%ongpu 1 --quiet\n%%time\nfor _ in range(3):\n    X.tolist()")
    assert gpumagic.last_report().ledger.implicit == 3


@pytest.mark.parametrize(
    "options", ["--dry-run --strict", "--dry-run --fix", "--report -q", "--report --dry-run"]
)
def test_options_that_contradict_each_other(ip, options):
    done = ip.run(f"%%ongpu 1 {options}\nY = 1")
    assert not done.success
    assert "leave out one of them" in done.text
    assert len(done.text.strip().splitlines()) == 1
    assert "Y" not in ip.ns


def test_functions_of_other_cells(ip):
    ip.run("def read(x):\n    return x.sum().item()")
    ip.run("%%ongpu 1 --quiet\nfor _ in range(3): read(X)")
    (entry,) = gpumagic.last_report().ledger
    assert (entry.file, entry.line, entry.count) == ("In [3]", 2, 3)


# ---------------------------------------------------------------- %gpuwatch
def test_gpuwatch(ip):
    assert ip.run("%gpuwatch").text == "%gpuwatch is off; %gpuwatch on starts it\n"
    told = ip.run("%gpuwatch --report").text
    assert told == "%gpuwatch is off; %gpuwatch on --report starts it\n"
    assert "counted from now on" in ip.run("%gpuwatch on").text
    assert ip.run("%gpuwatch").text == "%gpuwatch is on\n"
    told = ip.run("%gpuwatch --report").text
    assert told == "%gpuwatch is on; %gpuwatch on --report changes it\n"
    done = ip.run("Y = X.to('cuda:0')")
    assert done.text.strip() == "1 transfer: 160 B to cuda:0"
    assert ip.run("Y + 1; None").text == ""
    assert "wait" not in ip.run("Y").text
    done = ip.run("%%ongpu 0\nY.sum().item(); None")
    assert done.text.count("1 wait at line 2") == 1
    assert "no longer counted" in ip.run("%gpuwatch off").text
    assert ip.run("Y.cpu(); None").text == ""
    assert "%gpuwatch was not on" in ip.run("%gpuwatch off").text


def test_gpuwatch_counts_the_rest_of_its_own_cell_and_shows_the_table(ip):
    done = ip.run("%gpuwatch on --report\nY = X.to('cuda:0')\nY.cpu(); None")
    assert "cpu → cuda:0 (copy_, explicit, not pinned)" in done.text
    assert "cuda:0 → cpu" in done.text
    done = ip.run("%gpuwatch on --strict\nY.sum().item()")
    assert "from now on, and the first implicit one raises an error;" in done.text
    assert isinstance(done.error, gpumagic.ImplicitCopyError)
    ip.run("%gpuwatch off")


def test_gpuwatch_in_a_cell_that_fails_or_is_empty(ip):
    ip.run("%gpuwatch on")
    ip.run("")
    ip.run("x = (")
    assert "1 transfer" in ip.run("X.cuda()\n1 / 0").text
    ip.ip.run_cell("X.cuda()", silent=True)
    assert "1 transfer" in ip.run("X.cuda(); None").text
    ip.run("%gpuwatch off")


@pytest.mark.parametrize("line", ["sometimes", "on off", "--wrong"])
def test_gpuwatch_bad_input(ip, line):
    done = ip.run(f"%gpuwatch {line}")
    assert not done.success
    assert "type %gpuwatch on" in done.text
    assert len(done.text.strip().splitlines()) == 1


def test_unloading_ends_it(ip):
    bare = torch._C._dispatch_dump("aten::copy_")
    ip.run("%gpuwatch on")
    ip.run("X.cpu()")
    assert torch._C._dispatch_dump("aten::copy_") != bare
    ip.run("%unload_ext gpumagic")
    assert torch._C._dispatch_dump("aten::copy_") == bare
    ip.run("%load_ext gpumagic")


def test_many_cells_do_not_grow(ip):
    ip.run("%gpuwatch on")
    counts = []
    for n in range(60):
        ip.run(f"%%ongpu 1 --quiet\nX.cpu(); {n}", store_history=False)
        ip.run(f"X.cpu(); {n}; None", store_history=False)
        if n % 20 == 19:
            gc.collect()
            counts.append(
                sum("gpumagic.ledger" in str(type(o).__module__) for o in gc.get_objects())
            )
    ip.run("%gpuwatch off")
    assert counts[1] == counts[2]
    assert "torch" in sys.modules
