"""`gpumagic.dry_run`: functions, what is copied and how, and what is refused."""

import collections
import enum
import functools
import threading

import numpy as np
import pytest
import torch
from torch import nn

import gpumagic
from gpumagic import GpuError, dry_run
from gpumagic.tensors.dry_run.doubles import Doubles
from gpumagic.tensors.dry_run.modes import Fakes

pytestmark = pytest.mark.usefixtures("gpus")

TABLE = torch.ones(3)  # the module's own
SEEN = []


def returned(result):
    (found,) = (a for a in result.assigned if a.name == "return")
    return found


def test_a_function_where_it_is():
    X = torch.ones(2, 3, device="cuda:1")
    result = dry_run(lambda x, power=1: x**power, X, power=2)
    assert (returned(result).shape, returned(result).device) == ((2, 3), "cuda:1")
    assert returned(result).dtype is torch.float32
    assert result.device == ""
    assert result.transfers == ()
    assert X._version == 0


def test_a_function_that_is_placed_brings_its_arguments():
    X = torch.ones(2, 3)
    result = dry_run(lambda x: x + torch.ones(3), X, on=1)
    assert returned(result).device == "cuda:1"
    assert [(t.operator, t.where.source, t.nbytes) for t in result.transfers] == [("move", "x", 24)]
    result = dry_run(lambda x: x, X, on=1, move=False)
    assert (returned(result).device, result.transfers) == ("cpu", ())


def test_methods_modules_and_partials():
    net = nn.Linear(3, 2)
    X = torch.ones(4, 3)
    for call in (net, net.forward, functools.partial(net)):
        assert returned(dry_run(call, X, on=1)).kind == "float32[4, 2]"
    assert net.weight.device.type == "cpu"


def test_module_level_state_is_kept():
    def change():
        SEEN.append(1)
        TABLE.add_(1)
        globals()["NEW"] = 1
        return TABLE

    assert returned(dry_run(change)).shape == (3,)
    assert SEEN == []
    assert TABLE.tolist() == [1, 1, 1]
    assert "NEW" not in globals()


def test_what_it_refuses():
    async def wait(): ...

    for bad, words in (
        (lambda: dry_run(3), "takes a function to call, not int"),
        (lambda: dry_run(wait), "cannot follow an async function"),
        (lambda: dry_run(str, on=5), "no GPU 5"),
    ):
        with pytest.raises(GpuError, match=words) as error:
            bad()
        assert "\n" not in str(error.value)


def test_one_at_a_time():
    result = dry_run(lambda: dry_run(lambda: 1))
    assert "a dry run is under way" in result.error


def test_not_while_another_thread_runs_the_notebooks_code():
    go, started = threading.Event(), threading.Event()

    def busy():
        started.set()
        go.wait(10)

    thread = threading.Thread(target=busy, name="trainer")
    thread.start()
    started.wait(10)
    try:
        with pytest.raises(GpuError, match="the thread trainer runs code"):
            dry_run(lambda: 1)
    finally:
        go.set()
        thread.join()
    assert dry_run(lambda: 1).complete


def test_the_time_limit():
    def forever():
        x = torch.ones(2)
        while True:
            x = x + 1

    result = dry_run(forever, limit=0.05)
    (end,) = (unknown for unknown in result.unknown if unknown.ended)
    assert end.reason.startswith("the time limit of 0.05 s, after")
    assert end.where.function == "forever"


def test_a_bare_except_does_not_hide_what_is_not_known():
    X = torch.ones(3)

    def swallow():
        try:
            return 1 if X.sum() > 0 else 2
        except:  # noqa: E722
            return 3

    result = dry_run(swallow)
    (unknown,) = result.unknown
    assert "a condition on a tensor depends on data; the code went on" in unknown.reason


def test_backward_into_what_an_earlier_cell_computed():
    w = torch.ones(3, requires_grad=True)
    loss = (w * 2).sum()
    result = dry_run(lambda: loss.backward())
    assert any("an earlier cell computed" in u.reason for u in result.unknown)
    assert w.grad is None
    loss.backward()  # the graph is whole
    assert w.grad.tolist() == [2, 2, 2]


def test_hooks_run_on_stand_ins():
    seen = []
    w = nn.Parameter(torch.ones(3))
    w.register_hook(lambda grad: seen.append(grad))
    result = dry_run(lambda: (w * 2).sum().backward())
    assert result.complete
    assert seen == []
    assert w.grad is None


def test_optimizers_in_the_backward_pass():
    w = nn.Parameter(torch.ones(1000, device="cuda:1"))
    opt = torch.optim.SGD([w], lr=0.1)

    def step(parameter):
        opt.step()
        opt.zero_grad()

    w.register_post_accumulate_grad_hook(step)
    result = dry_run(lambda: (w * 2).sum().backward())
    assert result.complete, result
    assert w.tolist() == [1.0] * 1000


