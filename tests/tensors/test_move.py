"""Moving: every object stays the object it is, shared memory stays shared, all or nothing."""

import dataclasses
import gc
from collections import OrderedDict, UserDict, deque, namedtuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import gpumagic
from gpumagic.errors import GpuError
from gpumagic.tensors import plan as plans
from gpumagic.tensors.move import move_all

pytestmark = pytest.mark.usefixtures("gpus")
GPU0, GPU1, CPU = torch.device("cuda:0"), torch.device("cuda:1"), torch.device("cpu")


def moved(device=GPU1, followers=(), **variables):
    return move_all(variables.items(), device, followers=followers)


def test_a_tensor_keeps_its_identity_and_its_aliases():
    x = torch.arange(6.0).reshape(2, 3)
    alias, container = x, [x]
    moves = moved(x=x)
    assert alias is x is container[0]
    assert x.device == GPU1
    assert x.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert [(m.name, m.nbytes, m.sources) for m in moves.moved] == [("x", 24, ("cpu",))]
    assert moves.nbytes == 24
    assert moves.seconds > 0


def test_what_is_there_is_not_touched():
    x = torch.ones(3, device=GPU1)
    pointer = x.data_ptr()
    moves = moved(x=x)
    assert (moves.moved, moves.left, moves.seconds) == ((), (), 0.0)
    assert x.data_ptr() == pointer
    assert x.cuda(1) is x


def test_leaves_stay_leaves_with_their_gradients():
    w = torch.ones(2, requires_grad=True)
    (w * 2).sum().backward()
    grad = w.grad
    moved(w=w)
    assert w.is_leaf
    assert w.grad is grad
    assert grad.device == GPU1
    (w * 3).sum().backward()
    assert w.grad.tolist() == [5, 5]


def test_a_result_that_autograd_tracks_is_left_and_its_backward_still_works():
    w = torch.ones(2, requires_grad=True)
    loss = (w * 2).sum()
    moves = moved(loss=loss)
    assert loss.device == CPU
    assert [part.name for part in moves.left] == ["loss"]
    assert "detach" in moves.left[0].reason
    loss.backward()
    assert w.grad.tolist() == [2, 2]


def test_views_share_memory_there_too():
    base = torch.arange(10.0)
    train, test = base[:6], base[6:]
    every_other = base.view(5, 2)[:, 1]
    moves = moved(train=train, test=test, every_other=every_other)
    assert moves.nbytes == 40
    test[0] = -1
    assert every_other.tolist() == [1, 3, 5, 7, 9]
    train[1] = 100
    assert every_other[0] == 100
    assert base.device == CPU  # it was not named
    assert base[1] == 1


def test_small_overlapping_views_of_something_large_share_memory_there_too():
    big = torch.zeros(1000)
    first, second = big[:10], big[5:15]
    shaped, detached, apart = first.view(2, 5), first.detach(), big[900:]
    moves = moved(first=first, second=second, shaped=shaped, detached=detached, apart=apart)
    first.fill_(7)
    assert shaped.sum() == 70
    assert second.tolist() == [7] * 5 + [0] * 5
    assert detached.sum() == 70
    assert apart.sum() == 0
    assert moves.nbytes <= 4 * (15 + 100) + 2 * 64  # and the rest of it stayed


def test_a_bystander_that_shared_memory_is_told():
    base = torch.zeros(10)
    part, elsewhere = base[2:6], base[7:]
    moves = move_all(
        [("part", part)], GPU1, bystanders=[("base", base), ("part", part), ("e", elsewhere)]
    )
    assert [(x.name, "part" in x.reason) for x in moves.left] == [("base", True)]


def test_a_small_view_does_not_bring_its_large_base():
    base = torch.zeros(1000)
    part = base[:10]
    assert moved(part=part).nbytes == 40
    assert part.untyped_storage().nbytes() <= 40 + 64


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.ones(3, 4).t(),
        lambda: torch.ones(1, 4).expand(3, 4),
        lambda: torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last),
        lambda: torch.ones(3, dtype=torch.bool),
        lambda: torch.tensor(3),
        lambda: torch.empty(0, 5),
        lambda: torch.ones(3, dtype=torch.complex64),
        lambda: torch.arange(12.0)[::2],
    ],
)
def test_shapes_and_strides_stay(make):
    x = make()
    before = x.clone(), x.shape, x.stride(), x.dtype
    moved(x=x)
    assert x.device == GPU1
    assert (x.shape, x.stride(), x.dtype) == before[1:]
    assert torch.equal(x.cpu(), before[0])


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.ones(3, dtype=torch.complex64).mul(1j).conj(),
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.ones(2).as_subclass(Marked),
    ],
)
def test_other_kinds_of_tensors(make):
    x = make()
    before = x.clone().detach()
    moved(x=x)
    assert x.device == GPU1
    assert torch.equal(x.detach().cpu().to_dense(), before.to_dense())


