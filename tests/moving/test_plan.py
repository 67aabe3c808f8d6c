"""What is copied where: memory that was shared is shared there too, and it is all or nothing."""

from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from moved_values import CPU, GPU0, GPU1, moved

from gpumagic.moving.move import move_all

pytestmark = pytest.mark.usefixtures("gpus")


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


def test_what_no_longer_shares_memory_with_a_moved_tensor_is_named():
    base, digits = torch.zeros(1000), np.zeros(16, "float32")
    train, apart, X = base[:10], base[500:], torch.from_numpy(digits)
    namespace = {"base": base, "apart": apart, "digits": digits, "train": train, "X": X}
    namespace |= {"_1": base, "same": train, "half": digits[:2], "other": np.zeros(16, "float32")}
    moves = move_all([("train", train), ("X", X)], GPU1, namespace=namespace)
    assert [(left.name, left.reason) for left in moves.left] == [
        ("base", "not reached by later changes to train"),
        ("digits", "not reached by later changes to X"),
        ("half", "not reached by later changes to X"),
    ]


def test_variables_that_no_longer_share_memory_are_named_once_for_each_pair():
    data, digits = torch.zeros(300, 8), torch.zeros(64)
    namespace = {"data": data, "digits": digits}
    variables = [("rows", list(data)), ("parts", list(digits.split(16)))]
    moves = move_all(variables, GPU1, namespace=namespace)
    assert [(left.name, left.reason) for left in moves.left] == [
        ("data", "not reached by later changes to rows"),
        ("digits", "not reached by later changes to parts"),
    ]


def test_a_long_move_says_how_far_it_is():
    first, second, little = torch.empty(2**26), torch.empty(2**26), torch.ones(3)
    said, line = [], MagicMock()
    line.return_value.__enter__.return_value.update = said.append
    move_all([("net", [first, second])], GPU1, line=line)
    assert [(str(s), s.share) for s in said] == [
        ("moving to cuda:1: 0 B of 512 MiB", 0.0),
        ("moving to cuda:1: 256 MiB of 512 MiB", 0.5),
    ]
    move_all([("little", little)], GPU1, line=line)
    assert line.call_count == line.return_value.__exit__.call_count == 1


def test_a_small_view_does_not_bring_its_large_base():
    base = torch.zeros(1000)
    part = base[:10]
    assert moved(part=part).nbytes == 40
    assert part.untyped_storage().nbytes() <= 40 + 64


class Interrupting(torch.Tensor):
    """A tensor at which the user's Ctrl-C comes, once."""

    came = False

    @property
    def data(self):
        return torch.Tensor.data.__get__(self)

    @data.setter
    def data(self, new):
        if not Interrupting.came:
            Interrupting.came = True
            raise KeyboardInterrupt
        torch.Tensor.data.__set__(self, new)


def test_an_interrupt_moves_nothing():
    first, second = torch.ones(3), torch.ones(4).as_subclass(Interrupting)
    with pytest.raises(KeyboardInterrupt):
        moved(first=first, second=second)
    assert Interrupting.came
    assert first.device == second.device == CPU
    assert first.tolist() == [1, 1, 1]


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
