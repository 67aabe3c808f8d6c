"""What a dry run predicts against what the virtual GPUs measure when the same code really runs."""

import pytest
import torch
from dry_runs import check
from torch import nn
from torch.nn import functional as F

pytestmark = pytest.mark.usefixtures("gpus")


class Attention(nn.Module):
    def __init__(self, width=32, heads=4):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        batch, length, width = x.shape
        parts = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = parts
        weights = (q @ k.transpose(-1, -2) / 8).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).reshape(batch, length, width)).mean(1)


def mlp(width=256):
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, 10))


def conv():
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3), nn.GELU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10),
    )  # fmt: skip


class Causal(nn.Module):
    """With a mask, which torch looks at, and by its fused attention."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        return self.layers(x, mask=mask).mean(1)


def transformer():
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    return nn.Sequential(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), Mean())


class Mean(nn.Module):
    def forward(self, x):
        return x.mean(1)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.rnn = nn.Embedding(100, 32), nn.GRU(32, 48, batch_first=True)
        self.out = nn.Linear(48, 10)

    def forward(self, x):
        return self.out(self.rnn(self.words(x))[0][:, -1])


MODELS = {
    "mlp": (mlp, (128, 64)),
    "wide": (lambda: mlp(4096), (32, 64)),
    "conv": (conv, (16, 3, 16, 16)),
    "attention": (Attention, (8, 50, 32)),
    "transformer": (transformer, (8, 40, 32)),
    "causal": (Causal, (8, 40, 32)),
    "recurrent": (Recurrent, (16, 12)),
}
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p),
    "adamw fused": lambda p: torch.optim.AdamW(p, fused=True),
    "adamw loop": lambda p: torch.optim.AdamW(p, foreach=False),
}


def batch(shape, recurrent):
    X = torch.randint(0, 100, shape) if recurrent else torch.randn(shape)
    return X, torch.randint(0, 10, shape[:1])


# Each model once, each optimizer once, one step and several; all of them with -m slow.
ALL = [(m, o, steps) for m in MODELS for o in OPTIMIZERS for steps in (1, 3)]
FEW = [(m, list(OPTIMIZERS)[n % 5], 1 + n % 2 * 2) for n, m in enumerate(MODELS)]


@pytest.mark.parametrize(
    ("model", "optimizer", "steps"),
    [case if case in FEW else pytest.param(*case, marks=pytest.mark.slow) for case in ALL],
)
def test_training_steps(model, optimizer, steps):
    torch.manual_seed(0)
    make, shape = MODELS[model]
    net = make()
    opt = OPTIMIZERS[optimizer](net.parameters())
    X, y = batch(shape, model == "recurrent")

    def train(net, opt, X, y):
        for _ in range(steps):
            opt.zero_grad()
            loss = F.cross_entropy(net(X), y)
            loss.backward()
            opt.step()
        return loss

    check(train, net, opt, X, y)


@pytest.mark.parametrize("model", MODELS)
def test_inference(model):
    make, shape = MODELS[model]
    net = make().eval()
    X, _ = batch(shape, model == "recurrent")

    @torch.no_grad()
    def infer(net, X):
        return net(X).softmax(-1)

    result, value = check(infer, net, X)
    (returned,) = result.assigned
    assert (returned.shape, returned.dtype) == (value.shape, value.dtype)
    assert returned.device == str(value.device)


def wide():
    return torch.randn(256, 512, requires_grad=True)


# These hold more than their results: more than the result's shape says, the zeros that a backward
# pass writes into, the order of channels that the CPU's kernels choose.
HOLD = {
    "soft_margin_loss": lambda: F.soft_margin_loss(wide(), torch.ones(256, 512)),
    "max": lambda: wide().max(),
    "trace": lambda: wide().trace(),
    "topk": lambda: wide().topk(50)[0],
    "index": lambda: wide()[torch.zeros(100, dtype=torch.long)],
    "logits": lambda: F.binary_cross_entropy_with_logits(wide(), torch.ones(256, 512)),
    "channels last": lambda: F.conv2d(
        F.group_norm(torch.randn(2, 16, 16, 8, requires_grad=True).permute(0, 3, 1, 2), 4),
        torch.randn(4, 8, 1, 1),
    ).contiguous(),
}


def forward_and_backward(make):
    out = make()
    out.sum().backward()
    return out


@pytest.mark.parametrize("name", HOLD)
def test_what_operators_hold_beside_their_results(name):
    check(forward_and_backward, HOLD[name])