def test_memory_that_other_variables_keep():
    big = torch.ones(1000, 1000, device="cuda:1")
    space = {"a": big, "b": big, "torch": torch}
    import ast

    from gpumagic.tensors.dry_run import dry_run_cell

    def peak(names):
        code = "a = a + 1\na = a + 1"
        variables = {name: space[name] for name in names}
        result = dry_run_cell(ast.parse(code), "<cell>", variables, ["a"], device=None)
        return result.peak["cuda:1"].needed

    size = -(-4_000_000 // 512) * 512
    assert peak(["a", "torch"]) == size
    assert peak(["a", "b", "torch"]) == 2 * size


def test_no_peak_for_what_is_there_but_met_late():
    class Holder:
        __slots__ = ("tensor",)

        def __del__(self):
            """Makes it an object that is not copied."""

    holder = Holder()
    holder.tensor = torch.ones(100_000, device="cuda:1")
    result = dry_run(lambda: holder.tensor.sum())
    assert result.peak["cuda:1"].needed == 512
    assert result.peak["cuda:1"].peak == torch.cuda.memory_allocated(1) + 512


# ---------------------------------------------------------------- copies
class Colour(enum.Enum):
    RED = 1


class Slots:
    __slots__ = ("tensor", "unset")


class Angry:
    def __getattr__(self, name):
        raise RuntimeError("never ask")

    def __eq__(self, other):
        raise RuntimeError("never compare")

    __hash__ = None


Point = collections.namedtuple("Point", "x y")


class Ordered(collections.OrderedDict):
    pass


@pytest.fixture
def doubles():
    return Doubles(Fakes(allow_fallback_kernels=False), lambda t: None, lambda: None)


def test_structure_and_aliases_are_copied(doubles):
    t = torch.ones(2)
    point = Point(t, [t, 1])
    slots = Slots()
    slots.tensor = t
    value = {"a": [t, point], "s": slots, "d": collections.deque([t], maxlen=3), "c": Colour.RED}
    value["self"] = value
    copy = doubles.of(value)
    fake = copy["a"][0]
    assert copy["self"] is copy
    assert isinstance(copy["a"][1], Point)
    assert copy["a"][1].x is copy["a"][1].y[0] is copy["s"].tensor is copy["d"][0] is fake
    assert copy["d"].maxlen == 3
    assert copy["c"] is Colour.RED
    assert value["a"][0] is t


def test_views_share_their_memory(doubles):
    base = torch.ones(4, 4)
    one, two = doubles.of([base, base[1:]])
    assert one.untyped_storage()._cdata == two.untyped_storage()._cdata


def test_modules_optimizers_and_schedulers_agree(doubles):
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    opt = torch.optim.Adam(net.parameters())
    net(torch.ones(3, 2)).sum().backward()
    opt.step()
    sched = torch.optim.lr_scheduler.StepLR(opt, 1)
    net2, opt2, sched2 = doubles.of([net, opt, sched])
    assert opt2.param_groups[0]["params"][0] is net2[0].weight
    assert set(map(id, opt2.state)) == set(map(id, net2.parameters()))
    assert sched2.optimizer is opt2
    assert isinstance(net2[0].weight, nn.Parameter)
    assert net2[0].weight.grad is not None
    assert net2[1].running_mean is not net[1].running_mean


def test_objects_that_do_not_like_to_be_looked_at(doubles):
    angry = Angry()
    assert type(doubles.of(angry)) is Angry
    lock = threading.Lock()
    assert type(doubles.of(lock)) is type(lock)
    ordered = Ordered(b=1, a=[2])
    ordered.move_to_end("b")
    copy = doubles.of(ordered)
    assert list(copy.items()) == [("a", [2]), ("b", 1)]
    assert copy["a"] is not ordered["a"]


def test_arrays_and_generators_of_numbers(doubles):
    array, big = np.ones(3), np.ones(2**21 + 1)
    copy, view = doubles.of(array), doubles.of(big)
    copy[0] = 5
    assert array[0] == 1
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 5
    generator = torch.Generator().manual_seed(4)
    before = generator.get_state()
    doubles.of(generator).manual_seed(9)
    assert torch.equal(generator.get_state(), before)
    random = np.random.default_rng(1)
    doubles.of(random).random(5)
    assert random.random() == np.random.default_rng(1).random()


def test_closures_and_caches(doubles):
    total = []

    def add(x):
        total.append(x)
        return len(total)

    cached = functools.lru_cache(add)
    assert doubles.of(add)(1) == 1
    assert doubles.of(cached)(2) == 2
    assert total == []
    assert cached.cache_info().currsize == 0


def test_a_key_that_raises_is_refused_and_the_rest_goes_on():
    class Key:
        ready = True

        def __hash__(self):
            if not Key.ready:
                raise RuntimeError("not now")
            return 1

    broken = {Key(): 1}
    Key.ready = False
    result = dry_run(lambda: (torch.ones(2), broken and 1)[0])
    assert result.unknown or result.complete
    assert isinstance(result, gpumagic.DryRun)


class Marked(torch.Tensor):
    """A subclass: torch's fakes do not know what it does."""


def test_tensors_without_a_stand_in_end_it_where_they_are_used():
    marked = torch.ones(3).as_subclass(Marked)
    assert dry_run(lambda t: 1, marked).complete
    for use in (lambda t: torch.ones(3) + t, lambda t: t.sum(), lambda t: t[0]):
        result = dry_run(use, marked)
        (end,) = result.unknown
        assert end.ended
        assert "a Marked (torch.strided) has no dry run: it is no plain tensor" in end.reason
