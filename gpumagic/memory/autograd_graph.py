"""Read what an autograd graph holds: its nodes, the leaves that it ends in, what it saved.

Nothing is unpacked: hooks of saved tensors are the user's code, and what they packed is shown as it
is. What a backward pass on another thread may free at this moment is not read at all.
"""

import sys
import threading
import types
from collections import deque
from collections.abc import Iterator
from traceback import walk_stack
from typing import Any

from gpumagic.usercode.values import bases_of, class_name, members_of, torch_here

Edge = tuple[Any, str]
GRAPH = ".grad_fn"
"""The step from a tensor into its graph."""
# So many nodes are gone through for one leaf, at most.
_NODES = 500
_RAW = "_raw_saved_"


def is_node(kind: type) -> bool:
    """Whether objects of a class are nodes of autograd graphs."""
    found = (members_of(base).get("next_functions") for base in bases_of(kind))
    return any(type(member) is types.GetSetDescriptorType for member in found)


def edges(node: Any) -> list[Edge]:
    """List what a node of a graph holds, each with the step that reaches it."""
    found: list[Edge] = []
    try:
        for function, _ in node.next_functions:
            if function is not None:
                found.append((function, f": {class_name(type(function))}"))
        found += [(variable, ".variable") for variable in _leaf(node)]
        found += _saved(node)
    except RuntimeError:  # a backward pass has freed it
        pass
    return found


def nearest_leaf(node: Any) -> Any:
    """Return the leaf whose gradient follows a node's soonest: for a layer, its parameter."""
    waiting, seen = deque([node]), {id(node): node}
    while waiting and len(seen) < _NODES:
        node = waiting.popleft()
        for leaf in _leaf(node):
            return leaf
        for function, _ in node.next_functions:
            if function is not None and id(function) not in seen:
                seen[id(function)] = function
                waiting.append(function)
    return None


def _leaf(node: Any) -> Iterator[Any]:
    if type(node).__name__ == "AccumulateGrad":
        yield node.variable


def _saved(node: Any) -> Iterator[Edge]:
    for name in _raw_names(type(node)):
        try:
            raw = getattr(node, name)
            parts = enumerate(raw) if type(raw) in (tuple, list) else [("", raw)]
            for n, part in parts:
                # An older torch tells only by unpacking.
                data = getattr(part, "data", None)
                if data is not None:
                    yield data, f"._saved_{name[len(_RAW) :]}" + (f"[{n}]" if n != "" else "")
        except RuntimeError:  # freed
            continue


def _raw_names(kind: type) -> list[str]:
    names = [name for base in bases_of(kind) for name in members_of(base)]
    return [name for name in names if name.startswith(_RAW)]


def can_be_read() -> bool:
    """Whether no other thread runs a backward pass, which frees the tensors that it has used."""
    if (torch := torch_here()) is None:
        return True
    backward = torch.autograd.graph._engine_run_backward.__code__
    innermost = sys._current_frames()
    del innermost[threading.get_ident()]  # a frame that holds itself stays until it is collected
    return not any(
        frame.f_code is backward for each in innermost.values() for frame, _ in walk_stack(each)
    )
