"""Find every storage on a GPU, with its bytes and the paths by which Python reaches it.

Each storage is found once, and counted as torch's allocator counts it: in blocks of 512 bytes.
What is returned are names and numbers: it keeps nothing alive.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from gpumagic.moving.find_tensors import TensorFinder

BLOCK = 512
"""Bytes: torch's allocator for GPUs rounds every request up to a multiple of this."""


@dataclass(frozen=True)
class FoundPath:
    """A way to a storage: ``net.fc1.weight``, what it is, and its first part, the holder."""

    path: str
    kind: str
    root: str


@dataclass(frozen=True)
class FoundStorage:
    """A piece of memory on a GPU, its bytes, and the paths to it: the first one counts."""

    device: str
    address: int  # as in torch.cuda.memory_snapshot()
    nbytes: int
    paths: tuple[FoundPath, ...]


def find(namespace: Mapping[str, Any]) -> list[FoundStorage]:
    """Every storage on a GPU that something in this process holds, the largest first."""
    finder = TensorFinder(str(namespace.get("__name__", "__main__")))
    finder.variables(namespace.items())
    sizes: dict[tuple[str, int], int] = {}
    paths: dict[tuple[str, int], list[FoundPath]] = {}
    for found in finder.tensors:
        if not found.tensor.is_cuda:
            continue
        storage = found.tensor.untyped_storage()
        key = (str(found.tensor.device), storage.data_ptr())
        sizes[key] = -(-storage.nbytes() // BLOCK) * BLOCK
        paths.setdefault(key, []).append(
            FoundPath(found.path, _kind(found.tensor, found.path), found.root)
        )
    every = [FoundStorage(*key, nbytes, tuple(paths[key])) for key, nbytes in sizes.items()]
    return sorted(every, key=lambda storage: -storage.nbytes)


def _kind(tensor: Tensor, path: str) -> str:
    if path.endswith(".grad"):
        return "gradient"
    return "parameter" if tensor.is_leaf and tensor.requires_grad else "tensor"
