"""Cells with a bad index, label or probability, or that make NaN, as people ask about them.

Each is a cell after `SETUP`, the type of the error, and what its message must say: the variable,
the value and its place, and the bound. `…` stands for text that does not matter, `$` for the end.
"""

SETUP = """\
import numpy as np, torch
from torch import nn
from torch.nn import functional as F
torch.manual_seed(0)
inf = float("inf")
x = torch.arange(12.0).view(3, 4)
images = torch.rand(8, 4)
net = nn.Linear(4, 10)
labels = torch.tensor([0, 1, 2, 3, 4, 5, 6, 10])
from_one = torch.tensor([1, 2, 3, 4, 5, 8, 9, 10])
masks = torch.zeros(2, 6, 6, dtype=torch.long)
masks[1, 2, 3] = masks[1, 5, 5] = 255
tokens = torch.tensor([[5, 6, 7], [8, 1000, 1000]])
words = nn.Embedding(1000, 4)
index = torch.tensor([[0, 1], [2, 7]])
rows = torch.tensor([0, 3])
batch = {"image": images, "label": labels}
probabilities = torch.tensor([0.2, 0.5, 1.5])
targets = torch.ones(3)
logits = torch.tensor([-1.0, 2.0, 0.5])
weights = torch.zeros(3, requires_grad=True)


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.out = nn.Embedding(500, 8), nn.Linear(8, 2)

    def forward(self, ids):
        return self.out(self.words(ids).mean(1))
"""

