"""Changes to a graphsurgeon graph: adds a tensor, adds a node, detaches a node.

Knows graphsurgeon and the Op contract; knows no single op and no rule.
"""

from typing import Any

import onnx_graphsurgeon as gs

from spark_engine.builder.graph.nodes import Ops, infer
from spark_engine.errors import GraphError
from spark_engine.op import DOMAIN
from spark_engine.tensors import TensorSpec


def variable(spec: TensorSpec) -> gs.Variable:
    return gs.Variable(spec.name, spec.dtype.numpy, list(spec.shape))


def add_node(
    ops: Ops,
    name: str,
    op: str,
    inputs: list[gs.Tensor],
    outputs: list[gs.Tensor | str],
    **attrs: Any,
) -> gs.Node:
    """A new node of the domain `spark`; an output given as a name gets its inferred spec."""
    node = gs.Node(op, name, attrs, inputs, domain=DOMAIN)
    specs = infer(node, ops)
    if len(specs) != len(outputs):
        raise GraphError(f"{op} has {len(specs)} outputs, not {len(outputs)}")
    for spec, out in zip(specs, outputs, strict=True):
        named = isinstance(out, str)
        node.outputs.append(variable(TensorSpec(out, spec.dtype, spec.shape)) if named else out)
    return node


def detach(node: gs.Node) -> None:
    """Detaches a node, so that the next cleanup removes it."""
    node.inputs.clear()
    node.outputs.clear()
