"""What a value holds: containers, the notebook's own objects, and objects that bite."""

import dataclasses
from collections import OrderedDict, UserDict, deque, namedtuple

import pytest
import torch
from moved_values import CPU, GPU1, moved
from torch import nn

import gpumagic
from gpumagic.moving.find_tensors import DATASET_STAYS, NUMPY_STAYS, TensorFinder
from gpumagic.moving.move import move_all

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


class Node:
    bank = None

    def __init__(self, value):
        self.value = value


@pytest.mark.parametrize(
    "wrap",
    [
        lambda x: [(n, "a") for n in range(2000)] + [[x]],
        lambda x: [{"a": [n]} for n in range(2000)] + [{"a": {"b": (x,)}}],
        lambda x: {n: Node([n]) for n in range(2000)} | {"a": Node(Sample(x))},
        lambda x: [Node(n) for n in range(2000)] + [type("Other", (Node,), {"bank": x})(1)],
        lambda x: [Node(n) for n in range(2000)] + [nn.ParameterList([x])],
    ],
    ids=["tuples", "dicts", "objects", "a class", "a module"],
)
def test_a_tensor_in_much_plain_data_is_found(wrap):
    x = torch.ones(2)
    held = wrap(x)
    variables = [("plain", [Node([n]) for n in range(2000)]), ("held", held)]
    found = TensorFinder(variables, __name__)
    assert [each.root for each in found.tensors] == ["held"]


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

    __iter__ = items = values


def test_a_container_whose_methods_raise_is_looked_into_all_the_same():
    x = torch.ones(2)
    moves = moved(broken=Broken(a=x))
    assert x.device == GPU1
    assert moves.left == ()


