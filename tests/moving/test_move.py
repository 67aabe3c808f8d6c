"""Moving: every object stays the object it is, shared memory stays shared, all or nothing."""

import gc
import weakref
from collections import namedtuple

import pytest
import torch
from moved_values import CPU, GPU0, GPU1, moved
from torch import nn

import gpumagic
from gpumagic.errors import GpuError
from gpumagic.moving.move import (
    bring_home,
    brought_away,
    instances_in,
    move_all,
    origin_of,
    remember,
)
from gpumagic.moving.moved import Origin

pytestmark = pytest.mark.usefixtures("gpus")


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


class Unmovable(torch.Tensor):
    """A tensor whose own `to` is not written."""

    def to(self, *args, **options):
        raise NotImplementedError


def test_a_tensor_whose_to_is_not_written_is_left_and_said():
    space = {"x": torch.ones(3).as_subclass(Unmovable)}
    (left,) = moved(**space).left
    assert (left.name, left.reason) == ("x", "NotImplementedError")


@pytest.mark.parametrize("inference", [True, False])
def test_an_inference_tensor_stays_one_and_no_other_becomes_one(inference):
    with torch.inference_mode(inference):
        x = torch.ones(3)
        y = torch.eye(3).to_sparse()
    with torch.inference_mode(not inference):
        for device in (GPU1, CPU):
            move_all([("x", x), ("y", y)], device)
            assert (x.device, x.is_inference()) == (device, inference)
            assert (y.device, y.is_inference()) == (device, inference)


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
    assert "its graph is on cpu" in moves.left[0].reason
    loss.backward()
    assert w.grad.tolist() == [2, 2]


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


def test_optimizers_are_found_after_much_data():
    net = nn.Linear(2, 2)
    first, second = torch.optim.SGD(net.parameters()), torch.optim.Adam(net.parameters())
    rows = [object() for _ in range(20_000)]
    namespace = {"rows": rows, "net": net, "both": {"first": first}, "step": second.step}
    assert [found for _, found in instances_in(namespace, torch.optim.Optimizer)] == [first, second]


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
    before = torch.cuda.memory_allocated(1)
    small, large = torch.ones(10), torch.empty(2**28 + 1)  # the GPU has 1 GiB
    with pytest.raises(
        GpuError, match=r"cuda:1 has [0-9.]+ [MG]iB free.*large 1.0 GiB.*nothing was moved"
    ):
        moved(small=small, large=large)
    gc.collect()
    assert small.device == large.device == CPU
    assert torch.cuda.memory_allocated(1) == before


def test_what_does_not_fit_as_a_whole_is_refused_before_the_first_copy():
    before = torch.cuda.memory_allocated(1)
    torch.cuda.reset_peak_memory_stats(1)
    most, rest = torch.empty(3 * 2**26), torch.empty(2**27)  # 768 and 512 MiB of 1 GiB
    with pytest.raises(GpuError, match=r"cuda:1 has [0-9.]+ [MG]iB free.*need 1\.2 GiB"):
        moved(most=most, rest=rest)
    assert torch.cuda.max_memory_allocated(1) == before


def test_what_torch_keeps_of_gone_tensors_counts_as_free():
    kept = torch.empty(3 * 2**26, device=GPU1)
    del kept
    most = torch.empty(3 * 2**26)
    assert torch.cuda.memory_reserved(1) >= most.nbytes
    assert moved(most=most).nbytes == most.nbytes


# ---------------------------------------------------------------- the public function
def test_move():
    net, batch = nn.Linear(2, 2), [torch.ones(1, 2)]
    moves = gpumagic.move((net, batch), "gpu:1")
    assert net(batch[0]).device == GPU1
    assert moves.nbytes == 4 * (4 + 2 + 2)
    assert repr(moves).startswith("moved the tuple: 32 B from cpu in ")
    assert gpumagic.move(net, 1).nbytes == 0
    with pytest.raises(GpuError, match="'net' is a string; give the variable itself"):
        gpumagic.move("net", 1)
    with pytest.raises(GpuError, match="no GPU 7"):
        gpumagic.move(net, 7)


def test_a_move_says_the_variables_name():
    x, held = torch.ones(2), {"x": torch.ones(2)}
    assert repr(gpumagic.move(x, 1)).startswith("moved x: 8 B from cpu in ")
    assert repr(gpumagic.move(held["x"] + 1, 1)).startswith("moved a tensor: 8 B from cpu in ")
    assert repr(gpumagic.move(where=1, value=held)).startswith("moved held: 8 B from cpu in ")
    graph = [(torch.ones(2, requires_grad=True) * 2)]
    assert repr(gpumagic.move(graph, 1)).startswith("moved nothing; left graph[0]: its graph is on")


