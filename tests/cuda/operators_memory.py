"""Print what OpInfo's samples take on cuda:0: for each the peak of allocated bytes, or null.

    python operators_memory.py real|virtual FIRST STEP

A line for each entry, as JSON: its place, its name, the peaks of its first samples.
"""

import gc
import json
import sys
import warnings

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_leaves, tree_map

SAMPLES = 6


def there(value):
    if isinstance(value, torch.Tensor):
        return value.detach().to("cuda:0").requires_grad_(value.requires_grad)
    return torch.device("cuda:0") if isinstance(value, torch.device) else value


def peak_of(op, sample, backward):
    """Allocated bytes at most, beyond those of the inputs, forward and backward."""
    given = tree_map(there, (sample.input, sample.args, sample.kwargs))
    if "device" in given[2]:
        given[2]["device"] = "cuda:0"
    before = torch.cuda.memory_allocated(0)
    torch.cuda.reset_peak_memory_stats(0)
    found = [t for t in tree_leaves(op(given[0], *given[1], **given[2])) if torch.is_tensor(t)]
    sources = [t for t in tree_leaves(given) if torch.is_tensor(t) and t.requires_grad]
    targets = [t for t in found if t.requires_grad]
    if backward and sources and targets:
        gradients = [torch.ones_like(t) for t in targets]
        torch.autograd.grad(targets, sources, gradients, allow_unused=True)
    return torch.cuda.max_memory_allocated(0) - before


def peaks(op):
    wanted = (torch.float32, torch.int64, torch.complex64)
    dtype = next((d for d in wanted if d in op.dtypesIfCUDA), None)
    if dtype is None:
        return []
    backward = op.supports_autograd and dtype.is_floating_point
    torch.manual_seed(0)
    try:
        samples = list(op.sample_inputs("cpu", dtype, requires_grad=backward))[:SAMPLES]
    except Exception:  # noqa: BLE001  of another library or device: nothing to compare
        return []
    return [_tried(op, sample, backward) for sample in samples]


def _tried(op, sample, backward):
    torch.manual_seed(0)
    try:
        peak_of(op, sample, backward)  # a first call may load more
        return peak_of(op, sample, backward)
    except Exception:  # noqa: BLE001  the caller compares what ran on both
        return None


def main(which, first, step):
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if which == "virtual":
        from gpumagic import virtual

        virtual.enable(1, 2**32)
    torch.cuda.init()
    torch.autograd.set_multithreading_enabled(False)
    gc.freeze()  # else each collection would look through all of torch
    for place in range(int(first), len(op_db), int(step)):
        op = op_db[place]
        name = op.name + (f".{op.variant_test_name}" if op.variant_test_name else "")
        print(json.dumps([place, name]), flush=True)
        print(json.dumps(peaks(op)), flush=True)
        gc.collect()


if __name__ == "__main__":
    main(*sys.argv[1:])
