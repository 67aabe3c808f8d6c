"""`gpumagic.explain`: the fix stands where the data was made or is kept, and names no number."""

import pytest
import torch
from corpus_score import applied
from snippets import names_told, run

import gpumagic
from gpumagic.dryrun.try_fix import try_fix

pytestmark = [pytest.mark.usefixtures("gpus"), pytest.mark.filterwarnings("ignore")]

GRAPH = """
class Mean(nn.Module):
    def forward(self, x, source, target):
        sums = torch.zeros(x.size(0), x.size(1))
        count = torch.zeros(x.size(0))
        sums.index_add_(0, target, x[source])
        count.scatter_add_(0, target, torch.ones_like(target, dtype=torch.float))
        return sums / count.clamp(min=1).unsqueeze(1)
index = torch.zeros(5, dtype=torch.long, device="cuda:1")
y = Mean()(torch.ones(3, 2, device="cuda:1"), index, index)
"""
AVERAGE = """
class Average:
    def __init__(self, net):
        self.shadow = {k: v.detach().clone() for k, v in net.state_dict().items()}
    def update(self, net):
        for k, v in net.state_dict().items():
            self.shadow[k].mul_(0.9).add_(v, alpha=0.1)
net = nn.Linear(3, 2)
average = Average(net)
average.update(net.cuda())
"""
PENALTY = """
def penalty(net):
    return sum((weight[n] * (p - old[n]) ** 2).sum() for n, p in net.named_parameters())
net = nn.Linear(3, 2)
weight = {n: torch.ones_like(p) for n, p in net.named_parameters()}
old = {n: p.detach().clone() for n, p in net.named_parameters()}
penalty(net.cuda(1))
"""
TEXT = """
class Text(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(9, 4)
    def forward(self, batch):
        return self.words(batch["text"]["ids"])
Text().cuda(1)({"text": {"ids": torch.zeros(2, 3, dtype=torch.long), "raw": "a"}})
"""
FOCAL = """
SHARE = torch.tensor([0.25, 0.5, 0.75])
def focal(target):
    return torch.where(target > 0, SHARE, 1 - SHARE)
focal(torch.ones(2, 3, device="cuda"))
"""
LOADED = """
import io
file = io.BytesIO()
torch.save({"rows": torch.ones(5, 3), "labels": torch.arange(5)}, file)
index = torch.load(io.BytesIO(file.getvalue()), map_location="cpu")
def search(q):
    best = (q @ index["rows"].T).argmax(1)
    return index["labels"][best]
search(torch.ones(2, 3, device="cuda"))
"""
DRAWN = """
def sample(n):
    g = torch.manual_seed(0)
    return torch.randn(n, generator=g, device=device)
device = "cuda"
sample(3)
"""
LENGTHS = """
class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.rnn = nn.Embedding(9, 4), nn.GRU(4, 5, batch_first=True)
    def forward(self, x, lengths):
        packed = nn.utils.rnn.pack_padded_sequence(self.words(x), lengths, batch_first=True)
        return self.rnn(packed)[1]
net, x = Encoder().cuda(), torch.ones(2, 3, dtype=torch.long, device="cuda")
lengths = (x != 0).sum(1)
h = net(x, lengths)
"""
KEYWORDS = LENGTHS.replace(
    "h = net(x, lengths)", "data = {'x': x, 'lengths': lengths}\nh = net(**data)"
)
TABLE = """
table = torch.linspace(0, 1, 10)
def noisy(x):
    t = torch.zeros(x.size(0), dtype=torch.long, device=x.device)
    return table[t].view(-1, 1) * x
y = noisy(torch.ones(3, 4, device="cuda"))
"""
POOLED = """
def pooled(x, lengths):
    valid = torch.arange(3, device=x.device)[None] < lengths[:, None]
    return (x * valid).sum(1) / lengths[:, None]
y = pooled(torch.ones(2, 3, device="cuda"), torch.tensor([3, 2]))
"""
DEGREE = """
def degree(index):
    return torch.zeros(4).index_add_(0, index, torch.ones(index.numel()))
n = degree(torch.zeros(2, dtype=torch.long, device="cuda"))
"""
LOSS = """
loss = nn.CrossEntropyLoss(weight=torch.ones(2))
def step(x, y):
    return loss(x, y)
for _ in range(2):
    step(torch.ones(3, 2, device="cuda"), torch.zeros(3, dtype=torch.long, device="cuda"))
"""
CODEBOOK = """
book = torch.ones(5, 4)
def nearest(z):
    far = z.pow(2).sum(1, keepdim=True) - 2 * z @ book.t() + book.pow(2).sum(1)
    return book[far.argmin(1)]
y = nearest(torch.ones(3, 4, device="cuda"))
"""
ONE_HOT = """
def brier(p, y):
    hot = torch.eye(3)[y]
    return (p - hot).square().mean()
y = torch.tensor([0, 2]).cuda()
brier(torch.rand(2, 3, device="cuda"), y)
"""
ACTIONS = """
seen, chosen = torch.ones(2, 3).cuda(), np.array([0, 2])
act = torch.from_numpy(chosen)
p = seen.softmax(1).gather(1, act[:, None])
"""
LOSSES = """
losses = {"a": torch.tensor(1.0).cuda(), "b": torch.tensor(2.0).cuda(1)}
total = sum(losses.values())
"""
COLUMNS = """
a, b = torch.ones(4, 2).cuda(), torch.ones(4).cuda().requires_grad_()
rows = {
    "x": a[:, 0].numpy(),
    "y": a[:, 1].numpy(),
    "z": (b * 2).detach().numpy(),
}
"""
PADDED = LENGTHS.replace(
    "        return self.rnn(packed)[1]",
    "        out = nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0], batch_first=True)[0]\n"
    "        pad = torch.arange(out.size(1))[None, :] >= lengths[:, None]\n"
    "        return out.masked_fill(pad[..., None], 0.0)",
).replace("(x != 0).sum(1)", "(x != 0).sum(1).cpu()")
STATE = """
class Stateful(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.mix, self.h = nn.Embedding(9, 4), nn.Linear(8, 4), torch.zeros(2, 4)
    def forward(self, x):
        h, outs = self.h, []
        for t in range(x.size(1)):
            h = torch.tanh(self.mix(torch.cat([self.words(x[:, t]), h], dim=1)))
            outs.append(h)
        self.h = h.detach()
        return torch.stack(outs)
net, x = Stateful().to("cuda:0"), torch.ones(2, 3, dtype=torch.long)
net.h = net.h.to("cuda:0")
net(x.to("cuda:0"))
net.to("cuda:1")
y = net(x.to("cuda:1"))
"""
KERNEL = """
def rbf(a, b):
    return (a[:, None, :] - b[None, :, :]).pow(2).sum(-1)
X = torch.rand(8, 1, device="cuda:1")
at = torch.linspace(0, 1, 5)[:, None]
k = rbf(at, X)
"""
BANK = """
bank, labels = torch.rand(400, 16, device="cuda:1"), torch.ones(400, device="cuda:1")
z = torch.rand(3, 16, device="cuda:0")
sims = z @ bank.t()
found = labels[sims.topk(2).indices]
"""
NOISE = """
def noise(shape, device):
    g = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=g, device=device)
noise((2,), "cuda:1")
noise((2,), "cpu")
"""
WRITTEN = """
z, rows = torch.ones(4, 3, device="cuda:0"), torch.tensor([0, 2])
z[rows] = torch.zeros(2, 3)
"""
HIDDEN = """
class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(5, 2)
    def init_hidden(self, n):
        return (torch.zeros(n, 2).cuda(), torch.zeros(n, 2).cuda())
    def forward(self, x, state):
        h, c = state
        h = torch.tanh(self.mix(torch.cat([x, h], 1)) + c)
        return h, c
class Steps(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = Cell()
    def forward(self, x):
        state = self.cell.init_hidden(x.size(0))
        for _ in range(2):
            state = self.cell(x, state)
        return state[0]
y = Steps().to("cuda:1")(torch.ones(3, 3, device="cuda:1"))
"""
PACKED = LENGTHS.replace("lengths = (x != 0).sum(1)", "x = x.cpu()\nlengths = (x != 0).sum(1)")
CHUNKS = """
net, X = nn.Linear(3, 2).to("cuda:1"), torch.ones(6, 3)
for rows in torch.randperm(6).split(2):
    y = net(X[rows])
"""
SHUFFLED = """
X, y = torch.ones(6, 2), torch.ones(6)
order = torch.randperm(6, device="cuda")
for i in range(0, 6, 3):
    rows = order[i : i + 3]
    batch = X[rows].cuda(), y[rows].cuda()
"""
SCORES = """
from sklearn.metrics import accuracy_score, f1_score
truth, found = torch.tensor([0, 1, 1]), torch.tensor([0, 1, 0], device="cuda")
print(accuracy_score(truth, found))
print(f1_score(truth, found))
"""
MEAN = """
def mean(hidden, mask):
    kept = mask.unsqueeze(-1).expand(hidden.size()).float()
    return (hidden * kept).sum(1) / kept.sum(1)
texts = {"mask": torch.ones(2, 3)}
m = mean(torch.ones(2, 3, 4, device="cuda"), texts["mask"])
"""
HARD_CODED = """
def hinge(a, b):
    least = torch.zeros(a.size(0)).cuda()
    return torch.max(a - b, least).mean()
y = hinge(torch.ones(3, device="cuda:1"), torch.zeros(3, device="cuda:1"))
"""
COMPUTED = """
def hinge(a, b):
    least = (torch.zeros(a.size(0)) + 1).cuda()
    return torch.max(a - b, least).mean()
y = hinge(torch.ones(3, device="cuda:1"), torch.zeros(3, device="cuda:1"))
"""
RESUMED = """
state = {"rng": torch.get_rng_state().cuda()}
torch.set_rng_state(state["rng"])
"""


