"""Errors for want of memory, explained: notebooks whose GPUs have 64 MiB; every figure checked."""

import gc
import re
from types import SimpleNamespace

import pytest
import torch
from situations import SITUATIONS, START

import gpumagic
from gpumagic import faults, virtual
from gpumagic.frameworks.framework import Pool
from gpumagic.memory import explain_out_of_memory, oom_trials
from gpumagic.memory.explain_out_of_memory import by_figures
from gpumagic.memory.oom_state import OutOfMemoryState, Shortage

MIB = 2**20


@pytest.fixture
def noted(small):
    """What torch's allocator says when it fails: device, wanted, limit, free, and its counts."""
    found = []

    def note(ordinal, *said):
        counts = torch.cuda.memory_allocated(ordinal), torch.cuda.memory_reserved(ordinal)
        found.append((ordinal, *said, *counts))

    small.run("import torch\ntorch.cuda.init()")
    torch._C._cuda_attach_out_of_memory_observer(note)
    return found


@pytest.mark.parametrize("part", range(2))
def test_causes_remedies_and_figures(small, shown, noted, part):
    """Each in a notebook of its own; what is said to give or to fit is tried."""
    assert wrong_of([n for n in SITUATIONS if n.often][part::2], small, shown, noted) == []


@pytest.mark.slow
@pytest.mark.parametrize("part", range(3))
def test_all_situations(small, shown, noted, part):
    assert len(SITUATIONS) >= 25
    assert wrong_of(SITUATIONS[part::3], small, shown, noted) == []


def wrong_of(notebooks, small, shown, noted):
    """Those of which another cause, or another first lever, is told."""
    wrong = []
    for notebook in notebooks:
        for cell in [START, *notebook.before, notebook.cell]:
            small.run(cell)
        assert faults.all_kept() == [], notebook.name
        found = shown.pop()
        check_figures(found, noted)
        first = found.levers[0] if found.levers else None
        says = first.do[: len(notebook.first)] if first else ""
        if says != notebook.first or notebook.why not in found.reason:
            wrong.append((notebook.name, says, found.reason))
        elif notebook.gives is not None:
            assert first.gives == pytest.approx(notebook.gives * MIB, abs=0.1 * MIB)
        check_freed(found)
        if first is not None:
            check_first(small, found, first, notebook.cell)
        small.run("torch.set_default_dtype(torch.float32)")
        small.run("torch.cuda.set_per_process_memory_fraction(1.0)\n1 / 0")
        small.run("%reset -f")
        shown.clear()
        noted.clear()
        del found, first
        gc.collect()
        assert torch.cuda.memory_allocated(0) == torch.cuda.memory_allocated(1) == 0, notebook.name
    return wrong


def check_figures(found, noted):
    """They are those of the moment, and the holders add up to what is allocated now."""
    now, ordinal = found.device, int(found.device.device[-1])
    if noted:  # else the error was made up
        device, wanted, _, *counts = noted[-1]
        assert (found.wanted, ordinal) == (pytest.approx(wanted, rel=0.01), device)
        assert [now.free, now.allocated, now.reserved] == pytest.approx(counts, rel=0.01)
        assert now.total == 64 * MIB
    gone = sum(row.nbytes for row in now.holders if row.kind == "temporary")
    held = sum(row.nbytes for row in now.holders) - gone
    assert held == torch.cuda.memory_allocated(ordinal)
    assert held + gone == pytest.approx(now.allocated, rel=0.01) or not noted


def check_freed(found):
    """What the traceback is said to hold comes back, and what `%gpufree` is said to give."""
    freed = gpumagic.free_memory()
    by_gpufree = [r.gives for r in found.levers if r.do.startswith("`%gpufree` ")]
    assert freed.nbytes == found.traceback_holds + sum(by_gpufree)


def check_first(small, found, first, cell):
    ordinal = int(found.device.device[-1])
    if found.stale:
        small.run(f"%gpufree {' '.join(found.stale)}")  # as the title advises
    before = torch.cuda.memory_allocated(ordinal)
    if names := re.match(r"`del (.*)` before|`%gpufree (\w.*)`, which", first.do):
        names = re.split(r",? ", names[1] or names[2])
        if set(names) <= set(small.ns):  # and not of a function
            small.run(f"%gpufree {' '.join(names)}")
            assert before - torch.cuda.memory_allocated(ordinal) == first.gives
    elif (within := re.match(r"`(with .*:)`", first.do)) and first.fits:
        cell = f"{within[1]}\n" + re.sub("^", "    ", cell.strip(), flags=re.MULTILINE)
    elif (code := re.match(r"`((\w+)\.view\(.*\))` for", first.do)) and code[2] in small.ns:
        cell = re.sub(rf"\b{code[2]}\b(?! =)", code[1], cell)
    elif (batch := re.match(r"`(\w+)`: a batch of", first.do)) and torch.is_tensor(
        small.ns.get(batch[1])
    ):
        small.run(f"{batch[1]} = {batch[1]}[:{numbers_of(first.do)[0]}]\nn = len({batch[1]})")
    elif typed := re.match(r"`(\w+ = \w+\.clone\(\))`|create the tensors", first.do):
        small.run(typed[1] or "torch.set_default_dtype(torch.bfloat16)")
    elif not re.match("`del|`%gpufree", first.do):
        return  # written into the cell by hand
    if first.fits:
        assert small.run(cell).error is None, (cell, first)


def numbers_of(do):
    """What a lever tells: the number that fits, and the one that stands there."""
    return [int(found.replace(",", "")) for found in re.findall(r"\d[\d,]*", do)[:2]]


def test_what_the_failing_line_had_computed_has_a_row(small, shown):
    small.run(START + "a = mib(16)")
    small.run("b = 1\nd = torch.cat([a + 1, a + 2, a])")
    (row,) = (r for r in shown.pop().device.holders if r.kind == "temporary")
    assert row.nbytes == pytest.approx(32 * MIB, rel=0.01)
    assert (row.path, str(row.made)) == (
        "unnamed results",
        f"In [{small.ip.execution_count - 1}], line 2",
    )


def test_in_a_program_and_as_html(ip):
    ip.run("kept = torch.ones(2**20, device='cuda')")
    ip.run(
        "import gpumagic\ndef step(x):\n    return x + torch.empty(2**29, device='cuda')\n"
        "try:\n    step(kept)\nexcept RuntimeError as error:\n"
        "    found = gpumagic.explain_out_of_memory(error)"
    )
    found = ip.ns["found"]
    assert (found.expression, found.line) == ("torch.empty(2**29, device='cuda')", 3)
    assert (found.wanted, found.device.holders[0].path) == (2**31, "kept")
    assert "in all" in found.reason
    assert found.levers == ()  # to delete `kept` would not help
    assert "out of memory · In [3], line 3: torch.empty(2**29" in repr(found)
    assert "<code>torch.empty(2**29, device=&#x27;cuda&#x27;)</code>" in found._repr_html_()


