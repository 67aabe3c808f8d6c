"""Run cells on two real engines: what they read, show and give back, and how they fail."""

import re
import signal
import threading

import pytest
from ours import OURS

from gpumagic.cluster import cell_on_ranks, gpu_cluster, launching
from gpumagic.cluster.output import MOST

pytestmark = pytest.mark.usefixtures("ranks")


def out(shell, cell):
    result = shell.run(cell)
    assert result.error is None, result.text
    return result


def failed(shell, cell):
    result = shell.run(cell)
    assert result.error is not None, result.text
    return re.sub(r"\x1b\[[\d;]*m", "", result.text)


def test_a_cell_runs_on_all_ranks_each_on_its_gpu(shell):
    result = out(
        shell,
        "%%ongpu @all\nprint('hello')\nprint('I am', dist.get_rank())\n"
        "a = torch.ones(3) * (1 + dist.get_rank())\ndist.all_reduce(a)\n(dist.get_rank(), a)",
    )
    assert [rank for rank, _ in result.result] == [0, 1]
    assert [a.tolist() for _, a in result.result] == [[3, 3, 3], [3, 3, 3]]
    lines = result.text.splitlines()
    for rank in (0, 1):
        assert lines.index(f"[{rank}] hello") + 1 == lines.index(f"[{rank}] I am {rank}")
    assert "2 ranks (virtual) · " in lines[-1]
    assert "rank 0, " in lines[-1]
    assert out(shell, "%%ongpu @1\nstr(a.device), os.environ['RANK']").result == [("cuda:0", "1")]
    assert (
        "no rank 5: the ranks are 0 to 1; type @all, @0 or @0,1"
        in shell.run("%%ongpu @1,5\n1").text
    )
    out(shell, "%gpucluster pull a")
    assert [a.sum() for a in shell.ns["a"]] == [9, 9]


def test_what_a_cell_reads_is_sent_once_and_belongs_together_there(shell):
    shell.run(
        "from torch import nn\nfactor = 2\nnet = nn.Linear(4, 2)\n"
        "class Scale:\n    def __call__(self, x): return net(x).sum() * factor\n"
        "scale = Scale()\nx = torch.ones(3, 4)"
    )
    shell.run("import torch; x = torch.ones(3, 4)")
    first = out(shell, "%%ongpu @all\nloss = scale(x)\nisinstance(scale, Scale), loss.item()")
    assert [kind for kind, _ in first.result] == [True, True]
    assert "sent scale, x, Scale, net and 1 more: " in first.text
    shell.run("opt = torch.optim.SGD(net.parameters(), 1.0)")
    cell = "%%ongpu @all\nloss = scale(x); loss.backward()\n" + (
        "opt.param_groups[0]['params'][0] is net.weight, net.weight.device.type"
    )
    second = out(shell, cell)
    assert second.result == [(True, "cuda")] * 2
    assert "sent opt:" in second.text
    assert "sent" not in out(shell, "%%ongpu @all\nscale(x).item()").text
    shell.run("factor = 0")
    third = out(shell, "%%ongpu @all\nscale(x).item()")
    assert third.result == [0, 0]
    assert "sent factor again:" in third.text
    shell.run("items = (i for i in range(3))")
    refused = failed(shell, "%%ongpu @all\nnext(items)")
    assert "items cannot be sent to the ranks (cannot pickle 'generator' object)" in refused


def test_what_a_rank_cannot_make_is_told_and_sent_again_when_it_can(shell):
    shell.run("class Odd:\n    def __reduce__(self): return int, (text,)\ntext = 'x'\nodd = Odd()")
    text = failed(shell, "%%ongpu @all\nodd")
    assert "ValueError: invalid literal for int()" in text
    assert "when the rank unpickled what the notebook sent" in text
    assert OURS not in text
    shell.run("text = '7'")
    assert out(shell, "%%ongpu @all\nodd").result == [7, 7]


