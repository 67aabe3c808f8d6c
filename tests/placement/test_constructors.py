"""Score: how many of 204 ways to make a tensor, a module or a sample make it on its device."""

import functools
import io

import numpy as np
import pytest
import torch
import torch.distributions as D
import torch.nn.utils.prune
from torch import nn
from torch import zeros as taken  # noqa: F401  in a text below

import gpumagic

pytestmark = pytest.mark.usefixtures("gpus")

FACTORIES = """
arange(3); arange(1, 3, 0.5); as_tensor(3); as_tensor([1]); as_tensor(ARRAY); asarray([1]); asarray(ARRAY)
bartlett_window(4); blackman_window(4); hamming_window(4); hann_window(4); kaiser_window(4)
bernoulli(torch.full((2,), 0.5)); block_diag(torch.ones(2), torch.ones(2)); complex(torch.ones(2), torch.ones(2))
empty(2); empty((2, 3), dtype=torch.int8); empty_permuted((2, 3), (1, 0)); empty_strided((2, 3), (3, 1))
empty_like(torch.ones(2)); eye(2); eye(2, 3); fft.fftfreq(4); fft.rfftfreq(4); from_dlpack(ARRAY)
frombuffer(bytearray(8), dtype=torch.float32); from_numpy(ARRAY); full((2,), 7); full((2,), 7.0)
full_like(torch.ones(2), 3); linspace(0, 1, 3); logspace(0, 1, 3); normal(0.0, 1.0, (3,)); normal(torch.zeros(2), 1.0)
nested.nested_tensor([[1.0], [2.0, 3.0]]); nested.as_nested_tensor([torch.ones(2), torch.ones(3)])
nn.Parameter(torch.ones(2)); nn.Buffer(torch.ones(2)); ones(2); ones(2, requires_grad=True); ones_like(torch.ones(2))
poisson(torch.ones(2)); polar(torch.ones(2), torch.ones(2)); rand(2); rand_like(torch.ones(2)); randint(9, (2,))
randint(1, 9, (2,)); randint_like(torch.ones(2), 9); randn(2); randn((2, 3), dtype=torch.double)
randn(2, generator=torch.Generator()); randn_like(torch.ones(2)); randperm(4); range(0, 3); scalar_tensor(3.0)
sparse_coo_tensor([[0, 1]], [1.0, 2.0], (3,)); sparse_csr_tensor([0, 1, 2], [0, 1], [1.0, 2.0], (2, 2))
sparse_csc_tensor([0, 1, 2], [0, 1], [1.0, 2.0], (2, 2)); sparse_compressed_tensor([0, 1], [0], [1.0], (1, 2), layout=torch.sparse_csr)
signal.windows.bartlett(4); signal.windows.blackman(4); signal.windows.cosine(4); signal.windows.exponential(4)
signal.windows.gaussian(4, std=1.0); signal.windows.general_cosine(4, a=[0.5]); signal.windows.general_hamming(4)
signal.windows.hamming(4); signal.windows.hann(4); signal.windows.kaiser(4); signal.windows.nuttall(4)
tensor(3); tensor([1.0]); tensor([[True]]); tensor(ARRAY); tensor(3.0, requires_grad=True); tril_indices(2, 2); triu_indices(2, 2)
vander(torch.ones(2)); zeros(2); zeros((2, 3), dtype=torch.bool); zeros(2, device="cuda"); zeros_like(torch.ones(2))
Tensor(2, 3); Tensor([1.0]); Tensor(); FloatTensor(2); FloatTensor([1.0]); DoubleTensor(2); HalfTensor(2); BFloat16Tensor(2)
LongTensor([1]); IntTensor(2); ShortTensor(2); ByteTensor(2); CharTensor(2); BoolTensor(2); load(saved()); ones(2).new_zeros(3)
ones(2).new_tensor([1.0]); cartesian_prod(torch.arange(2), torch.arange(3)); combinations(torch.arange(3)); eye(3).to_sparse()
stack([torch.ones(2)] * 2); cat([torch.ones(2)] * 2); meshgrid(torch.arange(2), indexing="ij")[0]; quasirandom.SobolEngine(2).draw(2)
nn.init.xavier_uniform_(torch.empty(2, 2)); nn.init.orthogonal_(torch.empty(2, 2)); nn.utils.rnn.pad_sequence([torch.ones(2), torch.ones(3)])
nn.utils.rnn.pack_sequence([torch.ones(2)]).data; nn.utils.parameters_to_vector(nn.Linear(2, 2).parameters())
nn.functional.one_hot(torch.arange(3)); nn.functional.affine_grid(torch.eye(2, 3)[None], (1, 1, 2, 2)); masked.masked_tensor(torch.ones(2), torch.ones(2).bool())
"""  # noqa: E501
MODULES = """
Linear(2, 3); LazyLinear(3); Bilinear(2, 2, 2); Embedding(3, 2); EmbeddingBag(3, 2); Conv1d(1, 2, 3); Conv2d(1, 2, 3); Conv3d(1, 2, 3)
ConvTranspose1d(1, 2, 3); ConvTranspose2d(1, 2, 3); ConvTranspose3d(1, 2, 3); LazyConv2d(2, 3); LazyBatchNorm2d()
BatchNorm1d(2); BatchNorm2d(2); BatchNorm3d(2); SyncBatchNorm(2); InstanceNorm2d(2, affine=True, track_running_stats=True)
LayerNorm(2); GroupNorm(1, 2); RMSNorm(2); PReLU(); LSTM(2, 3); GRU(2, 3); RNN(2, 3); LSTMCell(2, 3); GRUCell(2, 3); RNNCell(2, 3)
MultiheadAttention(4, 2); TransformerEncoderLayer(4, 2); TransformerDecoderLayer(4, 2); Transformer(4, 2, 1, 1, 8)
TransformerEncoder(nn.TransformerEncoderLayer(4, 2), 2); AdaptiveLogSoftmaxWithLoss(4, 6, [2]); Embedding.from_pretrained(torch.ones(3, 2))
CrossEntropyLoss(torch.ones(2)); BCEWithLogitsLoss(pos_weight=torch.ones(2)); NLLLoss(torch.ones(2)); ParameterList([nn.Parameter(torch.ones(2))])
ParameterDict({"a": nn.Parameter(torch.ones(2))}); Sequential(nn.Linear(2, 2), nn.Linear(2, 2)); ModuleList([nn.Linear(2, 2)])
utils.weight_norm(nn.Linear(2, 2)); utils.parametrizations.spectral_norm(nn.Linear(2, 2)); utils.parametrizations.orthogonal(nn.Linear(2, 2))
utils.prune.l1_unstructured(nn.Linear(2, 2), "weight", 0.5)
"""  # noqa: E501
DISTRIBUTIONS = """
Normal(0.0, 1.0); Bernoulli(0.5); Beta(1.0, 1.0); Binomial(3, 0.5); Categorical(torch.ones(3)); Cauchy(0.0, 1.0); Chi2(1.0)
ContinuousBernoulli(0.5); Dirichlet(torch.ones(2)); Exponential(1.0); FisherSnedecor(1.0, 1.0); Gamma(1.0, 1.0); Geometric(0.5)
Gumbel(0.0, 1.0); HalfCauchy(1.0); HalfNormal(1.0); Kumaraswamy(1.0, 1.0); Laplace(0.0, 1.0); LKJCholesky(2); LogNormal(0.0, 1.0)
LogisticNormal(torch.zeros(2), torch.ones(2)); Multinomial(3, torch.ones(2)); MultivariateNormal(torch.zeros(2), torch.eye(2))
NegativeBinomial(3, 0.5); OneHotCategorical(torch.ones(2)); Pareto(1.0, 1.0); Poisson(1.0); RelaxedBernoulli(1.0, 0.5); StudentT(3.0)
Uniform(0.0, 1.0); VonMises(0.0, 1.0); Weibull(1.0, 1.0); Wishart(3.0, torch.eye(2)); MixtureSameFamily(D.Categorical(torch.ones(2)), D.Normal(torch.zeros(2), 1.0))
"""  # noqa: E501
# What somebody has taken before the placement began.
TAKEN = """
taken(2); default_argument(2); default_keyword(2); part((2,)); TABLE["ones"](2); TABLE["tensor"](2); Maker.make(2); Maker().draw(2); closure(2); bound(2)
"""  # noqa: E501
# A factory that a container, a class or a closure keeps; what torch makes on the host on purpose.
LEFT = {
    *('TABLE["ones"](2)', 'TABLE["tensor"](2)', "Maker.make(2)", "part((2,))", "closure(2)"),
    *("torch.from_dlpack(ARRAY)", "torch.quasirandom.SobolEngine(2).draw(2)"),
}
SPACES = ((TAKEN, ""), (FACTORIES, "torch."), (MODULES, "nn."), (DISTRIBUTIONS, "D."))
CONSTRUCTORS = [
    f"{prefix}{text.strip()}"
    for texts, prefix in SPACES
    for text in texts.strip().replace("\n", ";").split(";")
]
ARRAY = np.ones(2)


TABLE = {"ones": torch.ones, "tensor": torch.tensor}
part = functools.partial(torch.full, fill_value=3.0)


def default_argument(size, make=torch.zeros):
    return make(size)


def default_keyword(size, *, make=torch.randn):
    return make(size)


class Maker:
    make = staticmethod(torch.ones)

    def __init__(self):
        self.draw = torch.rand


def enclosing():
    make = torch.arange
    return lambda size: make(size)


closure = enclosing()
bound = [torch.eye].__getitem__(0)


def saved():
    file = io.BytesIO()
    torch.save(torch.ones(2, device="cpu"), file)
    return io.BytesIO(file.getvalue())


def devices(made):
    if isinstance(made, D.Distribution):
        made = made.sample()
    if isinstance(made, nn.Module):
        return {t.device for t in (*made.parameters(), *made.buffers())}
    return {made.device}


@pytest.mark.filterwarnings("ignore")  # of torch's, about what it will no longer make one day
def test_all_but_these_land():
    left = set()
    for text in CONSTRUCTORS:
        with gpumagic.on(1):
            if devices(eval(text)) != {torch.device("cuda:1")}:
                left.add(text)
    assert len(CONSTRUCTORS) == len({*CONSTRUCTORS}) == 204
    assert left == LEFT
