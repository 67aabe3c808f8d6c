"""Every storage on a GPU is found, once, and nothing is left behind by the search."""

import gc
import weakref

import torch
from torch import nn

from gpumagic.memory.find_holders import find


def test_nothing_is_kept_alive_by_the_search(gpus):
    gc.collect()
    namespace = {"net": nn.Linear(3, 3, device="cuda"), "x": torch.ones(3, 3, device="cuda")}
    namespace["loss"] = namespace["net"](namespace["x"]).sum()
    gc.disable()
    try:
        assert len(find(namespace)) == 4
        kept = weakref.ref(namespace["net"])
        namespace.clear()
        assert kept() is None
        assert torch.cuda.memory_allocated() == 0
    finally:
        gc.enable()
