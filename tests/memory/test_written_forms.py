"""Code with a drop-in replacement: it is found, it fits, and it gives the same."""

import re

import pytest
import torch
from situations import START

from gpumagic import faults

ATTENTION = """
def attention(q, k, v):
    scores = q @ k.transpose(-2, -1) {}
    weights = {}
    return weights @ v
out = attention(q, k, v)
"""
HEADS = (
    "q, k, v = (torch.randn(2, 2, 1500, 16, device=D) for _ in range(3))\nm = q[0, 0] @ q[0, 0].mT"
)
MATRICES = "x, y = torch.randn(3000, 8, device=D), torch.randn(2000, 8, device=D)"
MANY = MATRICES.replace("(3000", "(9000")
ALIKE = (
    "x, y = torch.randn(4200, 16, device=D) + 2, torch.randn(4200, 4, device=D)\n"
    "x = F.normalize(x, dim=1)"
)
SUMS = """out = torch.zeros({1}, device=D)
for n in range(0, len({0}), 500):
    out += {0}[n:n + 500].sum(0)"""
CASES = {
    "attention": (HEADS, ATTENTION.format("/ q.size(-1) ** 0.5", "F.softmax(scores, dim=-1)")),
    "a mask": (
        HEADS,
        ATTENTION.format("* 0.5", "scores.masked_fill(m > 1, float('-inf')).softmax(3)"),
    ),
    "a mask to add": (HEADS, ATTENTION.format("* 0.5 + m", "torch.softmax(scores, -1)")),
    "modules of layers": (
        HEADS + "\nsoftmax, drop = nn.Softmax(dim=-1), nn.Dropout(0.5).eval()",
        ATTENTION.format("* 2", "drop(softmax(scores))"),
    ),
    "dropout of a model": (
        HEADS + "\nlearns = False",
        ATTENTION.format("* 2", "F.dropout(torch.softmax(scores, -1), 0.5, training=learns)"),
    ),
    "three dimensions": (
        "q, k, v = (torch.randn(4, 1500, 16, device=D) for _ in range(3))",
        "w = torch.bmm(q, k.mT)\nw = F.softmax(w, dim=2)\nout = torch.bmm(w, v)",
    ),
    "squared distances": (
        MATRICES,
        "d = ((x.unsqueeze(1) - y.unsqueeze(0)) ** 2).sum(2)\nout = d.amin(1)",
    ),
    "many neighbours": (
        MANY,
        "d = torch.cdist(x, x)\nout = d.topk(9, largest=False).values[:, 1:].mean(1)",
    ),
    "distances": (MATRICES, "out = (x[:, None] - y).abs().sum(-1).amin(1)"),
    "roots of squared distances": (
        MATRICES,
        "d = (x[:, None, :] - y[None, :, :]).square().sum(-1).sqrt()\nout = d.argmin(1)",
    ),
    "cosines of all pairs": (
        MATRICES,
        "out = F.cosine_similarity(x.unsqueeze(1), y[None, :1900], dim=2).amin(1)",
    ),
    "the nearest": (MANY, "d = torch.cdist(x, y)\nout = d.argmin(dim=1)"),
    "the most alike": (MANY, "out = (x @ y.T).argmax(1)"),
    "gradients of each sample": (
        "x, y = torch.randn(300, 256, device=D), torch.randn(256, 256, device=D)",
        "def loss(y, row):\n    return (row @ y).square().sum()\n"
        "each = lambda row: sum(g.sum() for g in [torch.func.grad(loss)(y, row)])\n"
        "out = torch.vmap(each)(x) / 1000",
    ),
    "a model that reads all at once": (
        "x = torch.randn(9000, 64, device=D)\nnet = nn.Linear(64, 2000).to(D)",
        "def embed(model, x):\n    with torch.no_grad():\n"
        "        return model(x.to(D)).relu().mean(1)\nout = embed(net, x)",
    ),
    "a mean of outer products": (
        "x, y = torch.randn(400, 300, device=D), torch.randn(400, 200, device=D)",
        "outer = x[:, :, None] * y.unsqueeze(1)\nout = outer.mean(dim=0)",
    ),
    "a chain whose rows do not meet": (
        "x = torch.randn(4000, 2000, device=D)",
        "a = x.abs() * 2\nb = a.cumsum(1).exp().log()\nout = b.mean(dim=1) - 1",
    ),
    "a chain that ends in one number": (
        "x, y = torch.randn(2, 2500, 2000, device=D)",
        "a = (x - y) ** 2\nout = a.sum(1).max()",
    ),
    "a sum over the last dimension": (
        "m, v = torch.randn(300, 1, 1, device=D), torch.randn(1500, device=D)",
        "out = (m - v * torch.ones(40, 1, device=D)).square().sum(-1)",
    ),
    "a mean over pairs": (MATRICES, "out = (x[:, None] - y).square().sum(-1).neg().exp().mean()"),
    "rows that meet all rows": (ALIKE, "out = torch.exp(-torch.cdist(x, x).square() / 2) @ y"),
    "a field of the result": (ALIKE, "out = (x @ x.T).max(1).values"),
    "two fields": (ALIKE, "best, at = (x @ x.T).topk(3)\nout = best.sum(1) + at.sum(1) * 0"),
    "statements on one line": (ALIKE, "w = (x @ x.T * 9).softmax(1); out = w @ y"),
    "one_hot times a layer": (
        "x, net = torch.randint(9000, (900,)), nn.Linear(9000, 64)",
        "net.to(D)\nt = x.to(D)\nout = net(F.one_hot(t, 9000).float()).detach()",
    ),
    "a kernel": (
        "x = torch.randn(3400, 8, device=D)",
        "out = torch.exp(-torch.cdist(x, x) ** 2 / (2 * 0.5**2))",
    ),
    "standardized columns": (
        "x = torch.randn(23_000, 250, device=D)",
        "out = (x - x.mean(0)) / x.std(0)",
    ),
    "results that a comprehension reads": (
        "x, y = torch.randn(300, 256, device=D), torch.randn(256, 256, device=D)",
        "def loss(y, row):\n    return (row @ y).square().sum() / 1000\n"
        "each = torch.vmap(torch.func.grad(loss, (0, 1)), (None, 0))(y, x)\n"
        "out = torch.stack([g.flatten(1).norm(dim=1) for g in each]).sum(0)",
    ),
    "a new last dimension": (
        "x, y = torch.randn(400, 500, device=D), torch.randn(100, device=D)",
        "out = (x[..., None] * y).abs().sum(1)",
    ),
    "distances in batches": (
        "x, y = torch.randn(2, 4, 700, 8, device=D)",
        "out = ((x[:, :, None] - y[:, None]) ** 2).sum(-1).amin(2)",
    ),
}


