"""Reads a graphsurgeon graph in the project's types: specs, ops, producers and consumers.

Knows the Op contract; knows no single op and no rule. Changes nothing and imports no ONNX: the
native backend reads graphs through this file alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from spark_engine.errors import GraphError
from spark_engine.interface import STATE_OUT
from spark_engine.op import DOMAIN, Attrs, Op
from spark_engine.tensors import DType, TensorSpec

if TYPE_CHECKING:
    import onnx_graphsurgeon as gs

Ops = Mapping[str, Op]


def spec_of(tensor: gs.Tensor) -> TensorSpec:
    """The tensor's name, dtype and shape. Raises GraphError if `DType` lacks its dtype."""
    try:
        dtype = DType.of(tensor.dtype)
    except (KeyError, TypeError) as error:
        raise GraphError(f"tensor {tensor.name} has no dtype of ours: {tensor.dtype}") from error
    if tensor.shape is None:
        raise GraphError(f"tensor {tensor.name} has no shape")
    return TensorSpec(tensor.name, dtype, tuple(tensor.shape))


def is_op(node: gs.Node, *names: str) -> bool:
    return node.domain == DOMAIN and node.op in names


def is_standard(node: gs.Node, *names: str) -> bool:
    return node.domain in (None, "") and node.op in names


def attrs_of(node: gs.Node, op: Op) -> Attrs:
    given = {**op.attrs, **node.attrs}
    return MappingProxyType({k: v for k, v in given.items() if v is not None})


def producer(tensor: gs.Tensor) -> gs.Node | None:
    """The node that writes the tensor, or None for inputs and weights."""
    return tensor.inputs[0] if tensor.inputs else None


def consumers(tensor: gs.Tensor) -> list[gs.Node]:
    """The nodes that read the tensor, each once, in graph order of attachment."""
    return list({id(n): n for n in tensor.outputs}.values())


def is_output(graph: gs.Graph, tensor: gs.Tensor) -> bool:
    return any(t is tensor for t in graph.outputs)


def read_alone(graph: gs.Graph, tensors: Iterable[gs.Tensor]) -> str | None:
    """Why a rule may not remove these values: one is an output, or has a reader outside the rule's
    match, and the fused node no longer stores it."""
    for tensor in tensors:
        if is_output(graph, tensor) or len(consumers(tensor)) > 1:
            return f"{tensor.name} is also read alone"
    return None


def infer(node: gs.Node, ops: Ops) -> tuple[TensorSpec, ...]:
    """Output specs of a node by its op's shape inference. Raises GraphError."""
    op = ops[node.op]
    return op.infer(attrs_of(node, op), tuple(map(spec_of, node.inputs)))


def aliases(node: gs.Node, ops: Ops) -> list[tuple[gs.Tensor, gs.Tensor]]:
    """(output, input) pairs of the node that may share memory."""
    if node.domain != DOMAIN or node.op not in ops:
        return []
    op = ops[node.op]
    pairs = op.aliases(attrs_of(node, op)).items()
    return [(node.outputs[o], node.inputs[i]) for o, i in sorted(pairs)]


def state_aliases(states: Iterable[str]) -> dict[str, str]:
    """`{"token_counts.out": "token_counts", …}`."""
    return {name + STATE_OUT: name for name in states}
