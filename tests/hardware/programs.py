"""What is run on the device: programs for the ledger, models for the dry run, a notebook."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import nn

SETUP = """
import torch
from torch import nn
torch.manual_seed(0)
h = torch.randn(64, 32)
x = h.to(d)
target = torch.randint(4, (64,)).to(d)
net = nn.Linear(32, 4).to(d)
"""
# In each there are `x` on the device `d` and `h` on the host.
PROGRAMS = {
    "to the device": "h.to(d)",
    "to the host": "x.cpu()",
    "pinned": "p.to(d, non_blocking=True)",
    "to another dtype": "h.to(d, torch.float64)",
    "half, back and forth": "x.cpu().half().to(d).float().cpu()",
    "strided": "x[:, ::2].cpu()",
    "transposed": "h.T.to(d)",
    "broadcast": "torch.empty(5, 64, 32, device=d).copy_(h)",
    "into the host's": "torch.empty(64, 32).copy_(x)",
    "a module": "nn.LSTM(8, 8).to(d)",
    "from a list": "torch.tensor([1.0, 2.0, 3.0], device=d)",
    "numpy": "x.numpy(force=True)",
    "nothing": "torch.empty(0).to(d)",
    "where it is": "x.to(d).clone().sin()",
    "ten times": "for _ in range(10): h.to(d)",
    "item": "x.sum().item()",
    "float": "float(x[0, 0])",
    "if": "if x.sum() > 0: pass",
    "tolist": "x[:2].tolist()",
    "format": "f'{x.sum():.1f}'",
    "repr": "repr(x[0, 0])",
    "mask": "x[x > 0]",
    "nonzero": "x.nonzero()",
    "masked_select": "x.masked_select(x > 1)",
    "unique": "(x * 3).round().unique()",
    "equal": "torch.equal(x, x)",
    "bincount": "target.bincount()",
    "the host's index": "x[torch.tensor([0, 2])]",
    "synchronize": "torch.cuda.synchronize()",
    "training, a loss read each step": (
        "for _ in range(3):\n"
        "    loss = nn.functional.cross_entropy(net(h.to(d)), target)\n"
        "    loss.backward()\n"
        "    loss.item()"
    ),
}


def runner(name: str, device: str) -> Callable[[], None]:
    """A program, ready to run as the user's own code."""
    space: dict[str, Any] = {"__name__": "__main__", "d": device}
    exec(SETUP, space)
    if name == "pinned":
        space["p"] = space["h"].pin_memory()
    code = compile(PROGRAMS[name], f"{name}.py", "exec")
    return lambda: exec(code, space)


class Sequence(nn.Module):
    """A recurrent net or attention, of which the mean over time is the answer."""

    def __init__(self, inner: nn.Module, width: int) -> None:
        super().__init__()
        self.inner, self.out = inner, nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.inner(x)
        return self.out((found[0] if isinstance(found, tuple) else found).mean(1))


class Residual(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x)


def mlp(*widths: int) -> nn.Sequential:
    layers = [layer for a, b in pairwise(widths) for layer in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(widths[-1], 10))


def conv(*middle: nn.Module, channels: int = 16) -> nn.Sequential:
    begin = [nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), *middle]
    end = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10)]
    return nn.Sequential(*begin, *end)


def attention(layers: int = 2, **options: Any) -> Sequence:
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, **options)
    return Sequence(nn.TransformerEncoder(layer, layers, enable_nested_tensor=False), 64)


IMAGE, WORDS, FLAT = (3, 32, 32), (40, 64), (256,)
# Each model: how it is made, what one example is.
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "MLP": (lambda: mlp(256, 512), FLAT),
    "wide MLP": (lambda: mlp(256, 4096), FLAT),
    "deep MLP": (lambda: mlp(256, *[256] * 12), FLAT),
    "MLP, dropout": (lambda: nn.Sequential(mlp(256, 512, 256), nn.Dropout(0.2)), FLAT),
    "MLP, layer norm": (lambda: nn.Sequential(nn.LayerNorm(256), mlp(256, 512)), FLAT),
    "residual MLP": (lambda: nn.Sequential(Residual(mlp(256, 512)[0:1].append(
        nn.Linear(512, 256))), nn.Linear(256, 10)), FLAT),
    "convolutions": (lambda: conv(nn.Conv2d(16, 16, 3)), IMAGE),
    "batch norm": (lambda: conv(nn.BatchNorm2d(16), nn.MaxPool2d(2)), IMAGE),
    "group norm": (lambda: conv(nn.GroupNorm(4, 16), nn.GELU()), IMAGE),
    "depthwise": (lambda: conv(nn.Conv2d(16, 32, 3, groups=16), channels=32), IMAGE),
    "residual convolutions": (lambda: conv(Residual(nn.Conv2d(16, 16, 3, padding=1))), IMAGE),
    "GRU": (lambda: Sequence(nn.GRU(64, 96, batch_first=True), 96), WORDS),
    "LSTM": (lambda: Sequence(nn.LSTM(64, 96, batch_first=True), 96), WORDS),
    "transformer": (attention, WORDS),
    "transformer, norm first": (lambda: attention(4, norm_first=True), WORDS),
}  # fmt: skip

NOTEBOOK = {
    "load": "%load_ext gpumagic\nimport torch\nfrom torch import nn\nseed = torch.manual_seed(0)",
    "data": "X = torch.randn(512, 64); y = torch.randint(5, (512,)); net = nn.Linear(64, 5)\n"
    "data = torch.utils.data.TensorDataset(X.clone(), y.clone())\n"
    "loader = torch.utils.data.DataLoader(data, batch_size=128)",
    "move": "%%ongpu 0 --report\nout = net(X)",
    "train": "%%ongpu 0 --report\nfor _ in range(3):\n"
    "    loss = nn.functional.cross_entropy(net(X), y)\n    loss.backward()\n    loss.item()",
    "batches": "%%ongpu 0 --report\nfor a, b in loader:\n"
    "    nn.functional.cross_entropy(net(a), b).backward()",
    "peak": "%%ongpu 0 --report\nbig = torch.empty(8 * 2**20)\ndel big",
    "copies": "%%ongpu 0 --report\nhost = X.cpu()\nback = host[:, ::2].cuda()\npicked = X[X > 0]",
    "mismatch": "X + torch.ones(512, 64)",
    "dry run": "%%ongpu 0 --dry-run\nhidden = nn.Linear(64, 4096)(X)\nhidden.sum().item()",
}