# Of each kind of replacement, one case always runs.
RARE = {
    "the nearest",
    "a mask",
    "a mask to add",
    "modules of layers",
    "dropout of a model",
    "squared distances",
    "distances",
    "roots of squared distances",
    "the most alike",
    "gradients of each sample",
    "a chain that ends in one number",
    "distances in batches",
    "a mean over pairs",
    "a chain whose rows do not meet",
    "a sum over the last dimension",
    "a field of the result",
    "two fields",
    "statements on one line",
    "standardized columns",
    "a new last dimension",
}


@pytest.mark.parametrize(
    "case", [pytest.param(n, marks=[pytest.mark.slow] * (n in RARE)) for n in CASES]
)
def test_the_replacement_gives_the_same(small, shown, case):
    before, cell = CASES[case]
    small.run(f"{START}\nD = 'cpu'\ntorch.manual_seed(0)\n{before}")
    small.run(cell.strip())
    expected = small.ns["out"]
    small.run(f"D = 'cuda'\ntorch.manual_seed(0)\n{before.replace('device=D', '')}")
    for name in {*"qkvmxy"} & small.ns.keys():
        small.run(f"{name} = {name}.cuda()")
    small.run("del out\n1 / 0")
    small.run(cell.strip())
    lever = shown.pop().levers[0]
    assert lever.fits
    small.run("%gpufree")
    assert small.run(replaced(cell.strip(), lever.do)).error is None
    torch.testing.assert_close(small.ns["out"].cpu(), expected, atol=1e-3, rtol=1e-3)


