"""Open what one name holds: layer by layer of a module, item by item of anything else.

A module's layers have what optimizers keep for their parameters too, and what autograd saved of
what they computed, though others hold it.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from torch import Tensor, nn

from gpumagic.display.shown import Shown
from gpumagic.errors import GpuError
from gpumagic.memory.find_holders import FoundStorage, find
from gpumagic.memory.made_in import MadeIn
from gpumagic.memory.memory_report import Made

STATE, SAVED = "optimizer state", "saved for backward"
_OWN = {"parameter", "buffer", "gradient", STATE, SAVED}
"""Kinds that are columns of what has them; others have a row of their own."""
_STEP = re.compile(r"\.\w+|\[(?:'[^']*'|\"[^\"]*\"|[^\]'\"])*\]")
_NAMED = re.compile(rf"[^\W\d]\w*(?:{_STEP.pattern})*")


@dataclass(frozen=True)
class MemoryBranch:
    """A layer, or an item, with all below it.

    Attributes
    ----------
    path : str
        What one would type: ``"net.encoder[0]"``.
    depth : int
        0 for the whole.
    nbytes : dict of str to int
        Bytes by kind, those of a storage that stands elsewhere in the tree left out.
    alike : int
        How many that follow each other are like this one, which counts them all.
    """

    path: str
    depth: int
    nbytes: dict[str, int]
    alike: int = 1

    @property
    def total(self) -> int:
        """Bytes of all kinds."""
        return sum(self.nbytes.values())


@dataclass(frozen=True, repr=False)
class MemoryTree(Shown):
    """What one name holds on GPUs.

    Attributes
    ----------
    name : str
    devices : tuple of str
    branches : tuple of MemoryBranch
        Each before those below it.
    made : Made or None
        Where most of it was made.
    aliases : tuple of str
        Who else holds some of it.
    """

    name: str
    devices: tuple[str, ...]
    branches: tuple[MemoryBranch, ...]
    made: Made | None = None
    aliases: tuple[str, ...] = ()


@dataclass
class _Node:
    path: str
    own: Counter[str] = field(default_factory=Counter)
    below: dict[str, "_Node"] = field(default_factory=dict)

    def at(self, steps: Iterable[str]) -> "_Node":
        node = self
        for step in steps:
            node = node.below.setdefault(step, _Node(node.path + step))
        return node

    def sum(self) -> Counter[str]:
        return sum((node.sum() for node in self.below.values()), self.own.copy())

    def shape(self) -> tuple[Any, ...]:
        """Equal for layers that are alike."""
        return tuple(sorted(self.own.items())), tuple(n.shape() for n in self.below.values())


def tree(name: str, namespace: Mapping[str, Any]) -> MemoryTree:
    """What a name, with attributes and items if need be, holds on GPUs.

    Raises
    ------
    GpuError
        There is no such variable, or nothing on a GPU in it.
    """
    value, found = _value(name, namespace), find(namespace)
    own = {storage: _within(name, storage) for storage in found}
    root, devices = _Node(name), dict[str, None]()
    layers = None
    if isinstance(value, nn.Module):
        layers = _Layers(value, {(s.device, s.address): path for s, (path, _) in own.items()})
        for path in layers.paths:  # in the order of the module
            root.at(_steps(name, path, "parameter"))
    made, made_in, aliases = Counter[Made | None](), MadeIn(), dict[str, None]()
    for storage, (path, kind) in own.items():
        if path:
            made[made_in.of(storage.device, storage.address)] += storage.nbytes
            aliases |= {p.root: None for p in storage.paths if not name.startswith(p.root)}
        if layers is not None and not path:
            path, kind = layers.owner(storage)
        if path:
            devices[storage.device] = None
            root.at(_steps(name, path, kind)).own[kind] += storage.nbytes
    if not devices:
        raise GpuError(f"{name} holds nothing on a GPU")
    where = made.most_common(1)[0][0] if made else None
    return MemoryTree(name, tuple(sorted(devices)), tuple(_branches(root)), where, tuple(aliases))


def _steps(name: str, path: str, kind: str) -> list[str]:
    """From the whole to what has the row of a storage."""
    steps = _STEP.findall(path[len(name) :])
    if kind == "gradient" and steps[-1:] == [".grad"]:
        del steps[-1:]
    return steps[:-1] if kind in _OWN else steps


def _value(name: str, namespace: Mapping[str, Any]) -> Any:
    if not _NAMED.fullmatch(name):
        raise GpuError(f"{name} is no name of a variable or of what is in one, as net or data[0]")
    try:
        return eval(name, dict(namespace))
    except Exception as error:  # noqa: BLE001  it is the user's code that runs
        raise GpuError(f"{name} raises {type(error).__name__}: {error}") from None


def _within(name: str, storage: FoundStorage) -> tuple[str, str]:
    """The first path to a storage that begins with a name, and its kind there; or nothing."""
    for found in storage.paths:
        if found.path == name or found.path.startswith((f"{name}.", f"{name}[")):
            return found.path, found.kind
    return "", ""


class _Layers:
    """Finds the layer to which a tensor belongs that another one than the module holds."""

    def __init__(self, module: nn.Module, paths: Mapping[tuple[str, int], str]) -> None:
        # Torch's own method: a module may have another one of this name.
        found = (paths.get(_key(p)) for p in nn.Module.parameters(module))
        self.paths = [path for path in found if path]

    def owner(self, storage: FoundStorage) -> tuple[str, str]:
        """The path of the parameter, and what the storage is to it; or nothing."""
        every = ((found.beside, found.kind) for found in storage.paths)
        return next((each for each in every if each[0] in self.paths), ("", ""))


def _key(tensor: Tensor) -> tuple[str, int]:
    return str(tensor.device), tensor.untyped_storage().data_ptr()


def _branches(
    node: _Node, depth: int = 0, alike: int = 1, times: int = 1
) -> Iterator[MemoryBranch]:
    nbytes = {kind: times * count for kind, count in node.sum().items()}
    yield MemoryBranch(node.path, depth, nbytes, alike)
    for _, group in groupby(node.below.values(), key=_Node.shape):
        first, *others = group
        count = 1 + len(others)
        yield from _branches(first, depth + 1, count, times * count)
