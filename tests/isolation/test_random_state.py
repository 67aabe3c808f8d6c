"""Every random state is put back exactly, and every device can start from the same one."""

import random

import numpy
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from worlds import GPU0, GPU1, random_state

from gpumagic.isolation.settings import Randomness

pytestmark = pytest.mark.usefixtures("gpus")

_DRAWS = {
    "cpu": lambda: torch.rand(3),
    "cuda:0": lambda: torch.rand(3, device=GPU0),
    "cuda:1": lambda: torch.nn.functional.dropout(torch.ones(3, device=GPU1)),
    "random": random.random,
    "numpy": lambda: numpy.random.normal(size=3),
    "all": lambda: torch.manual_seed(5),
}


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.sampled_from(sorted(_DRAWS)), max_size=6))
def test_whatever_is_drawn_is_put_back_and_known(draws):
    torch.manual_seed(6)  # another test may have left the seed that this one sets
    state, before = Randomness(), random_state()
    for name in draws:
        _DRAWS[name]()
    devices = {"cpu", "cuda:0", "cuda:1"}
    assert state.drawn() == (devices if "all" in draws else devices & {*draws})
    state.restore()
    assert random_state() == before
    assert state.drawn() == set()


def test_a_gpu_that_has_not_started_is_started(monkeypatch, gpus):
    started = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: bool(started))
    monkeypatch.setattr(torch.cuda, "init", lambda: started.append(1))
    Randomness().same_start([GPU0])
    assert started == [1]


def test_every_device_draws_the_same_from_the_same_start():
    torch.rand(5, device=GPU1)
    state, before = Randomness(), random_state()
    state.same_start([torch.device("cpu"), GPU0, GPU1])
    assert state.drawn() == set()
    numbers = [torch.rand(3, device=device).tolist() for device in (GPU0, GPU1)]
    assert numbers[0] == numbers[1]
    assert state.drawn() == {"cuda:0", "cuda:1"}
    state.restore()
    assert random_state() == before


def test_a_device_that_starts_later_has_the_seed_of_the_cpu(monkeypatch):
    torch.manual_seed(11)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    state = Randomness()
    monkeypatch.undo()
    torch.manual_seed(12)
    torch.rand(3, device=GPU1)
    state.restore()
    expected = torch.rand(3, generator=torch.Generator(GPU1).manual_seed(11), device=GPU1)
    assert torch.equal(torch.rand(3, device=GPU1), expected)
