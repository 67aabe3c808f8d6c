"""Training on a virtual GPU gives the CPU's numbers."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

pytestmark = pytest.mark.usefixtures("gpus")


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(4, 16, 3, padding=1)
        self.norm = nn.BatchNorm1d(16)
        self.encoder = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, 5)

    def forward(self, x):
        h = F.relu(self.norm(self.conv(x.transpose(1, 2)))).transpose(1, 2)
        return self.head(self.encoder(h).mean(1))


def mlp():
    return nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 5))


def convnet():
    return nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2),
        nn.Sigmoid(),
        nn.AvgPool2d(2),
        nn.Conv2d(6, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.LazyLinear(16),
        nn.LayerNorm(16),
        nn.GELU(),
        nn.Linear(16, 5),
    )


MODELS = {"mlp": (mlp, (8, 12)), "conv": (convnet, (8, 1, 14, 14)), "attn": (Attention, (8, 6, 4))}
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2, foreach=False),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
}


def train(model, shape, optimizer, device, dtype=None, steps=3):
    torch.manual_seed(0)
    net = model()
    data = [(torch.randn(shape), torch.randint(0, 5, shape[:1])) for _ in range(steps)]
    net(data[0][0])  # lazy layers take their shape
    net.to(device)
    opt, losses = optimizer(net.parameters()), []
    for x, y in data:
        opt.zero_grad()
        with torch.autocast(torch.device(device).type, dtype=dtype, enabled=dtype is not None):
            loss = F.cross_entropy(net(x.to(device)), y.to(device))
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        opt.step()
        losses.append(loss)
    assert all(p.device == torch.device(device) for p in net.parameters())
    return losses, [*net.parameters(), *net.buffers()]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("model", MODELS)
def test_bit_for_bit(model, optimizer, same):
    cpu, gpu = (train(*MODELS[model], OPTIMIZERS[optimizer], d) for d in ("cpu", "cuda:1"))
    assert same(cpu, gpu)


@pytest.mark.parametrize("model", MODELS)
def test_autocast(model):
    cpu, gpu = (
        train(*MODELS[model], OPTIMIZERS["sgd"], d, torch.bfloat16)[0] for d in ("cpu", "cuda:1")
    )
    # The two device types cast different operators.
    assert all(torch.allclose(a, b.cpu(), atol=0.1) for a, b in zip(cpu, gpu, strict=True))


def test_autocast_casts_as_cuda():
    a = torch.ones(4, 4, device="cuda")
    with torch.autocast("cuda"):
        assert (a @ a).dtype == torch.float16
        assert torch.exp(a.half()).dtype == torch.float32


def test_gradient_scaler():
    net = mlp().cuda()
    opt, scaler = torch.optim.SGD(net.parameters(), lr=0.1), torch.amp.GradScaler("cuda")
    before = net[0].weight.clone()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = net(torch.randn(4, 12, device="cuda")).square().mean()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    assert scaler.get_scale() == 65536.0
    assert not torch.equal(before, net[0].weight)


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("cell", [nn.RNN, nn.LSTM, nn.GRU, nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_recurrent(cell, inference):
    def run(device):
        torch.manual_seed(0)
        net = cell(5, 7).to(device)
        x = torch.randn((3, 5) if cell.__name__.endswith("Cell") else (6, 3, 5)).to(device)
        with torch.inference_mode(inference):
            y = net(x)
            y = y[0] if isinstance(y, tuple) else y
        if inference:
            return [y]
        y.square().sum().backward()
        return [y, *(p.grad for p in net.parameters())]

    cpu, gpu = run("cpu"), run("cuda:1")
    assert all(g.device == torch.device("cuda:1") for g in gpu)
    assert all(torch.allclose(a, b.cpu(), atol=1e-5) for a, b in zip(cpu, gpu, strict=True))


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((2, 4, 6, 8), {"is_causal": True}),
        ((4, 6, 8), {}),
        ((2, 4, 6, 8), {"attn_mask": True}),
        ((2, 4, 6, 8), {"enable_gqa": True}),
    ],
    ids=["causal", "3-D", "mask", "grouped"],
)
def test_attention(shape, options, same):
    def run(device):
        torch.manual_seed(0)
        q, k, v = (torch.randn(shape).to(device).requires_grad_() for _ in range(3))
        given = dict(options)
        if "attn_mask" in given:
            given["attn_mask"] = torch.ones(6, 6, dtype=torch.bool, device=device).tril()
        if "enable_gqa" in given:
            k, v = k[:, :2].detach(), v[:, :2].detach()
        out = F.scaled_dot_product_attention(q, k, v, **given)
        out.sum().backward()
        return out, q.grad

    assert same(run("cpu"), run("cuda:1"))


def test_training_leaves_no_bytes_behind():
    net = mlp().cuda()
    opt = torch.optim.Adam(net.parameters())
    marks = []
    for _ in range(3):
        opt.zero_grad()
        net(torch.randn(8, 12, device="cuda")).square().mean().backward()
        opt.step()
        marks.append(torch.cuda.memory_allocated())
    assert marks[1] == marks[2]
    del net, opt
    assert torch.cuda.memory_allocated() == 0
