"""What torch's texts say of a shortage, in all the words that it has for it."""

import pytest
import torch

import gpumagic
from gpumagic.memory.oom_state import Shortage, read

MIB, GIB = 2**20, 2**30
TEXTS = {
    "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 1 has a total capacity of 23.69 GiB of "
    "which 5.31 GiB is free. Process 7 has 3.00 GiB memory in use. Process 9 has 1.00 GiB memory "
    "in use. Including non-PyTorch memory, this process has 18.36 GiB memory in use. Of the "
    "allocated memory 17.50 GiB is allocated by PyTorch, and 512.00 MiB is reserved by PyTorch but "
    "unallocated.": Shortage(
        1, 20 * GIB, round(23.69 * GIB), round(5.31 * GIB), 17 * GIB + GIB // 2, 18 * GIB, 4 * GIB
    ),
    "HIP out of memory. Tried to allocate 512 bytes. GPU 0 has a total capacity of 16.00 GiB of "
    "which 0 bytes is free. Of the allocated memory 8.00 GiB is allocated by PyTorch, and 0 bytes "
    "is reserved by PyTorch but unallocated.": Shortage(0, 512, 16 * GIB, 0, 8 * GIB, 8 * GIB),
    "CUDA out of memory. Allocation was preemptively rejected because it would exceed "
    "per_process_memory_fraction limit. Requested size: 7.00 GiB": Shortage(0, 7 * GIB),
    "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported": Shortage(0),
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`": Shortage(0),
    "cuDNN error: CUDNN_STATUS_ALLOC_FAILED": Shortage(0),
    "CUDA ran out of memory outside PyTorch's allocator.": Shortage(0),
}


@pytest.fixture
def started(gpus):
    torch.cuda.init()


@pytest.mark.parametrize("text", TEXTS)
def test_every_way_to_say_it(started, text):
    _, found = read(RuntimeError(text))
    assert found == TEXTS[text]


def test_it_is_found_behind_what_was_raised_from_it(started):
    inner = torch.OutOfMemoryError(next(iter(TEXTS)))
    outer = KeyError("a")
    outer.__cause__ = inner
    assert read(outer)[0] is inner


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        MemoryError("CUDA out of memory"),
        RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 7 has none"),
    ],
)
def test_nothing_is_said_of_others(started, error):
    assert gpumagic.explain_out_of_memory(error) is None


def test_without_a_gpu_nothing_is_said():
    assert read(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")) is None