BAD_INDICES = [
    (
        "F.cross_entropy(net(images), labels)",
        "labels[7] = 10, but net(images) has 10 classes: 0 … 9",
    ),
    (
        "criterion = nn.CrossEntropyLoss()\nlogit = net(images)\nloss = criterion(logit, labels)",
        "labels[7] = 10, but logit has 10 classes: 0 … 9",
    ),
    (
        "F.cross_entropy(net(images), from_one)",
        "from_one[7] = 10, but net(images) has 10 classes: …. They are 1 to 10: counting starts "
        "at 0, so perhaps subtract 1",
    ),
    (
        "F.cross_entropy(net(images), labels - 1)",
        "(labels - 1)[0] = -1, but net(images) has 10 classes: 0 … 9. -1 often means 'no class'",
    ),
    (
        "F.cross_entropy(net(batch['image']), batch['label'])",
        "batch['label'][7] = 10, but net(batch['image']) has 10 classes: 0 … 9",
    ),
    (
        "F.cross_entropy(torch.randn(2, 21, 6, 6), masks)",
        "masks[1, 2, 3] = 255, but torch.randn(2, 21, 6, 6) has 21 classes: 0 … 20; 2 of 72 are "
        "out of range. 255 often means 'no class'",
    ),
    (
        "out = net(images).log_softmax(1)\nF.nll_loss(out, target=labels)",
        "labels[7] = 10, but out has 10 classes: 0 … 9",
    ),
    (
        "out = torch.randn(2, 4, 3)\nF.cross_entropy(out.view(-1, 3), torch.arange(8).view(-1))",
        "torch.arange(8).view(-1)[3] = 3, but out.view(-1, 3) has 3 classes: 0 … 2",
    ),
    ("nn.MultiMarginLoss()(net(images), labels)", "labels[7] = 10, but net(images) has 10 classes"),
    (
        "words(tokens)",
        "tokens[1, 1] = 1000, but words has 1000 rows: 0 … 999; 2 of 6 are out of "
        "range. Only 1000 is too large: perhaps a token added later",
    ),
    ("F.embedding(tokens, words.weight)", "tokens[1, 1] = 1000, but words.weight has 1000 rows"),
    ("nn.Sequential(words, net)(tokens)", "tokens[1, 1] = 1000, but words has 1000 rows: 0 … 999"),
    (
        "model = nn.Sequential(words, net)\nmodel(tokens)",
        "tokens[1, 1] = 1000, but model.0 has 1000 rows: 0 … 999",
    ),
    (
        "Classifier()(tokens)",
        "ids[1, 1] = 1000, but self.words has 500 rows: 0 … 499",
    ),
    ("words(tokens - 9)", "(tokens - 9)[0, 0] = -4, but words has 1000 rows: 0 … 999; 4 of 6"),
    (
        "words(torch.tensor([5, -1]))",
        "torch.tensor([5, -1])[1] = -1, but words has 1000 rows: 0 … "
        "999. Negative indices do not count from the end here",
    ),
    ("nn.EmbeddingBag(6, 2)(tokens)", "tokens[0, 1] = 6, but there are 6 rows: 0 … 5"),
    ("x.gather(1, index)", "index[1, 1] = 7, but x has 4 elements in dimension 1: 0 … 3"),
    ("torch.gather(x, dim=1, index=index)", "index[1, 1] = 7, but x has 4 elements in dimension 1"),
    (
        "x.gather(-1, index - 1)",
        "(index - 1)[0, 0] = -1, but x has 4 elements in dimension 1: 0 … 3",
    ),
    (
        "net(images).gather(1, labels.unsqueeze(1))",
        "labels.unsqueeze(1)[7, 0] = 10, but net(images) has 10 elements in dimension 1: 0 … 9",
    ),
    (
        "torch.zeros(8, 10).scatter_(1, labels[:, None], 1.0)",
        "labels[:, None][7, 0] = 10, but torch.zeros(8, 10) has 10 elements in dimension 1: 0 … 9",
    ),
    ("x.scatter_add(0, index, x)", "index[1, 1] = 7, but x has 3 elements in dimension 0: 0 … 2"),
    ("x.index_select(0, rows)", "rows[1] = 3, but x has 3 elements in dimension 0: 0 … 2"),
    (
        "x.take(torch.tensor([3, 12]))",
        "torch.tensor([3, 12])[1] = 12, but x has 12 elements: -12 … 11",
    ),
    ("torch.take_along_dim(x, index, 1)", "index[1, 1] = 7, but x has 4 elements in dimension 1"),
    ("x.index_add_(0, rows, x[:2])", "rows[1] = 3, but x has 3 elements in dimension 0: 0 … 2"),
    ("x.index_copy(0, rows, x[:2])", "rows[1] = 3, but x has 3 elements in dimension 0: 0 … 2"),
    (
        "x.index_fill_(1, rows + 1, 0.0)",
        "(rows + 1)[1] = 4, but x has 4 elements in dimension 1: -4",
    ),
    ("F.one_hot(labels, num_classes=10)", "labels[7] = 10, but num_classes is 10: 0 … 9"),
    ("F.one_hot(labels - 1)", "(labels - 1)[0] = -1, but numbers from 0 are needed"),
    ("torch.bincount(labels - 1)", "(labels - 1)[0] = -1, but numbers from 0 are needed"),
    (
        "torch.bincount(labels - 3)",
        "(labels - 3)[0] = -3, but numbers from 0 are needed; 3 of 8 are out of range$",
    ),
    (
        "F.cross_entropy(net(images), labels - 5)",
        "(labels - 5)[0] = -5, but net(images) has 10 classes: 0 … 9; 5 of 8 are out of range$",
    ),
    (
        "F.cross_entropy(*(net(images), labels))",
        "F.cross_entropy(*(net(images), labels)): labels[7] = 10, but net(images) has 10 classes",
    ),
    (
        "pair = net(images), labels\nF.cross_entropy(*pair)",
        "F.cross_entropy(*pair): the target[7] = 10, but there are 10 classes: 0 … 9",
    ),
    (
        "torch.repeat_interleave(x, rows - 1, 0)",
        "(rows - 1)[0] = -1, but numbers from 0 are needed",
    ),
    ("x[rows]", "rows[1] = 3, but x has 3 elements in dimension 0: -3 … 2"),
    ("x[:, index]", "index[1, 1] = 7, but x has 4 elements in dimension 1: -4 … 3"),
    ("x[..., rows + 1]", "(rows + 1)[1] = 4, but x has 4 elements in dimension 1: -4 … 3"),
    ("x[[0, 5]]", "[0, 5][1] = 5, but x has 3 elements in dimension 0: -3 … 2"),
    ("x[np.array([1, 4])]", "np.array([1, 4])[1] = 4, but x has 3 elements in dimension 0: -3 … 2"),
    ("x[rows] = 0", "rows[1] = 3, but x has 3 elements in dimension 0: -3 … 2"),
    (
        "x[torch.arange(3), rows.new_tensor([0, 4, 1])] = 1",
        "rows.new_tensor([0, 4, 1])[1] = 4, but x has 4 elements in dimension 1: -4 … 3",
    ),
    ("x.index_put_((rows,), torch.ones(2, 4))", "rows[1] = 3, but x has 3 elements in dimension 0"),
]

