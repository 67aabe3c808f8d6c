"""Programs whose runs differ at a known place, the line with a comment, or not at all.

Each is the text of a cell, the two sides, and what the answer must say.
"""

import torch
from torch import nn

DEVICES, HALF, BRAIN, DOUBLE = (
    ("cpu", "cuda:1"),
    ("float32", "float16"),
    ("float32", "bfloat16"),
    ("float64", "float32"),
)


class Square(torch.autograd.Function):
    """Its backward pass is wrong on a GPU."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        factor = 3 if gradient.is_cuda else 2
        return gradient * x * factor  # here


def inputs():
    """The variables of the programs."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(32, 16, generator=generator)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    labels = torch.arange(32) % 4
    return {
        "__builtins__": __builtins__,
        "torch": torch,
        "nn": nn,
        "F": nn.functional,
        "x": x,
        "net": net,
        "labels": labels,
        "Square": Square,
    }


PLANTED = {
    "a reduction in half precision on one device": (
        DEVICES,
        """
h = x * 2
if h.is_cuda:
    s = h.half().sum()  # here
else:
    s = h.sum()
t = s * 2""",
        "different operations",
    ),
    "a write in place on one device": (
        DEVICES,
        """
h = x.clone()
if h.is_cuda:
    h.mul_(1.01)  # here
y = h @ x.t()""",
        "different operations",
    ),
    "a write to a part in place on one device": (
        DEVICES,
        """
h = x.clone()
h[3, 5] = 2.0 if h.is_cuda else 1.0  # here
y = h.sum(0)""",
        "2 on cuda:1",
    ),
    "a custom backward": (
        DEVICES,
        """
w = x.clone().requires_grad_()
Square.apply(w).sum().backward()
g = w.grad * 1""",
        "`gradient * x * factor` (aten.mul.Tensor)",
    ),
    "softmax that overflows": (
        HALF,
        """
scores = x * 100
e = torch.exp(scores)  # here
p = e / e.sum(-1, keepdim=True)""",
        "inf on float16",
    ),
    "cancellation": (
        DOUBLE,
        """
big = x + 1e6
variance = (big * big).mean() - big.mean() ** 2  # here
y = x / variance.abs().sqrt()""",
        "cancellation",
    ),
    "a branch by device": (
        DEVICES,
        """
if x.is_cuda:
    h = x.tanh()  # here
else:
    h = x.sin()
y = h @ h.t()""",
        "aten.sin on cpu, aten.tanh on cuda:1",
    ),
    "a branch by device at the end": (
        DEVICES,
        """
h = x * 2
y = h.exp() if h.is_cuda else h.cosh()  # here""",
        "aten.cosh on cpu, aten.exp on cuda:1",
    ),
    "a wrong cast": (
        DEVICES,
        """
kind = torch.float16 if x.is_cuda else torch.float32
h = x.to(kind)  # here
y = (h.float() * 3).sum(1)""",
        "nothing on cpu, aten._to_copy on cuda:1",
    ),
    "a lost eps": (
        HALF,
        """
v = torch.zeros(4, 4)
y = 1e-3 / (v + 1e-8)  # here""",
        "inf on float16",
    ),
    "accumulating in bfloat16": (
        BRAIN,
        """
ones = torch.ones(600) * 0.7
total = torch.zeros(1)
for n in range(600):
    total = total + ones[n]  # here
y = total / 600""",
        "small differences add up",
    ),
    "the backward of sqrt": (
        HALF,
        """
w = torch.full((4,), 1e-9).requires_grad_()
s = w.sqrt().sum()  # here
s.backward()""",
        "float16",
    ),
    "infinity minus infinity": (
        HALF,
        """
a = x.abs().clamp(min=1.0)
big = a * 40000  # here
y = big - big""",
        "inf on float16",
    ),
    "log(1 + x)": (
        DOUBLE,
        """
small = x.abs() * 1e-7
one = 1 + small
y = torch.log(one) * 1e7  # here""",
        "",
    ),
    "argmax of a tie": (
        BRAIN,
        """
h = torch.tensor([[1.0, 1.001, 0.5], [2.0, 1.0, 0.0]])
best = h.argmax(1)  # here
y = best + 1""",
        "agree, except for a choice",
    ),
    "topk of a tie": (
        BRAIN,
        """
h = torch.tensor([[1.0, 1.001, 3.0]])
values, places = h.topk(2)  # here""",
        "agree, except for a choice",
    ),
    "uninitialized memory": (
        DEVICES,
        """
room = torch.empty(8, 16)  # here
room[:4] = x[:4]
y = room.sum(0)""",
        "uninitialized",
    ),
    "the variance of batch norm": (
        HALF,
        """
norm = nn.BatchNorm1d(16)
y = norm(x * 1e-3 + 300)  # here""",
        "",
    ),
    "layer norm of a large offset": (
        BRAIN,
        """
h = x + 1000
y = F.layer_norm(h, (16,))  # here""",
        "",
    ),
    "a seed per device": (
        DEVICES,
        """
seed = 1 if x.is_cuda else 2
torch.manual_seed(seed)
noise = torch.randn(16)  # here
y = x + noise""",
        "",
    ),
    "a constant per device": (
        DEVICES,
        """
scale = torch.tensor(3.0 if x.is_cuda else 2.0)  # here
y = x * scale""",
        "",
    ),
    "NaN on one device": (
        DEVICES,
        """
h = x - x.mean()
bad = float("nan") if h.is_cuda else 0.0
h = h + bad  # here
y = net(h)""",
        "nan on cuda:1",
    ),
    # Written before the tolerance was chosen.
    "a scale in bfloat16 on one device": (
        DEVICES,
        """
h = x.bfloat16()
h = h * (1.1 if h.is_cuda else 1.0)  # here
y = h.sum(0)""",
        "1.1",
    ),
    "dropout on one device": (
        DEVICES,
        """
h = x.tanh()
h = F.dropout(h, 0.5, training=h.is_cuda)  # here
y = h @ h.t()""",
        "different operations",
    ),
    "labels moved by one on one device": (
        DEVICES,
        """
places = labels % 3
places = places + (1 if places.is_cuda else 0)  # here
y = x.gather(1, places[:, None])""",
        "aten.add",
    ),
    "a log of a sum of exponentials": (
        HALF,
        """
scores = x * 30
z = scores.exp().sum(-1).log()  # here
y = scores - z[:, None]""",
        "inf on float16",
    ),
    "a mean of squares": (
        HALF,
        """
h = x * 300
power = h.square().mean()  # here
y = h / power.sqrt()""",
        "inf on float16",
    ),
    "a large offset that is taken off again": (
        DOUBLE,
        """
far = x + 1e8
y = far - 1e8  # here
z = y * 2""",
        "cancellation",
    ),
    "the other dimension on one device": (
        DEVICES,
        """
square = x[:16]
h = square.sum(1 if square.is_cuda else 0)  # here
y = h.softmax(0)""",
        "aten.sum",
    ),
    "the eps of a norm on one device": (
        DEVICES,
        """
h = x * 1e-3
y = F.layer_norm(h, (16,), eps=1e-5 if h.is_cuda else 1e-12)  # here
z = y @ y.t()""",
        "aten.native_layer_norm",
    ),
    "the log of almost one": (
        BRAIN,
        """
small = x.abs() * 0.01
y = (1 + small).log()  # here
z = y * 100""",
        "",
    ),
    "a hook on one device": (
        DEVICES,
        """
w = x.clone().requires_grad_()
w.register_hook(lambda g: g * (2 if g.is_cuda else 1))  # here
w.square().sum().backward()
g = w.grad * 1""",
        "aten.mul",
    ),
    "gradients scaled in place on one device": (
        DEVICES,
        """
optimizer = torch.optim.SGD(net.parameters(), 0.1)
F.cross_entropy(net(x), labels).backward()
if x.is_cuda:
    for p in net.parameters():
        p.grad.mul_(2)  # here
optimizer.step()""",
        "in net.0.weight, values up to",
    ),
    "gradients clipped on one device": (
        DEVICES,
        """
optimizer = torch.optim.SGD(net.parameters(), 0.1)
F.cross_entropy(net(x), labels).backward()
if x.is_cuda:
    nn.utils.clip_grad_norm_(net.parameters(), 0.01)  # here
optimizer.step()""",
        "in net.0.weight, values up to",
    ),
    "a running mean that one device writes": (
        DEVICES,
        """
norm = nn.BatchNorm1d(16)
y = norm(x)
if x.is_cuda:
    norm.running_mean.add_(1)  # here""",
        "in norm.running_mean, values up to",
    ),
    "the state of an optimizer on one device": (
        DEVICES,
        """
optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
F.cross_entropy(net(x), labels).backward()
optimizer.step()
y = x.exp()
if x.is_cuda:
    optimizer.state[net[0].bias]["momentum_buffer"].zero_()  # here""",
        "in optimizer.state.momentum_buffer, tensor 2, values up to",
    ),
    "half precision after a fused LSTM": (
        DEVICES,
        """
torch.manual_seed(0)
h = nn.LSTM(16, 16, batch_first=True)(x.reshape(4, 8, 16))[0]
if h.is_cuda:
    h = h.half().float()  # here""",
        "nothing on cpu, aten._to_copy on cuda:1",
    ),
}

