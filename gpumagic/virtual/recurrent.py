"""Run LSTM, GRU and RNN on virtual GPUs by the CPU's own fused operators.

cuDNN does the same: one operator for all steps, whose gradient cannot be differentiated again.
A dry run's tensors without data get the same results' shapes and take the same memory. Tensors of
other classes or types, and those under vmap, take torch's decomposition into single operators,
which is 3 to 10 times slower.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from gpumagic.virtual.flip import adopt, flip_plain
from gpumagic.virtual.virtual_gpus import VirtualGpu, gpu_of

C: Any = torch._C
_FUSED = (torch.float32, torch.float64)
_PLAIN = {Tensor, nn.Parameter}
# Numbers kept for the backward pass, by step, row and hidden unit, as torch's own CUDA code keeps
# them without cuDNN (ATen/native/cuda/RNN.cu): gates, cell and output; cuDNN does not say its own.
_KEPT = {"lstm": 6, "gru": 6, "rnn_tanh": 1, "rnn_relu": 1}


def recurrent(op: Any) -> Callable[..., Any]:
    """Return the kernel of an operator, with cuDNN's check of devices."""
    names = [argument.name for argument in op._schema.arguments]

    def kernel(*args: Any) -> Any:
        given = dict(zip(names, args))  # noqa: B905 (defaults may be left out)
        device = args[0].device
        hidden = [given["hx"]] if isinstance(given["hx"], Tensor) else given["hx"]
        for kind, tensors in (("hidden", hidden), ("parameter", given["params"])):
            for tensor in tensors:
                if tensor.device != device:
                    raise RuntimeError(
                        f"Input and {kind} tensors are not at the same device, found input tensor "
                        f"at {device} and {kind} tensor at {tensor.device}"
                    )
        if torch.is_autocast_enabled("cuda"):
            given = tree_map(_autocast, given)
        return _layers(op, given)

    return kernel


def _autocast(x: Any) -> Any:
    floats = isinstance(x, Tensor) and x.is_floating_point() and x.dtype is not torch.double
    return x.to(torch.get_autocast_dtype("cuda")) if floats else x


def _layers(op: Any, given: dict[str, Any]) -> Any:
    """Run layer by layer if there is dropout between: a virtual GPU draws its own numbers."""
    count, dropout = given["num_layers"], given["dropout"]
    if not (given["train"] and dropout):
        return _all_steps(op, given)
    first = next(iter(given))
    each = len(given["params"]) // count
    single = isinstance(given["hx"], Tensor)
    hidden = [given["hx"]] if single else given["hx"]
    finals = []
    for n in range(count):
        if n:
            given[first] = torch.dropout(given[first], dropout, True)
        parts = [h.chunk(count)[n] for h in hidden]
        given |= {"hx": parts[0] if single else parts, "num_layers": 1, "dropout": 0.0}
        layer = {**given, "params": given["params"][n * each : (n + 1) * each]}
        given[first], *final = _all_steps(op, layer)
        finals.append(final)
    return given[first], *(torch.cat(final) for final in zip(*finals, strict=True))


def _all_steps(op: Any, given: dict[str, Any]) -> Any:
    leaves, shape = tree_flatten(list(given.values()))
    tensors = [x for x in leaves if isinstance(x, Tensor)]
    supported = all(x.dtype in _FUSED or not x.is_cuda for x in tensors)
    # torch's types have no `apply`.
    fused: Any = _Fused
    shapes: Any = _Shapes
    if supported and any(isinstance(x, FakeTensor) for x in tensors):
        return shapes.apply(op._schema.name.partition("::")[2], given, shape, *leaves)
    plain = supported and all(type(x) in _PLAIN for x in tensors)
    if not plain or C._functorch.peek_interpreter_stack() or C._len_torch_dispatch_stack():
        return op.decompose(*given.values())
    return fused.apply(op, shape, *leaves)


class _Fused(torch.autograd.Function):
    """Run the CPU's operator on the same bytes; its graph is freed with the saved tensors."""

    @staticmethod
    def forward(ctx: Any, op: Any, shape: Any, *leaves: Any) -> Any:
        """Return the results, on the GPU of the first tensor."""
        gpu = gpu_of(leaves[0].device)
        low = [_lowered(x) for x in leaves]
        with torch.set_grad_enabled(any(ctx.needs_input_grad)):
            found = op(*tree_unflatten(low, shape))
        if any(ctx.needs_input_grad):
            reserve = _reserve(op._schema.name.partition("::")[2], found[0], leaves[0].device)
            # With the inputs, so that torch sees if one of them was changed in place since.
            ctx.save_for_backward(reserve, *(x for x in leaves if isinstance(x, Tensor)))
            ctx.graph = {"low": low, "found": found}
            weakref.finalize(reserve, ctx.graph.clear).atexit = False
        return tuple(_raised([x.detach() for x in found], gpu))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Return the gradients of the inputs."""
        reserve, *_ = ctx.saved_tensors  # torch's own error in a second pass
        gpu = gpu_of(reserve.device)
        low, found = ctx.graph["low"], ctx.graph["found"]
        wanted = [x for x in low if isinstance(x, Tensor) and x.requires_grad]
        given = [flip_plain(x.detach()) for x in gradients]
        made = iter(torch.autograd.grad(found, wanted, given, retain_graph=True, allow_unused=True))
        results = [next(made) if isinstance(x, Tensor) and x.requires_grad else None for x in low]
        return None, None, *_raised(results, gpu)


class _Shapes(torch.autograd.Function):
    """Do the same for a dry run's tensors without data: what it allocates and keeps."""

    @staticmethod
    def forward(ctx: Any, name: str, given: dict[str, Any], shape: Any, *leaves: Any) -> Any:
        """Return tensors of the results' shapes."""
        x, hidden = leaves[0], given["hx"]
        hidden = [hidden] if isinstance(hidden, Tensor) else [*hidden]
        width = hidden[0].shape[-1] * (2 if given["bidirectional"] else 1)
        steps = (*x.shape[:-1], width)
        if given.get("batch_first"):
            output = x.new_empty((steps[1], steps[0], width)).transpose(0, 1)
        else:
            output = x.new_empty(steps)
        if any(ctx.needs_input_grad):
            tensors = (leaf if isinstance(leaf, Tensor) else None for leaf in leaves)
            ctx.save_for_backward(_reserve(name, output, x.device), *tensors)
        return output, *(torch.empty_like(h) for h in hidden)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Return tensors of the gradients' shapes."""
        _, *given = ctx.saved_tensors
        wanted = zip(given, ctx.needs_input_grad[3:], strict=True)
        return None, None, None, *(torch.empty_like(x) if needs else None for x, needs in wanted)


def _reserve(name: str, output: Tensor, device: torch.device) -> Tensor:
    """Return the memory that is kept for the backward pass."""
    return torch.empty(_KEPT[name] * output.numel(), dtype=output.dtype, device=device)


def _lowered(x: Any) -> Any:
    if not isinstance(x, Tensor) or not x.is_cuda:
        return x
    return flip_plain(x.detach()).requires_grad_(x.requires_grad)


def _raised(found: list[Any], gpu: VirtualGpu) -> list[Any]:
    """Return the CPU's results on the GPU, each with own bytes: both biases get one gradient."""
    used, raised = set(), []
    for x in found:
        if x is not None:
            storage = x.untyped_storage()
            if storage.data_ptr() in used or storage.nbytes() != x.nbytes:
                x = x.clone(memory_format=torch.contiguous_format)
            used.add(x.untyped_storage().data_ptr())
        raised.append(x if x is None else adopt(x, gpu, 3))
    return raised
