"""Training steps of networks on cuda:0, the same on torch's real allocator and on virtual GPUs.

    python tests/cuda/memory_networks.py [virtual]

prints as JSON the bytes allocated, reserved and requested at most, and those left, by network.
Without cuDNN: the stand-in has none, so what its workspaces would take is not decided here.
"""

import gc
import itertools
import json
import sys

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

WHERE = "cuda:0"


class Residual(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels),
        )  # fmt: skip

    def forward(self, x):
        return F.relu(x + self.layers(x))


class Attention(nn.Module):
    def __init__(self, words=1000, width=128, heads=4):
        super().__init__()
        self.embed, self.at, self.heads = nn.Embedding(words, width), nn.Embedding(64, width), heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.join = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 512), nn.GELU(), nn.Linear(512, width))
        self.out = nn.Linear(width, words, bias=False)

    def forward(self, x):
        batch, length = x.shape
        y = self.embed(x) + self.at(torch.arange(length, device=x.device))
        parts = self.qkv(self.before(y)).view(batch, length, 3, self.heads, -1)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        later = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        weights = (q @ k.transpose(-1, -2) * 0.2).masked_fill(later, -1e9).softmax(-1)
        y = y + self.join((weights @ v).transpose(1, 2).reshape(batch, length, -1))
        return self.out(y + self.feed(self.between(y))).flatten(0, 1)


class UNet(nn.Module):
    def __init__(self, channels=16):
        super().__init__()
        self.down = nn.Conv2d(3, channels, 3, padding=1)
        self.low = nn.Conv2d(channels, 2 * channels, 3, padding=1)
        self.up = nn.ConvTranspose2d(2 * channels, channels, 2, 2)
        self.out, self.norm = nn.Conv2d(2 * channels, 4, 3, padding=1), nn.GroupNorm(4, channels)

    def forward(self, x):
        high = F.relu(self.norm(self.down(x)))
        low = F.relu(self.low(F.max_pool2d(high, 2)))
        return self.out(torch.cat((high, self.up(low)), 1))


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.LayerNorm(256)) for _ in range(4)
        )
        self.out = nn.Linear(256, 10)

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return self.out(x)


def dense(*widths):
    layers = [m for a, b in itertools.pairwise(widths) for m in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def convolutional(*inner):
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), *inner,
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10),
    )  # fmt: skip


def adam(parameters):
    return torch.optim.Adam(parameters)


def momentum(parameters):
    return torch.optim.SGD(parameters, 0.1, momentum=0.9)


def fused(parameters):
    return torch.optim.AdamW(parameters, fused=True)


def loop(parameters):
    return torch.optim.Adam(parameters, foreach=False)


IMAGES, WORDS = (8, 3, 16, 16), (16, 64)
# Network, shape of a batch (of words: numbers below 1000), optimizer, and what else a step does.
NETWORKS = {
    "mlp": (lambda: dense(784, 512, 256, 10), (2048, 784), momentum, ""),
    "wide": (lambda: dense(64, 4096, 10), (1024, 64), adam, ""),
    "cnn": (convolutional, IMAGES, adam, ""),
    "residual": (lambda: convolutional(Residual(16), Residual(16)), IMAGES, momentum, ""),
    "batch norm": (
        lambda: nn.Sequential(dense(100, 512), nn.BatchNorm1d(512), nn.ReLU(), dense(512, 10)),
        (2048, 100), adam, "",
    ),
    "embedding": (
        lambda: nn.Sequential(nn.Embedding(1000, 64), nn.Flatten(), dense(64 * 64, 10)),
        WORDS, adam, "",
    ),
    "unet": (UNet, (2, 3, 32, 32), adam, "pixels"),
    "attention": (Attention, WORDS, torch.optim.AdamW, "words"),
    "fused": (lambda: dense(784, 1024, 10), (1024, 784), fused, ""),
    "autocast": (lambda: dense(784, 1024, 10), (1024, 784), adam, "autocast"),
    "checkpoints": (Checkpointed, (2048, 256), adam, ""),
    "loop": (lambda: dense(784, 512, 10), (512, 784), loop, ""),
    "clipped": (lambda: dense(784, 512, 10), (512, 784), adam, "clip"),
}  # fmt: skip


def made(name, where=WHERE):
    """A network, its optimizer, a batch and its targets."""
    make, shape, optimizer, how = NETWORKS[name]
    torch.manual_seed(0)
    net = make().to(where)
    x = torch.randint(1000, shape) if shape is WORDS else torch.randn(shape)
    targets = {"pixels": lambda: torch.randint(4, (shape[0], *shape[2:])), "words": x.flatten}
    y = targets.get(how, lambda: torch.randint(10, shape[:1]))()
    return net, optimizer(net.parameters()), x.to(where), y.to(where)


def steps(name, net, optimizer, x, y, count=2):
    """Train; the last loss."""
    how = NETWORKS[name][3]
    for _ in range(count):
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16, enabled=how == "autocast"):
            loss = F.cross_entropy(net(x), y)
        loss.backward()
        if how == "clip":
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
    return loss


def prepare():
    """Backward on this thread, and cuBLAS's workspaces made."""
    torch.autograd.set_multithreading_enabled(False)
    a = torch.ones(8, 8, device=WHERE)
    a @ a
    F.linear(a, a, a[0])


def peaks(name):
    """Bytes allocated, reserved and requested at most, and those that are left; without cuDNN."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()
    kept = made(name)
    with torch.backends.cudnn.flags(enabled=False):
        loss = steps(name, *kept)
    after = torch.cuda.memory_stats()
    del kept, loss
    kinds = ("allocated_bytes.all.peak", "reserved_bytes.all.peak", "requested_bytes.all.peak")
    kinds = (*kinds, "allocated_bytes.all.current")
    return [after[kind] - before[kind.replace("peak", "current")] for kind in kinds]


def main():
    if sys.argv[1:] == ["virtual"]:
        from gpumagic import virtual

        virtual.enable(1, "1GiB")
    torch.set_num_threads(1)
    prepare()
    print(json.dumps({name: peaks(name) for name in NETWORKS}))


if __name__ == "__main__":
    main()