def test_of_a_split_variable_that_a_function_reads_ranks_get_only_parts(shell):
    shell.run("import torch\nbig = torch.ones(2**18)\ndef total(): return big.sum()")
    done = out(shell, "%%ongpu @all --split big --reduce s=sum\ns = total()")
    assert shell.ns["s"] == 2**18
    assert "sent big, total: 1.0 MiB in" in done.text
    assert out(shell, "%%ongpu @all\ntotal().item()").result == [2**18] * 2


def test_commas_may_separate_names_and_ranks(shell):
    out(shell, "%%ongpu @all\na, b = 1, dist.get_rank()")
    out(shell, "%gpucluster pull a, b")
    assert (shell.ns["a"], shell.ns["b"]) == ([1, 1], [0, 1])
    out(shell, "%%ongpu @0\nonly = 5")
    out(shell, "%gpucluster pull only")
    assert "name 'only' is not defined" in shell.run("%%ongpu @1\nonly").text
    shell.run("only = 6")
    assert out(shell, "%%ongpu @1\nonly").result == [6]
    assert "no rank 7 or 8: the ranks are 0 to 1" in failed(shell, "%gpucluster restart 7,8")


REFUSED = {
    "what cannot be sent": "%%ongpu @all\nnext(gen)",
    "await": "%%ongpu @all\nimport asyncio\nawait asyncio.sleep(0)",
    "no such name": "%%ongpu @all --gather nope\nother = 1",
}


@pytest.mark.parametrize("cell", REFUSED.values(), ids=REFUSED)
def test_a_cell_that_is_refused_changes_nothing_in_the_ranks(shell, cell):
    shell.run("import torch\nw = torch.ones(3); gen = (i for i in range(3))")
    out(shell, "%%ongpu @all\nw += 5")
    failed(shell, cell)
    result = out(shell, "%%ongpu @all\nw.tolist()")
    assert result.result == [[6, 6, 6]] * 2
    assert "sent" not in result.text


# As that of transformers' tokenizers: `to` changes it in place.
ENCODING = """
class Encoding:
    def __init__(self, ids):
        self.ids, self.length = ids, 2

    def to(self, device):
        self.ids = self.ids.to(device)
        return self
"""


def test_what_ranks_made_is_theirs_until_the_notebook_changes_it(shell):
    shell.run("loss, kept = 99.0, [1]")
    out(shell, "%%ongpu @all\nloss = 2.0\nkept.append(2)")
    assert out(shell, "%%ongpu @all\nloss, kept").result == [(2.0, [1, 2])] * 2
    shell.run("kept.append('here')")  # changed in both places: the same list
    both = out(shell, "%%ongpu @all\nkept")
    assert both.result == [[1, 2]] * 2
    assert (
        "kept changed in the notebook and in ranks; the ranks keep theirs; del kept in the"
        in both.text
    )
    out(shell, "%%ongpu @all\ndel kept")
    assert out(shell, "%%ongpu @all\nkept").result == [[1, "here"]] * 2
    shell.run("loss = 7.0; kept = [0]")
    anew = out(shell, "%%ongpu @all\nloss, kept")
    assert anew.result == [(7.0, [0])] * 2
    assert "sent loss again, kept again: " in anew.text
    out(shell, "%gpucluster pull loss")
    assert shell.ns["loss"] == [7.0, 7.0]
    assert out(shell, "%%ongpu @all\nloss").result == [7.0, 7.0]  # not the list
    out(shell, "%%ongpu @all\ndel kept")
    assert out(shell, "%%ongpu @all\nkept").result == [[0]] * 2  # sent again


def test_a_move_in_the_ranks_is_no_change_of_theirs(shell, tmp_path, monkeypatch):
    (tmp_path / "encodings_of.py").write_text(ENCODING)
    monkeypatch.syspath_prepend(tmp_path)
    add = f"import sys\nsys.path.append({str(tmp_path)!r})"
    out(shell, f"%%ongpu @all\n{add}")
    shell.run("import torch, encodings_of\nbatch = encodings_of.Encoding(torch.ones(2))")
    assert out(shell, "%%ongpu @all\nstr(batch.ids.device)").result == ["cuda:0"] * 2
    shell.run("batch.length = 7")
    again = out(shell, "%%ongpu @all\nbatch.length")
    assert again.result == [7, 7]
    assert "sent batch again: " in again.text