@pytest.mark.parametrize(
    ("code", "fixed"),
    [
        (GRAPH, "sums = torch.zeros(x.size(0), x.size(1), device=target.device)"),
        (AVERAGE, "self.shadow[k] = self.shadow[k].to(v.device)"),
        (PENALTY, "weight[n].to(p.device) * (p - old[n].to(p.device)) ** 2"),
        (TEXT, 'batch["text"]["ids"].to(self.words.weight.device)'),
        (FOCAL, "SHARE.to(target.device), (1 - SHARE).to("),
        (CODEBOOK, "book.t().to(z.device)"),
        (ONE_HOT, "hot = torch.eye(3, device=y.device)[y]"),
        (ACTIONS, "act = torch.from_numpy(chosen).to(seen.device)"),
        (LOSSES, 'v.to("cuda:0") for k, v in losses.items()'),
        (COLUMNS, '"y": a[:, 1].cpu().numpy(),\n    "z": (b * 2).detach().cpu().numpy(),'),
        (WRITTEN, "z[rows] = torch.zeros(2, 3, device=z.device)"),
        (HIDDEN, "return (torch.zeros(n, 2, device=next(self.parameters()).device), torch.z"),
        (PACKED, 'x = x.to("cuda:0")'),
        (HARD_CODED, "least = torch.zeros(a.size(0), device=a.device)"),
        (COMPUTED, "least = (torch.zeros(a.size(0)) + 1).to(a.device)"),
        (SHUFFLED, "order = torch.randperm(6, device=X.device)"),
        (SCORES, "print(f1_score(truth, found.cpu()))"),
        (MEAN, 'texts["mask"].to("cuda:0")'),
        (CHUNKS, 'net(X[rows].to("cuda:1"))'),
        (NOISE, "g = torch.Generator(device).manual_seed(0)"),
        (LOADED, 'index["rows"].T.to(q.device)'),
        (DRAWN, "g = torch.Generator(device).manual_seed(0)"),
        (LENGTHS, "self.words(x), lengths.cpu(), batch_first=True"),
        (KEYWORDS, "self.words(x), lengths.cpu(), batch_first=True"),
        (TABLE, "table.to(t.device)[t]"),
        (POOLED, "(x * valid).sum(1) / lengths[:, None].to(x.device)"),
        (DEGREE, "torch.zeros(4, device=index.device)"),
        (LOSS, 'loss.to("cuda:0")'),
        (PADDED, "out.masked_fill(pad[..., None].to(out.device), 0.0)"),
        (STATE, "h = h.to(x.device)"),
        (KERNEL, "torch.linspace(0, 1, 5, device=X.device)[:, None]"),
        (BANK, "z.to(bank.device) @ bank.t()"),
        (RESUMED, 'torch.set_rng_state(state["rng"].cpu())'),
    ],
)
def test_the_fix_runs_and_is_where_it_lasts(code, fixed):
    error = run(code)
    explanation = try_fix(error, gpumagic.explain(error))
    edits = [explanation.fix, *explanation.more]
    assert fixed in "\n".join(edit.code for edit in edits)
    assert run(applied(explanation, code)) is None