class Marked(torch.Tensor):
    """A tensor subclass."""


Pair = namedtuple("Pair", "left right")


@dataclasses.dataclass(frozen=True)
class Sample:
    image: torch.Tensor
    label: object = None


@pytest.mark.parametrize(
    ("wrap", "paths"),
    [
        (lambda x: [x, 1, "a", None], "held"),
        (lambda x: (x, [x]), "held"),
        (lambda x: {"a": {"b": x}, 3: 4}, "held"),
        (lambda x: Pair(1, x), "held"),
        (lambda x: Sample(x), "held"),
        (lambda x: Sample(torch.zeros(1), [Sample(x)]), "held"),
        (lambda x: {x}, "held"),
        (lambda x: deque([x]), "held"),
        (lambda x: OrderedDict(a=x), "held"),
        (lambda x: UserDict(a=x), "held"),
    ],
)
def test_containers(wrap, paths):
    x = torch.ones(2)
    held = wrap(x)
    moves = moved(held=held)
    assert x.device == GPU1
    assert [m.name for m in moves.moved] == ["held"]


def test_a_container_that_holds_itself():
    x = torch.ones(2)
    ring = [x]
    ring.append(ring)
    moved(ring=ring)
    assert x.device == GPU1


def test_packed_sequences_keep_their_batch_sizes_on_the_host():
    packed = nn.utils.rnn.pack_sequence([torch.ones(3, 2), torch.ones(1, 2)])
    net = nn.LSTM(2, 4)
    moved(packed=packed, net=net)
    assert packed.data.device == GPU1
    assert packed.batch_sizes.device == CPU
    assert net(packed)[0].data.device == GPU1


# ---------------------------------------------------------------- modules
def test_a_module_comes_whole_and_keeps_its_parameters():
    net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    net.extra = torch.ones(4)  # neither parameter nor buffer: Module.to would leave it
    net.more = {"mask": torch.ones(1)}
    parameters = list(net.parameters())
    moves = moved(net=net)
    assert all(a is b for a, b in zip(parameters, net.parameters(), strict=True))
    every = [*net.parameters(), *net.buffers(), net.extra, net.more["mask"]]
    assert {t.device for t in every} == {GPU1}
    assert [m.name for m in moves.moved] == ["net"]
    assert net(torch.ones(4, 2, device=GPU1)).device == GPU1


def test_tied_weights_stay_tied():
    net = nn.ModuleDict({"embed": nn.Embedding(5, 3), "head": nn.Linear(3, 5, bias=False)})
    net["head"].weight = net["embed"].weight
    shares = torch.ones(6)
    views = {"first": shares[:3], "all": shares}
    moved(net=net, views=views)
    assert net["head"].weight is net["embed"].weight
    views["first"].zero_()
    assert views["all"].tolist() == [0, 0, 0, 1, 1, 1]


def test_lazy_and_recurrent_modules():
    net = nn.Sequential(nn.LazyLinear(3), nn.LSTM(3, 2))
    moved(net=net)
    out, _ = net(torch.ones(5, 4, device=GPU1))
    assert out.device == GPU1


def test_data_parallel_and_spread_models_stay():
    twin = nn.DataParallel(nn.Linear(2, 2).to(GPU0), device_ids=[0, 1])
    spread = nn.Linear(2, 2)
    spread.hf_device_map = {"a": 0, "b": "cpu"}
    moves = moved(twin=twin, spread=spread)
    assert not moves.moved
    assert [part.name for part in moves.left] == ["twin", "spread"]
    assert twin.module.weight.device == GPU0


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_traced_modules():
    net = torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2))
    moved(net=net)
    assert net(torch.ones(1, 2, device=GPU1)).device == GPU1


