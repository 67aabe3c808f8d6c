"""Models and steps whose largest batch is sought, and the same found by trying each."""

import gc

import torch
from torch import nn
from torch.nn import functional as F

import gpumagic


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(32, 96)

    def forward(self, x):
        q, k, v = self.qkv(x).view(len(x), 20, 3, 4, 8).permute(2, 0, 3, 1, 4)
        return ((q @ k.mT).softmax(-1) @ v).mean((1, 2))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.out = nn.GRU(16, 32, batch_first=True), nn.Linear(32, 10)

    def forward(self, x):
        return self.out(self.rnn(x)[0][:, -1])


class Pooled(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)

    def forward(self, x):
        return self.encoder(x).mean(1)


def conv():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10),
    )  # fmt: skip


def autoencoder():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.GroupNorm(2, 8), nn.GELU(),
        nn.ConvTranspose2d(8, 3, 4, stride=2, padding=1), nn.Flatten(), nn.LazyLinear(10),
    )  # fmt: skip


MODELS = {
    "mlp": (lambda: nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)), (64,)),
    "deep": (lambda: nn.Sequential(*[nn.Linear(64, 64), nn.GELU()] * 6, nn.Linear(64, 10)), (64,)),
    "conv": (conv, (3, 16, 16)),
    "autoencoder": (autoencoder, (3, 16, 16)),
    "attention": (Attention, (20, 32)),
    "transformer": (Pooled, (20, 32)),
    "recurrent": (Recurrent, (12, 16)),
}
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": torch.optim.AdamW,
}


def step_of(model, way):
    """A step that takes a batch, and the net and optimizer that it works on."""
    torch.manual_seed(0)
    make, shape = MODELS[model]
    net = make()
    net(torch.randn(2, *shape))  # what is lazy has its shape
    optimizer = OPTIMIZERS[way](net.parameters()) if way in OPTIMIZERS else None
    net.train(optimizer is not None)

    def step(batch):
        X = torch.randn(batch, *shape)
        if optimizer is None:
            with torch.no_grad():
                return net(X)
        optimizer.zero_grad()
        out = net(X)
        F.cross_entropy(out, torch.zeros(batch, dtype=torch.long)).backward()
        return optimizer.step()

    return step, net, optimizer


def runs(model, way, batch):
    """Whether that batch runs on cuda:1, as `%%ongpu` runs it."""
    step, net, optimizer = step_of(model, way)
    try:
        gpumagic.move((net, optimizer), 1)
        with gpumagic.on(1):
            step(batch)
        return True
    except torch.OutOfMemoryError:
        return False
    finally:
        del step, net, optimizer
        gc.collect()
        torch.cuda.empty_cache()


def brute_force(model, way, near):
    """The largest batch that runs, near one."""
    while not runs(model, way, near):
        near -= 1
    while runs(model, way, near + 1):
        near += 1
    return near