def test_a_tensor_that_is_written_twice_in_a_row_is_named_itself():
    told = names_told(gpumagic.explain(run(AVERAGE)))
    assert told["self.shadow[k]"].odd
    assert told["v"].devices == ("cuda:0",)


def test_a_state_that_is_no_state_of_a_generator_is_torchs_matter():
    assert gpumagic.explain(run("torch.set_rng_state(torch.ones(3))")) is None
    assert torch.get_rng_state().is_cpu


WEIGHTS = """
class Weighted(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.logs = [nn.Parameter(torch.zeros(1)) for _ in range(n)]
    def forward(self, losses):
        total = 0
        for log, loss in zip(self.logs, losses):
            total = total + torch.exp(-log) * loss + log
        return total
Weighted(2).cuda()([torch.ones(1, device="cuda")] * 2)
"""
LAYERS = """
class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.hidden = nn.Linear(4, 4), None
        self.hidden = [nn.Linear(4, 4) for _ in range(2)]
    def forward(self, x):
        x = self.first(x)
        for layer in self.hidden:
            x = layer(x)
        return x
net = Deep().cuda(1)
for layer in net.hidden:
    layer.cuda(1)
net.cpu()(torch.ones(3, 4))
"""
BATCH = """
class Batch:
    def __init__(self, ids, mask, labels):
        self.ids, self.mask, self.labels = ids, mask, labels
    def to(self, device):
        return Batch(self.ids.to(device), self.mask.to(device), self.labels)
words = nn.Embedding(9, 3).cuda(1)
def loss_of(b):
    y = (words(b.ids) * b.mask[:, None]).sum(1)
    return F.cross_entropy(words(b.ids), b.labels)
loss_of(Batch(torch.arange(3), torch.ones(3), torch.zeros(3, dtype=torch.long)).to("cuda:1"))
"""