def test_what_the_notebook_freezes_is_frozen_in_the_ranks_and_what_they_freeze_stays(shell):
    shell.run("import torch; net = torch.nn.Linear(2, 1)")
    cell = "%%ongpu @all\n[p.requires_grad for p in net.parameters()]"
    assert out(shell, cell).result == [[True, True]] * 2
    shell.run("net.bias.requires_grad_(False)")
    frozen = out(shell, cell)
    assert frozen.result == [[True, False]] * 2
    assert "sent net again: " in frozen.text
    out(shell, "%%ongpu @all\nnet.weight.requires_grad_(False)")
    shell.run("opt = torch.optim.SGD(net.parameters(), 1.0)")
    out(shell, "%%ongpu @all\nopt")
    assert out(shell, cell).result == [[False, False]] * 2


def test_a_rank_has_no_keyboard(shell):
    for asks in ("input('name?')", "import getpass; getpass.getpass()"):
        assert "EOFError" in failed(shell, f"%%ongpu @0\n{asks}")


def test_what_a_cell_had_assigned_before_it_failed_is_the_ranks_own(shell):
    shell.run("loss, later = 99.0, 1")
    out(shell, "%%ongpu @all\nlater")
    shell.run("later = 2")
    failed(shell, "%%ongpu @all\nloss = 2.5\n1 / 0\nlater = 3")
    assert out(shell, "%%ongpu @all\nloss, later").result == [(2.5, 2)] * 2


def test_what_a_class_behind_a_librarys_object_reads_is_sent_too(shell):
    shell.run(
        "from torch.utils.data import DataLoader, Dataset\nshift = 10\n"
        "class Numbers(Dataset):\n    def __len__(self): return 4\n"
        "    def __getitem__(self, i): return i + shift\nloader = DataLoader(Numbers(), 4)"
    )
    cell = "%%ongpu @all\n[batch.tolist() for batch in loader]"
    assert out(shell, cell).result == [[[10, 11, 12, 13]]] * 2
    shell.run("shift = 20")
    assert out(shell, cell).result == [[[20, 21, 22, 23]]] * 2


def test_magics_and_commands_run_in_the_ranks(shell):
    lines = out(shell, "%%ongpu @all\n%%time\nprint('timed')\n!echo shouted").text.splitlines()
    for rank in (0, 1):
        # The other rank's lines may stand between.
        own = [line for line in lines if line.startswith(f"[{rank}] ")]
        assert own[:2] == [f"[{rank}] timed", f"[{rank}] shouted"]
        assert any("Wall time" in line for line in own)


def test_a_rank_that_waits_for_one_that_does_not_run_the_cell_is_told(shell, monkeypatch):
    monkeypatch.setattr(cell_on_ranks, "HANGS_S", 1.0)
    text = failed(shell, "%%ongpu @0\ndist.barrier()")
    assert "rank 0 waits in barrier (In [1], line 2); rank 1 does not run this cell" in text


def test_items_are_split_between_ranks_and_gathered_in_order(shell):
    shell.run("words = [f'{n}' * n for n in range(17)]")
    whole = [len(word) for word in shell.ns["words"]]
    cell = "lengths = [len(w) for w in words]\ncount = len(words)"
    for line in ("", " --chunk 4"):
        asked = f"%%ongpu @all --split words --gather lengths --reduce count=sum{line}"
        result = out(shell, f"{asked}\n{cell}")
        assert (shell.ns["lengths"], shell.ns["count"]) == (whole, 17)
        assert "17 words: " in result.text
    assert out(shell, "words = []").error is None
    out(shell, "%%ongpu @all --split words --gather lengths\nlengths = [len(w) for w in words]")
    assert shell.ns["lengths"] == []
    # Afterwards the name is all of them again, and what ranks have made stays theirs.
    shell.run("import torch; net, rows = torch.nn.Linear(2, 1), torch.ones(5, 2)")
    out(shell, "%%ongpu @all\nwith torch.no_grad(): net.weight.fill_(3)\nrows.sum()")
    out(shell, "%%ongpu @all --split rows --reduce count=sum\ncount = len(rows); net(rows)")
    assert shell.ns["count"] == 5
    cell = "%%ongpu @all\nlen(rows), net.weight.sum().item()"
    assert out(shell, cell).result == [(5, 6.0)] * 2


