"""Whatever a measurement does, nothing of it may be left."""

import gc
import threading

import pytest
import torch

from gpumagic.tensors import factories, meter, placement
from gpumagic.tensors.watching import observe


@pytest.fixture(autouse=True)
def _nothing_is_left():
    collects, grad = gc.isenabled(), torch.is_grad_enabled()
    yield
    assert not factories.installed()
    assert placement.placement() is None
    assert not meter._running
    assert observe.running == ()
    assert (gc.isenabled(), torch.is_grad_enabled()) == (collects, grad)
    ours = [t for t in threading.enumerate() if t.name.startswith("gputime")]
    for thread in ours:
        thread.join(10)
    assert not any(thread.is_alive() for thread in ours)
