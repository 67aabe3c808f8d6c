"""What is split by ranks is, gathered, what it was; what cannot be split is one line."""

import sys
from collections import UserDict, defaultdict, namedtuple
from types import ModuleType

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from gpumagic.cluster.scattered import Sharing, SplitValues, gather, length, shares, take
from gpumagic.errors import GpuError

Pair = namedtuple("Pair", "x y")


def split(value, ranks):
    return [take(value, *bounds) for bounds in shares(length(value), ranks)]


class Encoded(UserDict):
    """As transformers' BatchEncoding: its constructor takes more, and it keeps what it found."""

    def __init__(self, data, encoding):
        super().__init__(data)
        self._encodings = encoding


class Rows:
    """As `datasets.Dataset`."""

    def __init__(self, rows):
        self.rows = list(rows)

    def __len__(self):
        return len(self.rows)

    def select(self, indices):
        return Rows(self.rows[n] for n in indices)


Rows.__name__ = "Dataset"
KINDS = {
    "list": lambda n: [f"prompt {k}" for k in range(n)],
    "tuple": lambda n: tuple(range(n)),
    "tensor": lambda n: torch.arange(3.0 * n).reshape(n, 3),
    "leaf": lambda n: torch.ones(n, requires_grad=True),
    "bool tensor": lambda n: torch.arange(n) % 2 == 0,
    "sparse": lambda n: torch.eye(max(n, 1))[:n].to_sparse(),
    "array": lambda n: np.arange(2 * n, dtype="int16").reshape(n, 2),
    "masked": lambda n: np.ma.masked_equal(np.arange(n), 1),
    "objects": lambda n: np.array([{k} for k in range(n)], dtype=object),
    "frame": lambda n: pd.DataFrame({"a": range(n), "b": pd.Categorical(["x", "y"] * n)[:n]}),
    "series": lambda n: pd.Series(range(n), index=[f"row {k}" for k in range(n)], name="s"),
    "dict": lambda n: {"x": torch.arange(n), "texts": ["t"] * n},
    "default dict": lambda n: defaultdict(list, a=[*range(n)]),
    "nested": lambda n: {"a": {"b": [*range(n)]}, "p": {"q": (0,) * n}},
    "encoded": lambda n: Encoded({"ids": torch.arange(n)}, [f"e{k}" for k in range(n)]),
    "rows": lambda n: Rows(range(n)),
}


@pytest.fixture(autouse=True)
def datasets(monkeypatch):
    library = ModuleType("datasets")
    library.Dataset = Rows
    library.concatenate_datasets = lambda every: Rows(row for one in every for row in one.rows)
    monkeypatch.setitem(sys.modules, "datasets", library)