def test_values_of_inference_mode_come_back_and_what_cannot_says_why(shell):
    shell.run("import torch\nwith torch.inference_mode(): four = torch.arange(4)")
    cell = "with torch.inference_mode():\n    more = four + 1"
    out(shell, f"%%ongpu @all --split four --gather more\n{cell}")
    assert shell.ns["more"].tolist() == [1, 2, 3, 4]
    text = failed(shell, "%%ongpu @all --gather lines\nlines = (n for n in range(3))")
    assert "it cannot be pickled (cannot pickle 'generator' object)" in text


def test_an_error_is_shown_once_with_its_line_and_frees_a_rank_in_a_collective(shell):
    out(shell, "%%ongpu @all\nkept = torch.ones(2)")
    text = failed(
        shell,
        "%%ongpu @all\nif dist.get_rank() == 0:\n    dist.all_reduce(kept)\nelse:\n    1 / 0",
    )
    assert text.count("ZeroDivisionError: division by zero") == 1
    assert "error in rank 1 (the other ranks were stopped):" in text
    assert re.search(r"^In \[\d+\], line 5|:5, in|:5$|-> 5 ", text, re.MULTILINE)
    assert OURS not in text
    result = out(shell, "%%ongpu @all\ndist.all_reduce(kept)\nkept.tolist()")
    assert result.result == [[2, 2], [2, 2]]


def test_code_of_a_file_and_of_a_cell_is_shown_with_its_own_lines(shell, tmp_path):
    (tmp_path / "step2.py").write_text("def fails():\n    return 1 / 0\n")
    out(shell, f"%run -i {tmp_path / 'step2.py'}")
    out(shell, "def calls():\n    return fails()")
    text = failed(shell, "%%ongpu @0\ncalls()")
    assert "return fails()" in text
    assert "return 1 / 0" in text
    assert "step2.py" in text
    assert "error in rank 0" in text


@pytest.mark.slow
def test_a_recursion_without_end_is_drawn_with_each_line_once_or_twice(shell):
    code = "def even(n):\n    return odd(n + 1)\ndef odd(n):\n    return even(n + 1)\neven(0)"
    text = failed(shell, f"%%ongpu @0\n{code}")
    assert "RecursionError: maximum recursion depth exceeded" in text
    assert 2 <= text.count("return odd(n + 1)") <= 8
    assert "skipping similar frames" in text


def test_ranks_that_wait_for_one_another_are_told_who_waits_where(shell, monkeypatch):
    monkeypatch.setattr(cell_on_ranks, "HANGS_S", 1.0)
    text = failed(shell, "%%ongpu @all\nif dist.get_rank() == 0:\n    dist.barrier()")
    assert "deadlock: rank 0 waits in barrier (In [" in text
    assert "], line 3); rank 1 has ended the cell" in text
    assert out(shell, "%%ongpu @all\ndist.barrier()\n1").result == [1, 1]


@pytest.mark.slow
def test_a_rank_that_makes_a_group_alone_is_told(shell, monkeypatch):
    monkeypatch.setattr(cell_on_ranks, "HANGS_S", 1.0)
    monkeypatch.setattr(cell_on_ranks, "GRACE_S", 2.0)
    text = failed(shell, "%%ongpu @all\nif dist.get_rank() == 0:\n    dist.new_group([0, 1])")
    assert "deadlock: rank 0 waits in new_group (In [" in text
    assert out(shell, "%%ongpu @all\nimport torch\ntorch.ones(1).item()").result == [1, 1]


