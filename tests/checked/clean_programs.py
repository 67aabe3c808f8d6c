"""Programs without a mistake, which a check must not disturb. Each makes the tensors of its names.

They are what a check could take for a mistake: empty indices, masks, negative indices, ignored
labels, masks of -inf, memory that nobody has written.
"""

SETUP = """\
import numpy as np, torch
from torch import nn
from torch.nn import functional as F
torch.manual_seed(0)
inf, T = float("inf"), torch.tensor
x, i = torch.randn(3, 4), torch.tensor([0, 2])
labels = torch.tensor([0, -100, 3])
"""

_TEXT = """\
y = x[i]
z = x[-i]
w = x[i, 1]
v = x[..., i]
u = x[:, None, i]
t = x[None, i, ::2]

y = x[x > 0]
z = x[[0, -3]]
w = x[np.array([0, 2])]
v = x[np.int64(1)]
u = x[[True, False, True]]

y = x[T(2)]
z = x[T(2), T(-4)]
w = x[()]
v = x[1]
u = x[...]
t = x[T([], dtype=torch.long)]

y = x[T([[0, 1], [2, -1]])]
z = x[[[0, 1], [1, 2]]]
y = x[[[0, 1], [1, 3]]]
w = x[x.new_ones(3).bool()]
v = x[:, [0, 3]]

c = torch.zeros(3, 4, 9)
y = c[np.ones((3, 4), bool), T([8])]
z = c[[[True] * 4] * 3, T([8])]

x[i] = 1
x[x > 1] = 2
x[:, i] += 1
x[-1] = 0
x[T([True, False, True]), i] = 5

x[i, i] = T([1.0, 2.0])
x.index_put_((i,), T(3.0), accumulate=True)
y = x.index_put([i, i], T(1.0))

y = F.cross_entropy(x, labels)
z = F.cross_entropy(x, x.softmax(1))
v = F.cross_entropy(x, x)
u = F.cross_entropy(x[:, :1], torch.ones(3, 1))
w = F.cross_entropy(x[0], T(3))

y = F.nll_loss(torch.randn(2, 3, 4, 4), torch.zeros(2, 4, 4).long())
z = F.nll_loss(x, i.new_tensor([9, 0, 9]), ignore_index=9)

y = nn.CrossEntropyLoss(ignore_index=255)(x, T([255, 0, 3]))
z = F.cross_entropy(x, labels, label_smoothing=0.1)

y = F.multi_margin_loss(x, T([0, 3, 1]))
z = F.multilabel_margin_loss(x, T([[0, -1, 0, 0]] * 3))

e = nn.Embedding(5, 3, padding_idx=0)
y = e(T([0, 4]))
y.sum().backward()
g = e.weight.grad

e = nn.EmbeddingBag(5, 3, mode="sum")
y = e(T([0, 1, 2, 4]), T([0, 2]))
z = F.embedding(T([], dtype=torch.long), x)

e = nn.Embedding(5, 3, sparse=True)
e(T([0, 4, 4])).sum().backward()
g = e.weight.grad.to_dense()

y = F.one_hot(i)
z = F.one_hot(i, 7)
w = torch.bincount(i)
v = torch.bincount(T([], dtype=torch.long))
u = torch.bincount(i, minlength=9)

y = x.gather(1, T([[3], [0]]))
z = x.gather(index=T([[0]]), dim=-1)
w = T(3.0).gather(0, T([0]))

y = x.scatter(1, T([[3]]), 1.0)
z = x.scatter_add(0, T([[2, 2]]), x[:1])
w = x.scatter_reduce(0, T([[1]]), x, "amax")

y = x.index_select(1, i)
z = x.index_add(0, i, x[:2])
w = x.index_fill(0, T([-1]), 0.0)
v = x.index_copy(1, i, x[:, :2])

y = x.take(T([-12, 11]))
z = x.take_along_dim(T([[3]]), 1)
w = torch.take_along_dim(x, T([0, 11]))
x.put_(T([-1]), T([9.0]))

y = torch.bernoulli(x.sigmoid())
v = torch.bernoulli(x, 0.5)
u = x.bernoulli(p=0.5)
t = torch.repeat_interleave(x, 2, 0)
s = torch.repeat_interleave(i)
z = torch.sparse_coo_tensor((3, 3)).to_dense()
w = torch.sparse_coo_tensor(indices=T([[0, 2]]), values=T([1.0, 2.0])).to_dense()

class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a): return a * 2
    @staticmethod
    def backward(ctx, g): return g * 2
a = x.clone().requires_grad_()
(Double.apply(a) + 1).sum().backward()
y = a.grad

y = torch.multinomial(x.softmax(1), 3)
z = torch.multinomial(T([0.0, 1.0]), 1)
w = F.binary_cross_entropy(x.sigmoid(), x.sigmoid())

y = F.binary_cross_entropy(T([0.0, 1.0]), T([1.0, 0.0]))
z = F.binary_cross_entropy_with_logits(x * 100, x.sigmoid())

y = torch.sparse_coo_tensor([[0, 1], [1, 2]], [1.0, 2.0], (3, 3)).to_dense()
z = torch.sparse_coo_tensor([[0, 1]], [1.0, 2.0]).to_dense()

y = torch.sparse_coo_tensor(T([[0], [0]]), T([[1.0, 2.0]]), (3, 3, 2)).to_dense()
z = torch.sparse.mm(torch.eye(3).to_sparse(), x)

y = torch.sparse_csr_tensor([0, 1, 1, 1], [2], [1.0], (3, 3)).to_dense()
x = torch.sparse_csr_tensor(T([0, 1, 2]), T([0, 2]), T([1.0, 2.0]), [2, 3]).to_dense()
w = torch.sparse_csr_tensor(T([[0, 1, 1]]), T([[3]]), T([[1.0]]), (1, 2, 4)).to_dense()
v = torch.sparse_coo_tensor(T([[0, 2]]), T([1.0, 2.0]), torch.Size([3])).to_dense()
u = torch.sparse_coo_tensor(T([[0, 2]]), T([1.0, 2.0]), [3]).to_dense()
t = F.one_hot(i, np.int64(3))
z = torch.sparse_csc_tensor([0, 1, 1, 1], [2], [1.0], (3, 3)).to_dense()

y = nn.AdaptiveLogSoftmaxWithLoss(8, 20, [5, 10])(torch.randn(4, 8), T([0, 6, 15, 19])).loss
z = F.gumbel_softmax(x, hard=True)

y = F.ctc_loss(torch.randn(5, 2, 4).log_softmax(2), T([[1, 2], [1, 3]]), T([5, 5]), T([2, 2]))
z = torch.searchsorted(x[0].sort().values, x[1])

p = nn.utils.rnn.pack_padded_sequence(torch.randn(2, 3, 4), T([3, 2]), batch_first=True)
y = nn.LSTM(4, 5)(p)[0].data

m = torch.zeros(3, 3).masked_fill(torch.ones(3, 3).triu(1).bool(), -inf)
y = m.softmax(1)
z = m + torch.randn(3, 3)
w = m.logsumexp(1)

m = torch.full((3, 3), -inf).triu(1)
q = torch.randn(1, 3, 8)
y = F.scaled_dot_product_attention(q, q, q, attn_mask=m)

least = torch.finfo(x.dtype).min
m = torch.zeros(3, 3).masked_fill(torch.ones(3, 3).triu(1).bool(), least)
y = (x @ x.T + m + m).softmax(1)
z = m.half() + torch.randn(3, 3)
w = torch.where(m < 0, torch.full_like(m, least), m) * 2

a = nn.MultiheadAttention(8, 2)
q = torch.randn(5, 1, 8)
y = a(q, q, q)[0]
y.sum().backward()
g = a.in_proj_weight.grad

y = torch.empty(100).zero_()
z = torch.empty(3, 4).copy_(x)
w = torch.empty_like(x).fill_(2)
v = x.new_empty(3).normal_()
u = torch.add(x, x, out=torch.empty(3, 4))

y = T([inf, 1.0]).minimum(torch.ones(2))
z = torch.nan_to_num(T([inf, float("nan")]))
w = T(inf).clone()
v = torch.full_like(x, inf).isinf()
u = x.clamp(max=inf)

y = x.max(1).values
z = x.topk(2).values
w = x.sort().indices
v = x.argmax(1)
u = x.unique(return_inverse=True)[1]
t = x[x.argmin(0)]

net = nn.Linear(4, 2)
o = torch.optim.AdamW(net.parameters())
net(x).square().mean().backward()
o.step()
o.zero_grad()
y = net(x)

net = nn.Sequential(nn.Conv1d(1, 2, 3), nn.BatchNorm1d(2), nn.ReLU(inplace=True), nn.Dropout())
y = net(x[:, None])
y.sum().backward()
g = net[0].weight.grad

a = x.clone().requires_grad_()
g, = torch.autograd.grad((a ** 3).sum(), a, create_graph=True)
g.sum().backward()
y = a.grad

a = x.clone().requires_grad_()
z = a * 2
z[0] = 1
z[i] = z[i] * 3
z.sum().backward()
y = a.grad

a = x.clone().requires_grad_()
torch.utils.checkpoint.checkpoint(lambda b: (b * 2).relu(), a, use_reentrant=False).sum().backward()
y = a.grad

y = torch.func.grad(lambda b: F.cross_entropy(b, T([0, 1, 2])))(x)
z = torch.vmap(lambda b, j: b[j])(x, T([[0], [1], [2]]))
w = torch.func.jacrev(torch.sin)(x[0])

y = torch.jit.script(torch.nn.Linear(4, 2))(x)

nn.utils.clip_grad_norm_([a := x.clone().requires_grad_()], 1.0)
(a / a.norm()).sum().backward()
y = a.grad
z = x.double().cumprod(1)
w = x.std(0)
v = F.normalize(x * 0)

m = torch.zeros(3, 4, device="meta")
n = F.cross_entropy(m, torch.zeros(3, device="meta").long())
y = nn.Embedding(3, 2, device="meta")(torch.zeros(2, device="meta").long()).shape

s = torch.utils.data.TensorDataset(x, i.new_tensor([0, 1, 2]))
d = torch.utils.data.DataLoader(s, 2, shuffle=True)
y = [F.cross_entropy(b, c) for b, c in d]
"""
PROGRAMS = _TEXT.strip().split("\n\n")
