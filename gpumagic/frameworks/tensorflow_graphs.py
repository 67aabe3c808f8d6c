"""Find the copies in a `tf.function` by TensorFlow's partition of it, a graph for each device.

TensorFlow puts send and receive operations between the graphs. So the copies of each call are known
once it is called with operands on these devices. A loop in it counts once, and bytes are unknown if
a shape is not known before it runs. TensorFlow's private parts: the graphs that
`context().enable_graph_collection` keeps. `tf.summary.trace_on` uses them too: while that is on,
only operands on another device are counted.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import tensorflow as tf
from tensorflow.python.eager import context
from tensorflow.python.framework.function_def_to_graph import function_def_to_graph
from tensorflow.python.ops import summary_ops_v2


class Sent(NamedTuple):
    """Record one copy in each call, between devices by TensorFlow's names."""

    source: str
    destination: str
    dtype: tf.DType
    nbytes: int | None  # None where its shape is not known before it runs
    batch: bool = False  # of a pipeline


class Graphs:
    """Keep the copies of all called functions, also from earlier cells."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, ...], list[Sent]] = {}
        self._collecting = 0

    def start(self) -> None:
        """Have TensorFlow keep the graphs of functions."""
        self._collecting += 1
        if not _traced():
            context.context().enable_graph_collection()

    def stop(self) -> None:
        """Stop keeping them, unless the user's own tracing needs them."""
        self._collecting -= 1
        if not self._collecting and not _traced():
            context.context().disable_graph_collection()

    def copies(self, function: str, device: str, operands: Sequence[Any]) -> list[Sent]:
        """Return the copies of one call of a function that ran on `device`."""
        key = (function, device, *(operand.backing_device for operand in operands))
        if key not in self._known:
            parts = [] if _traced() else context.context().export_run_metadata().partition_graphs
            if not parts:  # it was called before anything counted
                return list(_elsewhere(device, operands))
            self._known[key] = list(_sent(function, parts, operands))
        return self._known[key]


def _traced() -> bool:
    return getattr(summary_ops_v2, "_current_trace_context", None) is not None


def _elsewhere(device: str, operands: Sequence[Any]) -> Iterator[Sent]:
    for operand in operands:
        if operand.backing_device != device and operand.dtype not in (tf.resource, tf.variant):
            nbytes = _bytes(operand.shape, operand.dtype)
            yield Sent(operand.backing_device, device, operand.dtype, nbytes)


def _sent(function: str, parts: Sequence[Any], operands: Sequence[Any]) -> Iterator[Sent]:
    nodes = {node.name: node for part in parts for node in part.node}
    received = {_edge(node): node for node in nodes.values() if node.op.endswith("Recv")}
    shape_of = _shapes(function, nodes, operands)
    for node in nodes.values():
        if node.op not in ("_Send", "_HostSend"):
            continue
        # What a GPU's operation has in host memory is on the CPU.
        source, destination = (
            _memory(node, "send"),
            _memory(received.get(_edge(node), node), "recv"),
        )
        if source != destination:
            dtype = tf.dtypes.as_dtype(node.attr["T"].type)
            made = nodes.get(node.input[0].partition(":")[0])
            batch = made is not None and made.op in _MAKING
            nbytes = _bytes(shape_of(node.input[0]), dtype)
            yield Sent(source, destination, dtype, nbytes, batch)


def _edge(node: Any) -> tuple[bytes, bytes]:
    return node.attr["tensor_name"].s, node.attr["recv_device"].s


def _memory(node: Any, end: str) -> str:
    device: str = node.attr[f"{end}_device"].s.decode()
    task = device.partition("/device:")[0]
    return f"{task}/device:CPU:0" if node.op.startswith("_Host") else device


def _shapes(
    function: str, nodes: dict[str, Any], operands: Sequence[Any]
) -> Callable[[str], tf.TensorShape]:
    """Return a function that gives the shape of a result by its name in the graph."""
    definition = context.context().get_function_def(function)
    graph = function_def_to_graph(definition, input_shapes=[each.shape for each in operands])
    made = {operation.name: operation.outputs for operation in graph.get_operations()}

    def shape_of(name: str) -> tf.TensorShape:
        name, _, port = name.partition(":")
        node = nodes.get(name)
        if node is not None and node.op == "_Arg":
            return operands[node.attr["index"].i].shape
        if node is not None and node.op == "ReadVariableOp":
            return _of_variable(nodes.get(node.input[0].partition(":")[0]), operands)
        if node is not None and node.op == "Const":
            return tf.TensorShape(node.attr["value"].tensor.tensor_shape)
        outputs = made.get(name, ())
        return outputs[int(port or 0)].shape if len(outputs) > int(port or 0) else _UNKNOWN

    return shape_of


_MAKING = {"IteratorGetNext", "IteratorGetNextAsOptional", "OptionalGetValue"}
_UNKNOWN = tf.TensorShape(None)


def _of_variable(node: Any, operands: Sequence[Any]) -> tf.TensorShape:
    handle = operands[node.attr["index"].i] if node is not None and node.op == "_Arg" else None
    held = getattr(handle, "_handle_data", None)
    return tf.TensorShape(held.shape_and_type[0].shape) if held is not None else _UNKNOWN


def _bytes(shape: tf.TensorShape, dtype: tf.DType) -> int | None:
    elements = shape.num_elements()
    return None if elements is None else int(elements * dtype.size)