def test_lines_above_that_cannot_run_again_are_left_out(small, shown):
    small.run(f"{START}\nD = 'cuda'\n{HEADS}\ntemporary = 1")
    small.run("del temporary\ns = q @ k.mT\nw = s.softmax(-1)\nout = w @ v")
    assert "scaled_dot_product_attention(q" in shown.pop().levers[0].do


def test_dropout_without_a_number_has_torchs(small, shown):
    small.run(f"{START}\nD, learns = 'cuda', True\n{HEADS}\ndel m")
    small.run(ATTENTION.format("* 2", "F.dropout(scores.softmax(-1), training=learns)").strip())
    assert "dropout_p=0.5 * learns," in shown.pop().levers[0].do


def replaced(cell, do):
    """The cell with what a lever says in its place."""
    new, lines, rows, read = re.match(
        r"`(.*?)` for lines? ([\d, ]+)(?:, and `(.*)` for `(.*)`)?$", do
    ).groups()
    *others, last = (int(number) - 1 for number in lines.split(", "))
    typed = (cell.replace(read, rows) if rows else cell).splitlines()
    typed[last] = re.match(" *", typed[last])[0] + new
    return "\n".join(line for n, line in enumerate(typed) if n not in others)


@pytest.mark.parametrize(
    "cell",
    [
        # A softmax of columns, a mask that is no mask, and a name that has another value by then.
        pytest.param("out = (q @ k.mT).softmax(2) @ v", marks=pytest.mark.slow),
        "w = (q @ k.mT).masked_fill(m > 1, 0.0)\nout = w.softmax(-1) @ v",
        "w = q @ k.mT\nq = 0\nw = w.softmax(-1)\nout = w @ v",
        # Differences of other dimensions than rows.
        "a = q.view(120, 50, 16)\nout = ((a[:, None] - a) ** 2).sum(-1)",
        # An order instead of a dimension, and a boolean that is added.
        "a = q.view(6000, 16)\nout = (a[:, None] - a).norm(-1)",
        pytest.param("out = (q @ k.mT + (m > 1)).softmax(-1) @ v", marks=pytest.mark.slow),
    ],
)
def test_other_code_has_none(small, shown, cell):
    small.run(f"{START}\nD = 'cuda'\n{HEADS}")
    small.run(cell)
    told = [lever.do for lever in shown.pop().levers]
    assert not re.search("scaled_dot|cdist", " ".join(told))


def test_a_batch_of_random_positions_is_followed(small, shown):
    small.run(f"{START}\ndata = torch.randint(9, (9000,))\nembed = nn.Embedding(9, 16).cuda()")
    small.run(
        "def batch():\n    rows = [data[i : i + 2000] for i in torch.randint(900, (4,))]\n"
        "    return torch.stack(rows).cuda()"
    )
    small.run("q = embed(batch())\nout = (q @ q.mT).softmax(-1) @ q")
    assert "scaled_dot_product_attention(q[None]" in shown.pop().levers[0].do


def test_steps_of_a_long_graph_are_computed_again_in_the_backward_pass(small, shown):
    small.run(f"{START}\nw = torch.eye(64, device='cuda', requires_grad=True)")
    small.run("def step(x):\n    return (x @ w).tanh().exp().sigmoid()")
    small.run("x = torch.ones(4000, 64, device='cuda')")
    steps = "def steps(y):\n    for _ in range(24):\n        y = step(y)\n    return y"
    small.run(steps)
    small.run("steps(x).sum().backward()")
    lever = shown.pop().levers[0]
    assert lever.do.startswith(
        "`y = torch.utils.checkpoint.checkpoint(step, y, use_reentrant=False)`"
    )
    assert lever.fits
    small.run("%gpufree")
    new = "y = torch.utils.checkpoint.checkpoint(step, y, use_reentrant=False)"
    small.run(steps.replace("y = step(y)", new))
    assert small.run("steps(x).sum().backward()").error is None