@pytest.mark.parametrize(
    ("code", "new", "why"),
    [
        (
            *(WEIGHTS, "self.logs = nn.ParameterList([nn.Parameter(torch.zeros(1)) for"),
            "self.logs is a plain list, and .to() skips its contents",
        ),
        (
            *(LAYERS, "self.hidden = nn.ModuleList([nn.Linear(4, 4) for"),
            "self.hidden is a plain list, and .to() skips its contents",
        ),
        (
            *(BATCH, "return Batch(self.ids.to(device), self.mask.to(device), self.labels.to("),
            "Batch.to() leaves labels behind",
        ),
    ],
)
def test_what_a_class_left_behind_is_mended_there(code, new, why):
    explanation = gpumagic.explain(run(code))
    assert explanation.fix.code.strip().startswith(new)
    assert why in (explanation.reason or "")
    assert run(explanation.fix.apply(code)) is None


def test_an_attribute_that_is_no_state_is_moved_once_and_found_there_by_later_calls():
    code = (
        "class Boost:\n    def __init__(self):\n        self.by = torch.arange(4.0)\n"
        "    def __call__(self, x):\n        return x + self.by\n"
        "ys = [*map(Boost(), [torch.ones(2, 4, device='cuda')] * 2)]\n"
    )
    fix = gpumagic.explain(run(code)).fix
    assert fix.code.strip() == "self.by = self.by.to(x.device)"
    assert run(fix.apply(code)) is None


def test_each_model_of_a_comprehension_is_moved_where_it_is_called():
    code = (
        "nets, x = [nn.Linear(3, 2) for _ in range(2)], torch.ones(4, 3)\n"
        "ys = [net(x.to('cuda')) for net in nets]\n"
    )
    fix = gpumagic.explain(run(code)).fix
    assert fix.code == "ys = [net.to(\"cuda:0\")(x.to('cuda')) for net in nets]"
    assert run(fix.apply(code)) is None


def test_a_transfer_to_the_wrong_gpu_is_sent_to_the_right_one_at_once():
    code = (
        "net, data = nn.Linear(3, 2).cuda(1), [(torch.ones(4, 3), torch.ones(4, 2))] * 2\n"
        "for x, y in data:\n    x = x.to('cuda')\n    y = y.to('cuda')\n"
        "    loss = (net(x) - y).sum()\n"
    )
    fix = gpumagic.explain(run(code)).fix
    assert fix.code == '    x = x.to("cuda:1")\n    y = y.to("cuda:1")'
    assert run(fix.apply(code)) is None


