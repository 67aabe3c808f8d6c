"""Refuse to compile kernels for a virtual GPU, at once and with what to type instead.

Left alone, torch would follow the code, load its compiler, and then miss a Triton that would not
help. What computes on the CPU alone is compiled as ever.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from gpumagic.virtual.cuda_api import patch

_REFUSED = (
    'virtual GPUs have no compiled kernels; type torch.compile(..., backend="aot_eager"), which '
    "follows the code as the compiler does and runs its operators one by one"
)


def refuse_compiling(stack: ExitStack) -> None:
    """Let torch's own backend raise for a graph that has to do with a GPU, until `stack` closes."""
    backend: Any = getattr(torch, "_TorchCompileInductorWrapper", None)
    if backend is None:  # renamed: then torch's own error stands
        return
    compile_graph = backend.__call__

    def compile_on_the_cpu(self: Any, model: Any, inputs: Any, **options: Any) -> Any:
        __tracebackhide__ = True
        if any(tensor.device.type == "cuda" for tensor in _tensors(model, inputs)):
            raise NotImplementedError(_REFUSED)
        return compile_graph(self, model, inputs, **options)

    patch(stack, backend, __call__=compile_on_the_cpu)


def _tensors(model: Any, inputs: Any) -> Iterator[Tensor]:
    made = (node.meta.get("example_value") for node in model.graph.nodes)
    return (value for value in (*inputs, *made) if isinstance(value, Tensor))