BAD_VALUES = [
    (
        "F.binary_cross_entropy(probabilities, targets)",
        "probabilities[2] = 1.5, but numbers from 0 to 1 are needed",
    ),
    (
        "nn.BCELoss()(logits, targets)",
        "logits[0] = -1, but numbers from 0 to 1 are needed; 2 of 3 are "
        "out of range. These look like logits",
    ),
    (
        "F.binary_cross_entropy(targets, targets + 1)",
        "(targets + 1)[0] = 2, but targets from 0 to 1 are needed; 3 of 3 are out of range. Scale",
    ),
    (
        "F.binary_cross_entropy(targets / 0 * 0, targets)",
        "(targets / 0 * 0)[0] = nan, but numbers from 0 to 1 are needed; 3 of 3 are out of range. "
        "--check nan finds",
    ),
    (
        "F.binary_cross_entropy(images, labels[:8, None] * 2.0 - 1)",
        "(labels[:8, None] * 2.0 - 1)[0, 0] = -1, but targets",
    ),
    ("torch.multinomial(logits, 1)", "logits[0] = -1, but finite numbers from 0 are needed"),
    ("torch.multinomial((logits / 0).exp(), 1)", "[1] = inf, but finite numbers from 0 are needed"),
    ("torch.poisson(logits)", "logits[0] = -1, but numbers from 0 are needed"),
]

MADE_NAN = [
    ("torch.log(x)", "torch.log(x): makes -inf at [0, 0], from finite input: x[0, 0] = 0"),
    (
        "y = x - 1\n(images[:3] / y).sum()",
        "images[:3] / y: makes inf at [0, 1], from finite input: images[:3][0, 1] = …, y[0, 1] = 0",
    ),
    (
        "y = x.sin()\n1 / (x - x)",
        "1 / (x - x): makes inf at [0, 0] (12 of 12), from finite input: (x - x)[0, 0] = 0",
    ),
    (
        "(x * 1e4).half()",
        "(x * 1e4).half(): makes inf at [1, 3] (5 of 12), from finite input: "
        "(x * 1e4)[1, 3] = 70000",
    ),
    (
        "scores = torch.zeros(2, 3).masked_fill(torch.ones(2, 3).bool(), -inf)\n"
        "attention = scores.softmax(1)",
        "scores.softmax(1): makes nan at [0, 0] …, from input without NaN: scores[0, 0] = -inf",
    ),
    ("x /= torch.zeros(4)", "x /= torch.zeros(4): makes nan at [0, 0]"),
    (
        "(x - 1).sqrt().mean()",
        "(x - 1).sqrt(): makes nan at [0, 0], from finite input: (x - 1)[0, 0] = -1",
    ),
    ("torch.exp(x * 100).sum()", "torch.exp(x * 100): makes inf at [0, 1] (11 of 12)"),
    (
        "norm = weights.pow(2).sum().sqrt()\nloss = (norm - 1) ** 2\nloss.backward()",
        "weights.pow(2).sum().sqrt() (line 2): from finite gradients, its backward pass makes -inf "
        "of a gradient",
    ),
    (
        "torch.utils.checkpoint.checkpoint(\n    lambda w: (w.sqrt() * w).sum(), weights, "
        "use_reentrant=False\n).backward()",
        "from finite gradients, its backward pass makes",
    ),
    (
        "seen = images.clone()\nseen[0, 1] = float('nan')\n"
        "F.mse_loss(net(seen), torch.zeros(8, 10)).backward()",
        "F.mse_loss(net(seen), torch.zeros(8, 10)) (line 4): from input that already has nan or "
        "inf, its backward pass makes nan",
    ),
    (
        "loss = torch.where(weights > 0, weights.log(), weights).sum()\nloss.backward()",
        "weights.log(): makes -inf at [0] (3 of 3), from finite input: weights[0] = 0",
    ),
    (
        "y = weights.abs() ** 0.5\ny.sum().backward()",
        "weights.abs() ** 0.5 (line 2): from finite gradients, its backward pass makes inf at [0] "
        "(3 of 3) of a gradient",
    ),
]
