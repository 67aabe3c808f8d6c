"""Whatever a measurement does, nothing of it may be left."""

import gc
import threading

import pytest
import torch

from gpumagic.cell import peak_memory
from gpumagic.ledger import attribute
from gpumagic.placement import scope, swap


@pytest.fixture(autouse=True)
def _nothing_is_left():
    collects, grad = gc.isenabled(), torch.is_grad_enabled()
    yield
    assert not swap.installed()
    assert scope.placement() is None
    assert not peak_memory._running
    assert attribute.running == ()
    assert (gc.isenabled(), torch.is_grad_enabled()) == (collects, grad)
    ours = [t for t in threading.enumerate() if t.name.startswith("gputime")]
    for thread in ours:
        thread.join(10)
    assert not any(thread.is_alive() for thread in ours)
