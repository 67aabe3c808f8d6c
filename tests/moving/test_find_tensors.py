"""What a value holds: containers, the notebook's own objects, and objects that bite."""

import dataclasses
from collections import OrderedDict, UserDict, deque, namedtuple

import pytest
import torch
from moved_values import CPU, GPU1, moved
from torch import nn

pytestmark = pytest.mark.usefixtures("gpus")


Pair = namedtuple("Pair", "left right")


@dataclasses.dataclass(frozen=True)
class Sample:
    image: torch.Tensor
    label: object = None


@pytest.mark.parametrize(
    "wrap",
    [
        lambda x: [x, 1, "a", None],
        lambda x: (x, [x]),
        lambda x: {"a": {"b": x}, 3: 4},
        lambda x: Pair(1, x),
        lambda x: Sample(x),
        lambda x: Sample(torch.zeros(1), [Sample(x)]),
        lambda x: {x},
        lambda x: deque([x]),
        lambda x: OrderedDict(a=x),
        lambda x: UserDict(a=x),
    ],
)
def test_containers(wrap):
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


def test_a_proxy_is_not_asked_for_its_class():
    assert walked(proxy=Proxy()).left == []


def test_slots_that_were_never_set_are_passed_over():
    class Slotted:
        __slots__ = ("empty", "full")
        __module__ = __name__

        def __getattr__(self, name):
            raise KeyError(name)

    slotted = Slotted()
    slotted.full = torch.ones(1)
    finder = walked(slotted=slotted)
    assert [found.path for found in finder.found] == ["slotted.full"]
    assert finder.left == []


def test_classes_of_the_notebook_are_not_kept():
    import gc
    import weakref

    kind = type("Redefined", (), {"__module__": "__main__"})
    gone = weakref.ref(kind)
    walked(x=kind())
    del kind
    gc.collect()
    assert gone() is None


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
    from gpumagic.moving.find_tensors import TensorFinder

    finder = TensorFinder(module=__name__)
    finder.variables(variables.items())
    return finder


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