# ---------------------------------------------------------------- home again
def brought(namespace, device=GPU1, cell="In [1]"):
    origins = []
    move_all(namespace.items(), device, namespace, origins=origins)
    remember(origins, cell)
    return origins


def test_what_cells_brought_comes_home_with_its_gradients_and_its_optimizers_state():
    net, x = nn.Linear(2, 2), torch.ones(2, device=GPU0)
    view, stays = x[:1], torch.ones(1, device=GPU1)
    space = {"net": net, "x": x, "view": view, "stays": stays}
    brought(space)
    space["adam"] = adam = torch.optim.Adam(net.parameters())
    net(x).sum().backward()
    adam.step()
    moves = bring_home(space)
    assert {m.name for m in moves.moved} == {"net", "x", "view", "adam"}
    assert {t.device for t in (*net.parameters(), net.weight.grad)} == {CPU}
    assert adam.state[net.weight]["exp_avg"].device == CPU
    assert (x.device, view.device, stays.device) == (GPU0, GPU0, GPU1)
    assert view.data_ptr() == x.data_ptr()
    assert bring_home(space).moved == ()


@pytest.mark.parametrize("last", [GPU1, CPU])
def test_a_state_that_a_cell_made_goes_home_with_the_parameters(last):
    net, x = nn.Linear(2, 2), torch.ones(2)
    adam = torch.optim.Adam(net.parameters())
    space = {"net": net, "x": x, "adam": adam}
    for device in (GPU1, CPU, last):
        brought(space, device)
        net(x).sum().backward()
        adam.step()
    bring_home(space)
    assert {t.device for t in (*net.parameters(), adam.state[net.weight]["exp_avg"])} == {CPU}
    assert brought_away() == []
    net(x).sum().backward()
    adam.step()


def test_home_is_where_it_was_before_the_first_cell_that_brought_it():
    x = torch.ones(2)
    brought({"x": x}, GPU0, "In [1]")
    second = brought({"x": x}, GPU1, "In [2]")
    assert origin_of(x) == Origin("x", CPU, GPU1, "In [2]")
    assert [origin.device for _, origin in second] == [GPU0]
    bring_home({"x": x})
    assert x.device == CPU
    assert origin_of(x) is None


def test_what_is_remembered_is_not_kept_alive():
    x = torch.ones(2)
    brought({"x": x})
    gone = weakref.ref(x)
    del x
    gc.collect()
    assert gone() is None
    assert brought_away() == []


def test_what_the_user_moved_since_was_brought_by_no_cell():
    net = nn.Linear(2, 2)
    brought({"net": net}, GPU0)
    net.cpu().to(GPU1)
    assert (origin_of(net.weight), brought_away()) == (None, [])
    assert bring_home({"net": net}).moved == ()
    assert net.weight.device == GPU1
    brought({"net": net}, GPU0, "In [2]")
    assert origin_of(net.weight) == Origin("net", GPU1, GPU0, "In [2]")


def test_what_one_cell_brings_home_is_still_where_an_earlier_one_brought_it():
    x = torch.ones(2)
    brought({"x": x}, GPU0, "In [1]")
    origins = []
    move_all([("x", x)], GPU1, origins=origins)
    bring_home({"x": x}, origins)
    assert x.device == GPU0
    assert [m.name for m in bring_home({"x": x}).moved] == ["x"]
    assert x.device == CPU


def split():
    """A module with a layer on each of two GPUs, one of them with buffers."""
    return nn.Sequential(nn.Linear(2, 2).to(GPU0), nn.BatchNorm1d(2).to(GPU1))


def devices_of(net):
    return [{t.device for t in (*part.parameters(), *part.buffers())} for part in net]


@pytest.mark.parametrize("with_origins", [True, False], ids=["--back", "home"])
@pytest.mark.parametrize("device", [GPU0, GPU1, CPU])
@pytest.mark.parametrize("alias", [0, 1])
def test_a_module_on_two_devices_goes_home_to_both(device, with_origins, alias):
    net = split()
    adam = torch.optim.Adam(net.parameters())
    net[1](net[0](torch.ones(2, 2, device=GPU0)).to(GPU1)).sum().backward()
    adam.step()
    space = {"part": net[alias], "net": net, "adam": adam}
    origins = brought(space, device)
    assert devices_of(net) == [{device}, {device}]
    bring_home(space, origins if with_origins else None)
    assert devices_of(net) == [{GPU0}, {GPU1}]
    states = [adam.state[layer.weight]["exp_avg"] for layer in net]
    assert [state.device for state in states] == [GPU0, GPU1]
    assert [layer.weight.grad.device for layer in net] == [GPU0, GPU1]


