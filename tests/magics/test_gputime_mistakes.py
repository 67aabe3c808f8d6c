"""`%%gputime` as people type it: what is put right, what is refused, and in which words."""

import pytest
from IPython.core.error import UsageError

from gpumagic.magics.arguments import timing_request
from gpumagic.timing import last_comparison

SHORT = "--max-time 0.02"


@pytest.mark.parametrize(
    ("line", "where", "sweep"),
    [
        ("0 + 1", ["0+1"], None),
        ("cpu, 0", ["cpu,0"], None),
        ("cpu 0 +1", ["cpu", "0+1"], None),
        ("cpu --sweep n=1, 2, 3", ["cpu"], "n=1,2,3"),
        ("--sweep n = 1,-2 cpu", ["cpu"], "n=1,-2"),
        ("cpu, --quiet", ["cpu,"], None),
        ("--setup 'x, = y' cpu", ["cpu"], None),
        (r'--setup "x, = y" cpu --against "a\", b"', ["cpu"], None),
    ],
)
def test_blanks_within_a_word_are_none(line, where, sweep):
    found, code = timing_request(line, "1", "gputime")
    assert (found.where, found.sweep, code) == (where, sweep, "1")
    assert found.setup in (None, "x, = y")


def test_a_long_line_without_the_dashes_is_refused_at_once():
    with pytest.raises(UsageError, match="no code; put it after --"):
        timing_request("cpu 0 " + "net(images).argmax(1)" * 5, None, "gputime")


@pytest.mark.parametrize(
    ("cell", "says"),
    [
        ("%%gputime cpu\n# nothing", "there is no code to run; give some"),
        ("%%gputime cpu\n\n", "there is no code to run; give some"),
        ("%gputime cpu --", "there is no code to run; give some"),
        ("%%gputime cpu\nx = 1\nfor i in\n x", "line 3: invalid syntax: for i in"),
        ("%%gputime cpu\nreturn 3", "line 2: 'return' outside function"),
        ("%gputime cpu -- a @", "%gputime: line 1: invalid syntax: a @"),
        ("%%gputime cpu --setup 'a ='\n1", "--setup: invalid syntax: a ="),
        ("%%gputime cpu\n%%gputime cpu\n1", "the cell says %%gputime too"),
        ("%%gputime cpu\n1\n%ongpu 0\n1", "the cell says %ongpu too"),
        ("%%gputime cpu --max-time\n1", "--max-time: nothing after it; type --max-time 5"),
        ("%%gputime cpu -o 1x\n1", "-o: 1x cannot be the name of a variable; type -o result"),
        ("%%gputime 0+\n1", "a device is missing in 0+; type two or more, such as 0+1"),
        ("%%gputime cpu --items nope\n1", "items nope: NameError: name 'nope' is not defined"),
        ("%%gputime cpu --items (1\n1", "items (1 is not an expression"),
        ("%%gputime cpu --items -3\n1", "items -3: -3 is not a number above 0"),
        ("%%gputime cpu --items 0\n1", "items 0: 0 is not a number above 0"),
        ("%%gputime cpu --items n-2 --sweep n=5,1\nn", "items n-2, n = 1: -1 is not a number"),
    ],
)
def test_a_mistake_is_one_line_that_says_what_to_type(gpus, shell, cell, says):
    before = last_comparison()
    done = shell.run(cell)
    assert done.text.startswith("UsageError: %"), done.text
    assert done.text.count("\n") == 1
    assert says in done.text
    assert last_comparison() is before


def test_items_are_an_expression_in_the_users_names(shell):
    shell.run("sentences = ['a'] * 50")
    assert shell.run(f"%%gputime cpu {SHORT} --items len(sentences) -o r\n1").error is None
    assert shell.ns["r"].timings[0].items == 50
    assert shell.run(f"%%gputime cpu {SHORT} --items n*n --sweep n=2,3 -o r\nn").error is None
    assert [t.items for t in shell.ns["r"].timings] == [4, 9]
    assert "/s" in repr(shell.ns["r"])
    assert "n" not in shell.ns