# ---------------------------------------------------------------- optimizers
@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}, {"capturable": True}])
def test_optimizer_state_follows_named_or_not(options):
    def train(device, name_it):
        torch.manual_seed(0)
        net = nn.Linear(3, 2)
        start = GPU0 if options.get("capturable") else CPU
        net.to(start)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, **options)
        x = torch.ones(4, 3, device=start)
        for where in (start, device):
            if where != start:
                named = {"net": net, "x": x} | ({"optimizer": optimizer} if name_it else {})
                moved(where, followers=[("optimizer", optimizer)], **named)
            optimizer.zero_grad()
            net(x).square().sum().backward()
            optimizer.step()
        state = optimizer.state[net.weight]
        assert state["exp_avg"].device == device
        on_device = options.get("fused") or options.get("capturable")
        assert state["step"].device == (device if on_device else CPU)
        return net.weight.detach().cpu()

    reference = train(GPU0 if options.get("capturable") else CPU, False)
    assert torch.equal(train(GPU1, True), reference)
    assert torch.equal(train(GPU1, False), reference)


def test_an_optimizer_alone_brings_its_parameters():
    net = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    moves = moved(optimizer=optimizer)
    assert net.weight.device == GPU1
    assert [m.name for m in moves.moved] == ["optimizer"]


def test_state_of_other_parameters_stays():
    here, there = nn.Linear(2, 2), nn.Linear(2, 2)
    both = torch.optim.Adam([*here.parameters(), *there.parameters()])
    (here(torch.ones(1, 2)) + there(torch.ones(1, 2))).sum().backward()
    both.step()
    moved(followers=[("both", both)], here=here)
    assert both.state[here.weight]["exp_avg"].device == GPU1
    assert both.state[there.weight]["exp_avg"].device == CPU


# ---------------------------------------------------------------- all or nothing
def test_no_room_moves_nothing_and_leaves_nothing_there():
    small, large = torch.ones(10), torch.empty(2**28 + 1)  # the GPU has 1 GiB
    with pytest.raises(
        GpuError, match=r"cuda:1 has [0-9.]+ [MG]iB free.*large 1.0 GiB.*nothing was moved"
    ):
        moved(small=small, large=large)
    gc.collect()
    assert small.device == large.device == CPU
    assert torch.cuda.memory_allocated(1) == 0


class InterruptedAfterOne(list):
    """A list whose second reading is interrupted: the one in which tensors are changed."""

    readings = 0

    def __iter__(self):
        self.readings += 1
        for n, item in enumerate(list.__getitem__(self, slice(None))):
            if self.readings == 2 and n == 1:
                raise KeyboardInterrupt
            yield item


def test_an_interrupt_moves_nothing():
    first, second = torch.ones(3), torch.ones(4)
    plan = plans.Plan(GPU1)
    plan.assignments = InterruptedAfterOne([(first, first.cuda(1)), (second, second.cuda(1))])
    with pytest.raises(KeyboardInterrupt):
        plan.carry_out()
    assert plan.assignments.readings == 2
    assert first.device == second.device == CPU
    assert first.tolist() == [1, 1, 1]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 6), st.integers(1, 4)), min_size=1),
    st.sampled_from([GPU0, GPU1, CPU]),
)
def test_any_family_of_views_keeps_values_identity_and_sharing(slices, device):
    bases = [torch.arange(10.0) + 10 * n for n in range(4)]
    views = [bases[b][start : start + size] for b, start, size in slices]
    named = {f"v{n}": view for n, view in enumerate(views)}
    values = [view.tolist() for view in views]
    pointers = [v.data_ptr() - b.data_ptr() for v in views for b in [v._base]]
    moves = move_all(named.items(), device)
    assert [v.tolist() for v in views] == values
    assert {v.device for v in views} == {device}
    assert moves.nbytes <= 40 * 4 + sum(v.nbytes for v in views)
    by_base = {}
    for (base, start, size), view, offset in zip(slices, views, pointers, strict=True):
        assert offset == 4 * start
        by_base.setdefault(base, []).append((start, size, view))
    for family in by_base.values():
        if 2 * sum(4 * size for _, size, _ in family) >= 40:  # they moved together
            start, _, view = family[0]
            view[0] = -7
            for s, size, other in family:
                if s <= start < s + size:
                    assert other[start - s] == -7


