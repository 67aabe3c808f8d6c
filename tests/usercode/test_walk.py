"""The walk of the user's objects: by types, each once, with its path; it runs nothing of theirs."""

import functools
from collections import UserDict, deque, namedtuple
from types import SimpleNamespace

import pytest

from gpumagic.usercode.values import attributes, is_open, items, parts_of, walk, written

Pair = namedtuple("Pair", "left right")
ITEM = object()


class Slotted:
    __slots__ = ("item", "unset")

    def __init__(self):
        self.item = ITEM


class Raising(dict):
    def items(self):
        raise AssertionError("its own code runs")

    __iter__ = __len__ = items


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ([1, ITEM], "x[1]"),
        ((ITEM, "b"), "x[0]"),
        (deque([ITEM]), "x[0]"),
        ({"a": ITEM}, "x['a']"),
        (UserDict(a=ITEM), "x['a']"),
        (Raising(a=ITEM), "x['a']"),
        (Pair(1, ITEM), "x.right"),
        (functools.partial(print, ITEM), "x.args[0]"),
        (SimpleNamespace(a=ITEM), "x.a"),
        (Slotted(), "x.item"),
        ([{"a": Pair(ITEM, 2)}], "x[0]['a'].left"),
    ],
    ids=lambda value: value if type(value) is str else type(value).__name__,
)
def test_each_value_has_its_path(value, path):
    found = [written(path) for path, held in walk([(("x",), value)], parts_of) if held is ITEM]
    assert found == [path]


def test_each_value_comes_once_and_a_ring_ends():
    ring = [ITEM, ITEM]
    ring.append(ring)
    assert [held for _, held in walk([(("x",), ring)], parts_of)] == [ring, ITEM]


def test_it_goes_as_far_as_it_is_told():
    deep = [[[[ITEM]]]]
    assert len([*walk([(("x",), deep)], parts_of, depth=2)]) == 3
    assert len([*walk([(("x",), deep)], parts_of, most=2)]) == 2
    assert len([*walk([(("x",), deep)], lambda value: [])]) == 1


def test_plain_parts_are_passed_over():
    assert items([1, 2.0, "three", None]) == []
    assert items({"a": 1}) == []
    assert items([1, ITEM], 1) == []


def test_objects_of_the_standard_library_are_closed():
    import threading

    assert not is_open(threading.Thread)
    assert is_open(Slotted)
    assert list(attributes(Slotted())) == ["item"]
