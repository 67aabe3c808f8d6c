"""`%%ongpu 0,1 --split x --gather y`: a thread for each GPU, and the notebook as it was."""

import ast
import signal
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from gpumagic import virtual
from gpumagic.cluster.scattered import Sharing
from gpumagic.cluster.threads import CellOnDevices
from gpumagic.placement.torch_devices import find_several

MEET = threading.Barrier(2)
MAIN = threading.main_thread()


def both_are_here():
    MEET.wait(20)


def press_ctrl_c():
    signal.pthread_kill(MAIN.ident, signal.SIGINT)


SET_UP = """
net = nn.Linear(4, 2)
x = torch.randn(17, 4)
prompts = [f"prompt {n}" for n in range(17)]
@torch.no_grad()
def forward():
    return net(x)
"""


@pytest.fixture
def notebook(ip):
    ip.run(SET_UP)
    ip.ns |= {"both_are_here": both_are_here, "press_ctrl_c": press_ctrl_c}
    yield ip
    MEET.reset()
    assert not [t for t in threading.enumerate() if t.name.startswith("gputime")]


def test_two_gpus_share_the_items_and_the_notebook_gets_what_is_gathered(notebook):
    before = {**notebook.ns}
    done = notebook.run(
        "%%ongpu 0,1 --split x --gather y --reduce loss=mean\n"
        "both_are_here()\ny = net(x)\nloss = y.mean()\n(len(y), y.device.index)"
    )
    assert done.result == [(9, 0), (8, 1)]
    net, x = notebook.ns["net"], notebook.ns["x"]
    # Another number of rows may take another kernel, with other rounding errors.
    torch.testing.assert_close(notebook.ns["y"], net(x))
    mean = (net(x)[:9].mean() + net(x)[9:].mean()) / 2
    torch.testing.assert_close(notebook.ns["loss"], mean)
    assert {net.weight.device.type, x.device.type, notebook.ns["y"].device.type} == {"cpu"}
    changed = {n for n, value in notebook.ns.items() if before.get(n) is not value}
    assert {n for n in changed if not n.startswith("_")} == {"y", "loss"}
    line = done.text.splitlines()[-1]
    assert line.startswith("cuda:0, cuda:1 (virtual) · ")
    assert "(slowest: " in line
    assert "· 17 x: 9 + 8 · sent net, x: 352 B in" in line
    assert "· gathered y on the CPU · loss is the mean of 2 parts · peak " in line
    assert "· peak " in line


def test_results_that_nothing_gathers_are_said_to_be_dropped(notebook):
    line = notebook.run("%%ongpu 0,1 --split x\ny = net(x)").text.splitlines()[-1]
    assert "· not gathered: y (add --gather y) · peak " in line
    assert "y" not in notebook.ns


def test_what_is_trained_in_the_copies_is_said_to_stay_as_it_was(notebook):
    notebook.run(
        "net, X = nn.Linear(2, 1), torch.ones(4, 2)\nopt = torch.optim.SGD(net.parameters(), 1)"
    )
    step = "net(X).sum().backward()\nopt.step()"
    ran = notebook.run(f"%%ongpu 0,1 --split X\n{step}")
    assert "changed in the copies only, not in the notebook: net" in ran.text
    assert "changed only" not in notebook.run("%%ongpu 0,1 --split X\nnet(X).sum()").text


def test_sent_is_what_came_from_another_device(notebook):
    notebook.run("x = x.to('cuda:0')")
    line = notebook.run("%%ongpu 0,1 --split x\ny = x * 2").text.splitlines()[-1]
    assert "· sent x: 128 B in" in line  # 8 rows, to cuda:1


def test_a_function_reads_what_its_thread_has(notebook):
    done = notebook.run(
        "%%ongpu 0,1 --split x --gather y -q\nscale = 2.0\ny = forward() * later()\n"
        "def later(): return scale"
    )
    assert "later" in str(done.error)
    notebook.run("def later(): return scale")
    done = notebook.run("%%ongpu 0,1 --split x --gather y -q\nscale = 2.0\ny = forward() * later()")
    assert done.text == ""
    torch.testing.assert_close(notebook.ns["y"], notebook.ns["net"](notebook.ns["x"]).detach() * 2)
    assert "scale" not in notebook.ns


