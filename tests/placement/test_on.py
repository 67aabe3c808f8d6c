"""Entering and leaving, the context manager and the decorator."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gpumagic
from gpumagic.errors import GpuError
from gpumagic.placement import placement, swap

pytestmark = pytest.mark.usefixtures("gpus")
GPU1 = torch.device("cuda:1")


class Batch(torch.Tensor):
    """A subclass, whose `__new__` must stay its own."""


def test_nested():
    with gpumagic.on(0):
        with gpumagic.on(1):
            with gpumagic.on("cpu"):
                assert torch.zeros(1).device.type == "cpu"
            assert torch.zeros(1).device == GPU1
        assert torch.zeros(1).device.index == 0
        assert torch.cuda.current_device() == 0


def test_decorators():
    @gpumagic.on(1)
    def made(n):
        """Make."""
        return torch.zeros(n)

    assert made(3).device == GPU1
    assert (made.__name__, made.__doc__) == ("made", "Make.")
    with pytest.raises(TypeError, match="not generators"):

        @gpumagic.on(1)
        def numbers():
            yield 1

    with pytest.raises(TypeError, match="coroutine"):

        @gpumagic.on(1)
        async def made_later(n):
            return torch.zeros(n)


def test_what_does_not_exist_is_refused_in_one_line():
    for where in (7, "gpu:x", "0,1", "0,,1", "", "mps"):
        with pytest.raises(GpuError) as caught:
            gpumagic.on(where)
        assert "type" in str(caught.value)
        assert "\n" not in str(caught.value)
    assert not swap.installed()


# ---------------------------------------------------------------- nothing is left behind
def _names():
    return {
        (owner.__name__, name): id(value)
        for owner in (torch, torch.fft, torch.nested, torch.utils.data.DataLoader, torch.Tensor)
        for name, value in vars(owner).items()
    }


@settings(max_examples=60, deadline=None)
@given(
    st.recursive(st.just([]), lambda inner: st.lists(inner, max_size=3), max_leaves=8), st.data()
)
def test_any_nesting_with_any_failure_restores_everything(tree, data):
    before = _names()

    def enter(children, expected):
        where = data.draw(st.sampled_from(["0", "1", "cpu"]))
        device = torch.device("cpu" if where == "cpu" else f"cuda:{where}")
        try:
            with gpumagic.on(where):
                assert torch.zeros(1).device == device
                for child in children:
                    enter(child, device)
                if data.draw(st.booleans()):
                    raise KeyError(where)
        except KeyError:
            pass
        assert torch.zeros(1).device == expected

    enter(tree, torch.device("cpu"))
    assert _names() == before
    assert placement() is None
    assert torch.cuda.current_device() == 0


def test_what_on_cannot_wrap_is_said():
    for wrapped in (Batch, classmethod(lambda cls: None)):
        with pytest.raises(TypeError, match="methods, not generators, coroutines or classes"):
            gpumagic.on(1)(wrapped)
    with pytest.raises(RuntimeError, match="not entered"):
        gpumagic.on(1).__exit__(None, None, None)