def test_a_deletion_that_suffices_does_not_hide_that_no_graph_is_needed(small, shown):
    small.run(f"{START}\nnet = nn.Sequential(*[nn.Linear(256, 256), nn.Tanh()] * 3).cuda()")
    small.run("X = torch.ones(2, 9000, 256)")
    small.run("for x in X:\n    y = net(x.cuda())\n    best = y.argmax(1).cpu()")
    done = [lever.do for lever in shown.pop().levers]
    assert [do[:14] for do in done] == ["`y = None` bef", "`with torch.no"]


def test_an_estimator_that_fits_features_is_no_backward_pass(small, shown):
    small.run(f"{START}\nfrom sklearn.linear_model import LinearRegression")
    small.run("net = nn.Sequential(*[nn.Linear(256, 256), nn.Tanh()] * 3).cuda()\nouts = []")
    small.run(
        "def extract():\n    for n in range(9):\n        outs.append(net(mib(4).view(-1, 256)))\n"
        "    return torch.cat(outs)"
    )
    small.run("found = extract().detach().cpu().numpy()\nLinearRegression().fit(found, found)")
    assert shown.pop().levers[0].do.startswith("store `.detach()` in `outs`")


def test_a_failed_cell_that_runs_again_has_the_same_cure(small, shown):
    small.run(f"{START}\nx, spare = mib(8), mib(40)")
    for _ in range(2):
        small.run("y = [x * n for n in range(3)]")
        assert shown.pop().levers[0].do.startswith("`%gpufree spare`")


def test_what_a_loop_only_reads_does_not_grow(small, shown):
    small.run(f"{START}\nx, spare = mib(6), mib(50)")
    small.run("outs = []\nfor n in range(9):\n    outs.append((x * n).exp())")
    found = shown.pop()
    assert found.adds_to != "x"
    assert [lever.do.partition(",")[0] for lever in found.levers] == ["`%gpufree spare`"]


