"""Arrays that cannot move in place: copied, replaced wherever variables hold them, and home again.

The framework is one of this file, whose arrays are boxes that know their device.
"""

from collections import namedtuple
from dataclasses import dataclass

import pytest

from gpumagic import device
from gpumagic.device import Device
from gpumagic.errors import GpuError
from gpumagic.frameworks.array_framework import ArrayFramework

GPUS = [Device("cuda", n, f"GPU-virtual-{n}", virtual=True) for n in range(2)]
Pair = namedtuple("Pair", "left right")


@dataclass(eq=False)
class Box:
    """An array of 8 bytes."""

    place: str = "cpu"
    stays: bool = False


class Boxes(ArrayFramework):
    name = "Boxes"
    waits = 0

    def is_array(self, value):
        return isinstance(value, Box)

    def where(self, array):
        return array.place

    def nbytes(self, array):
        return 8

    def bring(self, array, device, *, committed=True):
        if array.stays:
            raise GpuError("it stays")
        return Box(str(device))

    def wait(self, *devices):
        self.waits += 1


@pytest.fixture
def boxes():
    device.set_virtual(lambda: GPUS)
    made = Boxes()
    yield made
    made.home({})
    device.set_virtual(None)


def test_names_and_containers_that_shared_an_array_share_the_copy(boxes):
    box = Box()
    space = {"a": box, "held": [box, {"x": Pair(box, 1)}], "also": "text"}
    held, origins = space["held"], []
    moves = boxes.move(space.items(), GPUS[1], space, origins)
    assert space["a"].place == "cuda:1"
    assert space["held"] is held
    assert space["held"][0] is space["a"] is space["held"][1]["x"].left
    assert [(m.name, m.nbytes, m.sources) for m in moves.moved] == [("a", 8, ("cpu",))]
    assert [origin.name for _, origin in origins] == ["a", "held"]
    assert (box.place, boxes.waits) == ("cpu", 1)


def test_one_that_stays_is_left_and_the_others_move(boxes):
    space = {"a": Box(stays=True), "b": Box()}
    moves = boxes.move([*space.items(), ("caught", Box())], GPUS[0], space, [])
    assert [(left.name, left.reason[:8]) for left in moves.left] == [
        ("a", "it stays"),
        ("caught", "a functi"),
    ]
    assert (space["a"].place, space["b"].place) == ("cpu", "cuda:0")


def test_a_copy_that_did_not_change_is_replaced_by_its_original(boxes):
    original, space, origins = Box(), {}, []
    space |= {"a": original, "b": Box()}
    boxes.move(space.items(), GPUS[1], space, origins)
    space["b"] = Box("cuda:1")  # the cell made a new one
    moves = boxes.home(space, origins)
    assert space["a"] is original
    assert space["b"].place == "cpu"
    assert {moved.name for moved in moves.moved} == {"a", "b"}


@pytest.mark.parametrize("for_good", [False, True])
def test_copies_that_other_variables_hold_by_now_go_home_too(boxes, for_good):
    """As `state = TrainState.create(params); params = ...` leaves them."""
    original, made, origins = Box(), Box("cuda:1"), []
    space = {"params": {"w": original}}
    boxes.move(space.items(), GPUS[1], space, origins)
    space |= {"state": [space["params"], made], "last": space["params"]["w"], "params": {"w": made}}
    if for_good:
        boxes.remember(origins, "In [1]")
    home = boxes.home(space, None if for_good else origins)
    assert space["state"][0]["w"] is space["last"]
    assert space["last"].place == "cpu"
    assert for_good or space["last"] is original
    assert space["params"]["w"].place == "cpu"  # the present value of what was moved
    assert sum(moved.nbytes for moved in home.moved) == 16
    assert boxes.home(space, None).moved == ()


def test_home_is_where_it_was_before_the_first_of_several_cells(boxes):
    space = {"a": Box()}
    for number in (0, 1):
        origins = []
        boxes.move(space.items(), GPUS[number], space, origins)
        boxes.remember(origins, f"In [{number}]")
    assert boxes.away(space) == {"a": {"cuda:1"}}
    boxes.home(space)
    assert space["a"].place == "cpu"
    assert boxes.home(space).moved == ()


def test_another_kind_of_value_stays(boxes):
    space = {"a": Box(), "b": Box()}
    origins = []
    boxes.move(space.items(), GPUS[0], space, origins)
    boxes.remember(origins, "In [1]")
    space["b"] = [Box("cuda:0")]
    assert {moved.name for moved in boxes.home(space).moved} == {"a"}
    assert boxes.home(space).moved == ()