def test_objects_of_the_user_are_not_asked_for_a_librarys_methods(small, shown):
    small.run(f"{START}\nclass Config(dict):\n    __getattr__ = dict.__getitem__")
    small.run(
        "class Net(nn.Linear):\n    sparse = False\nnet = nn.Sequential(Net(256, 256)).cuda()"
    )
    small.run("cfg, x = Config(rows=40_000), torch.ones(1, 256)")
    small.run("loss = net(x.expand(cfg['rows'], 256).cuda()).square().mean()\nloss.backward()")
    assert shown.pop().levers
    assert faults.all_kept() == []


def test_numbers_of_a_model_may_have_16_bits(small, shown):
    layers = "*(layer for _ in range(9) for layer in (nn.Linear(64, 64), nn.Tanh()))"
    small.run(f"{START}\nnet = nn.Sequential({layers}).cuda()\nx = torch.randn(1, 64)")
    cell = "loss = net(x.expand(30000, 64).cuda()).sum()"
    small.run(f"{cell}\nloss.backward()")
    (lever,) = (lever for lever in shown.pop().levers if "batch" not in lever.do)
    code = 'with torch.autocast("cuda", torch.bfloat16):'
    assert lever.do.startswith(f"`{code}` around the forward pass and the loss: ")
    assert lever.fits
    small.run("%gpufree")
    assert small.run(f"{code}\n    {cell}\nloss.backward()").error is None


@pytest.mark.parametrize("cell", ["opt.step()", "net(x).sum().backward()\nopt.step()"])
def test_what_an_optimizer_keeps_may_be_smaller(small, shown, cell):
    small.run(f"{START}\nnet = nn.Linear(2100, 2100).cuda()\nx = torch.ones(4, 2100).cuda()")
    small.run("opt = torch.optim.Adam(net.parameters())\nnet(x).sum().backward()")
    small.run(cell)
    found = shown.pop()
    why = "its state is small; set its learning rate, as the training changes"
    assert {lever.do: lever.fits for lever in found.levers} == {f"`{SMALL}`: {why}": True}
    # The next step of the old optimizer would read state that is not complete.
    assert found.clear == "opt.state.clear()"
    small.run(f"{found.clear}\n%gpufree")
    assert small.run(f"{SMALL}\n{cell}").error is None


def test_no_state_is_cleared_that_another_optimizer_or_an_earlier_step_made(small, shown):
    small.run(f"{START}\nnet = nn.Sequential(*[nn.Linear(1500, 1500) for _ in range(2)]).cuda()")
    small.run(
        "class Trainer:\n    def __init__(self):\n"
        "        self.opt = torch.optim.Adam(net.parameters())\ntrainer = Trainer()\n"
        "optimizer = torch.optim.Adam(nn.Linear(2, 2).parameters())\n"
        "net(torch.ones(1, 1500).cuda()).sum().backward()\nmore = mib(9)"
    )
    small.run("trainer.opt.step()")
    assert shown.pop().clear == ""
    small.run("del trainer, more\n%gpufree")
    small.run("opt = torch.optim.Adam(net.parameters())\ngrad = net[1].weight.grad")
    small.run("net[1].weight.grad = None\nopt.step()\nnet[1].weight.grad, more = grad, mib(16)")
    small.run("opt.step()")
    assert shown.pop().clear == ""


@pytest.mark.parametrize(
    "cell",
    [
        "out = torch.clamp(x @ x.T / 8.0, max=0.5)",
        "out = (x @ x.T).half() + x.sum()",
        "out = torch.exp(embed(x) @ x.T * 0.01) * 2",
    ],
)
def test_results_are_not_overwritten_by_other_dtypes_keywords_or_functions(small, shown, cell):
    small.run(f"{START}\nx, net = torch.randn(3400, 8, device='cuda'), nn.Linear(8, 8).cuda()")
    small.run("def embed(x):\n    return net(x)")
    small.run(cell)
    assert "_(" not in str([lever.do for lever in shown.pop().levers])


def test_another_layer_of_that_name_is_no_linear_layer(small, shown):
    small.run(f"{START}\nclass Linear(nn.Linear):\n    pass\nlin = Linear(9000, 64).cuda()")
    small.run("t = torch.zeros(2000, dtype=torch.long).cuda()")
    small.run("h = lin(F.one_hot(t, 9000).float())")
    assert "embedding" not in str([lever.do for lever in shown.pop().levers])