def test_new_buffers_follow_their_layer_of_a_module_on_two_devices():
    net = split()
    brought({"net": net}, GPU0)
    net.double()  # replaces the buffers by new tensors
    bring_home({"net": net})
    assert devices_of(net) == [{GPU0}, {GPU1}]


def test_new_layers_follow_their_module_but_layers_that_were_there_stay():
    net, other = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), nn.Linear(2, 2)
    brought({"net": net})
    net.double()
    net.append(nn.Linear(2, 2).to(GPU1))
    space = {"net": net, "other": other}
    brought({"other": other, "norm": net[1]}, cell="In [2]")
    bring_home(space)
    assert devices_of(net) == [{CPU}, {CPU}, {CPU}]
    net = nn.Sequential(nn.Linear(2, 2).to(GPU1), nn.Linear(2, 2))
    brought({"net": net})
    bring_home({"net": net})
    assert devices_of(net) == [{GPU1}, {CPU}]


class Pipeline:
    """An object whose `to` moves its module in place."""

    def __init__(self):
        self.net = nn.Linear(2, 2)

    def to(self, device):
        self.net.to(device)
        return self


@pytest.mark.parametrize("with_origins", [True, False], ids=["--back", "home"])
def test_an_object_whose_to_moves_a_module_goes_home(with_origins):
    space = {"pipe": Pipeline()}
    origins = brought(space)
    assert devices_of([space["pipe"].net]) == [{GPU1}]
    assert [m.name for m in bring_home(space, origins if with_origins else None).moved] == ["pipe"]
    assert devices_of([space["pipe"].net]) == [{CPU}]


class Strategy:
    """An object of a library's that took the first GPU for itself."""

    def __init__(self):
        self.root_device, self._n_gpu = GPU0, 2
        self.weights = torch.ones(2)
        self.config = Config()


class Config:
    """One that holds no tensor, and a device of the host."""

    def __init__(self):
        self._setup_devices, self.offload = GPU0, CPU


def test_the_gpu_that_an_object_names_follows_its_tensors_and_goes_home():
    strategy, origins = Strategy(), []
    for device in (GPU1, GPU0, GPU1):
        origins.clear()
        move_all([("strategy", strategy)], device, origins=origins)
        remember(origins, "In [1]")
        assert strategy.root_device == strategy.config._setup_devices == device
        assert strategy.weights.device == device
        assert strategy._n_gpu == 1
        assert strategy.config.offload == CPU
    bring_home({"strategy": strategy})
    assert strategy.root_device == strategy.config._setup_devices == GPU0
    assert strategy.weights.device == CPU
    assert strategy._n_gpu == 2
    assert not brought_away()


def test_the_gpu_that_an_object_names_goes_home_after_a_cell_with_back():
    strategy, earlier, later = Strategy(), [], []
    move_all([("strategy", strategy)], GPU1, origins=earlier)
    remember(earlier, "In [1]")
    move_all([("strategy", strategy)], GPU0, origins=later)
    bring_home({}, later)
    assert strategy.root_device == strategy.weights.device == GPU1
    bring_home({})
    assert (strategy.root_device, strategy.weights.device) == (GPU0, CPU)


def test_the_gpu_of_an_object_whose_tensors_stay_is_kept():
    strategy = Strategy()
    strategy.weights = (strategy.weights.requires_grad_() * 2).view(-1)  # autograd tracks it
    move_all([("strategy", strategy)], GPU1)
    assert strategy.weights.device == CPU
    assert strategy.root_device == GPU0


def test_modules_that_hold_each_other_go_home(gpus):
    a, b = nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2, device=GPU1))
    a.append(b)
    b._modules["outer"] = a
    space = {"a": a}
    brought(space, GPU1)
    bring_home(space)
    assert (a[0].weight.device, b[0].weight.device) == (CPU, GPU1)
    b._modules.clear()  # else the cycle holds memory of a GPU until a collection


def test_a_tensor_class_that_cannot_be_hashed_is_moved(gpus):
    class Pair(torch.Tensor):
        def __eq__(self, other):
            return torch.Tensor.__eq__(self, other)

    space = {"x": torch.ones(3).as_subclass(Pair)}
    gpumagic.move(space, 1)
    assert space["x"].device == GPU1
