"""DataLoaders under a placement: the loader works on the host, its batches land on the device."""

from collections import namedtuple

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import gpumagic
from gpumagic.placement import placement

pytestmark = pytest.mark.usefixtures("gpus")
Pair = namedtuple("Pair", "x y")


class Tokens(dict):
    """A batch of tokens, which has a `to` of its own."""

    def to(self, device):
        return Tokens({k: v.to(device) for k, v in self.items()})


class Rows(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, n):
        assert placement() is None  # a dataset works on the host, with workers or without
        return torch.full((2,), float(n)), n


class Stream(IterableDataset):
    def __iter__(self):
        yield from (torch.tensor(float(n)) for n in range(4))


def stack(rows):
    return torch.stack([x for x, _ in rows])


COLLATES = {
    "default": (None, lambda b: b),
    "dict": (lambda r: {"x": stack(r), "n": [len(r)]}, lambda b: [b["x"]]),
    "named tuple": (lambda r: Pair(stack(r), 1), lambda b: [b.x]),
    "packed": (lambda r: pack_sequence([x for x, _ in r]), lambda b: [b.data]),
    "sparse": (lambda r: stack(r).to_sparse(), lambda b: [b]),
    "tokens": (lambda r: Tokens(ids=stack(r)), lambda b: [b["ids"]]),
}


@pytest.mark.parametrize(("collate", "tensors"), COLLATES.values(), ids=COLLATES.keys())
def test_batches_of_any_shape_land(collate, tensors):
    loader = DataLoader(Rows(), batch_size=2, shuffle=True, collate_fn=collate)
    with gpumagic.on(1):
        batches = list(loader)
        place = placement()
    assert {t.device.index for b in batches for t in tensors(b)} == {1}
    assert len(place.delivered) == 2
    assert all(type(b) is type(batches[0]) for b in batches)
    host = next(iter(loader))
    assert {t.device.type for t in tensors(host)} == {"cpu"}


def test_batches_that_are_there_already_are_no_copies():
    loader = DataLoader(
        Rows(), batch_size=2, collate_fn=lambda rows: Tokens(x=stack(rows).to("cuda:1"))
    )
    with gpumagic.on(1):
        batches = list(loader)
        assert placement().delivered == []
    assert batches[0]["x"].device.index == 1


def test_streams_and_single_items():
    with gpumagic.on(1):
        assert {x.device.index for x in DataLoader(Stream(), batch_size=None)} == {1}


def test_a_dataset_made_on_the_device_can_be_loaded_with_pinning():
    with gpumagic.on(1):
        data = TensorDataset(torch.randn(6, 2))
        for (x,) in DataLoader(data, batch_size=3, pin_memory=True):
            assert x.device.index == 1
        assert placement().delivered == []  # nothing was copied


def test_batches_can_stay():
    with gpumagic.on(1, batches=False):
        assert {x.device.type for x, _ in DataLoader(Rows())} == {"cpu"}


def test_an_error_in_the_dataset_leaves_the_placement():
    class Failing(Rows):
        def __getitem__(self, n):
            raise KeyError(n)

    with gpumagic.on(1):
        with pytest.raises(KeyError):
            next(iter(DataLoader(Failing())))
        assert torch.zeros(1).device.index == 1