def test_a_variable_that_cannot_be_looked_into_is_left_and_the_others_move():
    x = torch.ones(2)
    unfinished = torch.optim.SGD.__new__(torch.optim.SGD)
    moves = moved(unfinished=unfinished, x=x)
    assert x.device == GPU1
    assert [(part.name, part.reason) for part in moves.left] == [
        ("unfinished", "searching it raised AttributeError")
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


def test_what_a_class_of_the_notebook_holds_is_its_objects_too():
    class Codes:
        __module__ = __name__
        bank = torch.ones(2)

    assert [found.path for found in walked(codes=Codes(), more=Codes()).found] == ["codes.bank"]


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

    return TensorFinder(variables.items(), __name__)


def test_objects_of_the_notebook_are_looked_into_and_datasets_stay():
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


# ---------------------------------------------------------------- objects of libraries
LIBRARY = """
import abc, torch
class Normal:
    def __init__(self, loc): self.loc = loc
    @property
    def scale(self): raise AssertionError("a property was run")
class Pipe:                             # as a pipeline of transformers
    def __init__(self, model): self.model, self.device = model, torch.device("cpu")
    def __call__(self, x): return self.model(x.to(self.device))
class Trainer:                          # as that of transformers
    def __init__(self, model, data): self.model, self.train_dataset = model, data
class Net:                              # as a net of skorch
    def __init__(self, module): self.module_, self.device = module, "cpu"
class Graph:                            # as Data of torch_geometric
    def __init__(self, x): self._store, self.where = {"x": x}, "cpu"
    def to(self, device, *args):
        self._store, self.where = {k: v.to(device) for k, v in self._store.items()}, str(device)
        return self
class Batch(Graph, abc.ABC):            # as a Batch of torch_geometric
    def __new__(cls, x): return object.__new__(abc.ABCMeta("GraphBatch", (cls,), {}))
class Frozen:                           # as a TensorDict
    def __init__(self, x): self.x = x
    def to(self, *args): return Frozen(self.x.to(*args))
class Stubborn(Frozen):
    def to(self, device): raise NotImplementedError("not for quantized ones")
class Average(Frozen):                  # as an ExponentialMovingAverage of torch_ema
    def to(self, device=None): self.x = self.x.to(device)
class Unit:                             # as a Quantity of astropy
    def __init__(self): self.value = 1
    def to(self, unit): raise AssertionError("asked to convert")
class Chain:
    def __init__(self, next): self.next = next
"""


SCHEDULER = """
import numpy
import torch
class Scheduler:                        # as one of diffusers
    def __init__(self): self.alphas, self.net = torch.ones(2), torch.nn.Linear(1, 1)
    def set_timesteps(self): return self.alphas.numpy()
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lib") / "site-packages"
    folder.mkdir()
    (folder / "a_library_with_tensors.py").write_text(LIBRARY)
    with pytest.MonkeyPatch.context() as patch:
        (folder / "a_library_with_numpy.py").write_text(SCHEDULER)
        patch.syspath_prepend(folder)
        import a_library_with_numpy
        import a_library_with_tensors

        a_library_with_tensors.Scheduler = a_library_with_numpy.Scheduler

        yield a_library_with_tensors


def test_tensors_and_modules_in_objects_of_libraries_come_along(library):
    loc, net = torch.ones(2), nn.Linear(2, 2)
    normal, pipe, skorch = library.Normal(loc), library.Pipe(net), library.Net(nn.Linear(2, 1))
    moves = moved(normal=normal, pipe=pipe, skorch=skorch)
    assert [m.name for m in moves.moved] == ["normal", "pipe", "skorch"]
    assert normal.loc is loc
    assert loc.device == GPU1
    assert pipe(torch.ones(2)).device == pipe.device == GPU1
    assert skorch.device == "cuda:1"
    assert next(skorch.module_.parameters()).device == GPU1
    assert moved(pipe=pipe).moved == ()


def test_a_list_that_a_library_keeps_as_its_dataset_stays(library):
    data = [{"x": torch.ones(2)}, {"x": torch.ones(2)}]
    trainer = library.Trainer(nn.Linear(2, 2), data)
    moves = moved(trainer=trainer)
    assert moves.nbytes == 24
    assert data[0]["x"].device == CPU
    assert moved(data=data).nbytes == 16


def test_a_module_that_notes_its_device_notes_where_it_was_brought():
    # As Lightning's modules and torchmetrics do, within their own `to`.
    class Noted(nn.Linear):
        def __init__(self, *sizes):
            super().__init__(*sizes)
            self._device, self.part = torch.device("cpu"), nn.Identity()
            self.part._device = torch.device("cpu")

        def forward(self, x):
            return super().forward(x + torch.zeros(2, device=self._device))

    net = Noted(2, 2)
    moved(net=net)
    assert net(torch.ones(2, device=GPU1)).device == GPU1
    assert net.part._device == GPU1


def test_a_device_that_an_object_names_follows_what_it_holds(library):
    net = nn.Linear(2, 2)
    pipe = library.Pipe(net)
    moved(net=net)
    moved(pipe=pipe)
    assert pipe(torch.ones(2)).device == GPU1


def test_an_object_with_a_to_of_its_own_is_brought_by_that(library):
    x = torch.ones(2)
    graph = library.Graph(x)
    moves = moved(graph=graph, also=[graph])
    assert graph.where == "cuda:1"
    assert graph._store["x"].device == GPU1
    assert [(m.name, m.nbytes, m.sources) for m in moves.moved] == [("graph", 8, ("cpu",))]
    assert moved(graph=graph).moved == ()
    assert moved(unit=library.Unit()).left == ()


def test_a_class_that_a_library_has_made_is_the_librarys(library):
    batch = library.Batch(torch.ones(2))
    assert type(batch).__module__ != library.__name__
    assert [m.name for m in moved(batch=batch).moved] == ["batch"]
    assert batch.where == "cuda:1"


def test_an_object_whose_tensors_came_along_with_a_variable_is_brought_too(library):
    x = torch.ones(2)
    graph = library.Graph(x)
    moves = moved(graph=graph, x=x)
    assert x.device == graph._store["x"].device == GPU1
    assert graph.where == "cuda:1"
    assert [m.name for m in moves.moved] == ["x"]


def test_where_to_makes_another_object_the_name_is_bound_anew(library):
    frozen = library.Frozen(torch.ones(2))
    space = {"frozen": frozen, "held": [frozen]}
    moves = move_all(space.items(), GPU1, namespace=space)
    assert space["frozen"].x.device == GPU1
    assert frozen.x.device == CPU
    assert [m.name for m in moves.moved] == ["frozen"]
    (left,) = move_all([("held", [frozen])], GPU1, namespace=space).left
    assert left.name == "held[0]"
    assert "returned a new object" in left.reason


def test_an_object_whose_to_returns_nothing_keeps_its_name(library):
    average = library.Average(torch.ones(2))
    space = {"average": average}
    moves = move_all(space.items(), GPU1, namespace=space)
    assert ([m.name for m in moves.moved], moves.left) == (["average"], ())
    assert space["average"] is average
    assert average.x.device == GPU1


def test_an_object_whose_to_fails_is_left(library):
    (left,) = moved(odd=library.Stubborn(torch.ones(2))).left
    assert (left.name, left.reason) == (
        "odd",
        ".to('cuda:1') raised not for quantized ones",
    )


def test_no_room_for_an_object_with_a_to_of_its_own(library):
    x, graph = torch.ones(2), library.Graph(torch.empty(2**28 + 1))
    with pytest.raises(gpumagic.GpuError, match=r"graph 1\.0 GiB.*nothing was moved"):
        moved(x=x, graph=graph)
    assert x.device == CPU


def test_what_is_read_alone_and_in_such_an_object_needs_its_room_once(library):
    x = torch.empty(3 * 2**26)  # 768 MiB of 1 GiB
    graph = library.Graph(x)
    moved(x=x, graph=graph)
    assert x.device == graph._store["x"].device == GPU1


def test_objects_of_libraries_are_looked_into_within_bounds(library):
    chain = library.Chain(torch.ones(1))
    for _ in range(10):
        chain = library.Chain(chain)
    assert moved(chain=chain).moved == ()
    many = [library.Chain(torch.ones(1)) for _ in range(600)]
    moved(many=many)
    assert 400 < sum(link.next.device == GPU1 for link in many) < 600


def test_tensors_that_a_library_reads_by_numpy_stay_and_are_named(library):
    scheduler = library.Scheduler()
    moves = moved(scheduler=scheduler)
    assert scheduler.set_timesteps().tolist() == [1, 1]
    assert scheduler.net.weight.device == GPU1
    assert [(part.name, part.reason) for part in moves.left] == [("scheduler", NUMPY_STAYS)]


def test_a_dataset_stays_and_is_named():
    data = torch.utils.data.TensorDataset(torch.ones(2))
    moves = moved(data=data, loader=torch.utils.data.DataLoader(data))
    assert data.tensors[0].device == CPU
    assert [(part.name, part.reason) for part in moves.left] == [("data", DATASET_STAYS)]