CLEAN = {
    "mlp": "F.cross_entropy(net(x), labels).backward()",
    "cnn": """
torch.manual_seed(1)
conv = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(4, 3))
y = conv(x[:8].reshape(8, 1, 4, 4))
y.square().mean().backward()""",
    "lstm": """
torch.manual_seed(1)
lstm = nn.LSTM(16, 8, 2)
y, _ = lstm(x.reshape(4, 8, 16))
y.square().mean().backward()""",
    "lstm whose workspace depends on the dtype": """
torch.manual_seed(0)
y = nn.LSTM(16, 16, batch_first=True)(x[:20].reshape(2, 10, 16))[0]""",
    "gru": "torch.manual_seed(1)\ny, _ = nn.GRU(16, 8, bidirectional=True)(x.reshape(4, 8, 16))",
    "transformer layer": """
torch.manual_seed(1)
layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
layer(x.reshape(4, 8, 16)).square().mean().backward()""",
    "adam": """
optimizer = torch.optim.Adam(net.parameters())
for _ in range(5):
    optimizer.zero_grad()
    loss = F.cross_entropy(net(x), labels)
    loss.backward()
    optimizer.step()""",
    "sgd with momentum": """
optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
for _ in range(5):
    optimizer.zero_grad()
    F.mse_loss(net(x), F.one_hot(labels, 4).to(x.dtype)).backward()
    optimizer.step()""",
    "sort": "values, places = (torch.arange(64.) * 7 % 64).sort()",
    "indexing": "y = x[labels][:, [3, 1]]\nz = x[x[:, 0] > 100]\nw = x.index_select(0, labels)",
    "cumsum": "y = x.abs().cumsum(0)\nz = (x.abs() + 0.5).cumprod(1)",
    "cdist": "y = torch.cdist(x, x[:8] + 3)",
    "einsum": 'y = torch.einsum("bi,bj->ij", x, x)',
    "fft": "y = torch.fft.rfft(x.float()).abs()",
    "matmul of 512": "a = torch.randn(512, 512)\ny = a @ a.t()",
    "layer norm": "y = F.layer_norm(x, (16,)) * 2 + 1",
    "batch norm": """
norm = nn.BatchNorm1d(16)
norm(x).square().mean().backward()""",
    "dropout": "y = F.dropout(x, 0.5) + nn.Dropout(0.1)(x)",
    "softmax and log": "p = (x * 3).softmax(-1)\nh = -(p * p.clamp_min(1e-6).log()).sum(-1)",
    "attention": """
q = x.reshape(1, 2, 16, 16)
y = F.scaled_dot_product_attention(q, q, q, is_causal=True)""",
    "embedding": """
torch.manual_seed(1)
table = nn.Embedding(10, 16)
F.cosine_similarity(table(labels), x).mean().backward()""",
    "random numbers": """
a, b, c = torch.rand(5), torch.randint(9, (5,)), torch.randperm(7)
d = torch.empty(5).normal_().exponential_()
e = torch.bernoulli(torch.full((50,), 0.3))
f = torch.rand_like(x)""",
    "a buffer written in parts": """
room = torch.empty(4, 16)
for n in range(4):
    room[n] = x[n]
y = room.sum(0)""",
    # Written before the tolerance was chosen.
    "rms norm": "y = x * (x.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt()",
    "rotary embedding": """
angles = torch.arange(32)[:, None] / 32 * torch.linspace(0, 1, 8)
c, s = angles.cos(), angles.sin()
a, b = x[:, :8], x[:, 8:]
y = torch.cat([a * c - b * s, a * s + b * c], -1)""",
    "residual of gelu": """
torch.manual_seed(1)
up, down = nn.Linear(16, 64), nn.Linear(64, 16)
y = x + down(F.gelu(up(F.layer_norm(x, (16,)))))
y.square().mean().backward()""",
    "divergence of softmaxes": """
p, q = F.log_softmax(x, -1), F.softmax(x / 2, -1)
loss = F.kl_div(p, q, reduction="batchmean")""",
    "clipped gradients": """
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for _ in range(5):
    optimizer.zero_grad()
    F.cross_entropy(net(x), labels).backward()
    nn.utils.clip_grad_norm_(net.parameters(), 0.5)
    optimizer.step()""",
    "group norm after a transposed convolution": """
torch.manual_seed(1)
grow = nn.ConvTranspose2d(2, 4, 2, stride=2)
y = nn.GroupNorm(2, 4)(grow(x.reshape(4, 2, 8, 8)))
y.abs().mean().backward()""",
    "similarities": "h = F.normalize(x, dim=-1)\ny = (h @ h.t()).softmax(-1)",
    "scattered sums": """
sums = torch.zeros(4, 16).index_add_(0, labels, x)
counts = torch.zeros(4).scatter_add_(0, labels, torch.ones(32))
y = sums / counts[:, None]""",
    "a loop of twenty steps": """
torch.manual_seed(1)
w, h = torch.randn(16, 16) * 0.2, torch.zeros(32, 16)
for _ in range(20):
    h = (h @ w + x).tanh()""",
    "binary cross-entropy": """
w = x.clone().requires_grad_()
loss = F.binary_cross_entropy_with_logits(w, (x > 0).to(x.dtype))
loss.backward()""",
}
