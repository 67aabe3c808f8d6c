"""The texts of PyTorch 2.6 to 2.15 about devices, each known for what it is; and others, not."""

import pytest

from gpumagic.mismatch import operation

TEXTS = {
    "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and "
    "cpu! (when checking argument for argument mat1 in method wrapper_CUDA_addmm)": "mixed",
    "Expected all tensors to be on the same device, but got mat2 is on cpu, different from other "
    "tensors on cuda:0 (when checking argument in method wrapper_CUDA_mm)": "mixed",
    "Input type (torch.FloatTensor) and weight type (torch.cuda.FloatTensor) should be the same": (
        "mixed"
    ),
    "Input type (torch.cuda.FloatTensor) and weight type (torch.FloatTensor) should be the same "
    "or input should be a MKLDNN tensor and weight is a dense tensor": "mixed",
    "Input type (MPSFloatType) and weight type (torch.FloatTensor) should be the same": "mixed",
    "Input and hidden tensors are not at the same device, found input tensor at cuda:0 and hidden "
    "tensor at cpu": "mixed",
    "masked_fill_: Expected inputs to be on same device": "mixed",
    "expected self and mask to be on the same device, but got mask on cpu and self on cuda:0": (
        "mixed"
    ),
    "Expected query, key, and value to have the same device type, but got query.device: cuda:0 "
    "key.device: cpu and value.device: cpu instead.": "mixed",
    "Expected condition, x and y to be on the same device, but condition is on cuda:0 and x and y "
    "are on cpu and cpu respectively": "mixed",
    "index_add_(): self, index and source expected to be in the same device, but got (self) "
    "cuda:0, (index) cpu, and (source) cuda:0": "mixed",
    "grid_sampler(): expected input and grid to be on same device, but input is on cuda:0 and "
    "grid is on cpu": "mixed",
    "X1 and X2 must have the same device type. X1: cuda X2: cpu": "mixed",
    "Tensors of the same index must be on the same device and the same dtype except `step` "
    "tensors that can be CPU and float32/64 notwithstanding": "mixed",
    "Unhandled FakeTensor Device Propagation for aten.add.Tensor, found two different devices "
    "cuda:0, cpu": "mixed",
    "Expected all tensors to be on the same device. addmm: expected 'mat1' to be CUDA, but got "
    "CPU": "mixed",
    "Tensor for argument #2 'mat1' is on CPU, but expected it to be on GPU (while checking "
    "arguments for addmm)": "mixed",
    "nms_kernel, /vision/csrc/ops/cuda/nms_kernel.cu:170, scores must be a CUDA tensor": "mixed",
    "module must have its parameters and buffers on device cuda:0 (device_ids[0]) but found one "
    "of them on device: cpu": "replicas",
    "CUDA error: invalid device ordinal": "ordinal",
    "indices should be either on cpu or on the same device as the indexed tensor (cpu)": "index",
    "indices should be either on the CPU or on the same device as the indexed tensor (cuda:0)": (
        "index"
    ),
    "can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy the tensor to "
    "host memory first.": "numpy",
    "Expected a 'cuda' device type for generator but found 'cpu'": "generator",
    "Expected a 'cuda:1' generator device but found 'cuda:0'": "generator",
    "Attempting to deserialize object on a CUDA device but torch.cuda.is_available() is False": (
        "load"
    ),
    "Attempting to deserialize object on CUDA device 2 but torch.cuda.device_count() is 1": "load",
    "'lengths' argument should be a 1D CPU int64 tensor, but got 1D cuda:0 Long tensor": "host",
    "legacy constructor expects device type: cpu but device type: cuda was passed": "host",
    "invalid gradient at index 0 - expected device cuda:0 but got cpu": "mixed",
}
OTHERS = [
    "mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)",
    "Input type (torch.cuda.HalfTensor) and weight type (torch.cuda.FloatTensor) should be the "
    "same",
    "expected scalar type Float but found Long",
    "CUDA out of memory. Tried to allocate 2.00 GiB",
    "Caught RuntimeError in DataLoader worker process 0.\nOriginal Traceback (most recent call "
    "last):\nRuntimeError: Expected all tensors to be on the same device",
    "",
]


@pytest.mark.parametrize(("text", "kind"), TEXTS.items())
def test_every_family_of_texts_is_known(text, kind):
    assert operation.read(RuntimeError(text)).kind == kind


@pytest.mark.parametrize("text", OTHERS)
def test_other_errors_are_not(text):
    assert operation.read(RuntimeError(text)) is None
    assert operation.read(KeyboardInterrupt(text)) is None