@pytest.mark.parametrize("moved", ["x.to(device), y", "x, y"])
def test_a_function_that_moves_only_some_of_its_results_moves_the_others_too(moved):
    code = (
        "device, data = 'cuda', torch.arange(40)\ndef batch(n):\n"
        "    x = torch.stack([data[i : i + 4] for i in range(n)])\n    y = x[:, 1:] + 0\n"
        f"{'    x = x.to(device)' if moved == 'x, y' else ''}\n    return {moved}\n"
        "words = nn.Embedding(50, 60).cuda()\nfor _ in range(2):\n    x, y = batch(3)\n"
        "    loss = F.cross_entropy(words(x)[:, 1:].flatten(0, 1), y.flatten())\n"
    )
    fix = gpumagic.explain(run(code)).fix
    assert fix.code == f"    return {moved}.to(device)"
    assert run(fix.apply(code)) is None


def test_what_a_module_computed_stays_where_it_is():
    code = (
        "net, kept = nn.Linear(4, 3).cuda(0), torch.ones(9, 3).cuda(1)\n"
        "y = net(torch.ones(2, 4).cuda(0))\nd = y[:, None] - kept[None]\n"
    )
    fix = gpumagic.explain(run(code)).fix
    assert fix.code == "d = y[:, None] - kept[None].to(y.device)"
    assert run(fix.apply(code)) is None


PAIR = """
def pair(x, y, device='cuda'):
    {}
    return x, y
a, b = pair(torch.ones(3), torch.ones(3))
c = a + b
"""
SCORE = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin, self.w = nn.Linear(3, 3), nn.Parameter(torch.ones(3))
    def width(self):
        x = torch.zeros(1, 3)
        return self.lin(x).shape[1]
    def export(self, device):
        self.w.to(device)
        return self.w
    def score(self, x):
        return {}
net = Net().cuda()
net.score(torch.ones(2, 3))
"""


@pytest.mark.parametrize(
    "code",
    [
        PAIR.format("send = lambda t, to: t.to(to)\n    x = send(x, device)"),
        PAIR.format("x = x.to(torch.float64)\n    x = x.to(device)"),
        PAIR.format("x = x.to(device, torch.float16)"),
        PAIR.format("x = x.cuda()\n    y = y.cpu()"),
        SCORE.format("self.lin(x).sum()"),
        SCORE.format("x @ self.w"),
        "def draw(p, g=None):\n    return torch.multinomial(p, 2, generator=g)\n"
        "draw(torch.ones(4, device='cuda'), torch.Generator())",
        "net, buf = nn.Linear(3, 3).cuda(), torch.zeros(2, 3)\n"
        "for n in range(2):\n    buf[n] += net(torch.ones(3).cuda())\nrows = buf.numpy()",
        "class Box:\n    def __init__(self):\n        self.x, self.y = torch.ones(2, 2)\n"
        "    def to(self, device):\n        assert len(self.x) == len(self.y)\n"
        "        self.x = self.x.to(device)\n        return self\n"
        "box = Box().to('cuda')\nz = box.x + box.y",
        "class Odd:\n    def __getattr__(self, name):\n        raise KeyError(name)\n"
        "    def __call__(self):\n        return torch.ones(2), torch.ones(2).cuda()\n"
        "f = Odd()\na, b = f()\nc = a + b",
    ],
)
def test_a_fix_runs_or_there_is_none(code):
    explanation = gpumagic.explain(run(code))
    assert explanation is not None
    assert explanation.fix is None or run(explanation.fix.apply(code)) is None


def test_a_transfer_of_two_names_is_edited():
    code = "net, x = nn.Linear(3, 3).cuda(1), torch.ones(1, 3)\nx = x.to('cuda')\ny = net(x)\n"
    assert gpumagic.explain(run(code)).fix.code == 'x = x.to("cuda:1")'
    code = (
        "net, x, y = nn.Linear(3, 3).cuda(1), torch.ones(2, 3), torch.ones(2, 3)\n"
        "x, y = x.to('cuda'), y.to('cuda')\nloss = (net(x) - y).sum()\n"
    )
    fix = gpumagic.explain(run(code)).fix
    assert fix.code == 'x, y = x.to("cuda:1"), y.to("cuda:1")'
    assert run(fix.apply(code)) is None


def test_a_gpu_that_a_function_names_follows_its_argument():
    code = (
        "def noisy(x):\n    noise = torch.randn(x.shape, device='cuda:0')\n"
        "    return x + 0.1 * noise\nnoisy(torch.ones(3, device='cuda:1'))\n"
    )
    fix = gpumagic.explain(run(code)).fix
    assert fix.code.strip() == "noise = torch.randn(x.shape, device=x.device)"
    assert run(fix.apply(code)) is None
