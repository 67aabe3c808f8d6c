"""Longer cells with such a mistake, in the style of public questions, and how their error begins.

Above each stands the type of its error and what its message must say; `…` is any text.
"""

SETUP = """\
import numpy as np, torch
from torch import nn
from torch.nn import functional as F
torch.manual_seed(0)
x = torch.randn(32, 20)
net = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 10))
"""

_TEXT = """
CheckedIndexError: labels[9] = 10, but outputs has 10 classes: 0 … 9; …subtract 1
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.Adam(net.parameters())
labels = torch.arange(32) % 10 + 1
for epoch in range(2):
    optimizer.zero_grad()
    outputs = net(x)
    loss = criterion(outputs, labels)
    loss.backward()
    optimizer.step()

CheckedValueError: bce(model(x), y): model(x)[…] = -…, but numbers from 0 to 1…like logits
class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(20, 1)
    def forward(self, inputs):
        return self.fc(inputs).squeeze(1)
model, bce = Classifier(), nn.BCELoss()
y = torch.randint(0, 2, (32,)).float()
loss = bce(model(x), y)

CheckedIndexError: input_ids[2, 5] = 100, but self.embed has 100 rows: 0 … 99
class Encoder(nn.Module):
    def __init__(self, vocab):
        super().__init__()
        self.embed = nn.Embedding(vocab, 8)
        self.lstm = nn.LSTM(8, 8, batch_first=True)
    def forward(self, input_ids):
        embedded = self.embed(input_ids)
        return self.lstm(embedded)[0]
tokens = torch.randint(0, 100, (4, 12))
tokens[2, 5] = 100
Encoder(100)(tokens)

CheckedIndexError: positions[16] = 16, but self.pe has 16 rows: 0 … 15; 4 of 20
class Positions(nn.Module):
    def __init__(self, longest=16):
        super().__init__()
        self.pe = nn.Embedding(longest, 4)
    def forward(self, h):
        positions = torch.arange(h.size(1), device=h.device)
        return h + self.pe(positions)
Positions()(torch.zeros(1, 20, 4))

CheckedIndexError: edge_index[1][3] = 6, but out has 6 elements in dimension 0: 0 … 5
edge_index = torch.tensor([[0, 1, 2, 5], [1, 2, 3, 6]])
h = torch.randn(6, 4)
out = torch.zeros_like(h)
out.index_add_(0, edge_index[1], h[edge_index[0]])

CheckedIndexError: actions.unsqueeze(1)[2, 0] = 2, but q(states) has 2 elements in dimension 1
q = nn.Linear(4, 2)
states, actions = torch.randn(5, 4), torch.tensor([0, 1, 2, 1, 0])
values = q(states).gather(1, actions.unsqueeze(1)).squeeze(1)

CheckedIndexError: perm[:32][…] = …, but x has 32 elements in dimension 0: -32 … 31
perm = np.random.permutation(400)
batch = x[perm[:32]]

CheckedIndexError: nn.Embedding(3, 2)(torch.tensor([3])): torch.tensor([3])[0] = 3, but there are 3
nn.Embedding(3, 2)(torch.tensor([3]))

CheckedValueError: x.view(-1, 20)[…] = …, but targets from 0 to 1 are needed…Scale them
def loss_function(recon_x, x, mu, logvar):
    BCE = F.binary_cross_entropy(recon_x, x.view(-1, 20), reduction="sum")
    KLD = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
    return BCE + KLD
loss_function(torch.sigmoid(x), x, torch.zeros(32, 2), torch.zeros(32, 2))

CheckedIndexError: index[3] = 4, but torch.zeros(n, device=src.device) has 4 elements: 0 … 3
def segment_sum(src, index, n):
    return torch.zeros(n, device=src.device).scatter_add(0, index, src)
segment_sum(torch.ones(4), torch.tensor([0, 0, 1, 4]), 4)

CheckedIndexError: tgt.view(-1)[12] = 50, but logits.view(-1, logits.size(-1)) has 50 classes
lm = nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 50))
ids = torch.randint(0, 50, (2, 9))
tgt = ids.clone()
tgt[1, 3] = 50
logits = lm(ids)
loss = F.cross_entropy(logits.view(-1, logits.size(-1)), tgt.view(-1))

CheckedIndexError: target_ids[..., None][0, 3, 0] = -1, but logp has 7 …do not count from the end
logp = torch.log_softmax(torch.randn(2, 5, 7), -1)
target_ids = torch.tensor([[1, 2, 3, -1, -1], [1, 2, 3, 4, 5]])
taken = torch.gather(logp, -1, target_ids[..., None])

CheckedIndexError: batch["y"][5] = 10, but self.model(batch["x"]) has 10 classes
class Trainer:
    def __init__(self, model):
        self.model, self.criterion = model, nn.CrossEntropyLoss(ignore_index=-100)
    def step(self, batch):
        return self.criterion(self.model(batch["x"]), batch["y"])
batch = {"x": x, "y": torch.full((32,), -100)}
batch["y"][5] = 10
Trainer(net).step(batch)

CheckedIndexError: target[12] = 10, but net(data) has 10 classes: 0 … 9; 4 of 16
from torch.utils.data import DataLoader, TensorDataset
def train(loader):
    for data, target in loader:
        F.cross_entropy(net(data), target).backward()
train(DataLoader(TensorDataset(torch.randn(64, 20), torch.arange(64) // 6), batch_size=16))

CheckedIndexError: ids[1] = 5, but counts has 5 elements: -5 … 4
counts, ids = torch.zeros(5), torch.tensor([0, 5])
counts[ids] += 1

CheckedIndexError: shift_labels.view(-1)[1] = 31, but shift_logits.view(-1, self.vocab) has 30
class LM(nn.Module):
    def __init__(self, vocab=30):
        super().__init__()
        self.vocab, self.wte, self.head = vocab, nn.Embedding(vocab, 8), nn.Linear(8, vocab)
    def forward(self, input_ids, labels):
        logits = self.head(self.wte(input_ids))
        shift_logits = logits[..., :-1, :].contiguous()
        shift_labels = labels[..., 1:].contiguous()
        loss_fct = nn.CrossEntropyLoss()
        return loss_fct(shift_logits.view(-1, self.vocab), shift_labels.view(-1))
ids = torch.randint(0, 30, (2, 6))
labels = ids.clone()
labels[0, 2], labels[1] = 31, -100
LM()(ids, labels)

CheckedIndexError: ei[0][2] = 5, but size[0] is 5: 0 … 4
ei = torch.tensor([[0, 1, 5], [1, 2, 3]])
A = torch.sparse_coo_tensor(ei, torch.ones(3), (5, 5))

CheckedIndexError: col[1] = 3, but size is 3: 0 … 2
crow, col = torch.tensor([0, 1, 2]), torch.tensor([0, 3])
M = torch.sparse_csr_tensor(crow, col, torch.ones(2), size=(2, 3))

CheckedIndexError: row[1] = 2, but size is 2: 0 … 1
ccol, row = torch.tensor([0, 1, 2, 2]), torch.tensor([0, 2])
M = torch.sparse_csc_tensor(ccol, row, torch.ones(2), size=(2, 3))

CheckedValueError: p[0] = …, but numbers from 0 to 1 are needed; 5 of 5
p = torch.rand(5) + 1.5
keep = torch.bernoulli(p)

CheckedValueError: probs.sum(-1)[1] = 0, but a sum above 0 is needed
probs = torch.tensor([[0.5, 0.5], [0.0, 0.0]])
picked = torch.multinomial(probs, 1)

MadeNanError: F.mse_loss(lin(x), x[:, :1]): makes inf, from finite input
lin = nn.Linear(20, 1)
opt = torch.optim.SGD(lin.parameters(), lr=1e6)
for step in range(100):
    opt.zero_grad()
    loss = F.mse_loss(lin(x), x[:, :1])
    loss.backward()
    opt.step()

MadeNanError: batch.var(0, unbiased=False).log(): makes -inf at [0] (5 of 5), from finite input
batch = torch.randn(1, 5)
entropy = batch.var(0, unbiased=False).log().mean()

MadeNanError: v.sqrt() (line 3): from finite gradients, its backward pass makes nan at [0]
v = torch.tensor([0.0, 1.0], requires_grad=True)
y = torch.where(v > 0, v.sqrt(), torch.zeros_like(v))
y.sum().backward()

MadeNanError: SafeBackward, whose call came before Safe.apply(s).sum() (line 11): from finite …
class Safe(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a):
        ctx.save_for_backward(a)
        return a.clamp(min=0)
    @staticmethod
    def backward(ctx, g):
        return g / ctx.saved_tensors[0]
s = torch.tensor([0.0, 1.0], requires_grad=True)
Safe.apply(s).sum().backward()

MadeNanError: (t - mean) / var.sqrt(): makes nan at [0, 0] (256 of 256), from finite input
class Norm(nn.Module):
    def forward(self, t):
        mean, var = t.mean(-1, keepdim=True), t.var(-1, keepdim=True, unbiased=False)
        return (t - mean) / var.sqrt()
nn.Sequential(nn.Linear(20, 8), Norm())(x).sum()
with torch.no_grad():
    Norm()(torch.zeros(32, 8))

MadeNanError: torch.log(1 - D(fake)): makes -inf …, from finite input: (1 - D(fake))[…] = 0
D = nn.Sequential(nn.Linear(20, 1), nn.Sigmoid())
fake = x * 1e4
loss = -torch.log(1 - D(fake)).mean()
"""
ASKED = [cell.partition("\n")[::2] for cell in _TEXT.strip().split("\n\n")]
