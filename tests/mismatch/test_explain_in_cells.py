"""Errors between devices after a `%%ongpu` cell: fixes for the cell, in the names typed there."""

from dataclasses import replace

import pytest

from gpumagic.mismatch.explanation import Explanation, Fix

pytestmark = pytest.mark.filterwarnings("ignore")
CLASSES = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.c1, self.fc = nn.Linear(4, 5), nn.Linear(5, 3)
    def forward(self, x):
        x = torch.relu(self.c1(x.flatten(1)))
        return self.fc(x)
class Moving(Net):
    def __init__(self):
        super().__init__()
        self.scale = [torch.ones(4)]
    def forward(self, x):
        x = x.to(self.c1.weight.device)
        return super().forward(x * self.scale[0])
def accuracy(model, X, y):
    return (model(X).argmax(1) == y).float().mean()
dev = "cuda:1"
X, y = torch.rand(64, 4), torch.randint(3, (64,))
Xte, yte = torch.rand(16, 4), torch.randint(3, (16,))
"""
TRAIN = "%%ongpu 1\nmodel = Net()\nnn.functional.cross_entropy(model(X), y).backward()"
PUT = "fix: put %%ongpu 1 on top of this cell"


def explained(ran):
    return ran.text[ran.text.index("between devices") :]


@pytest.fixture
def trained(ip):
    ip.run(CLASSES)
    assert ip.run(TRAIN).error is None
    return ip


@pytest.mark.parametrize(
    ("score", "edit"),
    [
        ("pred = model(Xte)", "pred = model(Xte.to(dev))"),
        ("acc = accuracy(model, Xte, yte)", "Xte, yte = Xte.to(dev), yte.to(dev)"),
    ],
)
def test_after_training_in_a_placed_cell_the_next_is_to_be_placed_too(trained, score, edit):
    told = explained(trained.run(score))
    assert told.index(PUT) < told.index("or: In [")
    assert edit in told
    assert "self.c1" not in told
    assert "model" in told
    assert trained.run(f"%%ongpu 1\n{score}").error is None
    assert trained.run(f"{edit}\n{score}").error is None


def test_a_cell_that_is_placed_and_a_notebook_that_has_no_such_cell_get_the_edit_alone(ip):
    ip.run(CLASSES)
    ip.run("model = Net().cuda(1)")
    assert "%%ongpu" not in explained(ip.run("model(Xte)"))
    ip.run(TRAIN)
    assert "put %%ongpu" not in explained(ip.run("%%ongpu 1 --no-move\nmodel(Xte)"))


HOME = [
    ("p = model(X).argmax(1).cpu()\nacc = p == y", "acc = p.to(dev) == y"),
    (
        "ps = []\nfor b in X.split(8):\n    ps.append(model(b).argmax(1).to('cpu'))\n"
        "acc = torch.cat(ps) == y",
        "acc = torch.cat(ps).to(dev) == y",
    ),
    ("model.to('cpu')\nout = model(X)", "model.to(dev)"),
    ("ones = torch.ones(64, device='cpu')\nsame(ones, y)", "same(ones.to(dev), y)"),
    ("ones = torch.ones(64, device='cpu')\nz = ones * y", "z = ones.to(dev) * y"),
]


@pytest.mark.parametrize(("cell", "edit"), HOME)
def test_a_cell_that_brought_its_values_home_itself_is_not_to_be_placed(trained, cell, edit):
    trained.run("def same(a, b):\n    return a == b")
    told = explained(trained.run(cell))
    assert PUT not in told
    assert edit in told
    assert PUT in explained(trained.run("model = Net()\nn = model(X).cpu()"))


@pytest.mark.parametrize(
    ("before", "cell"),
    [
        ("%ongpu 1", "made = torch.ones(4, device='cpu')\ngrown + made"),
        ("1", "made = torch.ones(4, device='cpu')\ngrown + made"),
        ("1", "made = torch.ones(4).cpu()\ngrown + made"),
    ],
)
def test_a_line_on_top_that_would_change_nothing_is_not_offered(trained, before, cell):
    trained.run("host, grown = torch.rand(4), torch.rand(4, device='cuda:1')")
    assert PUT in explained(trained.run("grown + host"))
    trained.run(before)
    told = explained(trained.run(cell))
    trained.run("%ongpu off")
    assert "on top" not in told
    assert ".to(" in told


STILL_FAILS = {
    "allclose": "torch.allclose(table, table.cpu())",
    "equal": "torch.equal(table, table.cpu())",
    "lengths": "nn.utils.rnn.pack_padded_sequence(table[None], lens, batch_first=True)",
    "state": (
        "opt = torch.optim.Adam(model.parameters()); model.cpu()\n"
        "model(Xte.cpu()).sum().backward(); opt.step(); model.cuda(1)\n"
        "model(Xte.cuda(1)).sum().backward(); opt.step()"
    ),
}


@pytest.mark.parametrize("cell", STILL_FAILS.values(), ids=STILL_FAILS)
def test_a_line_on_top_is_offered_only_where_a_dry_run_predicts_the_error_without_it(trained, cell):
    trained.run("table = torch.randn(5, 2, device='cuda:1'); lens = torch.full((1,), 5).cuda(1)")
    assert "on top" not in explained(trained.run(cell))


def test_what_the_code_makes_without_a_device_is_placed_too(trained):
    trained.run("grown = torch.rand(4, device='cuda:1')\ndef f(x):\n    return x + torch.ones(4)")
    assert PUT in explained(trained.run("grown + torch.ones(4)"))
    assert trained.run("%%ongpu 1\ngrown + torch.ones(4)").error is None
    # In a function, that lasts: it comes first.
    told = explained(trained.run("f(grown)"))
    assert "return x + torch.ones(4, device=x.device)" in told
    assert PUT not in told


def test_a_module_of_the_users_class_is_moved_where_it_was_called(trained):
    trained.run("lstm2, xb, dev = Net(), torch.rand(2, 4, device='cuda:1'), None")
    told = explained(trained.run("lstm2(xb)"))
    assert 'lstm2.to("cuda:1")' in told or "lstm2.to(xb.device)" in told
    assert "self." not in told
    for code in ("def use(net, x):\n    return net(x)", "dev = 'cuda:1'"):
        trained.run(code)
    told = explained(trained.run("use(lstm2, xb)"))
    assert "In [8], before line 1" in told
    assert "lstm2.to(dev)" in told


def test_what_a_class_moves_itself_is_not_blamed_on_the_call(trained):
    told = explained(trained.run("Moving().cuda(1)(Xte)"))
    assert "self.scale[0]" in told
    assert ".to(dev)" not in told  # a variable of the notebook, in a class


def test_a_fix_in_a_class_says_that_its_objects_keep_the_old_code(ip):
    ip.run(
        "class Shift(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.by = torch.ones(2)\n    def forward(self, x):\n        return x + self.by"
    )
    told = explained(ip.run("Shift().cuda()(torch.ones(2, device='cuda'))"))
    assert "with (moves nothing), then run that cell and all below it again" in told
    assert "permanently" not in told


LOADER = "loader = torch.utils.data.DataLoader({}, 2, num_workers=1)"


AGAIN = "make loader again with num_workers=0, pin_memory=False; or put its tensors"


@pytest.mark.parametrize("data", ["D(X, y)", "D(X[:9] * 1)"])
def test_workers_over_moved_data_name_the_loader_and_what_to_do(ip, data):
    ip.run(CLASSES + "D = torch.utils.data.TensorDataset")
    ip.run(TRAIN)
    ip.run("def epoch(batches):\n    for batch in batches: pass")
    ip.run(LOADER.format(data))
    told = " ".join(explained(ip.run("epoch(loader)")).split())
    assert "model" not in told
    assert "loader.dataset.tensors.0 cuda:1" in told
    assert AGAIN in told
    ip.run("%ongpu home")
    ip.run(LOADER.format(data))
    assert ip.run("epoch(loader)").error is None


def test_data_made_on_the_gpu_can_be_loaded_as_the_explanation_says(ip):
    made = CLASSES + LOADER.format("torch.rand(4, 4)")
    ip.run("%%ongpu 1\n" + made)
    told = " ".join(explained(ip.run("for batch in loader: pass")).split())
    assert AGAIN in told
    assert "type %ongpu home, then make the data and loader in a cell without %%ongpu" in told
    ip.run("%ongpu home")
    for cell in (made, "%%ongpu 1\n" + made.replace("num_workers=1", "num_workers=0")):
        ip.run(cell)
        assert ip.run("for batch in loader: pass").error is None


def test_all_loaders_over_the_data_and_their_data_sets_are_named(ip):
    ip.run("import torch\nX = torch.rand(9, 4).to('cuda:1')\ny = X[:, 0].sum(0)")
    ip.run(
        "from torch.utils.data import DataLoader, TensorDataset\n"
        "train, test = TensorDataset(X[:6]), TensorDataset(X[6:])\n"
        "loader, other = DataLoader(train, pin_memory=True), DataLoader(test, pin_memory=True)\n"
        "def epoch(batches):\n    for batch in batches: pass"
    )
    told = " ".join(explained(ip.run("epoch(loader)")).split())
    assert "make loader, other again with num_workers=0, pin_memory=False" in told
    assert "type X = X.cpu(), then make the data and loader, other in a cell without" in told


def test_named_data_made_on_the_gpu_is_to_be_copied_to_the_cpu(ip):
    ip.run(CLASSES + "D = torch.utils.data.TensorDataset")
    ip.run("%%ongpu 1\na, b = torch.rand(4, 4), torch.rand(8, 2)\nX.sum()")
    ip.run(LOADER.format("D(a, b[:4])"))
    told = " ".join(explained(ip.run("for batch in loader: pass")).split())
    assert "type a, b = a.cpu(), b.cpu(), then make loader in a cell without %%ongpu" in told
    ip.run(LOADER.format("D(a, X[:4])") + "\na")  # also named _
    told = " ".join(explained(ip.run("for batch in loader: pass")).split())
    assert "type a = a.cpu() and %ongpu home, then make loader in a cell" in told
    ip.run("a = a.cpu()\n%ongpu home\n" + LOADER.format("D(a, X[:4])"))
    assert ip.run("for batch in loader: pass").error is None


def test_a_cell_on_several_gpus_places_no_later_one(ip):
    ip.run(CLASSES)
    ip.run("model = Net().cuda(1)")
    ip.run("%%ongpu 1,0 --no-such\npass")
    assert "%%ongpu" not in explained(ip.run("model(Xte)"))
    ip.run("%%ongpu gpu:1?\npass")
    assert PUT in explained(ip.run("model(Xte)"))


def test_libraries_frames_do_not_stand_between_the_cell_and_the_explanation(trained):
    trained.run("%xmode Context")
    told = trained.run("nn.Sequential(model, nn.ReLU())(Xte)").text
    assert "skipping hidden" in told
    assert "_call_impl" not in told
    assert "return self." in told  # the frame of the user's class
    assert "fix: " in told
    assert "_call_impl" in trained.run("%tb").text
    # An error that is not explained is shown as ever.
    assert "_call_impl" in trained.run("nn.Sequential(nn.Linear(2, 2))(5)").text


def test_a_loader_that_shuffles_under_a_default_device_is_given_a_generator_there(ip):
    loader = f"import torch\n{LOADER.format('torch.ones(4)')}"
    ip.run(loader.replace("num_workers=1", "shuffle=True"))
    ip.run("torch.set_default_device('cuda')")
    told = explained(ip.run("for x in loader: pass"))
    given = 'shuffle=True, generator=torch.Generator("cuda:0"))'
    assert given in told
    done = ip.run(f"{told.splitlines()[-1].strip()}\nfor x in loader: pass")
    ip.run("torch.set_default_device(None)")
    assert done.error is None


def test_the_graphs_of_earlier_cells_keep_the_backward_of_a_function(ip):
    ip.run(
        "import torch\nclass Half(torch.autograd.Function):\n    @staticmethod\n"
        "    def forward(ctx, x):\n        ctx.n = x.shape\n        return x / 2\n"
        "    @staticmethod\n    def backward(ctx, grad):\n        half = torch.ones(ctx.n)\n"
        "        return grad * half / 2"
    )
    x = "x = torch.ones(3, device='cuda', requires_grad=True)"
    told = explained(ip.run(f"{x}\nHalf.apply(x).sum().backward()"))
    assert "half = torch.ones(ctx.n, device=grad.device)" in told
    assert "below it again" in told


def test_the_magic_before_the_code_stays_and_a_magic_that_places_is_not_placed(trained):
    trained.run("import torch\nx = torch.ones(3, 4)")
    for magic in ("%time ", "%timeit -n1 -r1 ", "%gpudiff float32 bfloat16 -- "):
        told = explained(trained.run(f"{magic}model(x)"))
        assert f"\n      {magic}model(x.to(" in told
        assert (PUT in told) == (magic[:5] == "%time")


def test_a_placed_line_is_offered_only_where_the_whole_cell_then_runs(trained):
    cell = "best = Xte.cpu()\npred = model(best)\nacc = pred.argmax(1) == yte"
    told = explained(trained.run(cell))
    assert PUT not in told
    assert "best, yte = best.to(dev), yte.to(dev)" in told
    assert PUT in explained(trained.run(cell.replace(".cpu()", ".clone()")))


FAR = """def nearest(q, bank, labels):
    place = (q @ bank.T).argmax(1)
    votes = labels[place]
    return torch.zeros(len(q), device=q.device).add_(votes)