@settings(max_examples=5)
@given(count=st.integers(0, 9), chunk=st.integers(0, 4))
def test_the_results_are_those_of_one_device(count, chunk):
    virtual.enable(2, 2**30)
    try:
        asked = Sharing(("x", "texts"), ("y", "out"), (("n", "sum"),), chunk or None)
        x, net = torch.randn(count, 3), nn.Linear(3, 2)
        space = {"x": x, "texts": [f"t{n}" for n in range(count)], "net": net}
        tree = ast.parse("y = net(x)\nout = [t.upper() for t in texts]\nn = len(out)")
        names = ["net", "x", "texts", "len"]
        CellOnDevices(tree, "<cell>", find_several("0,1"), asked, space, names).run()
        assert torch.allclose(space["y"], net(x))
        assert space["y"].shape == (count, 2)
        assert space["out"] == [f"T{n}" for n in range(count)]
        assert space["n"] == count
    finally:
        virtual.disable()


def test_who_is_free_takes_the_next_chunk(notebook):
    done = notebook.run(
        "%%ongpu 0,1 --split prompts --gather out --chunk 3\n"
        "slow = 'prompt 0' in prompts\nout = [(p, torch.ones(1).device.index) for p in prompts]\n"
        "if slow:\n    others.wait(20)\nelif 'prompt 16' in prompts:\n    others.set()",
    )
    assert "name 'others' is not defined" in done.text
    notebook.ns["others"] = threading.Event()
    done = notebook.run(notebook.ip.history_manager.input_hist_raw[-1])
    out = notebook.ns["out"]
    assert [prompt for prompt, _ in out] == notebook.ns["prompts"]
    first = out[0][1]
    assert [index == first for _, index in out] == [True] * 3 + [False] * 14
    assert "17 prompts: 6 parts of at most 3" in done.text


def test_fewer_items_than_gpus(notebook):
    done = notebook.run("%%ongpu 0,1 --split one --gather y\ny = one * 2")
    assert "--split one: there is no variable one; the cell reads no variable" in done.text
    notebook.run("one = x[:1]")
    done = notebook.run("%%ongpu 0,1 --split one --gather y\ny = one * 2; y.device.index")
    assert done.result == [0]
    assert "(cuda:1 had no items) · 1 one: 1 + 0" in done.text


def test_what_is_not_here_is_the_cpu_and_that_is_told(notebook):
    done = notebook.run("%%ongpu 0,7? --split x --gather y\ny = x * 2")
    assert done.text.startswith("cuda:0, cpu (virtual")
    assert "→ cpu: asked for GPU 7, which is not here" in done.text


def test_what_is_gathered_is_of_the_notebooks_own_classes(notebook):
    notebook.run(
        "import math\nclass Mine:\n    def __init__(self, text): self.text = text\n"
        "items = [Mine(p) for p in prompts]"
    )
    done = notebook.run(
        "%%ongpu 0,1 --split items --gather mine,news\n"
        "class New:\n    def root(self): return math.sqrt(4)\n"
        "assert all(isinstance(i, Mine) for i in items)\n"
        "mine, news = [Mine(i.text) for i in items], [New() for i in items]"
    )
    assert done.success, done.text
    assert all(type(one) is notebook.ns["Mine"] for one in notebook.ns["mine"])
    assert [one.text for one in notebook.ns["mine"]] == notebook.ns["prompts"]
    assert {one.root() for one in notebook.ns["news"]} == {2.0}


def test_what_holds_no_tensors_is_shared_and_what_does_is_not(notebook):
    notebook.run(
        "log, box, data = [], {'w': torch.zeros(2)}, torch.utils.data.TensorDataset(x)\n"
        "params = torch.zeros(4, requires_grad=True)"
    )
    done = notebook.run(
        "%%ongpu 0,1 --split params --gather grads -q\n"
        "log.append(box['w'].device.index)\nbox['w'] += 1\n"
        "assert data.tensors[0].device.type == 'cpu'\n"
        "params.sum().backward()\ngrads = params.grad"
    )
    assert done.success, done.text
    assert sorted(notebook.ns["log"]) == [0, 1]
    assert notebook.ns["box"]["w"].tolist() == [0, 0]
    assert notebook.ns["grads"].tolist() == [1] * 4
    assert notebook.ns["params"].grad is None


def test_an_error_is_shown_once_with_its_device_and_ends_the_other(notebook):
    done = notebook.run(
        "%%ongpu 0,1 --split prompts --gather prompts --chunk 1\n"
        "both_are_here()\nkept = net, prompts, torch.ones(9)\n"
        "if torch.ones(1).device.index:\n    1 / 0\nwhile True: pass"
    )
    assert isinstance(done.error, ZeroDivisionError)
    assert done.text.count("ZeroDivisionError") == 1
    lines = done.text.splitlines()
    assert "Cell In[" in lines[1]
    assert lines[1].endswith("line 5")
    assert "gpumagic" not in done.text
    assert "on cuda:1, line 5, prompts[" in done.text
    assert [torch.cuda.memory_allocated(n) for n in range(2)] == [0, 0]
    assert len(notebook.ns["prompts"]) == 17
    assert notebook.run("torch.ones(1).device.type").result == "cpu"