def test_a_rank_that_still_writes_its_error_keeps_its_variables(shell, monkeypatch):
    monkeypatch.setattr(cell_on_ranks, "GRACE_S", 1.0)
    out(shell, "%%ongpu @all\nmine = dist.get_rank()")
    slow = "class Slow(Exception):\n    def __str__(self): time.sleep(1.5); return 'slow'\n"
    text = failed(shell, f"%%ongpu @all\n{slow}if mine:\n    raise Slow\n1 / 0")
    assert "ZeroDivisionError" in text
    assert "was replaced" not in text
    assert out(shell, "%%ongpu @all\nmine").result == [0, 1]


@pytest.mark.parametrize(
    "wait", ["time.sleep(60)", "if dist.get_rank(): dist.barrier()\ntime.sleep(60)"]
)
def test_ctrl_c_ends_the_cell_on_all_ranks_and_the_next_one_runs(shell, wait):
    out(shell, "%%ongpu @all\nmine = dist.get_rank()")
    timer = threading.Timer(1.0, signal.raise_signal, (signal.SIGINT,))
    timer.start()
    text = failed(shell, f"%%ongpu @all\n{wait}")
    timer.join()
    assert "KeyboardInterrupt: interrupted on 2 ranks" in text
    assert OURS not in text
    assert out(shell, "%%ongpu @all\ndist.barrier()\nmine").result == [0, 1]


def test_an_interrupt_that_comes_late_ends_no_other_cell(shell):
    cell = "import signal\nsignal.raise_signal(signal.SIGINT)\ntime.sleep(0.01)\n7"
    assert out(shell, f"%%ongpu @all\n{cell}").result == [7, 7]


def test_a_rank_that_prints_without_end_is_bounded(shell):
    text = out(shell, "%%ongpu @all\nfor n in range(40_000):\n    print('line', n)").text
    assert len(text) < 3 * MOST
    assert re.search(r"… and [\d,]+ more lines", text)


def test_an_error_between_devices_is_explained_in_the_rank(shell):
    text = failed(shell, "%%ongpu @0\nx = torch.ones(3)\nx + x.cpu()")
    assert "between devices · In [1], line 3: x + x.cpu()" in text
    assert "\n      x + x\n" in text


def test_a_rank_that_dies_is_told_with_its_cause_and_replaced_in_its_place(shell, ranks):
    out(shell, "%%ongpu @all\nkept = dist.get_rank()")
    starts = "import subprocess; subprocess.Popen(['sleep', '600'])"
    kills = f"if kept == 0:\n    {starts}\n    os.kill(os.getpid(), 9)"
    died = shell.run(f"%%ongpu @all\n{kills}\ntime.sleep(60)")
    its = launching.marked(gpu_cluster.current()._engines.mark)
    assert not any("sleep" in process.cmdline() for process in its)
    assert "rank 0 has died: it was ended by SIGKILL (signal 9)" in died.text
    assert str(died.error) == "rank 0: died: it was ended by SIGKILL (signal 9)"
    del died
    assert "type %gpucluster restart 0" in shell.run("%%ongpu @all\n1").text
    assert "gone: it was ended by SIGKILL" in shell.run("%gpucluster").text
    shell.run("%gpucluster restart 0")
    cell = "import torch, torch.distributed as dist\n(dist.get_rank(), 'kept' in globals())"
    assert out(shell, f"%%ongpu @all\n{cell}").result == [(0, False), (1, True)]
    assert out(shell, "%%ongpu @all\nx = torch.ones(1)\ndist.all_reduce(x)\nx.item()").result == [
        2,
        2,
    ]


def test_a_tensor_of_which_only_the_shape_is_read_is_sent(shell):
    shell.run("import torch; big = torch.ones(3, 4)")
    assert out(shell, "%%ongpu @all\ntuple(big.shape)").result == [(3, 4), (3, 4)]
