"""What a dry run copies of the user's objects, and how."""

import collections
import enum
import functools
import threading

import numpy as np
import pytest
import torch
from torch import nn

import gpumagic
from gpumagic import dry_run
from gpumagic.dryrun.doubles import Doubles
from gpumagic.dryrun.fakes import Fakes

pytestmark = pytest.mark.usefixtures("gpus")


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