def test_an_error_names_its_items_without_a_chunk_size_too(notebook):
    done = notebook.run(
        "%%ongpu 0,1 --split prompts,x -q\nif 'prompt 16' in prompts:\n    len(x) / 0"
    )
    assert "on cuda:1, line 3, prompts[9:17], x[9:17]" in done.text


def test_ctrl_c_ends_all_and_the_next_cell_runs(notebook):
    done = notebook.run(
        "%%ongpu 0,1 --split prompts --gather prompts\n"
        "both_are_here(), prompts\nif torch.ones(1).device.index:\n    press_ctrl_c()\n"
        "while True: pass"
    )
    assert isinstance(done.error, KeyboardInterrupt)
    assert done.text == "KeyboardInterrupt: nothing was gathered\n"
    assert len(notebook.ns["prompts"]) == 17
    assert notebook.run("%%ongpu 0,1 --split prompts --gather out -q\nout = prompts").success
    assert notebook.ns["out"] == notebook.ns["prompts"]


def test_lines_are_whole_and_say_their_device(notebook):
    notebook.ns["numbers"] = [*range(50), *range(50)]
    done = notebook.run(
        "%%ongpu 0,1 --split numbers -q\nfor n in numbers:\n"
        "    print('a', end=' ')\n    print('b', n)\nprint('end', end='')"
    )
    lines = done.text.splitlines()
    for index in range(2):
        own = [line for line in lines if line.startswith(f"[cuda:{index}] ")]
        assert own == [f"[cuda:{index}] a b {n}" for n in range(50)] + [f"[cuda:{index}] end"]
    assert len(lines) == 102


def test_what_does_not_fit_together_is_not_lost(notebook):
    done = notebook.run("%%ongpu 0,1 --split x --gather y\ny = torch.ones(1, len(x))")
    assert done.text.count("\n") == 1
    assert "--gather y: the parts do not fit together: " in done.text
    assert "; y is the list of its 2 parts" in done.text
    assert [part.shape[1] for part in notebook.ns["y"]] == [9, 8]


@pytest.mark.parametrize(
    ("cell", "says"),
    [
        (
            "0,1 --split prompts --gather outs\nout = prompts",
            "not assign outs; did you mean out? the cell assigns out",
        ),
        (
            "0,1 --split prompts --reduce n=men\nn = len(prompts)",
            "men: unknown reduction; did you mean mean?",
        ),
        (
            "0,1 --split prompts\nnet(x)",
            "does not read prompts; the cell reads net, x\n",
        ),
        ("0,1 --split promts\nprompts", "there is no variable promts; did you mean prompts?"),
        ("0,1 --split net\nnet", "Linear cannot be split"),
        ("0,1 --split x,two\nx, two", "different lengths: 'x' has 17, 'two' has 2; give all"),
        ("0,5 --split x\n1", "no GPU 5"),
        ("0,0 --split x\n1", "is named twice"),
        ("0,1 --split x\nawait x", "line 2 awaits"),
        ("0,1 --split x\n%time y = x", "%time: magics use the notebook's variables"),
        (
            "0,1 --split x\nip = get_ipython()\nip.run_line_magic(str(x), '')",
            "ip.run_line_magic: magics use the notebook's variables",
        ),
        (
            "0,1 --split x\nip = get_ipython()\nip.run_line_magic(magic_name='time', line='x')",
            "ip.run_line_magic: magics use the notebook's variables",
        ),
        ("0,1 --split x\nx, opened", "opened cannot be copied (cannot copy an open file)"),
    ],
)
def test_bad_input_is_one_line_and_nothing_runs(notebook, tmp_path, cell, says):
    notebook.ns["two"] = [1, 2]
    with (tmp_path / "f").open("w") as file:
        notebook.ns["opened"] = [file, torch.ones(1)]
        done = notebook.run(f"%%ongpu {cell}")
    assert done.text.startswith("UsageError: %%ongpu: ")
    assert done.text.count("\n") == 1
    assert says in done.text


def test_it_runs_below_another_magic_and_not_above_one(notebook):
    done = notebook.run("%%time\n%%ongpu 0,1 --split x --gather y\ny = x * 2")
    assert torch.equal(notebook.ns["y"], notebook.ns["x"] * 2)
    assert "gathered y" in done.text
    done = notebook.run("%%ongpu 0,1 --split x --gather y\n%%time\ny = x * 2")
    assert "%time: magics use the notebook's variables" in done.text