# ---------------------------------------------------------------- the public function
def test_move():
    net, batch = nn.Linear(2, 2), [torch.ones(1, 2)]
    moves = gpumagic.move((net, batch), "gpu:1")
    assert net(batch[0]).device == GPU1
    assert moves.nbytes == 4 * (4 + 2 + 2)
    assert gpumagic.move(net, 1).nbytes == 0
    with pytest.raises(GpuError, match="no GPU 7"):
        gpumagic.move(net, 7)


class Broken(dict):
    def values(self):
        raise KeyError("no values for you")


def test_a_variable_that_cannot_be_looked_into_is_left_and_the_others_move():
    x = torch.ones(2)
    moves = moved(broken=Broken(a=1), x=x)
    assert x.device == GPU1
    assert [(part.name, part.reason) for part in moves.left] == [
        ("broken", "looking into it raised KeyError")
    ]


class AttrDict(dict):
    __getattr__ = dict.__getitem__


class Lazy:
    """A mapping that reads a file when it is asked for its values, as numpy's npz does."""

    def __getattr__(self, name):
        raise KeyError(name)


class Unprintable:
    def __repr__(self):
        raise ValueError

    def __hash__(self):
        return 1


class Proxy:
    @property
    def __class__(self):
        raise ReferenceError("gone")


def deep(levels):
    nested = []
    for _ in range(levels):
        nested = [nested]
    return nested


@pytest.mark.parametrize(
    "make",
    [
        lambda: AttrDict(x=1),
        lambda: Lazy(),
        lambda: {Unprintable(): torch.ones(1, requires_grad=True) * 2},
        lambda: Proxy(),
        lambda: Broken(a=1),
        lambda: deep(5000),
        lambda: type("Slots", (), {"__slots__": ("a", "b"), "__module__": "__main__"})(),
    ],
)
def test_strange_objects_do_no_harm(make):
    x = torch.ones(2)
    moved(hostile=make(), x=x)
    assert x.device == GPU1


def test_mappings_that_would_read_a_file_are_not_asked(tmp_path):
    import numpy as np

    np.savez(tmp_path / "a.npz", x=np.ones(3))
    archive = np.load(tmp_path / "a.npz")
    archive.close()  # to ask it for a value raises now
    assert moved(archive=archive).left == ()


# ---------------------------------------------------------------- the notebook's own objects
class Trainer:
    """Stands for a class of the notebook: this module plays its part."""

    shared = None

    def __init__(self):
        self.net = nn.Linear(2, 2)
        self.optimizer = torch.optim.Adam(self.net.parameters())
        self.loss = None


@dataclasses.dataclass
class Config:
    rate: float = 0.1


def walked(**variables):
    from gpumagic.tensors.walk import Walk

    walk = Walk(module=__name__)
    walk.variables(variables.items())
    return walk


def test_objects_of_the_notebook_are_looked_into_and_those_of_libraries_are_not():
    trainer = Trainer()
    trainer.extra = {"mask": torch.ones(1)}
    paths = {found.path for found in walked(trainer=trainer).found}
    assert paths == {"trainer.net.weight", "trainer.net.bias", "trainer.extra['mask']"}
    data = torch.utils.data.TensorDataset(torch.ones(2))
    assert walked(data=data, loader=torch.utils.data.DataLoader(data)).found == []


def test_attributes_of_dataclasses_namespaces_and_classes():
    import types

    config, space = Config(), types.SimpleNamespace(a=torch.ones(1))
    config.later = torch.ones(1)
    Trainer.shared = torch.ones(1)
    paths = [found.path for found in walked(config=config, space=space, T=Trainer).found]
    Trainer.shared = None
    assert paths == ["config.later", "space.a", "T.shared"]


def test_bound_methods_and_partials():
    from functools import partial

    bound = walked(step=Trainer().net.forward).found
    assert [f.root for f in bound] == ["step", "step"]
    assert len(walked(step=partial(torch.add, torch.ones(1))).found) == 1


def test_activations_that_a_module_keeps_are_no_news():
    net = nn.Linear(2, 2)
    net.last = net(torch.ones(1, 2))
    assert moved(net=net).left == ()


def test_tensors_of_an_optimizers_options_come_along():
    net = nn.Linear(2, 2)
    rate = torch.tensor(0.1)
    optimizer = torch.optim.AdamW(net.parameters(), lr=rate, foreach=False, capturable=True)
    moved(optimizer=optimizer)
    assert rate.device == GPU1