"""


def test_a_fix_has_the_edits_for_the_errors_that_follow_it(trained):
    trained.run(FAR)
    trained.run("labels, on = torch.arange(6), 'cuda:0'")
    trained.run("q, bank = torch.rand(6, 4, device=on), torch.rand(6, 4, device=on)")
    cell = "near = nearest(q, bank, labels)\nright = near == torch.arange(6)"
    told = explained(trained.run(cell))
    assert "near = nearest(q, bank, labels.to(q.device))" in told
    assert "right = near == torch.arange(6, device=near.device)" in told


MEAN = """class Mean:
    def __init__(self, net):
        self.net = copy.deepcopy(net)
    def update(self, net):
        for a, b in zip(self.net.parameters(), net.parameters()):
            a.data.mul_(0.9).add_(b.data, alpha=0.1)
"""
LOSS = """class Loss(nn.Module):
    def forward(self, z):
        same = torch.eye(len(z), dtype=torch.bool)
        scores = (z @ z.T).masked_fill(same, -1e9)
        return nn.functional.cross_entropy(scores, torch.arange(len(z)))
"""


def test_globals_that_a_function_of_another_cell_reads_are_moved_once(ip):
    ip.run("def rows(a, t):\n    part = a[t]\n    return part[:, None]")
    ip.run("def noise(x, t):\n    return rows(small, t) * x + rows(large, t)")
    ip.run("small, large = torch.rand(2, 9)\nx = torch.rand(4, 3, device='cuda')")
    told = explained(ip.run("y = noise(x, torch.arange(4, device=x.device))"))
    small, large = (f'{name} = {name}.to("cuda:0")' for name in ("small", "large"))
    assert f"before line 1 (moves 72 B)\n      {small}\n      {large}\n" in told
    assert "and:" not in told


def test_a_fix_in_a_class_is_tried_and_completed_too(ip):
    ip.run(LOSS)
    told = explained(ip.run("loss = Loss()(torch.rand(4, 3, device='cuda'))"))
    assert "replace lines 3 to 5 with" in told
    assert "same = torch.eye(len(z), dtype=torch.bool, device=z.device)" in told
    assert "torch.arange(len(z), device=scores.device)" in told
    assert "then run that cell and all below it again" in " ".join(told.split())


def test_a_module_in_an_object_is_moved_by_the_cell_that_calls_the_object(ip):
    ip.run(f"import copy\n{MEAN}")
    ip.run("net = nn.Linear(2, 2)\nmean = Mean(net)\nnet.cuda()")
    assert '\n      mean.net.to("cuda:0")' in explained(ip.run("mean.update(net)"))


def test_a_loss_that_only_has_weights_is_moved_to_the_model_and_not_the_model_to_it(ip):
    ip.run("loss = nn.CrossEntropyLoss(weight=torch.ones(3, device='cuda:1'))")
    ip.run("net, x = nn.Linear(4, 3, device='cuda:0'), torch.rand(8, 4, device='cuda:0')")
    told = explained(ip.run("out = loss(net(x), torch.ones(8, dtype=torch.long, device='cuda:0'))"))
    assert "\n      loss.to(" in told


def test_an_argument_that_one_call_needs_on_the_cpu_stays_on_the_gpu_for_the_others(ip):
    ip.run(
        "def pack(x, n):\n    packed = nn.utils.rnn.pack_padded_sequence(x, n, batch_first=True)\n"
        "    return packed.data.sum() + (torch.arange(4, device=x.device) < n[:, None]).sum()"
    )
    ip.run("x, n = torch.ones(2, 4, 3, device='cuda'), torch.tensor([3, 2], device='cuda')")
    told = explained(ip.run("total = pack(x, n)"))
    assert "packed = nn.utils.rnn.pack_padded_sequence(x, n.cpu(), batch_first=True)" in told


def test_a_long_list_of_what_is_also_to_be_moved_is_cut(ip):
    ip.run("def both(a, b):\n    return torch.stack(a) + torch.stack(b)")
    ip.run("a, b = ([torch.ones(2, device=d) for d in ('cuda', *['cpu'] * 40)] for _ in 'ab')")
    told = explained(ip.run("c = both(a, b)"))
    assert told.count("also to move") <= 6


def test_the_edits_of_a_fix_stand_in_html_one_below_the_other(gpus):
    fix = Fix("a = 1", "replace", 1, 1, "f", "In [2]", 8)
    explanation = Explanation("a", 1, "f", "In [2]", (), fix, None, more=(replace(fix, line=4),))
    assert explanation._repr_html_().count("<pre") == 2
    assert "and:" in str(explanation)


def test_an_edit_of_another_cell_says_what_to_run_then(ip):
    scaled = "def scaled(x):\n    return x * torch.ones(3)"
    ip.run(scaled)
    then = "then run that cell "
    assert then + "again" in explained(ip.run("y = scaled(torch.ones(3, device='cuda'))"))
    ip.run(f"{scaled}\nx = torch.ones(3, device='cuda')")
    assert then + "and all below it again" in explained(ip.run("y = scaled(x)"))
    assert then not in explained(ip.run(f"{scaled}\ny = scaled(x)"))


def test_a_leaf_that_a_function_reads_is_moved_once_where_the_function_is_called(ip):
    ip.run("w = torch.ones(3, device='cuda:1', requires_grad=True)")
    ip.run("b = torch.ones(3, requires_grad=True)\ndef line(x):\n    return x * w + b")
    told = explained(ip.run("loss = line(torch.ones(3, device='cuda:1')).sum()"))
    assert "b.data = b.data.to(" in told
    ip.run('b.data = b.data.to("cuda:1")')
    assert (
        ip.run("loss = line(torch.ones(3, device='cuda:1')).sum()\nloss.backward()").error is None
    )
    assert ip.ns["b"].grad.tolist() == [1, 1, 1]


def test_a_result_of_a_call_that_was_given_is_moved_by_the_caller(ip):
    ip.run(CLASSES + "def mask(n):\n    return torch.ones(n)\nmodel = Net().to(dev)")
    ip.run(
        "class Masked(Net):\n    def forward(self, x, m):\n        return super().forward(x * m)"
    )
    told = explained(ip.run("net = Masked().to(dev)\nout = net(X.to(dev), mask(4))"))
    assert "out = net(X.to(dev), mask(4).to(dev))" in told


def test_an_object_that_cannot_move_is_left_where_it_is(ip):
    ip.run(
        "class Schedule:\n    def __init__(self):\n"
        "        self.a, self.b = torch.ones(3), torch.ones(3, device='cuda:1')\n"
        "    def add(self, x, noise):\n        return x * self.b + self.b * noise"
    )
    cell = "x, schedule = torch.ones(3, device='cuda:1'), Schedule()\nnoise = torch.randn(3)\n"
    told = explained(ip.run(f"{cell}y = schedule.add(x, noise)"))
    assert "noise = torch.randn(3, device=x.device)" in told


@pytest.mark.parametrize(
    ("code", "fixed"),
    [
        ("(y == found).float()", "(y == torch.as_tensor(found, device=y.device)).float()"),
        ("x.cpu().numpy().argmax(0) == y", "x.cpu().numpy().argmax(0) == y.cpu().numpy()"),
        ("y + np.ones(3)", "y.cpu() + np.ones(3)"),
        ("np.abs(net(x) - ones)", "np.abs(net(x).detach().cpu() - ones)"),
        (
            "net(x * ones).sum().backward()",
            "net(x * torch.as_tensor(ones, dtype=x.dtype, device=x.device)).sum().backward()",
        ),
        (
            "(net(x) - ones).sum().backward()",
            "(net(x) - torch.as_tensor(ones, device=x.device)).sum().backward()",
        ),
    ],
)
def test_arrays_beside_tensors_give_what_the_code_goes_on_with(ip, code, fixed):
    ip.run("import numpy as np\nfound, x = np.arange(3), torch.ones(3, 3, device='cuda:1')")
    ip.run("y, ones = torch.arange(3, device='cuda:1'), np.ones(3)\nnet = nn.Linear(3, 3).cuda(1)")
    assert f"\n      {fixed}" in explained(ip.run(code))
    assert ip.run(fixed).error is None


def test_the_cell_that_moved_it_last_is_named(ip):
    ip.run("net, X = nn.Linear(4, 2), torch.ones(3, 4)")
    ip.run("%%ongpu 1\ny = net(X)")
    ip.run("%%ongpu 0\ny = net(X)")
    told = explained(ip.run("net(torch.ones(3, 4))"))
    assert f"In [{ip.ip.execution_count - 2}] moved net to cuda:0" in told


def test_an_edit_of_init_that_no_trial_can_make_follows_the_edits_before_it(ip):
    ip.run(
        "class Scaled(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.fc, self.scale = nn.Linear(2, 1), torch.ones(1)\n"
        "    def forward(self, x):\n        return self.fc(x) * self.scale\n"
        "def mul(p, q):\n    return p * q"
    )
    ip.run("net, w = Scaled().cuda(1), torch.ones(2).cuda(1)\nx, y = torch.ones(2), torch.ones(2)")
    told = explained(ip.run("a = w + x\nnet(a + mul(w, y))"))
    for moved in ("x.to(w.device)", "y.to(w.device)", "self.scale"):
        assert moved in told.partition("fix:")[2], told


def test_a_call_that_makes_a_tensor_on_the_default_gpu_moves_too(ip):
    ip.run("import numpy as np\nx = torch.ones(3)\n%ongpu 1")
    told = explained(ip.run("np.dot(x, torch.arange(3.0))"))
    assert 'np.dot(x.cpu(), torch.arange(3.0, device="cpu"))' in told
    ip.run("%ongpu off")


def test_another_error_of_the_trial_is_not_the_first_one_again(ip):
    ip.run("net, y = nn.Linear(3, 2).to('cuda'), torch.zeros(8, dtype=torch.long)")
    ip.run("loader = torch.utils.data.DataLoader(torch.ones(8, 3), batch_size=2)")
    cell = (
        "def collect():\n    found = torch.tensor([])\n    for x in loader:\n"
        "        found = torch.cat([found, net(x.cuda())])\n    return found\n"
        "found = collect()\nright = (found.argmax(1) == y).sum()"
    )
    told = explained(ip.run(cell))
    assert "found = torch.tensor([], device=" in told
    assert "and: In [" in told
    assert "right = (found.argmax(1) == y.to(" in told


def test_a_state_that_stayed_on_the_gpu_follows_its_module(ip):
    ip.run(
        "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.cell, self.h = nn.GRUCell(4, 4), None\n    def forward(self, x):\n"
        "        self.h = torch.zeros(3, 4) if self.h is None else self.h\n"
        "        self.h = self.cell(x, self.h.detach())\n        return self.h"
    )
    assert ip.run("%%ongpu 1\nnet, x = Net(), torch.ones(3, 4)\nnet(x)").error is None
    told = explained(ip.run("x = x.cpu()\nnet.cpu()(x)"))
    assert "self.h.detach().to(x.device)" in told
    assert "self.cell.to" not in told
    assert 'register_buffer("h", …' in told  # forward() may not assign to a Parameter


def test_an_edit_that_calls_to_of_a_tuple_is_not_offered(ip):
    ip.run("rnn, x = nn.LSTM(4, 8).cuda(1), torch.ones(2, 1, 4).cuda(1)")
    ip.run("def start():\n    return torch.zeros(1, 1, 8), torch.zeros(1, 1, 8)")
    told = explained(ip.run("y, state = rnn(x, start())"))
    assert "start() cpu" in " ".join(told.split())
    assert "fix:" not in told


def test_the_earlier_cell_that_moved_the_model_is_named(ip):
    ip.run("net, x = nn.Linear(2, 1).cuda(), torch.ones(3, 2).cuda()")
    ip.run(
        "def run(x):\n    return net(x)\ndef state_of(model):\n    return model.cpu().state_dict()"
    )
    ip.run("run(x)")
    ip.run("saved = state_of(net)")
    told = explained(ip.run("run(x)"))
    assert "line 4: model.cpu() moves the module itself" in told
    assert "net.to(" in told
    ip.run("net = nn.Linear(2, 1)")
    assert "moves the module itself" not in explained(ip.run("run(x)"))


def test_the_buffer_that_a_modules_forward_makes_is_made_on_the_device(ip):
    ip.run(
        "class Decoder(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.fc = nn.Linear(2, 3)\n    def forward(self, x):\n"
        "        outputs = torch.zeros(4, 3)\n        for t in range(4):\n"
        "            outputs[t] = self.fc(x)\n        return outputs"
    )
    ip.run("net, x, y = Decoder().cuda(), torch.ones(2).cuda(), torch.zeros(4, 3).cuda()")
    told = explained(ip.run("out = net(x)\nloss = ((out[1:] - y[1:]) ** 2).mean()"))
    assert "line 6" in told
    assert "torch.zeros(4, 3, device=next(self.parameters()).device)" in told


def test_the_line_that_made_an_operand_is_named_and_a_comprehension_is_no_obstacle(ip):
    ip.run(
        "class Both:\n    def __init__(self):\n        self.big = nn.Linear(2, 1)\n"
        "    def step(self, x):\n        return self.big(x.cuda())"
    )
    ip.run("xs, w = torch.ones(3, 2), torch.ones(2)\nboth = Both()")
    told = explained(ip.run("ys = [both.step(x) for x in xs]"))
    assert "In [2], line 3 made self.big on the CPU" in told
    assert "both.big.to(" in told
    told = explained(ip.run("y = xs.cuda() * w"))
    assert "In [3], line 1 made w on the CPU" in told


def test_a_function_of_one_line_in_a_class_is_tried_too_and_serves_any_device(ip):
    ip.run(
        "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.fc = nn.Linear(3, 2)\n        self.top = torch.ones(2)\n"
        "    def forward(self, x): return self.fc(x) + self.top"
    )
    told = explained(ip.run("net = Net().cuda()\ny = net(torch.ones(3))"))
    assert 'self.register_buffer("top", torch.ones(2), persistent=False)' in told
    ip.run("def step(net):\n    z = torch.ones(3)\n    return net.fc(z)")
    told = explained(ip.run("step(net)"))
    assert "torch.ones(3, device=net.fc.weight.device)" in told


@pytest.mark.parametrize(
    ("made", "read"),
    [
        ("X = torch.ones(3, 2)", "X = X * 2 + 1\nnet(X)"),
        ("for X in [torch.ones(3, 2)]:\n    pass", "net(X)"),
        ("X = torch.ones(3, 2)\nX += 1", "net(X)"),
        ("Y = torch.ones(3, 2)\nX = Y", "net(X)"),
        ("X = torch.ones(3, 2, device='cpu')", "net(X)"),
    ],
)
def test_no_line_is_named_that_did_not_make_the_operand(ip, made, read):
    ip.run("X, net = torch.zeros(3, 2), nn.Linear(2, 1).cuda()")
    ip.run(made)
    assert "made X on the CPU" not in explained(ip.run(read))


def test_a_line_that_has_not_run_moved_no_model(ip):
    ip.run("net, x = nn.Linear(2, 1), torch.ones(3, 2).cuda()")
    assert "moves the module itself" not in explained(ip.run("net(x)\nnet.cpu()"))


def test_a_comprehension_whose_items_move_has_no_line_above(ip):
    ip.run("ws, y = [torch.ones(2), torch.ones(2)], torch.ones(2).cuda(1)")
    told = explained(ip.run("out = [ws[i].add_(y) for i in range(2)]"))
    assert "ws[i] = ws[i]" not in told


def test_a_model_that_a_function_of_the_loop_moves_is_moved_in_each_pass(ip):
    ip.run("net, xs = nn.Linear(2, 1).cuda(), torch.ones(2, 3, 2).cuda()")
    ip.run("def save(m, device):\n    m.to(device)\n    return 0")
    told = explained(ip.run("for x in xs:\n    net(x)\n    save(net, 'cpu')"))
    assert "before line 2" in told


def test_an_error_further_down_does_not_hide_a_fix(ip):
    ip.run("net, x = nn.Linear(2, 1).cuda(), torch.ones(3, 2)")
    told = explained(ip.run("y = net(x)\nz = [y]\nz.to('cpu')"))
    assert 'y = net(x.to("cuda:0"))' in told


def test_a_list_that_code_needs_on_the_gpu_is_copied_where_numpy_reads_it(ip):
    ip.run("import numpy as np\nnet = nn.Linear(4, 1).to('cuda:1')\nx = torch.ones(8, 4).cuda(1)")
    cell = (
        "losses = []\nfor _ in range(3):\n    losses.append(net(x).mean())\n"
        "print(np.mean(losses))\ntorch.stack(losses).sum().backward()"
    )
    told = explained(ip.run(cell))
    new = "print(np.mean([t.detach().cpu() for t in losses]))"
    assert new in told
    assert ip.run(cell.replace("print(np.mean(losses))", new)).error is None


def test_a_list_that_two_calls_fill_is_copied_where_numpy_reads_it(ip):
    ip.run("import numpy as np\nx = torch.ones(2).cuda()")
    told = explained(ip.run("n = []\nn.append(x.sum())\nn.append(x.max())\nnp.mean(n)"))
    assert "np.mean([t.detach().cpu() for t in n])" in told


def test_the_line_that_replaced_a_layer_is_named_and_no_line_of_another_object(ip):
    ip.run(CLASSES + "net, other = Net().cuda(), Net()\nx = torch.ones(3, 4).cuda()")
    ip.run("other.fc = nn.Linear(5, 2)")
    ip.run("net.fc = nn.Linear(5, 2)")
    assert "why: In [4], line 1 made net.fc on the CPU" in explained(ip.run("net(x)"))


def test_a_parameter_that_is_bound_again_does_not_name_the_device_above_that_line(ip):
    ip.run("def f(h):\n    x = torch.zeros(3)\n    h = h.to('cuda:1')\n    return h + x")
    assert 'x = torch.zeros(3, device="cuda:1")' in explained(ip.run("f(torch.ones(3))"))


@pytest.mark.parametrize(
    ("code", "fixed"), [("net(X) * w.cpu()", "w.to(X.device)"), ("net(X.cpu())", "X.to(X.device)")]
)
def test_a_cell_on_several_gpus_has_a_fix_for_each_of_them(ip, code, fixed):
    ip.run("net, X, w = nn.Linear(4, 3), torch.ones(8, 4), torch.ones(3)")
    told = explained(ip.run(f"%%ongpu 0,1 --split X --gather q\nq = {code}"))
    assert fixed in told
    new = code.replace("w.cpu()", fixed).replace("X.cpu()", fixed)
    assert ip.run(f"%%ongpu 0,1 --split X --gather q\nq = {new}").error is None


def test_no_cell_is_said_to_have_made_what_a_name_already_had(ip):
    ip.run("net = nn.Linear(8, 3)")
    ip.run("%%ongpu 1\nnet = net.eval()")
    ip.run("%ongpu home")
    told = explained(ip.run("net(torch.ones(2, 8, device='cuda:1'))"))
    assert "made net on the CPU" not in told
    setup = '--setup "v = torch.ones(8, device=0).numpy()"'
    failed = ip.run(f"q = torch.ones(8, 8)\n%gputime cpu {setup} --max-time 0.1 -- q @ q")
    assert "to numpy" in failed.text
    assert "between devices" not in failed.text


def test_a_device_that_is_not_there_is_named_where_it_was_assigned(ip):
    ip.run("n = 3\ndevice = torch.device(f'cuda:{n}' if n else 'cpu')")
    told = explained(ip.run("x = torch.ones(3)\ny = x.to(device)"))
    assert "replace line 1 with, then run that cell and all below it again" in told
    assert told.rstrip().endswith("n = 1")


def test_a_module_that_keeps_the_old_hook_is_to_be_made_again(ip):
    ip.run("net = nn.Linear(4, 3).cuda()")
    ip.run(
        "def add(module, given, out):\n    more = torch.zeros(3)\n    return out + more\n"
        "net.register_forward_hook(add);"
    )
    told = explained(ip.run("net(torch.ones(2, 4, device='cuda'))"))
    assert "recreate net, which keeps its old hooks, then run" in " ".join(told.split())


def test_a_hook_that_is_no_function_keeps_no_code(ip):
    ip.run("class Hook:\n    def __call__(self, *given): pass")
    ip.run("net = nn.Linear(4, 3).cuda()\nnet.register_forward_hook(Hook());")
    ip.run("x = torch.ones(2, 4)\nx.to('cuda')")
    told = explained(ip.run("net(x)"))
    assert "x = x.to('cuda')" in told
    assert "recreate" not in told


def test_a_model_that_only_a_function_names_is_moved_by_the_cell_that_calls_it(ip):
    ip.run("net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)).cuda()")
    ip.run("net[1] = nn.Linear(4, 2)")
    told = explained(ip.run("def step(x):\n    return net(x.cuda())\nstep(torch.ones(2, 4))"))
    assert "before line 3 (moves 40 B)\n      net" in told


def test_what_has_the_fewest_companions_is_moved(ip):
    ip.run("big, small, y = (torch.ones(3, device=f'cuda:{n}') for n in (1, 0, 0))")
    told = explained(ip.run("m = torch.stack([big, small]).mean(0)\nprint(m == y)"))
    assert "stack([big.to(small.device), small])" in told
