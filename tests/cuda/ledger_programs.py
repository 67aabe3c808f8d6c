"""List programs as people write them, whose copies and waits torch's own CUDA code decides."""

SETUP = """
import copy, io, pickle, random
import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
torch.manual_seed(0)
h = torch.randn(64, 32); p = h.pin_memory()
x = h.to(d); x1 = h.to("cuda:1")
target = torch.randint(4, (64,)).to(d)
net = nn.Linear(32, 4).to(d); seq = nn.Sequential(nn.Linear(32, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)).to(d)
home = copy.deepcopy(net).cpu().state_dict()
adam = torch.optim.Adam(seq.parameters()); event = torch.cuda.Event(); stream = torch.cuda.Stream()
saved = io.BytesIO(); torch.save(h, saved); mask = x > 0; c0 = torch.tensor(2.0); z = x.sum()
data = torch.utils.data.TensorDataset(h, torch.randint(4, (64,)))
def step():
    adam.zero_grad(); F.cross_entropy(seq(x), target).backward(); adam.step()
step()
"""

PROGRAMS = {
    "to the device": "h.to(d)",
    "to the host": "x.cpu()",
    "pinned": "p.to(d, non_blocking=True)",
    "pinned, blocking": "p.to(d)",
    "pageable, non_blocking": "h.to(d, non_blocking=True)",
    "home, non_blocking": "x.to('cpu', non_blocking=True)",
    "into pinned": "torch.empty(64, 32).pin_memory().copy_(x, non_blocking=True)",
    "to another dtype": "h.to(d, torch.float64)",
    "half, back and forth": "x.cpu().half().to(d).float().cpu()",
    "strided": "x[:, ::2].cpu()",
    "transposed": "h.T.to(d)",
    "broadcast": "torch.empty(5, 64, 32, device=d).copy_(h)",
    "into the host's": "torch.empty(64, 32).copy_(x)",
    "into the host's, strided": "torch.empty(32, 64).t().copy_(x)",
    "into the device's, strided": "torch.empty(32, 64, device=d).t().copy_(h)",
    "a module": "nn.LSTM(8, 8).to(d)",
    "from a list": "torch.tensor([1.0, 2.0, 3.0], device=d)",
    "from numpy": "torch.as_tensor(np.ones(7), device=d)",
    "numpy": "x.numpy(force=True)",
    "nothing": "torch.empty(0).to(d)",
    "where it is": "x.to(d).clone().sin()",
    "item": "x.sum().item()",
    "float": "float(x[0, 0])",
    "if": "if x.sum() > 0: pass",
    "tolist": "x[:2].tolist()",
    "format": "f'{x.sum():.1f}'",
    "repr": "repr(x[0, 0])",
    "repr of a matrix": "repr(x)",
    "repr of ints": "repr(target)",
    "mask": "x[x > 0]",
    "mask, two": "x[x > 0], x1[x1 > 0]",
    "nonzero": "x.nonzero()",
    "where": "torch.where(x > 1)",
    "masked_select": "x.masked_select(x > 1)",
    "equal": "torch.equal(x, x)",
    "allclose": "torch.allclose(x, x)",
    "bincount": "target.bincount()",
    "one_hot": "F.one_hot(target)",
    "one_hot, 4": "F.one_hot(target, 4)",
    "the host's index": "x[torch.tensor([0, 2])]",
    "a list's index": "x[[0, 2]]",
    "set a number": "x[0, 0] = 1.0",
    "set by mask": "x[mask] = 0.5",
    "set by mask, tensor": "x[mask] = torch.tensor(0.5)",
    "set by the host's index": "x[torch.tensor([1])] = 0.0",
    "set the host's row": "x[0] = h[0]",
    "set the host's from here": "h[0] = x[0]",
    "masked_fill": "x.masked_fill(mask, c0)",
    "times a scalar of the host": "x * c0",
    "the host's times a scalar here": "h.mul(z.cpu())",
    "fill by a tensor": "x.fill_(c0)",
    "clamp by tensors": "x.clamp(z * 0, z)",
    "repeat_interleave": "torch.repeat_interleave(torch.arange(5, device=d))",
    "repeat_interleave, size": "torch.repeat_interleave(torch.arange(5, device=d), output_size=10)",
    "synchronize": "torch.cuda.synchronize()",
    "synchronize 1": "torch.cuda.synchronize(1)",
    "stream.synchronize": "torch.cuda.current_stream().synchronize()",
    "event.synchronize": "event.record(); event.synchronize()",
    "wait_stream": "stream.wait_stream(torch.cuda.current_stream())",
    "accelerator": "torch.accelerator.synchronize()",
    "to the other": "x.to('cuda:1')",
    "to the other, converted": "x.to('cuda:1', torch.float64)",
    "to the other, strided": "x[:, ::2].to('cuda:1')",
    "from the other, into": "x.copy_(x1)",
    "three ways": "x1.to(d).cpu().to('cuda:1')",
    "to the other, non_blocking": "x.to('cuda:1', non_blocking=True)",
    "Adam": "step()",
    "clip_grad_norm_": "nn.utils.clip_grad_norm_(seq.parameters(), 1.0)",
    "clip, error": "nn.utils.clip_grad_norm_(seq.parameters(), 1.0, error_if_nonfinite=True)",
    "load_state_dict": "net.load_state_dict(home)",
    "state_dict home": "{k: v.cpu() for k, v in seq.state_dict().items()}",
    "torch.save": "torch.save(x, io.BytesIO())",
    "torch.load": "saved.seek(0); torch.load(saved, map_location=d)",
    "pickle": "pickle.loads(pickle.dumps(x))",
    "deepcopy": "copy.deepcopy(net)",
    "storage": "x.untyped_storage().cpu()",
    "load_state_dict of Adam": "adam.load_state_dict(copy.deepcopy(adam.state_dict()))",
    "loader": "for a, b in torch.utils.data.DataLoader(data, batch_size=16): a.to(d), b.to(d)",
    "loader, pinned": "for a, b in torch.utils.data.DataLoader(data, batch_size=16, pin_memory=True): a.to(d, non_blocking=True), b.to(d, non_blocking=True)",
    "any": "bool(mask.any())",
    "max": "x.max().item(), x.argmax().item()",
    "in": "3 in target",
    "len": "len(x)",
    "iterate": "for row in x[:3]: row.sum()",
    "iterate and read": "for v in x[0, :5]: float(v)",
    "int index": "h[target[0]]",
    "slice by tensor": "x[: target[0]]",
    "range": "list(range(target[0]))",
    "python's sum": "sum(x[0, :3])",
    "python's max": "max(x[0, :3])",
    "sorted": "sorted(x[0, :4])",
    "round": "round(x[0, 0].item(), 2)",
    "print": "print(x[0], file=io.StringIO())",
    "rng state": "torch.cuda.get_rng_state()",
    "randperm": "torch.randperm(100, device=d)",
    "multinomial": "torch.softmax(x, 1).multinomial(2)",
    "dropout": "F.dropout(x)",
    "linspace": "torch.linspace(0, 1, 5, device=d)",
    "arange": "torch.arange(9, device=d)",
    "zeros": "torch.zeros(9, device=d)",
    "full": "torch.full((3,), 2.0, device=d)",
    "cat": "torch.cat([x, x])",
    "stack": "torch.stack([z, z]).cpu()",
    "split": "x.split([16, 48])",
    "tensor_split by tensor": "torch.tensor_split(x, torch.tensor([3, 5]))",
    "isfinite all": "x.isfinite().all().item()",
    "std": "x.std().item()",
    "histc": "torch.histc(x, 10)",
    "quantile": "x.quantile(0.5).item()",
    "topk": "x.topk(3)[0].cpu()",
    "autocast": "with torch.autocast('cuda', torch.bfloat16): net(x).float().sum().item()",
    "scaler": "s = torch.amp.GradScaler('cuda'); adam.zero_grad(); s.scale(F.cross_entropy(seq(x), target)).backward(); s.step(adam); s.update()",
    "batch norm": "seq(x)",
    "lstm": "nn.LSTM(32, 8, device=d)(x)",
    "embedding": "nn.Embedding(4, 8, device=d)(target).sum().backward()",
    "pack": "nn.utils.rnn.pack_padded_sequence(x[None].repeat(2, 1, 1), [64, 3], batch_first=True)",
    "pack, lengths here": "nn.utils.rnn.pack_padded_sequence(x[None].repeat(2, 1, 1), torch.tensor([64, 3], device=d).cpu(), batch_first=True)",
    "cross_entropy weights": "F.cross_entropy(net(x), target, weight=torch.ones(4, device=d))",
    "complex": "torch.view_as_complex(x.view(-1, 2)).cpu()",
    "bool of two": "if (x > 0).any() and (x < 0).any(): pass",
    "while": """\
k = torch.zeros((), device=d)
while k < 3: k += 1
""",
    "is_nonzero": "torch.is_nonzero(z)",
    "assert": "assert z == z",
    "empty cache": "torch.cuda.empty_cache()",
    "thread": "import threading; t = threading.Thread(target=lambda: x.cpu()); t.start(); t.join()",
    "foreach copy": "torch._foreach_copy_([x.clone(), x.clone()], [h, h])",
    "set_": "x.clone().set_(x)",
    "where scalars": "torch.where(mask, x, 0.0)",
    "index_copy": "x.clone().index_copy_(0, torch.tensor([0], device=d), x[:1])",
    "take the host's index": "torch.take(x, torch.tensor([0], device=d))",
    "to by like": "h.to(x)",
    "type_as": "h.type_as(x)",
    "new_tensor": "x.new_tensor([1.0, 2.0])",
    "x.data": "x.data.cpu()",
    "no grad": "net.weight.detach().cpu().numpy()",
    "array": "np.asarray(x.cpu())",
    "cuda.comm": "torch.nn.parallel.comm.scatter(x, [0, 1])",
    "gather": "torch.nn.parallel.comm.gather([x, x1])",
    "buffered": "nn.BatchNorm1d(8).to(d)",
    "epoch": """\
total = 0.0
for a, b in torch.utils.data.DataLoader(data, batch_size=32):
    a, b = a.to(d), b.to(d)
    adam.zero_grad()
    loss = F.cross_entropy(seq(a), b)
    loss.backward()
    adam.step()
    total += loss.item() * len(a)
""",
    "evaluation": """\
seq.eval()
with torch.inference_mode():
    out = [seq(a.to(d)).cpu() for a, _ in torch.utils.data.DataLoader(data, batch_size=16)]
seq.train()
torch.cat(out).numpy()
""",
    "accuracy": "(seq(x).argmax(1) == target).float().mean().item()",
    "confusion matrix": "torch.bincount(target * 4 + net(x).argmax(1), minlength=16).view(4, 4).cpu()",
    "metrics in a dict": "{'loss': z.item(), 'max': x.max().item(), 'norm': x.norm().item()}",
    "losses stacked, read once": "torch.stack([x[i].sum() for i in range(4)]).tolist()",
    "early stopping": """\
best = float('inf')
for i in range(3):
    loss = x[i].abs().sum()
    if loss < best:
        best = loss
""",
    "data frame": "import pandas as pd; pd.DataFrame(x[:, :3].cpu().numpy(), columns=list('abc')).mean()",
    "data frame to the device": "import pandas as pd; torch.from_numpy(pd.DataFrame({'a': [1.0, 2.0], 'b': [3.0, 4.0]}).to_numpy()).to(d)",
    "collate to the device": """\
def collate(rows):
    return tuple(torch.stack(column).to(d) for column in zip(*rows))
for a, b in torch.utils.data.DataLoader(data, batch_size=32, collate_fn=collate):
    a.sum()
""",
    "shuffled on the device": "for i in torch.randperm(64, device=d).split(32): x[i], target[i]",
    "SGD, fused": "o = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, fused=True); net(x).sum().backward(); o.step()",
    "AdamW, foreach": "o = torch.optim.AdamW(seq.parameters(), foreach=True); seq(x).sum().backward(); o.step(); o.zero_grad()",
    "Adam, lr on the device": "o = torch.optim.Adam(net.parameters(), lr=torch.tensor(0.01, device=d), capturable=True); net(x).sum().backward(); o.step()",
    "LBFGS": """\
v = torch.ones(3, device=d, requires_grad=True)
o = torch.optim.LBFGS([v], max_iter=3)
def closure():
    o.zero_grad()
    loss = (v ** 2).sum()
    loss.backward()
    return loss
o.step(closure)
""",
    "scheduler": """\
o = torch.optim.SGD(net.parameters(), lr=0.1)
plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(o)
net(x).sum().backward(); o.step(); plateau.step(z.abs())
""",
    "moving average": "average = torch.optim.swa_utils.AveragedModel(net); average.update_parameters(net); average.update_parameters(net)",
    "autograd.grad": "torch.autograd.grad(net(x).sum(), net.weight)[0].norm().item()",
    "a Function": """\
class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, v):
        ctx.save_for_backward(v)
        return v ** 3
    @staticmethod
    def backward(ctx, g):
        v, = ctx.saved_tensors
        return 3 * v.cpu().to(g.device) ** 2 * g
v = x.clone().requires_grad_()
Cube.apply(v).sum().backward()
""",
    "save_on_cpu": """\
v = x.clone().requires_grad_()
with torch.autograd.graph.save_on_cpu(pin_memory=True):
    y = (v.sin() * v).sum()
y.backward()
""",
    "checkpoint": """\
from torch.utils.checkpoint import checkpoint
v = x.clone().requires_grad_()
checkpoint(lambda v: F.dropout(v.sin()), v, use_reentrant=False).sum().backward()
""",
    "forward hook": """\
seen = []
hook = net.register_forward_hook(lambda m, a, out: seen.append(out.detach().cpu()))
net(x); hook.remove()
""",
    "gradient hook": """\
norms = []; w = net.weight.detach().clone().requires_grad_()
w.register_hook(lambda g: norms.append(g.norm().item()))
F.linear(x, w).sum().backward()
""",
    "any gradient is nan": "any(p.grad.isnan().any() for p in seq.parameters())",
    "anomaly": """\
import warnings
with warnings.catch_warnings():
    warnings.simplefilter('ignore')
    with torch.autograd.detect_anomaly():
        net(x).sum().backward()
""",
    "vmap": "torch.func.vmap(lambda r: r.dot(r))(x).sum().item()",
    "jvp": "torch.func.jvp(torch.sin, (x,), (torch.ones_like(x),))[1].cpu()",
    "functional_call": "torch.func.functional_call(net, {k: v.to(d) for k, v in home.items()}, (x,)).mean().item()",
    "Normal": "torch.distributions.Normal(z * 0, 1.0).sample((3,)).cpu()",
    "Categorical": "torch.distributions.Categorical(logits=x[:, :4]).log_prob(target).sum().item()",
    "rfft": "torch.fft.rfft(x).abs().cpu()",
    "inverse": "torch.linalg.inv(x[:32] + 9 * torch.eye(32, device=d)).cpu()",
    "solve": "torch.linalg.solve(x[:32] + 9 * torch.eye(32, device=d), x[:32]).sum().item()",
    "embedding bag": "nn.EmbeddingBag(10, 3, device=d)(torch.tensor([1, 2, 4, 5], device=d), torch.tensor([0, 2], device=d)).cpu()",
    "equal, of another": "torch.equal(x, x.clone()), torch.equal(x, x[:, :5])",
    "unique rows, of bools": "mask.unique(), (x[:, :2] > 0).unique(dim=0)",
    "padded": "nn.utils.rnn.pad_sequence([x[:3], x[:5]]).cpu()",
    "attention": "nn.MultiheadAttention(32, 4, batch_first=True, device=d)(x[None], x[None], x[None])[0].cpu()",
    "greedy decoding": """\
tokens = target[:1]
for _ in range(3):
    tokens = torch.cat([tokens, net(x[:1]).argmax(1)])
    if tokens[-1] == 9:
        break
tokens.tolist()
""",
    "k-means step": """\
nearest = torch.cdist(x, x[:3]).argmin(1)
torch.stack([x[nearest == k].mean(0) for k in range(3)]).cpu()
""",
    "unique with counts": "target.unique(return_counts=True)[1].tolist()",
    "fake quantize": "torch.fake_quantize_per_tensor_affine(x, 0.1, 0, 0, 255).cpu()",
    "image": "(torch.arange(192, dtype=torch.uint8).view(3, 8, 8).to(d).float() / 255).clamp(0, 1).mul(255).byte().permute(1, 2, 0).cpu().numpy()",
    "half from numpy": "torch.tensor(np.arange(6), dtype=torch.float16, device=d)",
    "copy_ into halves": "torch.empty(64, 32, dtype=torch.float16, device=d).copy_(h)",
    "copy_ home, into doubles": "torch.empty(64, 32, dtype=torch.float64).copy_(x)",
    "copy_ home, into doubles, strided": "torch.empty(32, 64, dtype=torch.float64).t().copy_(x)",
    "pinned, to half": "p.to(d, torch.float16, non_blocking=True)",
    "shared memory": "h.clone().share_memory_().to(d)",
    "on a stream": """\
with torch.cuda.stream(stream):
    y = p.to(d, non_blocking=True)
torch.cuda.current_stream().wait_stream(stream)
y.record_stream(torch.cuda.current_stream())
y.sum().item()
""",
    "timed by events": """\
start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
start.record(); x.sin(); end.record(); end.synchronize(); start.elapsed_time(end)
""",
    "a network over both": """\
head = nn.Linear(4, 2, device='cuda:1')
head(net(x).to('cuda:1')).sum().backward()
""",
    "to the other, transposed": "x.t().to('cuda:1')",
    "to the other, ints to floats": "target.to('cuda:1', torch.float32)",
    "set rows of the other": "x1[:32] = x[:32]",
    "set columns of the other": "x1[:, ::2] = x[:, ::2]",
    "checkpoint of all": """\
f = io.BytesIO(); torch.save({'net': net.state_dict(), 'adam': adam.state_dict()}, f); f.seek(0)
torch.load(f, map_location='cpu')
""",
    "assert_close": "torch.testing.assert_close(x, x.clone())",
    "numbers of Python": "int(z), complex(z), min(x[0, 0], x[0, 1]), [3, 1, 2].index(torch.tensor(1, device=d))",
    "set a row from numbers": "x[0, :3] = torch.tensor([1.0, 2.0, 3.0]); x[np.array([1, 2])] = 0.0",
}  # fmt: skip