SMALL = "opt = torch.optim.Adafactor(net.parameters())"


@pytest.mark.slow
def test_a_library_model_computes_its_layers_again(small, shown):
    small.run("from transformers import GPT2Config, GPT2LMHeadModel")
    small.run(
        "config = GPT2Config(n_layer=16, n_head=2, n_embd=32, vocab_size=50, n_positions=128)"
    )
    small.run(f"{START}\nlm = GPT2LMHeadModel(config).cuda()")
    small.run("x = torch.randint(50, (16, 128)).cuda()\nlm(x, labels=x).loss.backward()")
    lever = shown.pop().levers[0]
    assert lever.do == "`lm.activation_checkpointing_enable()`: slower, less memory"
    assert lever.fits
    small.run("%gpufree")
    small.run("lm.activation_checkpointing_enable()")
    assert small.run("lm(x, labels=x).loss.backward()").error is None


def test_the_call_in_the_failed_cell_is_split_before_the_function(small, shown):
    small.run(f"{START}\n{MATRICES.replace('device=D', 'device=' + repr('cuda'))}")
    small.run("def nearest(a, b):\n    d = (a[:, None] * b).tanh().sum(-1)\n    return d.amin(1)")
    small.run("near = nearest(x, y)")
    assert "near = torch.cat([nearest(rows, y) for rows in x.split(" in shown.pop().levers[0].do


def test_rows_are_split_where_a_placed_cell_makes_tensors_too(small, shown):
    small.run(f"{START}\nx = torch.randn(3000, 8)\nx.cuda()")
    cell = "d = (x[:, None] * torch.ones(2000, 8)).tanh().sum(-1)\nout = d.amin(1)"
    small.run(f"%%ongpu 0\n{cell}")
    lever = shown.pop().levers[0]
    assert "for rows in x.split(" in lever.do
    assert lever.fits


@pytest.mark.parametrize(
    "cell",
    [
        "a = x.abs().softmax(0)\nout = a.sum(1)",
        pytest.param("a = x - x.abs().max()\nout = a.abs().sum(1)", marks=pytest.mark.slow),
        pytest.param("out = norm(x).abs().sum(1)", marks=pytest.mark.slow),
        pytest.param("out = F.dropout(x).abs().sum(1)", marks=pytest.mark.slow),
        "a = x.abs() + 1\nout = a.sum(1) / len(a)",
        pytest.param("out = F.cross_entropy(x.exp(), labels)", marks=pytest.mark.slow),
    ],
)
def test_rows_that_depend_on_other_rows_stay_together(small, shown, cell):
    small.run(f"{START}\nx = torch.randn(4000, 3000, device='cuda')")
    small.run("norm = nn.BatchNorm1d(3000).cuda()")
    small.run("labels = torch.tensor([-100, 1], device='cuda').repeat(2000)")
    small.run(cell)
    assert ".split(" not in str(shown.pop())


@pytest.mark.parametrize("cell", ["f = net(x).float", "with torch.no_grad():\n    y = net(x[()])"])
def test_odd_code_is_explained_too(small, shown, cell):
    small.run(f"{START}\nnet, x = nn.Linear(64, 2000).cuda(), torch.ones(9000, 64, device='cuda')")
    small.run(cell)
    assert faults.all_kept() == []
    assert shown.pop().reason


def test_rows_that_the_code_chooses_are_not_split(small, shown):
    small.run(f"{START}\nnet, x = nn.Linear(64, 8000).cuda(), torch.ones(4000, 64).cuda()")
    small.run("out = net(x[:3000]).square().mean()")
    assert not [lever for lever in shown.pop().levers if "x.split" in lever.do]


def test_the_header_of_a_line_stays(small, shown):
    small.run(f"{START}\nnet, x = nn.Linear(64, 2000).cuda(), torch.ones(9000, 64, device='cuda')")
    small.run("with torch.no_grad(): y = net(x).relu().mean()")
    lever = shown.pop().levers[0]
    assert lever.do.startswith("`with torch.no_grad(): y = sum(rows.shape[0] * net(rows).relu()")
    assert small.run(f"%gpufree\n{replaced('y = 1', lever.do)}").error is None
