"""Notebooks that run out of memory on a GPU of 64 MiB, each for a reason of its own."""

from dataclasses import dataclass

START = """
import copy, torch
from torch import nn
import torch.nn.functional as F
def mib(n, **kwargs):
    return torch.ones(int(n * 2**18), device='cuda', **kwargs)
"""


@dataclass
class Notebook:
    """Cells before, the cell that fails, and what is to be said of it."""

    name: str
    before: list[str]
    cell: str
    first: str = ""  # what the first lever begins with
    gives: float | None = None  # its MiB
    often: bool = False  # it is tried in each run of the tests
    why: str = ""  # what the reason says, where the figures tell it


def said(text):
    """A cell that raises what torch would say on a GPU that is real."""
    return f"x = mib(1)\nraise torch.OutOfMemoryError({text!r})"


MODEL = "model = nn.Linear(2560, 4095, device='cuda')"  # 40 MiB
NET = "net = nn.Linear(1280, 8191, device='cuda')"  # 40 MiB
HIDDEN = """
def work():
    inside = mib(40)
    raise ValueError('a')
"""
ADAM = """
model = nn.Linear(1280, {}, device='cuda')
opt = torch.optim.Adam(model.parameters())
"""
STEP = "model(torch.ones(1, 1280, device='cuda')).sum().backward()\nopt.step()"
AGAIN = f"""{ADAM.format(1500)}
loss = model(torch.ones(1, 1280, device='cuda')).sum()
loss.backward()
history.append(loss)
opt.step()"""
PERCEPTRON = """
wide = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU())
net = nn.Sequential(*wide, nn.Linear(512, 64)).cuda()
opt = torch.optim.SGD(net.parameters(), lr=0.1)
X = torch.ones(600, 20, 64, device='cuda')
"""
TRAIN = """
for _ in range(2):
    opt.zero_grad()
    loss = net(X).square().mean()
    loss.backward()
    opt.step()
"""
LOADER = (
    PERCEPTRON.replace("X =", "data =").replace("device='cuda')", "device='cpu')")
    + """
loader = torch.utils.data.DataLoader(data, batch_size={})
def train():
    for X in loader:
        X = X.cuda()
        loss = net(X).square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
"""
)
SITUATIONS = [
    # -- what is made anew while the old is there
    Notebook("a model made anew", [MODEL], MODEL, "`del model`", 40, True),
    Notebook(
        "a model and its optimizer made anew",
        [ADAM.format(2047) + STEP],
        ADAM.format(8191),
        "`del model, opt`",
        40,
    ),
    Notebook(
        "a name of a function's, in a loop",
        ["x = mib(20)\ndef work():\n    for n in range(3):\n        y = x * n + 1\n    return y"],
        "work()",
        "`y = None`",
        20,
        True,
    ),
    Notebook(
        "in a cell on a device",
        ["%%ongpu 1\nmodel = nn.Linear(2560, 4095)"],
        "%%ongpu 1\nmodel = nn.Linear(2560, 4095)",
        "`del model`",
        40,
    ),
    Notebook("in a timed cell", [f"%%time\n{MODEL}"], f"%%time\n{MODEL}", "`del model`", 40),
    Notebook(
        "in a cell that awaits",
        ["model = mib(40)", "import asyncio"],
        "await asyncio.sleep(0)\nmodel = mib(40)",
        "`del model`",
        40,
    ),
    Notebook(
        "another error raised from it",
        ["model = mib(40)"],
        "try:\n    model = mib(40)\nexcept RuntimeError as e:\n    raise KeyError('a') from e",
        "`del model`",
        40,
    ),
    # -- what nobody needs any more
    Notebook(
        "outputs",
        ["x = mib(4)", "mib(20)", "x + mib(4)", "mib(20)"],
        "y = mib(30) + x[:1]",
        "`%gpufree`",
        44,
        True,
    ),
    Notebook("an earlier error", [HIDDEN, "work()"], "y = mib(30)", "`%gpufree`", 40, True),
    Notebook(
        "a stored exception",
        [f"{HIDDEN}\ntry:\n    work()\nexcept ValueError as error:\n    err = error"],
        "y = mib(30)",
        "`%gpufree err`",
        40,
    ),
    Notebook(
        "two models",
        [NET.replace("net", "teacher"), "student = nn.Linear(64, 64, device='cuda')"],
        "x = mib(30)\nstudent(x[:64])",
        "`%gpufree teacher`",
        40,
        True,
    ),
    Notebook(
        "a variable by two names",
        ["a = mib(30)\nb = a"],
        "a = mib(40)",
        "`del a, b`",
        30,
    ),
    Notebook(
        "a cache that nobody names",
        [
            "from functools import lru_cache\n@lru_cache\ndef made(n):\n    return mib(n)",
            "made(40) is None",
        ],
        "y = made(30)",
    ),
    Notebook(
        "what a hook fills",
        [
            "kept, net = [], nn.Linear(64, 64, device='cuda')",
            "net.register_forward_hook(lambda module, args, y: kept.append(y));",
        ],
        "for n in range(30):\n    with torch.no_grad():\n        net(mib(4).view(-1, 64))",
        "store `.cpu()` of the tensors in `kept`, if RAM has room",
        56,
    ),
    Notebook(
        "a cache that a loop fills, and a small variable",
        ["cache, small = {}, mib(8)"],
        "for n in range(100):\n    cache[n] = mib(1)",
        "store `.cpu()` of the tensors in `cache`, if RAM has room",
        56,
    ),
    # -- graphs
    Notebook(
        "results of a method, through layers that add up",
        [
            "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
            "        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))\n"
            "    def forward(self, x):\n        for layer in self.layers:\n"
            "            x = x + layer(x).sigmoid()\n        return x\n"
            "net = Net().cuda()\ndef validate(n):\n    outs = []\n    for _ in range(n):\n"
            "        outs.append(net(mib(2).view(-1, 64)))\n    return outs",
        ],
        "validate(9)",
        "store `.detach()`",
        often=True,
    ),
    Notebook(
        "a list of losses",
        ["w = torch.ones(2**19, device='cuda', requires_grad=True)\nlosses = []"],
        "for n in range(60):\n    losses.append((w * n).exp().sum())",
        "store `.item()`",
        often=True,
    ),
    Notebook(
        "losses in a dict of lists",
        [
            "from collections import defaultdict",
            "w = torch.ones(2**19, device='cuda', requires_grad=True)\nlog = defaultdict(list)",
        ],
        "for n in range(60):\n    log['loss'].append((w * n).exp().sum())",
        "store `.item()`",
        often=True,
    ),
    Notebook(
        "a view of each batch, which the loop moves",
        ["batches, first = [torch.ones(4, 2**18) for _ in range(30)], []"],
        "for batch in batches:\n    batch = batch.cuda()\n    first.append(batch[0])",
        "store `.clone()` in `first`: a view keeps its whole base tensor alive",
        often=True,
        why="line 1 keeps 4.0 MiB",
    ),
    Notebook(
        "pairs of losses and a backward pass now and then",
        [f"{PERCEPTRON}total, X = 0, X[:60]"],
        "for n in range(200):\n    total = total + net(X).square().mean()\n"
        "    if n % 100 == 99:\n        total.backward()\n        opt.step()\n        total = 0",
        "in each pass, call `.backward()` on the values",
    ),
    Notebook(
        "outputs that a module collects",
        [
            "class Lit(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
            "        self.net, self.outputs = nn.Linear(64, 2**12), []\n"
            "    def step(self, x):\n        self.outputs.append({'y': self.net(x)})\n"
            "lit, x = Lit().cuda(), torch.ones(64, 64, device='cuda')"
        ],
        "with torch.no_grad():\n    for n in range(100):\n        lit.step(x)",
        "store `.cpu()` of the tensors in `lit`",
    ),
    Notebook(
        "a teacher that has gradients",
        [
            f"{PERCEPTRON}teacher = copy.deepcopy(wide)\n"
            "student = nn.Linear(64, 512).cuda()\nX = X[:250]\n"
            "opt = torch.optim.SGD(student.parameters(), lr=0.1)"
        ],
        "loss = (student(X) - teacher(X)).square().mean()\nloss.backward()",
        "`teacher.requires_grad_(False)`: no optimizer trains it",
    ),
    Notebook(
        "float64 of pairs",
        ["x = torch.ones(1500, 8, dtype=torch.float64, device='cuda')"],
        "d = (x[:, None] - x[None]).sin().sum(-1)\nk = torch.exp(-d)",
        "`d = torch.cat([(rows",
    ),
    Notebook(
        "one_hot times a matrix",
        ["w = torch.ones(20_000, 16, device='cuda')\nids = torch.arange(1000, device='cuda')"],
        "y = F.one_hot(ids, 20_000).float() @ w",
        "`y = w[ids]`",
    ),
    Notebook(
        "the capacity of a replay buffer",
        ["capacity = 20_000"],
        "states = torch.zeros(capacity, 4, 32, 32, device='cuda')",
        "`capacity = 4",
    ),
    Notebook(
        "a sum of losses",
        ["w = torch.ones(2**19, device='cuda', requires_grad=True)\ntotal = 0"],
        "for n in range(60):\n    total += (w * n).exp().sum()",
        "store `.item()`",
    ),
    Notebook(
        "evaluation that keeps graphs",
        [
            "net = nn.Sequential(*[nn.Linear(64, 64), nn.ReLU()] * 20).cuda()",
            "X = torch.ones(20000, 64, device='cuda')",
        ],
        "score = net(X).mean().item()",
        "`with torch.no_grad():`",
        often=True,
    ),
    Notebook(
        "a state that takes its graph along",
        [
            "rnn = nn.GRU(16, 64, batch_first=True).cuda()",
            "steps = torch.ones(512, 400, 16)",
        ],
        "hidden = None\nfor n in range(0, 400, 20):\n"
        "    out, hidden = rnn(steps[:, n:n + 20].cuda(), hidden)\n"
        "    loss = out.square().mean()\n    loss.backward(retain_graph=True)",
        "store `.detach()` in `hidden`",
        often=True,
    ),
    Notebook(
        "a sum of losses with one backward pass after the loop",
        [
            "net = nn.Sequential(nn.Linear(64, 512), nn.Tanh()).cuda()",
            "data = mib(1).view(-1, 64)",
        ],
        "loss = 0\nfor n in range(9):\n    loss = loss + net(data).square().mean()\n"
        "loss.backward()",
        "in each pass, call `.backward()` on the values added to `loss`",
        why="line 2 keeps 8.0 MiB",
    ),
    # -- what collects, and is not named where it fills
    Notebook(
        "a hook within no_grad",
        [
            "kept, net = {'a': []}, nn.Linear(64, 64, device='cuda')",
            "net.register_forward_hook(lambda module, args, y: kept['a'].append(y));",
        ],
        "with torch.no_grad():\n    for n in range(30):\n        net(mib(4).view(-1, 64))",
        "store `.cpu()` of the tensors in `kept`, if RAM has room",
        56,
        True,
    ),
    Notebook(
        "a class that caches",
        [
            "class Features:\n    cache = {}\n    def __call__(self, n):\n"
            "        if n not in self.cache:\n            self.cache[n] = mib(4)\n"
            "        return self.cache[n]",
            "features = Features()",
        ],
        "for n in range(30):\n    features(n)",
        "store `.cpu()` of the tensors in `Features`, if RAM has room",
        64,
    ),
    # -- what the code does needs too much
    Notebook(
        "shapes that broadcast by mistake",
        ["net, X = nn.Linear(8, 1).cuda(), torch.ones(4000, 8, device='cuda')", "y = X.sum(1)"],
        "pred = net(X)\nloss = ((pred - y) ** 2).mean()\nloss.backward()",
        "`pred.view(4000)` for `pred`",
        often=True,
    ),
    Notebook(
        "an optimizer of before, by the name of an argument",
        [
            "net = nn.Linear(1024, 3072, device='cuda')\nx = torch.ones(1, 1024, device='cuda')\n"
            "def step(opt):\n    net(x).sum().backward()\n    opt.step()\n    opt.zero_grad()",
            "opt = torch.optim.Adam(net.parameters())\nstep(opt)",
        ],
        "other = torch.optim.Adam(net.parameters())\nstep(other)",
        "`%gpufree opt`",
        24,
        True,
    ),
    Notebook(
        "a loss of shapes that broadcast, in a function",
        [
            "X = torch.ones(6000, 4, device='cuda')\ny = torch.ones(6000, 1, device='cuda')",
            "def mse(p, t):\n    return ((t - p) ** 2).mean()",
        ],
        "err = mse(X @ X[0], y)",
        "`p.view(6000, 1)` for `p`: [6000] and [6000, 1] broadcast to 6,000 × 6,000",
    ),
    Notebook(
        "shapes that broadcast by mistake, made in the same cell",
        [],
        "p = torch.ones(6000, 1, device='cuda')\nt = torch.ones(6000, device='cuda')\n"
        "err = ((p - t) ** 2).mean()",
        "`p.view(6000)` for `p`: [6000, 1] and [6000] broadcast to 6,000 × 6,000",
    ),
    Notebook(
        "attention that keeps all scores",
        [
            "class Attention(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
            "        self.qkv = nn.Linear(64, 192)\n    def forward(self, x):\n"
            "        q, k, v = self.qkv(x).view(1, -1, 3, 4, 16).permute(2, 0, 3, 1, 4)\n"
            "        scores = q @ k.transpose(-2, -1) / 4\n"
            "        return torch.softmax(scores, -1) @ v",
            "net, x = Attention().cuda(), torch.ones(1, 1500, 64, device='cuda')",
        ],
        "with torch.no_grad():\n    y = net(x)",
        "`return F.scaled_dot_product_attention(q, k, v, scale=1 / 4)`",
        why="the code needs",
    ),
    Notebook(
        "a checkpoint that was saved on the GPU",
        [
            "import io\nfile = io.BytesIO()\nnet = nn.Linear(2400, 2400).cuda()",
            "torch.save(net.state_dict(), file)\nfile.seek(0)",
            "rest = mib(24)",
        ],
        "net.load_state_dict(torch.load(file))",
        "`%gpufree rest`",
        24,
    ),
    Notebook(
        "all distances, of which the nearest are kept",
        ["points = torch.ones(5000, 3, device='cuda')"],
        "near = torch.cdist(points, points).topk(2, largest=False).values",
        why="in all",
    ),
    Notebook(
        "numbers of NumPy's",
        ["import numpy as np\na = np.ones((6000, 900))"],
        "X = torch.from_numpy(a).cuda()\nm = X * 2",
        "`torch.from_numpy(a).float()` for line 1",
    ),
    Notebook(
        "outputs with their graphs in a dictionary of lists",
        [
            "from collections import defaultdict\nhistory = defaultdict(list)\n"
            "net, x = nn.Linear(64, 2**12).cuda(), torch.ones(64, 64, device='cuda')"
        ],
        "for n in range(100):\n    history['p'].append(net(x).softmax(1))",
        "store `.detach().cpu()` of the tensors in `history`",
    ),
    Notebook(
        "a checkpoint that is mapped to the GPU",
        [MODEL, "import io\nfile = io.BytesIO()", "torch.save(model.state_dict(), file)"],
        "file.seek(0)\nmodel.load_state_dict(torch.load(file, map_location='cuda'))",
        "`model.load_state_dict(torch.load(file, map_location='cpu'))`",
    ),
    Notebook(
        "a state of two tensors with their graphs",
        ["rnn = nn.LSTM(32, 128, batch_first=True).cuda()\nx = torch.ones(64, 25, 32)"],
        "state = None\nfor n in range(80):\n    out, state = rnn(x.cuda(), state)\n"
        "    out.square().mean().backward(retain_graph=True)",
        "store `tuple(x.detach() for",
    ),
    Notebook(
        "a state whose graph the failing backward pass holds too",
        [
            "rnn = nn.GRU(16, 64, batch_first=True).cuda()\ntext = torch.ones(128, 400, 16)\n"
            "def epoch():\n    h = torch.zeros(1, 128, 64, device='cuda')\n"
            "    for n in range(0, 400, 20):\n"
            "        out, h = rnn(text[:, n:n + 20].cuda(), h)\n"
            "        out.square().mean().backward(retain_graph=True)",
        ],
        "epoch()",
        "store `.detach()` in `h`",
    ),
    Notebook(
        "a teacher with gradients, in a step that returns a number",
        [
            f"{PERCEPTRON}teacher = copy.deepcopy(wide)\nstudent = nn.Linear(64, 512).cuda()\n"
            "opt = torch.optim.SGD(student.parameters(), lr=0.1)\n"
            "def step(X):\n    loss = (student(X) - teacher(X)).square().mean()\n"
            "    loss.backward()\n    return float(loss)"
        ],
        "for n in range(2):\n    print(step(X[:250]))",
        "`teacher.requires_grad_(False)`: no optimizer trains it",
    ),
    Notebook(
        "data on the GPU of which a loader gives batches",
        [
            "X = mib(48).view(-1, 1024)\nnet = nn.Linear(1024, 1024).cuda()",
            "loader = torch.utils.data.DataLoader(X, batch_size=1000)",
        ],
        "for x in loader:\n    y = net(x.cuda()).relu().square().sum()\n    y.backward()",
        "keep `X` on the CPU, made without `.to(…)`, `.cuda()` or `device=`, and move each batch",
        48.0,
    ),
    Notebook(
        "data that are moved whole and read by rows",
        ["data = torch.ones(20000, 1024)", "net = nn.Linear(1024, 8).cuda()"],
        "X = data.to('cuda')\nfor n in range(0, 20000, 2000):\n    y = net(X[n:n + 2000]).sum()",
        "keep the data of In [",
    ),
    Notebook(
        "texts that are padded far beyond the longest",
        [
            "net = nn.Sequential(nn.Embedding(50, 64), nn.Linear(64, 256), nn.ReLU()).cuda()",
            "ids, mask = torch.ones(512, dtype=torch.long), torch.zeros(512, dtype=torch.long)\n"
            "mask[:20] = 1\nrows = [{'input_ids': ids, 'attention_mask': mask}] * 64\n"
            "batches = torch.utils.data.DataLoader(rows, batch_size=64)",
        ],
        "for batch in batches:\n    batch = {k: v.cuda() for k, v in batch.items()}\n"
        "    out = net(batch['input_ids']) * batch['attention_mask'][..., None]\n"
        "    out.sum().backward()",
        "pad each batch to its longest sample: only 20 of 512 tokens are not padding in `batch`",
    ),
    Notebook(
        "padded texts and their mask in variables",
        [
            "net = nn.Sequential(nn.Embedding(50, 64), nn.Linear(64, 256), nn.ReLU()).cuda()",
            "ids, mask = torch.ones(64, 512, dtype=torch.long), torch.zeros(64, 512)\n"
            "mask[:, :20] = 1\nrows = torch.utils.data.TensorDataset(ids, mask.long())\n"
            "batches = torch.utils.data.DataLoader(rows, batch_size=64)",
        ],
        "for ids, mask in batches:\n    ids, mask = ids.cuda(), mask.cuda()\n"
        "    (net(ids) * mask[..., None]).sum().backward()",
        "`ids, mask = (x[:, :mask.sum(1).max()] for x in (ids, mask))` in each pass: only 20 of",
    ),
    Notebook(
        "a batch whose size is the default of a function",
        [
            "net = nn.Sequential(nn.Linear(64, 2048), nn.ReLU(), nn.Linear(2048, 8)).cuda()",
            "data = torch.ones(9000, 64)\ndef get_batch(split, bs=4096):\n"
            "    ix = torch.randint(9000, (bs,))\n"
            "    return torch.stack([data[i] for i in ix]).cuda()",
        ],
        "for _ in range(3):\n    x = get_batch('train')\n    net(x).sum().backward()",
        "`x`: a batch of ",
    ),
    Notebook(
        "a loader whose images and labels move in one line",
        [
            "net = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),"
            " nn.Flatten(), nn.Linear(16 * 32 * 32, 5)).cuda()\n"
            "images, labels = torch.rand(512, 3, 32, 32), torch.arange(512) % 5\n"
            "data = torch.utils.data.TensorDataset(images, labels)\n"
            "loader = torch.utils.data.DataLoader(data, 256)"
        ],
        "for images, labels in loader:\n    images, labels = images.cuda(), labels.cuda()\n"
        "    loss = F.cross_entropy(net(images), labels)\n    loss.backward()",
        "`loader`: a batch of ",
    ),
    Notebook(
        "a loss over pairs of a batch",
        [
            "net = nn.Linear(64, 16).cuda()",
            "loader = torch.utils.data.DataLoader(torch.ones(9000, 64), 3000)",
        ],
        "for x in loader:\n    z = net(x.cuda())\n"
        "    near = z @ z.T - 9 * torch.eye(len(z)).cuda()\n"
        "    loss = F.cross_entropy(near, torch.arange(len(z)).cuda())\n    loss.backward()",
        "`loader`: a batch of ",
    ),
    Notebook(
        "a batch that the cell itself makes",
        ["net = nn.Sequential(nn.Linear(64, 2048), nn.ReLU(), nn.Linear(2048, 8)).cuda()"],
        "cfg = {'bs': 9000}\nx, y = torch.randn(cfg['bs'], 64, device='cuda'), "
        "torch.ones(cfg['bs'], dtype=torch.long, device='cuda')\n"
        "F.cross_entropy(net(x), y).backward()",
        "`x`, `y`: a batch of ",
        often=True,
    ),
    Notebook(
        "a batch that is a list",
        [
            "net = nn.Sequential(nn.Linear(64, 2048), nn.BatchNorm1d(2048)).cuda()\n"
            "data = torch.utils.data.TensorDataset(torch.ones(9000, 64))\n"
            "loader = torch.utils.data.DataLoader(data, batch_size=4500)"
        ],
        "for i, found in enumerate(loader):\n    x = found[0].cuda()\n"
        "    net(x).square().mean().backward()",
        "`loader`: a batch of ",
    ),
    Notebook(
        "losses of a function whose graphs are retained",
        [
            "net, losses = nn.Linear(784, 512).cuda(), []\ndef train():\n    for _ in range(50):\n"
            "        loss = net(torch.ones(1024, 784, device='cuda')).square().mean()\n"
            "        loss.backward(retain_graph=True)\n        losses.append(loss)"
        ],
        "train()",
        "`loss.backward(retain_graph=False)` for line",
        often=True,
    ),
    Notebook(
        "a state that is never detached",
        ["net, h = nn.GRUCell(64, 512).cuda(), torch.zeros(256, 512, device='cuda')"],
        "for t in range(200):\n    h = net(torch.ones(256, 64, device='cuda'), h)\n"
        "    if t % 20 == 19:\n        loss = h.sum()\n        loss.backward(retain_graph=True)",
        "`h = h.detach()` after `.backward()`",
    ),
    Notebook(
        "results in a list that is joined below the loop",
        ["data, net = torch.ones(40, 1000, 64), nn.Linear(64, 256).cuda()"],
        "found = []\nwith torch.no_grad():\n    for x in data:\n        y = net(x.cuda())\n"
        "        found.append(y)\nevery = torch.cat(found).cpu()",
        "`found.append(y.cpu())` for line 5",
    ),
    Notebook(
        "nearest neighbours of all rows at once",
        [
            "a, b = torch.rand(6000, 32, device='cuda'), torch.rand(9000, 32, device='cuda')\n"
            "def nearest(a, b):\n    near = a @ b.T\n    score, index = near.topk(5)\n"
            "    return score, index"
        ],
        "score, index = nearest(a, b)",
        "`(score, index) = tuple(map(torch.cat, zip(*(nearest(rows, b) for rows in a.split(",
    ),
    Notebook(
        "augmentation that depends on a random tensor",
        [
            "net, bank = nn.Sequential(nn.Linear(64, 512), nn.Tanh()).cuda(), []",
            "def augment(x):\n    return x.flip(0) if torch.rand(()) < 0.5 else x",
        ],
        "for _ in range(40):\n    k = net(augment(torch.ones(2000, 64, device='cuda'))).mean(1)\n"
        "    bank.append(k)\n    k.detach().sum()",
        "store `.detach()` in `bank`",
    ),
    Notebook(
        "whole outputs of a model in a list",
        [
            "class Output:\n    def __init__(self, y):\n        self.y = y",
            "torch.utils._pytree.register_pytree_node(\n"
            "    Output, lambda o: ([o.y], None), lambda found, _: Output(*found))",
            "net, outs = nn.Sequential(nn.Linear(64, 512), nn.ELU(), nn.Linear(512, 8)).cuda(), []",
        ],
        "for n in range(90):\n    outs.append(Output(net(torch.ones(900, 64, device='cuda'))))\n"
        "best = sum(o.y.sum().item() for o in outs)",
        "store `.detach()` of the tensors that later code reads, not whole objects, in `outs`",
    ),
    Notebook(
        "a batch that a function makes for a normalised layer",
        [
            "net = nn.Sequential(nn.Linear(64, 4096), nn.BatchNorm1d(4096)).cuda()\n"
            "data = torch.ones(9000, 64)\ndef crops(data, n):\n"
            "    return torch.stack([data[i] for i in torch.randint(9000, (n,))])"
        ],
        "for _ in range(2):\n    x = crops(data, n=2000).cuda()\n"
        "    net(x).square().mean().backward()",
        "`x`: a batch of ",
    ),
    Notebook(
        "batches of a generator that the loop moves",
        [
            "net = nn.Sequential(nn.Linear(64, 4096), nn.BatchNorm1d(4096)).cuda()\n"
            "data = torch.ones(4000, 64)\ndef train():\n    for X in data.split(2000):\n"
            "        X = X.cuda()\n        net(X).square().mean().backward()"
        ],
        "train()",
        "`X`: a batch of ",
    ),
    Notebook(
        "copies of an optimizer's state after each epoch",
        [PERCEPTRON.replace("SGD", "Adam"), "net = nn.Linear(1024, 1024).cuda()\nkept = []"],
        "opt = torch.optim.Adam(net.parameters())\nfor _ in range(9):\n"
        "    opt.zero_grad()\n    net(mib(1).view(-1, 1024)).sum().backward()\n    opt.step()\n"
        "    kept.append(copy.deepcopy(opt.state_dict()))",
        "store `.cpu()` of the tensors in `kept`",
    ),
    Notebook(
        "coordinates that a network reads with its graph",
        ["net = nn.Sequential(nn.Linear(2, 256), nn.ReLU(), nn.Linear(256, 3)).cuda()"],
        "n = torch.linspace(0, 1, 200, device='cuda')\nxy = torch.cartesian_prod(n, n)\n"
        "rgb = net(xy).sigmoid()",
        "`with torch.no_grad(): rgb = torch.cat([net(rows).sigmoid() for rows in xy.split(4096)])`",
        often=True,
    ),
    Notebook("a batch too large", [PERCEPTRON], TRAIN, "`loss = sum(rows"),
    Notebook(
        "a batch of a loader, in a function",
        [LOADER.format(600)],
        "for epoch in range(2):\n    train()",
        "`loss = sum(rows",
    ),
    Notebook(
        "a batch whose size has a name",
        [PERCEPTRON, "n = len(X)"],
        TRAIN.replace("net(X)", "(net(X) - torch.zeros(n, 1, 1, device='cuda'))"),
        "`X`, `n`: a batch of",
    ),
    Notebook(
        "a step that is given a closure",
        [
            "net, x = nn.Linear(1024, 1024, device='cuda'), mib(1).view(-1, 1024)",
            "opt = torch.optim.LBFGS(net.parameters())",
            "def loss():\n    y = net(x).square().sum()\n    y.backward()\n    return y",
        ],
        "for _ in range(5):\n    opt.step(loss)",
    ),
    Notebook(
        "the first step of an optimizer",
        [
            "net = nn.Linear(1024, 4096, device='cuda')",
            "opt = torch.optim.Adam(net.parameters(), foreach=False)",
            "net(torch.ones(1, 1024, device='cuda')).sum().backward()",
        ],
        "opt.step()\nopt.zero_grad()",
        often=True,
    ),
    Notebook(
        "foreach's lists",
        [
            "net = nn.Sequential(*(nn.Linear(512, 1024, device='cuda') for _ in range(8)))",
            "given = dict(lr=0.1, weight_decay=0.1, foreach=True)",
            "opt = torch.optim.SGD(net.parameters(), **given)",
            "for p in net.parameters():\n    p.grad = torch.ones_like(p)",
            "rest = mib(20)",
        ],
        "opt.step()\nrest.sum()",
        why="the code needs 16.0 MiB",
    ),
    Notebook(
        "a cache of keys and values",
        ["cache = mib(2).view(1, 64, -1)\nstep = mib(1).view(1, 32, -1)"],
        "for _ in range(100):\n    cache = torch.cat([cache, step], 1)",
        why="line 1 keeps 2.0 MiB",
    ),
    Notebook(
        "a checkpoint beside its model",
        [
            "import os, tempfile\npath = os.path.join(tempfile.mkdtemp(), 'model.pt')",
            f"{NET}\ntorch.save(net.state_dict(), path)",
        ],
        "net.load_state_dict(torch.load(path))",
    ),
    Notebook(
        "a copy for an average",
        [NET],
        "ema = copy.deepcopy(net)\nema(net.weight[:9])",
    ),
    Notebook(
        "a data set beside a model",
        ["net = nn.Linear(1280, 4095, device='cuda')", "X = torch.ones(10 * 2**10, 1280)"],
        "batch = X.to('cuda')\nnet(batch[:9])",
        "keep the data of In [",
        often=True,
    ),
    Notebook(
        "a module beside another",
        [NET, NET.replace("net", "two").replace(", device='cuda'", "")],
        "two.cuda()\nnet(two.weight[:9])",
    ),
    # -- no GPU could
    Notebook("a data set", ["X = torch.ones(100, 2**18)"], "loader = X.to('cuda')", why="in all"),
    Notebook("one huge tensor", [], "x = torch.empty(8000, 8000, device='cuda')", why="in all"),
    Notebook(
        "attention's scores",
        ["q = torch.ones(1, 8, 1900, 16, device='cuda')"],
        "scores = q @ q.transpose(-1, -2)",
        "",
        why="in all",
    ),
    Notebook(
        "an embedding",
        [],
        "emb = nn.Embedding(30_000, 1024, device='cuda')",
        "",
        often=True,
        why="in all",
    ),
    # -- as torch says it where there are others, pieces and limits
    Notebook(
        "other processes",
        [],
        said(
            "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 64.00 "
            "MiB of which 2.00 MiB is free. Process 812 has 58.00 MiB memory in use. Including "
            "non-PyTorch memory, this process has 4.00 MiB memory in use. Of the allocated memory "
            "1.00 MiB is allocated by PyTorch, and 1.00 MiB is reserved by PyTorch but unallocated."
        ),
        "`%%ongpu 1`",
        64,
        True,
        why="other processes hold 58.0 MiB",
    ),
    Notebook(
        "memory in pieces",
        [],
        said(
            "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 64.00 "
            "MiB of which 1.00 MiB is free. Including non-PyTorch memory, this process has 63.00 "
            "MiB memory in use. Of the allocated memory 30.00 MiB is allocated by PyTorch, and "
            "32.00 MiB is reserved by PyTorch but unallocated. If reserved but unallocated memory "
            "is large try setting PYTORCH_ALLOC_CONF=expandable_segments:True to avoid "
            "fragmentation."
        ),
        "`os.environ",
        32,
        why="in pieces too small",
    ),
    Notebook(
        "a limit that the code set",
        ["torch.cuda.set_per_process_memory_fraction(0.5)", "x = mib(20)"],
        "y = mib(20) + x",
        "`torch.cuda.set_per_process_memory_fraction(1.0)`",
        32,
        why="torch may take 32.0 MiB",
    ),
]
