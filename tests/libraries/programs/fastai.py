# %% A tabular learner, one cycle
# earlier: elsewhere, because loaders that fastai made earlier name cuda:0
# own: picks
import pandas as pd
from fastai.tabular.all import (
    Categorify,
    CategoryBlock,
    FillMissing,
    Normalize,
    TabularDataLoaders,
    tabular_learner,
)

table = pd.DataFrame({"a": [n % 7 / 7 for n in range(64)], "b": list("xyzw") * 16})
table["y"] = [str(n % 2) for n in range(64)]
steps = [Categorify, FillMissing, Normalize]
given = {"procs": steps, "cat_names": ["b"], "cont_names": ["a"], "y_names": "y"}
loaders = TabularDataLoaders.from_df(table, y_block=CategoryBlock(), bs=16, **given)
# --
learner = tabular_learner(loaders, layers=[8])
with learner.no_bar(), learner.no_logging():
    learner.fit_one_cycle(1, 0.01)
result = [p.detach() for p in learner.model.parameters()]

# %% A learner of one's own data and network
from fastai.data.core import DataLoaders
from fastai.learner import Learner
from torch.utils.data import TensorDataset

data = TensorDataset(torch.randn(32, 6), torch.randn(32, 2))
net = torch.nn.Linear(6, 2)
# --
loaders = DataLoaders.from_dsets(data, data, bs=8, shuffle=False, num_workers=0)
loaders, net = loaders.to("cuda:1"), net.to("cuda:1")  # own
learner = Learner(loaders, net, loss_func=torch.nn.MSELoss())
with learner.no_bar(), learner.no_logging():
    learner.fit(2, 0.05)
result = [p.detach() for p in net.parameters()], learner.validate()[0]

# %% Layers and losses of fastai, by hand
from fastai.layers import ConvLayer, Embedding, ResBlock
from fastai.losses import FocalLossFlat

net = torch.nn.Sequential(ConvLayer(3, 8), ResBlock(1, 8, 8), torch.nn.Flatten())
words, labels = Embedding(9, 4), torch.randint(0, 5, (2,))
pictures = torch.randn(2, 3, 8, 8)
net, words, labels, pictures = (x.to("cuda:1") for x in (net, words, labels, pictures))  # own
# --
flat = net(pictures)
loss = FocalLossFlat()(flat[:, :5], labels) + words(labels).sum()
loss.backward()
result = loss, flat, [p.grad for p in net.parameters()]