def test_another_gpu_is_offered_without_a_context_on_it(gpus, monkeypatch):
    """A context takes 0.5 GiB, and raises on a GPU that others have filled."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", None)
    trials = SimpleNamespace(loop=None, whole=None)
    device = SimpleNamespace(allocated=MIB)
    state = SimpleNamespace(shortage=Shortage(0), device=device, wanted=MIB, name="cuda:0")
    state.read, state.rests, state.namespace = {"where"}, (), {"where": "cpu"}
    (lever,) = explain_out_of_memory.other_gpu(state, trials)
    assert lever.do.startswith("`%%ongpu 1`")
    state.namespace["where"] = "cuda:0"  # the code names its GPU, so `%%ongpu` chooses no other
    assert not [*explain_out_of_memory.other_gpu(state, trials)]
    state.wanted, state.namespace["where"] = 2**60, "cpu"
    assert not [*explain_out_of_memory.other_gpu(state, trials)]


def test_our_own_failure_leaves_the_users_error(ip, monkeypatch):
    def broken(*args):
        raise ZeroDivisionError("ours")

    monkeypatch.setattr(explain_out_of_memory, "OutOfMemoryState", broken)
    ran = ip.run("torch.empty(2**29, device='cuda')")
    assert isinstance(ran.error, torch.OutOfMemoryError)
    assert ran.text.count("gpumagic failed while explaining an out-of-memory error") == 1


def test_who_has_seen_enough_may_interrupt(ip, monkeypatch):
    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(explain_out_of_memory, "OutOfMemoryState", interrupted)
    ran = ip.run("torch.empty(2**29, device='cuda')")
    assert isinstance(ran.error, torch.OutOfMemoryError)
    assert "KeyboardInterrupt" not in ran.text


def test_a_search_without_time_says_so(small, shown, monkeypatch):
    small.run(f"{START}\nx = mib(20)")
    with monkeypatch.context() as busy:
        busy.setattr(oom_trials, "_PATIENCE_S", 0.0)
        small.run("torch.cat([x, x, x])")
    assert "no time to try all" in str(shown.pop())
    small.run("torch.cat([x, x, x])")
    assert "no time" not in str(shown.pop())


ADDING = """
total, outs, hist, loader = 0, [], {"loss": []}, torch.ones(60, 1000, 256)
net = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 10)).cuda()
"""


@pytest.mark.parametrize(
    ("statement", "name"),
    [
        ("total = total + net(x.cuda()).sum()", "total"),
        ("hist['loss'].append(net(x.cuda()).sum())", "hist"),
        ("(y := net(x.cuda()).sum()).backward(retain_graph=True); outs.append(y)", "outs"),
    ],
)
def test_of_a_loop_that_keeps_more_the_holder_is_told_and_no_batch(small, shown, statement, name):
    """A loop may have made many passes: of one it is known what it needs, not of all."""
    small.run(START + ADDING)
    small.run(f"for x in loader:\n    {statement}")
    found = shown.pop()
    assert re.match(r"each pass of the loop in In \[\d+\], line 1 keeps", found.reason)
    assert found.adds_to == name
    grown = next(row for row in found.device.holders if row.path == name)
    assert 2 * found.adds <= grown.nbytes
    assert "last pass" in repr(found)
    assert found.levers[0].do.startswith(f"store `.item()` in `{name}`")
    assert [r for r in found.levers if "a batch" in r.do] == []


def test_no_result_is_to_be_detached_before_its_backward_pass(small, shown):
    small.run(START + ADDING)
    small.run("x = torch.ones(9000, 256, device='cuda')\nloss = net(x).sum()")
    small.run("for n in range(3):\n    loss = net(x).sum()\n    y = net(x)\n    loss.backward()")
    assert [r for r in shown.pop().levers if "detach" in r.do] == []


def test_losses_that_a_callback_sums_are_detached_whatever_its_caller_trains(small, shown):
    small.run(START + ADDING)
    small.run(
        "class Check:\n    def __call__(self, net):\n        total = 0\n        for x in loader:\n"
        "            total = total + net(x.cuda()).sum()\n        self.last = total"
    )
    small.run("check = Check()\nnet(torch.ones(2, 256).cuda()).sum().backward()\ncheck(net)")
    assert shown.pop().levers[0].do.startswith("store `.item()` in `total`")


# As they are asked most in forums: the code before, the failed cell, and the first lever.
RARER = (
    *("what hooks keep", "a loader of dicts", "a part that no optimizer trains"),
    *("a dict of lists in a function", "a model of float64", "a memory in an object"),
    *("results of items that the loop changes", "copies that an outer loop keeps"),
)
ASKED = {
    "results of items that the loop changes": (
        "items = [torch.ones(640, 256) for _ in range(60)]\nresults = []",
        "for n, x in enumerate(items):\n    x = x.unsqueeze(0).cuda()\n    results.append(net(x))",
        "store `.detach()` in `results`",
    ),
    "a dict of lists in a function": (
        "from collections import defaultdict\n@torch.no_grad()\ndef render(rays):\n"
        "    found = defaultdict(list)\n    for i in range(0, len(rays), 500):\n"
        "        part = {'rgb': net(rays[i : i + 500].cuda())}\n"
        "        for k, v in part.items():\n            found[k] += [v]\n    return found",
        "out = render(torch.ones(90_000, 256))",
        "store `.cpu()` of the tensors in `found`",
    ),
    "what hooks keep": (
        "class Kept:\n    def __init__(self, layer):\n        self.all = []\n"
        "        layer.register_forward_hook(self.save)\n    def save(self, module, given, out):\n"
        "        self.all.append(out.detach())",
        "kept = Kept(net[0])\nfor n in range(40):\n    y = net(torch.ones(2000, 256).cuda()).sum()",
        "store `.cpu()` of the tensors in `kept`",
    ),
    "a graph that the last backward pass keeps": (
        "x = torch.ones(7000, 256).cuda()",
        "for n in range(3):\n    y = net(x)\n    a = y.square().mean()\n"
        "    a.backward(retain_graph=True)\n    b = y.mean()\n    b.backward(retain_graph=True)",
        "`b.backward(retain_graph=False)` for line 6",
    ),
    "a loop that validates between passes that train": (
        "opt, x = torch.optim.SGD(net.parameters(), 0.1), torch.ones(16_000, 256)",
        "for epoch in range(2):\n    for rows in x[:500].split(100):\n"
        "        loss = net(rows.cuda()).sum()\n        loss.backward()\n        opt.step()\n"
        "    for rows in x.split(16_000):\n        loss = net(rows.cuda()).sum().item()",
        "`with torch.no_grad():` around the loop in In [3], line 6: no backward pass uses its",
    ),
    "a function that gathers what is trained on": (
        "opt = torch.optim.SGD(net.parameters(), 0.1)\ndef collect():\n    found = []\n"
        "    for n in range(60):\n        found.append(net(torch.ones(500, 256).cuda()).sum(1))\n"
        "    return torch.stack(found)\ndef update(found):\n"
        "    loss = (net(torch.ones(5, 256).cuda()) - found.detach().mean()).sum()\n"
        "    loss.backward()\n    opt.step()",
        "for n in range(2):\n    found = collect()\n    update(found)",
        "`@torch.no_grad()` above `def collect`: no backward pass uses its results",
    ),
    "copies that an outer loop keeps": (
        "import copy\nbest, big = {'w': []}, nn.Linear(1000, 1000).cuda()",
        "for epoch in range(30):\n    for step in range(3):\n"
        "        y = big(torch.ones(1000, 1000).cuda()).sum()\n        y.backward()\n"
        "    best['w'].append(copy.deepcopy(big.state_dict()))",
        "store `.cpu()` of the tensors in `best`",
    ),
    "a state of all steps": (
        "cell = nn.GRUCell(64, 64).cuda()\ndef sample(h):\n    found = []\n"
        "    for t in range(200):\n        h = cell(torch.ones(500, 64).cuda(), h)\n"
        "        found.append(h.argmax(1))\n    return found",
        "out = sample(torch.zeros(500, 64).cuda())",
        "store `.detach()` in `h`",
    ),
    "a memory in an object": (
        "class Memory:\n    def __init__(self):\n        self.all = []\n"
        "    def push(self, *values):\n        self.all.append(values)\n"
        "memory, state = Memory(), torch.zeros(100, 256).cuda()\nnet.requires_grad_(False)",
        "while len(memory.all) < 900:\n    new = state + 1\n    memory.push(state, new)\n"
        "    y = net(memory.all[-1][0])\n    state = new",
        "store `.cpu()` of the tensors in `memory`",
    ),
    "a part that no optimizer trains": (
        "head = nn.Linear(256, 2).cuda()\nall_ = nn.Sequential(net, head)\n"
        "opt = torch.optim.SGD(head.parameters(), 0.1)\nx = torch.ones(12000, 256).cuda()",
        "loss = all_(x).sum()\nloss.backward()\nopt.step()",
        "`all_.0.requires_grad_(False)`: no optimizer trains it",
    ),
    "a part that is only thought to be frozen": (
        "net.requires_grad = False\nhead = nn.Linear(256, 2)\n"
        "all_ = nn.ModuleDict({'body': net, 'head': head}).cuda()\n"
        "opt = torch.optim.SGD(all_.parameters(), 0.1)\nx = torch.ones(12000, 256).cuda()",
        "loss = all_['head'](all_['body'](x)).sum()\nloss.backward()\nopt.step()",
        "`all_.body.requires_grad_(False)`: `.requires_grad = False` freezes nothing",
    ),
    "a model of float64": (
        "net.double()\nx = torch.ones(5000, 256).double().cuda()",
        "loss = net(x).sum()\nloss.backward()",
        "`net = net.float()` and `x = x.float()` first",
    ),
    "dense gradients of rows": (
        "words = nn.Embedding(70_000, 128).cuda()\nopt = torch.optim.SGD(words.parameters(), 0.1)",
        "loss = words(torch.arange(9).cuda()).sum()\nloss.backward()\nopt.step()",
        "`words.sparse = True`: its gradients have only the rows that are read",
    ),
    "a loader of dicts": (
        "class Rows(torch.utils.data.Dataset):\n    def __len__(self):\n        return 24_000\n"
        "    def __getitem__(self, n):\n        return {'x': torch.ones(256)}\n"
        "loader = torch.utils.data.DataLoader(Rows(), batch_size=22_000)",
        "with torch.no_grad():\n    for sample in loader:\n        y = net(sample['x'].cuda())",
        "`loader`: a batch of ",
    ),
}


@pytest.mark.parametrize(
    "asked", [pytest.param(n, marks=[pytest.mark.slow] * (n in RARER)) for n in ASKED]
)
def test_what_is_asked_most_has_a_lever(small, shown, asked):
    before, cell, lever = ASKED[asked]
    small.run(START + "net = nn.Sequential(*[nn.Linear(256, 256), nn.Tanh()] * 3).cuda()")
    small.run(before)
    small.run(cell)
    assert shown.pop().levers[0].do.startswith(lever)


def test_what_a_backward_pass_needs_is_not_made_without_a_graph(small, shown):
    small.run(START + "net = nn.Sequential(*[nn.Linear(64, 64), nn.Tanh()] * 3).cuda()\nkept = []")
    small.run(
        "def act():\n    for n in range(60):\n"
        "        kept.append(net(torch.ones(2000, 64).cuda()).sum(1))\n"
        "def update(kept):\n    torch.stack(kept).sum().backward()"
    )
    small.run("for n in range(2):\n    act()\n    update(kept)")
    assert "no_grad" not in str(shown.pop())


def test_old_results_that_hold_the_graph_of_a_state_are_freed_before_a_rerun(small, shown):
    small.run(START + "rnn, x = nn.LSTM(1, 64).cuda(), torch.ones(40, 64, 1).cuda()")
    small.run(
        "state = None\nfor n in range(60):\n    y, state = rnn(x, state)\n    loss = y.sum()\n"
        "    loss.backward(retain_graph=True)"
    )
    found = shown.pop()
    assert found.stale == ("loss", "state", "y")
    assert found.levers[0].do.startswith("store `tuple(x.detach() for x in state)` in `state`")
    assert found.levers[0].fits is not False


def test_targets_of_another_shape_than_the_models_results_get_its_shape(small, shown):
    small.run(START + "X, y = torch.ones(4000, 9, device='cuda'), torch.ones(4000, device='cuda')")
    small.run("net = nn.Linear(9, 1).cuda()\nloss = ((net(X) - y) ** 2).mean()")
    lever = shown.pop().levers[0]
    assert lever.do.startswith("`y.view(4000, 1)` for `y`: [4000] and [4000, 1] broadcast")
    assert lever.fits


def test_a_model_is_not_deleted_with_what_holds_the_memory(small, shown):
    small.run(START + "net = nn.Sequential(*[nn.Linear(256, 256), nn.Tanh()] * 3).cuda()")
    small.run("X, total = torch.ones(9000, 256).cuda(), 0\ntotal = total + net(X[:6000]).sum()")
    small.run("sims = X[:3500] @ X[:3500].T")
    assert "`%gpufree total`" in shown.pop().levers[0].do


@pytest.mark.slow
def test_no_backward_pass_is_told_through_a_state_that_passes_hand_on(small, shown):
    small.run(START + "rnn, xs = nn.LSTMCell(256, 256).cuda(), torch.ones(900, 64, 256)")
    small.run(
        "h = c = torch.zeros(64, 256).cuda()\nloss = 0\nfor x in xs:\n"
        "    h, c = rnn(x.cuda(), (h, c))\n    loss = loss + h.mean()\nloss.backward()"
    )
    assert not [lever for lever in shown.pop().levers if ".backward()" in lever.do]
    small.run(
        "logs, c = [], torch.zeros(64, 256).cuda()\nfor x in xs:\n"
        "    h, c = rnn(x.cuda(), (h.detach(), c))\n    logs.append(h.mean(1))\n"
        "torch.stack(logs).sum().backward()"
    )
    assert not [lever for lever in shown.pop().levers if ".backward()" in lever.do]


def test_names_that_only_together_hold_a_graph_are_freed_before_a_rerun(small, shown):
    small.run(START + "net = nn.Sequential(*[nn.Linear(256, 256), nn.Tanh()] * 3).cuda()")
    small.run(
        "for n in range(9):\n    x = torch.ones(9000, 256).cuda()\n    y = net(x)\n"
        "    a, b = y.square().mean(), y.mean()\n    (a + b).backward(retain_graph=True)"
    )
    assert {"a", "b", "y"} <= {*shown.pop().stale}


def test_the_loop_that_keeps_most_is_named_and_losses_with_a_later_backward_pass_stay(small, shown):
    small.run(START + "net = nn.Sequential(*[nn.Linear(256, 256), nn.Tanh()] * 3).cuda()")
    small.run(
        "def adapt(x):\n    for _ in range(3):\n        loss = net(x).square().mean()\n"
        "        grads = torch.autograd.grad(loss, [*net.parameters()], create_graph=True)\n"
        "        x = x - grads[0].sum()\n    return x"
    )
    small.run(
        "loss = 0\nfor _ in range(40):\n"
        "    loss = loss + net(adapt(torch.ones(200, 256, device='cuda'))).mean()\nloss.backward()"
    )
    found = shown.pop()
    assert found.reason.startswith("each pass of the loop in In [3], line 2 keeps")
    assert not [lever for lever in found.levers if "or `.detach()` in" in lever.do]


def test_what_a_function_makes_anew_in_each_pass_is_no_reason_for_a_smaller_batch(small, shown):
    small.run(START + "net = nn.Linear(512, 64).cuda()")
    small.run(
        "def train(bs):\n    for _ in range(2):\n        x = torch.randn(bs, 512, device='cuda')\n"
        "        net(x).tanh().sum().backward()"
    )
    small.run("train(60_000)")
    lever = shown.pop().levers[0]
    small.run("%gpufree")
    number = int(re.search(r"bs = (\d+)", lever.do)[1])
    assert small.run(f"train({number})").error is None
    small.run("%gpufree")
    assert small.run(f"train({int(number * 1.2)})").error is not None


def test_the_gradients_of_two_parts_of_a_batch_fit_together(small, shown):
    small.run(f"{START}net = nn.Sequential(nn.Linear(512, 2048), nn.Linear(2048, 1)).cuda()")
    small.run("other = nn.Linear(2048, 2048).cuda().requires_grad_(False)")
    small.run("X = torch.ones(6000, 512, device='cuda')")
    small.run("net(X).square().mean().backward()")
    number = int(re.search(r"a batch of ([\d,]+)", repr(shown.pop()))[1].replace(",", ""))
    small.run("%gpufree")
    parts = f"for x in X.split({number}):\n    net(x).square().mean().backward()"
    assert small.run(parts).error is None
    small.run("net.zero_grad()")
    assert small.run(f"net(X[:{int(number * 1.2)}]).square().mean().backward()").error is not None


def test_no_loss_is_to_be_detached_whose_sum_has_a_backward_pass(small, shown):
    small.run(
        START + "net = nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 1)).cuda()"
    )
    small.run(
        "losses, X = [], torch.ones(4000, 64, device='cuda')\nfor step in range(20):\n"
        "    losses.append(net(X).square().mean())\n    if len(losses) == 16:\n"
        "        sum(losses).backward()\n        losses = []"
    )
    found = shown.pop()
    assert found.adds_to == "losses"
    assert [lever.do for lever in found.levers if "or `.detach()` in" in lever.do] == []
    assert "in each pass, call `.backward()` on the values added to `losses`" in repr(found.levers)


def test_a_sparse_tensor_is_no_batch(small, shown):
    small.run(START + "A = torch.eye(9000).to_sparse()\nw = torch.ones(1, device='cuda')")
    small.run("w.requires_grad_()\nB = A.to_dense().cuda()\n(B * w).sum().backward()")
    assert "310 MiB at once is more than" in shown.pop().reason
    assert faults.all_kept() == []


def test_data_that_is_made_and_then_split_is_no_batch(small, shown):
    small.run(START + "X, net = torch.ones(500, 3, 64, 64, device='cuda'), nn.Flatten()")
    small.run("up = F.interpolate(X, size=96)\ny = [net(part) for part in up.split(50)]")
    assert [lever for lever in shown.pop().levers if "a batch" in lever.do] == []


def test_what_this_very_cell_made_and_reads_no_more_is_deleted_before(small, shown):
    small.run(START)
    small.run("a = mib(30)\nb = a.sum()\nb = mib(40)")
    lever = shown.pop().levers[0]
    assert (lever.do, lever.fits) == ("`del a` before line 3", True)


def test_what_a_pass_makes_is_not_deleted(small, shown):
    small.run(START)
    small.run("for n in range(2):\n    a = mib(30)\n    b = mib(40)")
    assert "del" not in repr(shown.pop())


def test_the_seconds_of_an_explanation_are_none_of_the_cells(small, shown, monkeypatch):
    small.run(START)
    clock = SimpleNamespace(perf_counter=iter([0.0, 0.0, 0.0, 1000.0]).__next__)
    monkeypatch.setattr("gpumagic.magics.hooks.time", clock)
    small.run("%%ongpu 0\ntorch.empty(2**29)")
    assert shown
    assert -1000 < gpumagic.last_report().seconds < -900


@pytest.mark.parametrize(
    "cell",
    [
        pytest.param("d = torch.cdist(data, data)\nd.sum()", marks=pytest.mark.slow),
        "torch.fft.fftn(data.to('cuda'))",
        pytest.param(
            "all_ = (data * 2).to('cuda')\nfor n in range(0, len(all_), 9):\n"
            "    all_[n:n + 9].sum()",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_pairs_of_samples_and_data_cut_in_a_loop_are_no_batch(small, shown, cell, monkeypatch):
    monkeypatch.setattr(oom_trials, "_LIMIT_S", 2.0)
    rows, on = (5000, ", device='cuda'") if "cdist" in cell else (70_000, "")
    small.run(START + f"data = torch.ones({rows}, 256{on})")
    small.run(cell)
    levers = shown.pop().levers
    assert [lever for lever in levers if "a batch of" in lever.do] == []
    assert ("each batch" in str(levers)) == ("9" in cell)


def test_what_a_needed_variable_shares_does_not_keep_another_from_being_deleted(small, shown):
    small.run(START)
    small.run("every = {'a': mib(10), 'b': mib(30)}\nkept = [every['a']]")
    small.run("first = every['b'].sum()\nmore = mib(45) + kept[0].sum()")
    assert "`del every` before line 2" in [lever.do for lever in shown.pop().levers]


def test_losses_in_a_list_are_followed_to_their_backward_pass(small, shown):
    small.run(
        f"{START}\nnet = nn.Linear(64, 8000).cuda()\nx = torch.randn(2500, 64, device='cuda')"
    )
    small.run(
        "losses = []\nfor part in x.split(100):\n    y = net(part).sigmoid()\n"
        "    losses.append(y.square().mean())\n"
        "loss = torch.stack(losses).mean()\nloss.backward()"
    )
    assert "call `.backward()` on the values added to `losses`" in shown.pop().levers[0].do


def test_a_batch_whose_size_has_a_name_that_must_follow_names_it_too(small, shown):
    small.run(f"{START}\nnet, n = nn.Linear(64, 5000).cuda(), 900")
    small.run("X = torch.randn(n, 64, device='cuda')")
    small.run(
        "y = net(X).sigmoid().view(n, 50, 100)\nloss = (y**2).sum((1, 2)).mean()\nloss.backward()"
    )
    assert "`X`, `n`: a batch of" in shown.pop().levers[0].do


def test_a_batch_in_capitals_is_lowered_too(small, shown):
    small.run(START + "net = nn.Sequential(*[nn.Linear(64, 64), nn.ReLU()] * 6).cuda()")
    small.run("X, BATCH = torch.ones(36_000, 64), 36_000")
    loop = (
        "for n in range(0, len(X), BATCH):\n    x = X[n:n + BATCH].cuda()\n"
        "    net(x).sum().backward()"
    )
    small.run(loop)
    lever = next(lever for lever in shown.pop().levers if lever.fits)
    assert re.match(r"`BATCH = \d+` instead of 36,000", lever.do)
    assert small.run(f"%gpufree\n{lever.do.split('`')[1]}\n{loop}").success


def test_a_result_of_the_failed_run_counts_as_free(small, shown):
    small.run(START + "net = nn.Sequential(*[nn.Linear(256, 256), nn.ReLU()] * 9).cuda()")
    small.run("X = torch.ones(5800, 256)\nopt = torch.optim.SGD(net.parameters())")
    cell = "x = X.cuda()\nloss = net(x).square().mean()\nloss.backward()\nopt.step()"
    small.run(cell)
    found = shown.pop()
    assert found.stale == ("loss",)
    assert "after %gpufree loss" in str(found)
    assert any(lever.fits for lever in found.levers)


def test_a_part_of_the_data_is_not_taken_for_the_batch(small, shown):
    small.run(START + ADDING + "data = torch.ones(60000, 256)")
    small.run("net(data[:20000].cuda()).sum().backward()")
    assert [lever for lever in shown.pop().levers if "batch" in lever.do] == []


def test_a_virtual_gpu_that_was_turned_off_counts_for_nothing(small):
    kept = torch.ones(2**18, device="cuda")
    virtual.disable()
    virtual.enable(2, 64 * MIB)
    small.run(START + "x = torch.ones(2**18, device='cuda:1')")
    rows = [row.path for row in gpumagic.memory().holders]
    assert rows == ["x"]
    del kept


def test_numbers_that_the_data_may_know_stay_as_they_are(small, shown):
    small.run(START + "y = torch.ones(50_000, dtype=torch.long, device='cuda')")
    small.run("F.one_hot(y, 9_000)\nx = mib(8)")
    assert " instead of 9,000" not in repr(shown.pop())
    small.run("emb = nn.Embedding(90_000, 256).cuda()\nx = emb(y[:9])")
    assert " instead of " not in repr(shown.pop())
    small.run("for n in range(20, 999):\n    small = mib(n)")
    assert " instead of " not in repr(shown.pop())  # n is the loop's


def test_how_many_samples_a_result_has_is_no_batch(small, shown):
    small.run(START + "data = torch.ones(3000, device='cuda')")
    small.run("B = 8000\nmeans = data[torch.randint(0, 3000, (B, 3000), device='cuda')].mean(1)")
    assert " instead of " not in repr(shown.pop())


def test_copies_of_a_model_are_kept_on_the_cpu(small, shown):
    small.run(START + "net, kept = nn.Linear(1024, 1024).cuda(), []")
    small.run("for epoch in range(20):\n    kept.append(copy.deepcopy(net))")
    assert "`.cpu()` of the models in `kept`" in shown.pop().levers[0].do
    small.run("%gpufree\nkept.clear()")
    ran = small.run("for epoch in range(20):\n    kept.append(copy.deepcopy(net).cpu())")
    assert ran.success


def test_float64_becomes_float32_first(small, shown):
    small.run(f"{START}\nX = torch.ones(4000, 1000).double().cuda()")
    cell = "A = X - X.mean(0)\nA = A / X.std(0)"
    small.run(cell)
    lever = shown.pop().levers[0]
    assert lever.do == "`X = X.float()` first: float64 takes twice the memory"
    assert lever.fits
    assert small.run(f"%gpufree\nX = X.float()\n{cell}").success


@pytest.mark.parametrize(
    ("made", "instead"),
    [
        ("torch.from_numpy(A).cuda()", "torch.from_numpy(A).float()"),
        pytest.param(
            "torch.tensor(A, device='cuda')",
            "torch.tensor(A, device='cuda', dtype=torch.float32)",
            marks=pytest.mark.slow,
        ),
        ("torch.from_numpy(A.astype(int)).cuda()", ""),
    ],
)
def test_a_float64_array_of_the_cell_becomes_a_float32_tensor(small, shown, made, instead):
    small.run(f"{START}import numpy as np")
    labels = "y = torch.from_numpy(np.zeros(3500, dtype=int)).cuda()\n"
    cell = f"A = np.ones((3500, 1500))\n{labels}x = {made}\nloss = (x * 2)[y[:1]].sum()"
    small.run(cell)
    told = " ".join(lever.do for lever in shown.pop().levers)
    assert ("float64" in told) is bool(instead)
    if instead:
        assert told == f"`{instead}` for line 3: float64 takes twice the memory"
        assert small.run(f"%gpufree\n{cell.replace(made.removesuffix('.cuda()'), instead)}").success


FRAMES = "frames = [torch.ones(3, 64, 64, device='cuda') for _ in range(500)]"
"""23.4 MiB."""


def test_what_the_cell_has_made_itself_counts_once(small, shown):
    small.run(START + "users = mib(19.5)")
    cell = f"{FRAMES}\nclip = torch.stack(frames)"
    small.run(cell)
    (lever,) = shown.pop().levers
    assert (lever.do, lever.fits) == ("`%gpufree users`, which this code does not read", True)
    small.run("%gpufree users")
    assert small.run(cell).success  # while the frames of the first run are still there


def test_a_variable_whose_loss_would_help_little_is_kept(small, shown):
    small.run(START + "users, X = mib(60), mib(0.5)")
    small.run("table = mib(60)")
    assert "`%gpufree users`, which" in repr(shown.pop().levers)


def test_what_the_cell_reads_is_let_go_in_the_cell(small, shown):
    small.run(START + "A = torch.ones(2000, 2000, device='cuda')\nkept = mib(10)")
    cell = "D = torch.cdist(A, A){}\nW = torch.exp(-D**2) + kept[0]"
    small.run(cell.format(""))
    assert shown.pop().levers[0].do == "`del A` before line 2"
    assert small.run(cell.format("\ndel A")).success


def test_differences_of_all_pairs_that_are_meant_keep_their_shapes(small, shown):
    small.run(START + "x = torch.ones(6000, device='cuda')")
    small.run("d = x[:, None] - x\nd.sum()")
    assert ".view(" not in repr(shown.pop())


def test_a_part_of_a_batch_is_not_made_shorter_alone(small, shown):
    small.run(START + "data, got = torch.ones(8192, 1024), []")
    small.run(
        "for i in range(0, 8192, 512):\n    got.append(data[i:i + 512].cuda() * mib(8).sum())"
        "\n    got.append(data[i:i + 512].cuda() * 2)"
    )
    assert " instead of " not in repr(shown.pop())


def test_the_list_that_collects_is_named(small, shown):
    small.run(START + "class Log:\n    pass\nlog = Log()\nlog.seen = {'pred': []}")
    small.run("for n in range(40):\n    log.seen['pred'].append(mib(2).relu())")
    error = shown.pop()
    assert (error.adds_to, error.adds) == ("log", 2 * MIB)
    assert error.levers[0].do.startswith("store `.cpu()` of the tensors in `log`, if RAM has room")
    assert error.levers[0].gives == 62 * MIB


def test_no_number_is_told_that_does_not_decide(small, shown):
    small.run(START + "torch.manual_seed(99_999)\nkept = mib(60)")
    small.run("torch.manual_seed(99_999)\nx = mib(5.5) + torch.ones(20, device='cuda')")
    assert " instead of " not in repr(shown.pop())


@pytest.mark.slow
def test_what_a_loop_in_a_loop_assigns_is_freed_before_a_rerun(small, shown):
    small.run(f"{START}net = nn.Sequential(nn.Linear(256, 256), nn.Tanh()).cuda()")
    small.run(
        "for epoch in range(2):\n    total = 0\n    for n in range(40):\n"
        "        out = net(torch.ones(900, 256).cuda())\n        total += out.square().mean()"
    )
    assert "total" in shown.pop().stale


def test_a_cache_by_strings_grows(small, shown):
    small.run(f"{START}from functools import lru_cache\nnames = [str(n) for n in range(90)]")
    small.run("w = mib(1)\n@lru_cache\ndef encode(text):\n    return w * len(text)")
    small.run("for name in names:\n    y = encode(name)")
    found = shown.pop()
    assert found.adds_to == "encode"
    assert found.levers[0].do.startswith("store `.cpu()` of the tensors in `encode`")


def test_the_next_part_of_a_batch_fits_beside_the_results_of_the_last(small, shown):
    small.run(f"{START}w = torch.ones(60_000, device='cuda', requires_grad=True)")
    small.run("x = torch.ones(96, 60_000)")
    small.run("out = x.cuda() * w\nout.square().sum().backward()")
    lever = shown.pop().levers[0]
    number = int(re.search(r"a batch of (\d+) instead", lever.do)[1])
    part = f"for part in x.split({number}):\n    out = part.cuda() * w\n"
    assert small.run(f"%gpufree out\n{part}    out.square().sum().backward()").error is None


def test_a_model_that_is_freed_could_be_kept(small, shown):
    small.run(f"{START}net = nn.Linear(2900, 2900).cuda()")
    small.run("x = torch.ones(12_000_000, device='cuda')")
    (lever,) = shown.pop().levers
    kept = "; to keep the trained weights instead, `net.cpu()`"
    assert lever.do == f"`%gpufree net`, which this code does not read{kept}"


def test_the_batch_that_is_told_is_nearly_the_largest_that_fits(small, shown):
    notebook = next(each for each in SITUATIONS if each.name == "a batch too large")
    for cell in [START, *notebook.before, notebook.cell]:
        small.run(cell.replace("(*wide,", "(nn.BatchNorm1d(20), *wide,"))  # no rows apart
    lever, *_ = (r for r in shown.pop().levers if "a batch of" in r.do)
    batch = numbers_of(lever.do)[0]
    assert lever.fits
    larger = next(n for n in range(batch + 1, 601) if 600 % n == 0)
    for size in (batch, larger):
        ran = small.run("%gpufree\n" + notebook.cell.replace("net(X)", f"net(X[:{size}])"))
        assert (ran.error is None) == (size == batch), ran.text
        del ran  # and with it the frames of its error


def test_a_tensor_that_the_cell_makes_is_not_offered_to_the_cpu(small, shown):
    small.run(START)
    small.run(
        "x = torch.ones(3_000_000, dtype=torch.float64, device='cuda')\n"
        "m = (x - x.mean()) / x.std()"
    )
    assert not [lever for lever in shown.pop().levers if "on the CPU" in lever.do]


def test_states_that_a_loop_passes_on_do_not_grow(small, shown):
    small.run(
        f"{START}\ndef bend(u):\n    return torch.roll(u, 1) + torch.roll(u, -1)\n"
        "def simulate(u):\n    frames, before, now = [], u.clone(), u.clone()\n"
        "    for _ in range(90):\n        before, now = now, bend(now) - before\n"
        "        frames.append(now.clone())\n    return frames"
    )
    small.run("movie = simulate(mib(1))")
    assert shown.pop().adds == MIB


def test_what_another_framework_took_and_does_not_use_is_the_cause(gpus):
    pool = Pool("JAX", 1 * MIB, None, 48 * MIB, 48 * MIB)
    device = SimpleNamespace(pools=(pool,), total=64 * MIB, free=0, reserved=48 * MIB)
    s = OutOfMemoryState.__new__(OutOfMemoryState)
    vars(s).update(
        device=device,
        shortage=Shortage(0, 20 * MIB, 64 * MIB),
        wanted=20 * MIB,
        most=48 * MIB,
        limit=None,
        short_by=20 * MIB,
        name="cuda:0",
    )
    device.others, device.others_by_name, device.allocated = 0, (), MIB
    why, (lever,) = by_figures(s, None)
    assert why == "JAX in this process has taken 48.0 MiB of cuda:0, of which it uses 1.0 MiB"
    assert "XLA_PYTHON_CLIENT_PREALLOCATE" in lever.do
    assert lever.gives == 47 * MIB
    s.short_by = 47 * MIB + 1
    assert by_figures(s, None) is None


@pytest.mark.filterwarnings("ignore:Using a target size")
def test_shapes_that_broadcast_are_told_once(small, shown):
    small.run(START + "net, X = nn.Linear(8, 1).cuda(), mib(0.25).view(-1, 8)\ny = X[:, 0].clone()")
    small.run("loss = F.mse_loss(net(X), y)")
    assert len([lever for lever in shown.pop().levers if ".view(" in lever.do]) == 1


MOVED_WHOLE = {
    "in a function that reads batches": (
        "def train(X, bs=500):\n    order = torch.randperm(len(X), device='cuda')\n"
        "    for i in range(0, len(X), bs):\n        net(X[order[i : i + bs]]).sum().backward()",
        "X = data.to('cuda')\ntrain(X)",
        ("In [3], line 1", ': `X[order[i : i + bs].cpu()].to("cuda:0")`'),
    ),
    "in a helper function": (
        "def to_gpu(x):\n    return torch.tensor(x.numpy(), device='cuda')",
        "loader = torch.utils.data.DataLoader(to_gpu(data), batch_size=500)\n"
        "for x in loader:\n    net(x).sum().backward()",
        ("In [2], line 2", ": in `for x in loader:`"),
    ),
    "by the samples of a data set": (
        "class Rows(torch.utils.data.Dataset):\n    def __init__(self, every):\n"
        "        self.rows = []\n        for x in every:\n            self.rows.append(x.cuda())",
        "rows = Rows(data.split(50))",
        ("In [2], line 5", ""),
    ),
}


@pytest.mark.parametrize(
    "where",
    [
        pytest.param(n, marks=[pytest.mark.slow] * (n == "in a helper function"))
        for n in MOVED_WHOLE
    ],
)
def test_data_that_are_moved_whole_are_kept_on_the_cpu(small, shown, where):
    before, cell, (line, batch) = MOVED_WHOLE[where]
    small.run(f"{START}data, net = torch.ones(4000, 5120), nn.Linear(5120, 64).cuda()")
    small.run(before)
    small.run(cell)
    (found,) = shown.pop().levers[:1]
    assert found.do == (
        f"keep the data of {line} on the CPU, made without `.to(…)`, `.cuda()` or `device=`, "
        f"and move each batch{batch}"
    )
    assert found.fits


def test_rows_of_code_without_a_backward_pass_need_no_graph_either(small, shown):
    small.run(f"{START}net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).cuda()")
    small.run("X = torch.ones(88_000, 64)")
    small.run("out = net(X.cuda())")
    lever = shown.pop().levers[0]
    assert lever.do.startswith("`with torch.no_grad(): out = torch.cat([net(rows.cuda())")
    assert lever.fits
    assert small.run(f"%gpufree\n{lever.do.split('`')[1]}").success


@pytest.mark.slow
def test_float64_whose_copy_does_not_fit_becomes_float32_on_the_cpu(small, shown):
    small.run(f"{START}X = torch.ones(45, 2**17).double().cuda()")
    cell = "A = X - X.mean(0)"
    small.run(cell)
    lever = shown.pop().levers[0]
    assert lever.do.startswith("`X = X.cpu().float()` and `X = X.cuda()` first: float64")
    assert lever.fits
    assert small.run(f"%gpufree\nX = X.cpu().float()\nX = X.cuda()\n{cell}").success


def test_a_loop_whose_own_variables_are_on_the_gpu_is_explained(small, shown):
    small.run(f"{START}net = nn.Sequential(nn.Linear(784, 2000), nn.ReLU(), nn.Linear(2000, 10))")
    small.run("net, X, y = net.cuda(), torch.ones(4096, 784), torch.zeros(4096, dtype=torch.long)")
    small.run("from torch.utils.data import DataLoader, TensorDataset")
    small.run("batches = DataLoader(TensorDataset(X, y), batch_size=4096)")
    small.run("xb, yb, other = X.cuda(), y.cuda(), mib(41)")
    loop = "for xb, yb in batches:\n    l = nn.functional.cross_entropy(net(xb), yb); l.backward()"
    assert "out of memory" in str(small.run(f"%%ongpu 0\n{loop}").error)
    assert faults.all_kept() == []
    assert "other" in shown.pop().levers[0].do


def test_runs_that_a_dict_keeps_by_a_fraction_are_the_cause(small, shown):
    small.run(f"{START}runs, x = {{}}, torch.ones(1, 1024).cuda()")
    small.run(
        "for rate in (0.1, 0.01, 0.001, 0.0001, 0.2, 0.3):\n"
        "    net = nn.Linear(1024, 1024).cuda()\n"
        "    opt = torch.optim.Adam(net.parameters(), lr=rate)\n"
        "    net(x).sum().backward()\n    opt.step()\n    runs[rate] = {'net': net, 'opt': opt}"
    )
    found = shown.pop()
    assert "each pass of the loop in In [" in found.reason
    assert "in `runs`" in found.levers[0].do


def test_what_a_loop_appends_for_a_later_backward_pass_keeps_its_graph(small, shown):
    small.run(f"{START}net, x = nn.Linear(1024, 1024).cuda(), torch.ones(512, 1024).cuda()")
    small.run(
        "for episode in range(2):\n    values, n = [], 0\n    while n < 50:\n"
        "        value = net(x).relu()\n        values.append(value)\n        n += 1\n"
        "    loss = torch.cat(values).mean()\n    loss.backward()"
    )
    told = " ".join(lever.do for lever in shown.pop().levers)
    assert "no backward pass" not in told
    assert "detach" not in told


def test_a_check_of_values_and_an_object_with_every_attribute_hide_no_lever(small, shown):
    small.run(f"{START}\nfrom unittest.mock import Mock\nlog = Mock()")
    small.run("net, x = nn.Linear(256, 512).cuda(), torch.ones(30_000, 256)")
    small.run(
        "log.info(1)\ny = net(x.cuda())\nassert torch.isfinite(y).all()\n"
        "if torch.isnan(y).any():\n    raise ValueError('nan')\nz = y.square().sum(1)"
    )
    assert shown.pop().levers


def test_an_integer_that_a_library_reads_is_one_in_a_trial(small, shown):
    code = "def longest(n):\n    return list(range(n.max().item()))"
    small.run(f"{START}\nlib = {{}}\nexec(compile({code!r}, torch.__file__, 'exec'), lib)")
    small.run("net = nn.Sequential(*[nn.Linear(256, 256), nn.ReLU()] * 4).cuda()")
    small.run(
        "for _ in range(2):\n    x = torch.ones(20_000, 256).cuda()\n"
        "    k = lib['longest'](torch.tensor([3, 4]).cuda())\n    net(x).sum().backward()"
    )
    assert shown.pop().levers[0].do.startswith("`x`: a batch of ")


def test_a_gans_losses_do_not_accumulate_and_only_the_number_of_the_batch_is_named(small, shown):
    small.run(f"{START}\nbs = width = 24_000\nD = nn.Linear(256, 1).cuda()")
    small.run("G = nn.Linear(256, 256).cuda()")
    small.run("d, g = torch.optim.SGD(D.parameters(), 0.1), torch.optim.SGD(G.parameters(), 0.1)")
    small.run(
        "for _ in range(2):\n    z = torch.ones(bs, 256).cuda()\n"
        "    D(G(z).tanh()).sum().backward()\n    g.step()\n    d.step()\n    g.zero_grad()"
    )
    told = [lever.do for lever in shown.pop().levers]
    assert not re.search("accumulating|width", " ".join(told))
    assert any("a batch of" in do or "bs = " in do for do in told)


def test_a_cell_that_begins_with_a_deletion_has_levers(small, shown):
    small.run(
        f"{START}\nnet = nn.Sequential(*[nn.Linear(256, 256), nn.Tanh()] * 3).cuda()\nold = 1"
    )
    small.run("del old\ny = net(torch.ones(14_000, 256).cuda())\nbest = y.argmax(1).cpu()")
    assert any("no_grad" in lever.do for lever in shown.pop().levers)


def test_the_images_of_a_loader_that_move_with_their_labels_are_a_batch(small, shown):
    small.run(f"{START}\nnet = nn.Sequential(nn.Linear(64, 2048), nn.BatchNorm1d(2048)).cuda()")
    small.run("data = torch.utils.data.TensorDataset(torch.ones(9000, 64), torch.ones(9000))")
    small.run("loader = torch.utils.data.DataLoader(data, 3000)")
    small.run(
        "for x, y in loader:\n    x, y = x.cuda(), y.cuda()\n"
        "    out = net(x)\n    (out.sum() - y.sum()).backward()"
    )
    (lever,) = shown.pop().levers  # no checkpoint, as it would change the layer's statistics
    assert lever.do.startswith("`loader`: a batch of ")


def test_the_weight_that_takes_most_of_the_memory_is_named(small, shown):
    small.run(f"{START}\nnet = nn.Sequential(nn.Flatten(), nn.Linear(8192, 600)).cuda()")
    small.run("opt, x = torch.optim.Adam(net.parameters()), torch.ones(2, 8192).cuda()")
    small.run("for _ in range(2):\n    net(x).sum().backward()\n    opt.step()")
    assert "; net.1.weight takes 18.8 MiB" in shown.pop().reason


def test_a_cat_of_a_starred_list_and_a_frozen_model_hide_no_explanation(small, shown):
    small.run(f"{START}\nfrozen = nn.Linear(4000, 800).requires_grad_(False)")
    small.run("net, out = nn.Linear(64, 1024).cuda(), torch.empty(0, 1024).cuda()")
    small.run(
        "for _ in range(20):\n    parts = [net(torch.ones(1024, 64).cuda()).detach()]\n"
        "    out = torch.cat([out, *parts])"
    )
    assert "takes" not in shown.pop().reason


def test_a_variable_that_an_earlier_error_holds_too_can_be_freed(small, shown):
    small.run(START + "big = torch.ones(20_000, 256, device='cuda')")
    small.run("big.foo")
    small.run("t = torch.zeros(48, 1024, 256, device='cuda:0')")
    lever = shown.pop().levers[0]
    assert lever.do == "`%gpufree big`, which this code does not read"
    assert lever.fits


def test_no_line_is_named_where_the_loop_has_one_line(small, shown):
    small.run(START + "net, x = nn.Linear(256, 2048).cuda(), torch.ones(8000, 256).cuda()")
    small.run("with torch.no_grad():\n    for part in x.split(4000): z = net(part)")
    told = [lever.do for lever in shown.pop().levers]
    assert "`z = None` at the start of the body of the loop in line 2" in told


def test_a_loop_carries_what_an_outer_loop_binds_for_it(small, shown):
    small.run(START + "xs, net = [torch.ones(1, 256)], nn.Linear(256, 256).cuda()")
    small.run(
        "with torch.no_grad():\n    for x in xs:\n        x = x.cuda()\n"
        "        for _ in range(40):\n            x = torch.cat([x, net(x)])"
    )
    assert not [lever for lever in shown.pop().levers if "store" in lever.do]


def test_an_output_that_holds_a_variable_too_is_not_freed_by_del(small, shown):
    small.run(START + "a = torch.ones(20, 1024, 256, device='cuda')\na")
    small.run("s = a.sum()\nb = torch.zeros(44, 1024, 256, device='cuda')")
    assert not [
        lever for lever in shown.pop().levers if lever.do.startswith("`del a") and lever.fits
    ]


def test_one_element_views_are_cloned(small, shown):
    small.run(f"{START}x = torch.ones(1000, 1000, device='cuda')\nfirsts = []")
    small.run("for _ in range(40):\n    firsts.append((x @ x).flatten()[0])")
    assert "store `.clone()` in `firsts`" in shown.pop().levers[0].do


def test_a_retry_within_except_goes_below_it(small, shown):
    small.run(START + "def run(n):\n    h = mib(n)\n    return (h + 1).sum()")
    cell = "try:\n    run(40)\nexcept torch.cuda.OutOfMemoryError:\n    run(25)"
    small.run(cell)
    (lever, *_) = shown.pop().levers
    assert lever.do.startswith("set a flag in the `except` block and retry below the block")
    assert lever.fits


def test_lbfgs_keeps_fewer_steps(small, shown):
    small.run(START + "x = mib(1, requires_grad=True)\nopt = torch.optim.LBFGS([x], max_iter=60)")
    small.run("c = torch.linspace(1, 9, 2**18).cuda()")
    small.run(
        "def closure():\n    opt.zero_grad()\n    loss = (c * x.square() + x.abs().sqrt()).sum()\n"
        "    loss.backward()\n    return loss"
    )
    small.run("opt.step(closure)")
    (lever, *_) = shown.pop().levers
    assert lever.do.startswith("`history_size=10` for `opt`: LBFGS keeps two vectors")
    small.run(f"%gpufree\nopt.param_groups[0]['history_size'] = 10\n{'opt.state.clear()'}")
    assert small.run("opt.step(closure)").error is None


def test_a_smaller_batch_with_16_bits_is_proposed_where_neither_suffices_alone(small, shown):
    layers = "nn.Sequential(*[nn.Conv2d(8, 8, 3, padding=1), nn.Tanh()] * 6).cuda()"
    small.run(START + f"net = {layers}\nx = torch.ones(2, 8, 512, 512).cuda()")
    small.run("opt = torch.optim.SGD(net.parameters(), 0.1)")
    small.run("net(x).mean().backward()\nopt.step()")
    (lever, *_) = shown.pop().levers
    assert lever.do.startswith('`with torch.autocast("cuda", torch.bfloat16):`')
    assert lever.do.endswith("and `x`: a batch of 1 instead of 2, accumulating the gradients of 2")
    assert lever.fits
