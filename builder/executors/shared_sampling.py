"""Sampling where ranks share the vocabulary, as the CPU runs it: local part, all-gather, join.

A bucket of several ranks is cut at its collectives, so one node cannot wait for other ranks. Knows
the ops of `plugins/ops/sampling`; does not change the graph.
"""

from collections.abc import Iterable

import onnx_graphsurgeon as gs

from spark_engine.builder.graph.nodes import Ops, attrs_of, is_op, spec_of
from spark_engine.op import DOMAIN
from spark_engine.tensors import TensorSpec


def divided(nodes: Iterable[gs.Node], ops: Ops) -> list[gs.Node]:
    """The nodes, with `sample` replaced by the nodes that several ranks run."""
    made: list[gs.Node] = []
    for node in nodes:
        apart = is_op(node, "sample") and int(node.attrs.get("ranks", 0)) > 1
        made += _parts(node, ops) if apart else [node]
    return made


def _parts(node: gs.Node, ops: Ops) -> list[gs.Node]:
    """The nodes that replace `node`, over copies of its tensors: these keep their consumers."""
    inputs, outputs = ([_variable(spec_of(t)) for t in ts] for ts in (node.inputs, node.outputs))
    attrs = dict(attrs_of(node, ops["sample"]))
    ranks, (logits, *rest, _) = int(attrs["ranks"]), inputs
    rows, share = logits.shape
    specs = ops["sample_part"].infer(attrs, tuple(spec_of(t) for t in inputs))
    part, wanted = (_variable(spec, node.name) for spec in specs)
    parts = _variable(TensorSpec("parts", specs[0].dtype, (rows, ranks * part.shape[1])), node.name)
    whole = _variable(TensorSpec("whole", spec_of(logits).dtype, (rows, ranks * share)), node.name)

    def one(op: str, given: list[gs.Variable], to: list[gs.Variable], **more: object) -> gs.Node:
        return gs.Node(op, to[0].name, more, given, to, domain=DOMAIN)

    return [
        one("sample_part", inputs, [part, wanted], **attrs),
        one("gather_logits", [part], [parts], ranks=ranks),
        one("gather_rows", [logits, wanted], [whole], ranks=ranks),
        gs.Node(
            "sample_join", node.name, attrs, [parts, wanted, whole, *rest], outputs, domain=DOMAIN
        ),
    ]


def _variable(spec: TensorSpec, scope: str = "") -> gs.Variable:
    name = f"{scope}.{spec.name}" if scope else spec.name
    return gs.Variable(name, spec.dtype.numpy, list(spec.shape))