def test_a_value_with_a_dot_is_what_it_names(shell):
    import torch

    shell.run("import torch")
    done = shell.run(f"%%gputime cpu {SHORT} --sweep d=torch.int8,v1.5,torch.no -o r\nd")
    assert done.error is None
    assert shell.ns["r"].sweep == {"d": (torch.int8, "v1.5", "torch.no")}


@pytest.mark.parametrize(
    ("line", "code", "notes"),
    [
        ("--sweep zz=1,2", "k", ("zz makes no difference: the code does not read it",)),
        ("--sweep n=1,2", "n = 5\nn", ("n makes no difference: the code sets it itself",)),
        ("--sweep n=1,2", "f()", ()),
        ("--sweep n=1,2 --setup 'm = n'", "m", ()),
        ("--sweep n=1,2", "n += 1", ()),
        ("--sweep n=1,2", "eval('n')", ()),
    ],
)
def test_a_sweep_that_makes_no_difference_is_said_to(shell, line, code, notes):
    shell.run("k = 1\ndef g():\n    return n\ndef f():\n    return g()")
    done = shell.run(f"%%gputime cpu {SHORT} {line} -o r\n{code}")
    assert done.error is None, done.text
    assert shell.ns["r"].notes == notes


def test_the_title_is_what_was_typed(shell):
    shell.run(f"%%gputime cpu {SHORT} -o r\n%pwd\n")
    assert (shell.ns["r"].code, shell.ns["r"].title) == ("%pwd", "%pwd")


def test_an_error_in_the_setup_is_shown_with_its_line_only(shell):
    done = shell.run(f"%%gputime cpu {SHORT} --setup 'x = zz + 1'\n1")
    assert isinstance(done.error, NameError)
    assert "x = zz + 1" in done.text
    assert "gpumagic" not in done.text


def test_a_device_without_room_for_the_inputs_is_said_in_a_line(gpus, shell):
    shell.run("import torch\nbig = torch.empty(2**29)")
    done = shell.run(f"%%gputime 0 {SHORT}\nbig")
    assert done.text.startswith("torch.OutOfMemoryError: CUDA out of memory")
    assert "gpumagic" not in done.text


def test_a_time_of_a_device_that_the_code_names_itself_is_said_to_be_that(gpus, shell):
    shell.run("import torch")
    done = shell.run(f"%%gputime cpu 1 {SHORT}\ntorch.ones(99, device='cuda:0') + 1")
    for where in ("cpu", "cuda:1"):
        assert f"! {where}: the code ran on cuda:0, which it names in `device=`" in done.text
    assert "the code ran on" not in shell.run(f"%%gputime cpu 1 {SHORT}\ntorch.ones(99) + 1").text


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("ds.tensors[0] @ ds.tensors[0].T", "; left ds: a dataset stays where it is"),
        ("torch.ones(9, device='cpu') + 1", "\n"),
        ("a @ a", "\n"),
    ],
)
def test_a_time_of_a_gpu_on_which_nothing_ran_is_said_to_be_that(gpus, shell, code, why):
    shell.run("import torch, numpy; from torch.utils.data import TensorDataset")
    shell.run("ds = TensorDataset(torch.ones(9, 3)); a = numpy.ones((3, 3)); x = torch.ones(3)")
    assert shell.run(f"%%gputime cpu 1 {SHORT} -o r\n{code}").text.startswith(
        f"! torch ran nothing on cuda:1{why}"
    )
    assert "torch ran nothing on cuda:1" in shell.ns["r"]._repr_html_()
    assert "cuda:1" not in shell.ns["r"].comparable
    # Work on copies that are there may allocate nothing.
    assert "ran nothing" not in shell.run(f"%%gputime cpu 1 {SHORT}\nx.add_(1); {code}").text