def plain(value):
    """The value in what Python compares, with what it is of."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.layout, value.requires_grad, value.shape, value.tolist()
    if isinstance(value, np.ma.MaskedArray):
        return value.filled(-1).tolist(), value.mask.tolist()
    if isinstance(value, np.ndarray):
        return value.dtype, value.shape, value.tolist()
    if isinstance(value, pd.DataFrame):
        return value.to_dict("split"), value.dtypes.astype(str).tolist()
    if isinstance(value, pd.Series):
        return value.to_dict(), value.dtype, value.name
    if isinstance(value, (dict, UserDict)):
        held = {key: plain(item) for key, item in value.items()}
        return type(value), held, getattr(value, "_encodings", None)
    if isinstance(value, tuple):
        return type(value), [plain(item) for item in value]
    return value.rows if isinstance(value, Rows) else value


def same(one, other):
    if isinstance(one, torch.Tensor) and one.layout is torch.sparse_coo:
        one, other = one.to_dense(), other.to_dense()
    wanted, found = plain(one), plain(other)
    if isinstance(one, torch.Tensor):  # a graph stays behind: parts are leaves of their own
        wanted, found = (wanted[:2], wanted[3:]), (found[:2], found[3:])
    return type(one) is type(other) and wanted == found


@pytest.mark.parametrize("kind", KINDS)
@given(count=st.integers(0, 9), ranks=st.integers(1, 5))
@settings(max_examples=5)
def test_what_is_split_and_gathered_is_what_it_was(kind, count, ranks):
    value = KINDS[kind](count)
    before = plain(value) if kind != "sparse" else None
    parts = split(value, ranks)
    assert [length(part) for part in parts] == [
        stop - start for start, stop in shares(count, ranks)
    ]
    assert {type(part) for part in parts} == {type(value)}
    assert same(value, gather(parts))
    assert kind == "sparse" or plain(value) == before
    made = [take(value, start, min(start + 2, count)) for start in range(0, count, 2)]
    assert [length(part) for part in made] == [2] * (count // 2) + [1] * (count % 2)
    assert not made or same(value, gather(made))


@given(count=st.integers(0, 50), ranks=st.integers(1, 9))
def test_ranks_have_what_torch_and_numpy_give_them(count, ranks):
    items = torch.arange(count)
    want = [part.tolist() for part in torch.tensor_split(items, ranks)]
    assert [part.tolist() for part in split(items, ranks)] == want
    assert [[*part] for part in split(range(count), ranks)] == want
    assert want == [part.tolist() for part in np.array_split(np.arange(count), ranks)]


def test_a_part_has_memory_of_its_own():
    x = torch.zeros(8, 2)
    first, _ = split(x, 2)
    assert first.untyped_storage().nbytes() == x.nbytes // 2
    first += 1
    assert x.sum() == 0


def test_a_part_of_an_array_has_memory_of_its_own_unless_it_is_read_only():
    whole = {"array": np.zeros(4), "series": pd.Series(np.zeros(4)), "frozen": np.zeros(4)}
    whole["frozen"].flags.writeable = False
    part = take(whole, 0, 2)
    part["array"] += 1
    part["series"].iloc[:] = 1
    assert whole["array"].sum() == whole["series"].sum() == 0
    assert np.shares_memory(part["frozen"], whole["frozen"])


def test_a_part_of_what_is_trained_is_a_leaf():
    x = torch.ones(4, requires_grad=True)
    first, second = split(x * 2, 2)
    first.sum().backward()
    assert first.is_leaf
    assert second.requires_grad
    assert x.grad is None


def test_a_dataset_is_split_and_not_gathered():
    parts = split(TensorDataset(torch.arange(5)), 2)
    assert [[int(item[0]) for item in part] for part in parts] == [[0, 1, 2], [3, 4]]
    with pytest.raises(GpuError, match="a dataset cannot be joined; gather what is computed"):
        gather(parts)


class Endless(IterableDataset):
    def __iter__(self):
        return iter(())


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("a photo of a cat", "str cannot be split; give a list, tuple"),
        (7, "int cannot be split"),
        (torch.tensor(1.0), "Tensor cannot be split"),
        (np.array(1.0), "ndarray cannot be split"),
        ({1, 2}, "set cannot be split"),
        (iter([1]), "list_iterator cannot be split"),
        (torch.nn.Sequential(), "Sequential cannot be split"),
        (DataLoader([1, 2]), "DataLoader cannot be split"),
        (Endless(), "Endless cannot be split"),
        (torch.ones(2, 2).max(0), "max cannot be split"),
        ({"x": [1], "y": [1, 2]}, "different lengths: 'x' has 1, 'y' has 2"),
        ({"x": [1], "lr": 0.1}, "float cannot be split"),
        (Pair([1], "a"), "Pair cannot be split"),
    ],
)
def test_what_cannot_be_split_is_told_in_one_line(value, says):
    with pytest.raises(GpuError) as caught:
        split(value, 2)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("count", "chunk", "line"),
    [
        (17, None, "17 prompts: 9 + 8"),
        (1, None, "1 prompts: 1 + 0"),
        (1001, 100, "1,001 prompts: 11 parts of at most 100"),
        (0, 4, "0 prompts: 0"),
    ],
)
def test_the_remainder_is_told(count, chunk, line):
    asked = Sharing(("prompts",), chunk=chunk)
    assert str(SplitValues(asked, {"prompts": range(count)}, 2)) == line