@pytest.mark.parametrize("magic", [f"%%gputime cpu 0 1 {SHORT}", "%%gpudiff cpu 0"])
@pytest.mark.parametrize(
    ("code", "fixed"),
    [
        ("layer(ds.tensors[0]).sum()", "layer(ds.tensors[0].to(layer.weight.device)).sum()"),
        ("layer(ds.tensors[0].to('cuda:1'))", "layer(ds.tensors[0].to(layer.weight.device))"),
        ("net(ds.tensors[0])", "net(ds.tensors[0].to(next(net.parameters()).device))"),
        ("x + ds.tensors[0]", "x + ds.tensors[0].to(x.device)"),
        (
            "torch.ones(3) + ds.tensors[0]",
            "torch.ones(3) + ds.tensors[0].to(torch.get_default_device())",
        ),
    ],
)
def test_a_fix_for_several_devices_names_none_and_works(gpus, shell, magic, code, fixed):
    shell.run("import torch; from torch.utils.data import TensorDataset; from torch import nn")
    shell.run("ds = TensorDataset(torch.ones(9, 3)); layer = nn.Linear(3, 3); x = torch.ones(3)")
    shell.run("net = nn.Sequential(layer)")
    told = shell.run(f"{magic}\n{code}").text
    assert f"\n      {fixed}\n" in told, told
    assert shell.run(f"{magic}\n{fixed}").error is None


def test_a_dataset_on_another_gpu_is_the_reason_for_work_there(gpus, shell):
    shell.run("import torch; from torch.utils.data import TensorDataset")
    shell.run("ds = TensorDataset(torch.ones(9, 3, device='cuda:0'))")
    done = shell.run(f"%%gputime cpu 1 {SHORT}\nds.tensors[0] + 1")
    for where in ("cpu", "cuda:1"):
        assert f"! {where}: the code ran on cuda:0; left ds: a dataset stays" in done.text
    single = shell.run(f"%%gputime 1 {SHORT} -o r\nds.tensors[0] + 1")
    assert "ran on cuda:0; left ds" in single.text
    assert "ran on cuda:0; left ds" in shell.ns["r"]._repr_html_()


def test_what_it_displays_is_shown_once(shell):
    done = shell.run(
        f"%%gputime cpu {SHORT} -o r\nfrom IPython.display import display\ndisplay('shown')"
    )
    assert done.text.count("'shown'") == 1
    assert "the output of the code is shown for its first run only" in shell.ns["r"].notes[0]
    assert "'again'" in shell.run("display('again')").text


def test_under_a_standing_placement_the_variables_stay_where_they_are(gpus, shell):
    shell.run("import torch\na = torch.ones(4)\n%ongpu 1")
    done = shell.run(f"%%gputime cpu {SHORT}\na + 1")
    assert "moved" not in done.text
    assert shell.ns["a"].device.type == "cpu"
    assert "cuda:1" in shell.run("torch.zeros(1).device").text
    shell.run("%ongpu off")


@pytest.mark.parametrize(
    "options",
    ["", "--quiet -o half"],
)
def test_an_interrupt_before_the_first_result_says_that_nothing_was_measured(gpus, shell, options):
    done = shell.run(f"%%gputime cpu 0 {options}\nraise KeyboardInterrupt")
    assert done.text.rstrip().endswith("KeyboardInterrupt")
    assert [(t.where, t.error) for t in last_comparison().timings] == [("cpu", "interrupted")]
    assert "! interrupted: 0 timings finished" in repr(last_comparison())


@pytest.mark.parametrize(
    ("magic", "elsewhere"),
    [(f"%%gputime 1 {SHORT}", "cuda:0"), ("%%gpufit n=1..4", "cuda:1")],
)
@pytest.mark.parametrize("called", [False, True])
def test_an_error_of_a_trial_is_explained_as_one_of_a_cell(gpus, shell, magic, elsewhere, called):
    failing = f"x - n * torch.zeros(2).to('{elsewhere}')"
    shell.run(f"import torch\nn, x = 2, torch.ones(2, 2)\ndef f(x, n):\n    return {failing}")
    told = shell.run(f"{magic}\n{'f(x, n)' if called else failing}").text
    assert "← the odd one" in told
    assert ".to(x.device)" in told
