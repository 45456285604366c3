"""A graph seen through our types: attributes over defaults, consumers, and what has no type."""

from dataclasses import replace

import numpy as np
import onnx_graphsurgeon as gs
import pytest

from spark_engine.builder.graph.edit import add_node
from spark_engine.builder.graph.nodes import aliases, attrs_of, consumers, is_output, spec_of
from spark_engine.errors import GraphError
from tests.builder.toy import OPS, toy_graph


def test_what_a_node_says_goes_before_the_default_and_none_is_no_value() -> None:
    op = replace(OPS["double"], attrs={"tile": 1, "eps": None, "act": "none"})
    node = gs.Node("double", "n", {"tile": 64}, domain="spark")
    assert dict(attrs_of(node, op)) == {"tile": 64, "act": "none"}


def test_a_node_that_reads_twice_is_one_consumer() -> None:
    graph = toy_graph()
    x, h = graph.inputs[0], graph.nodes[0].outputs[0]
    graph.nodes[1].inputs = [h, h]
    assert consumers(h) == [graph.nodes[1]] and consumers(x) == [graph.nodes[0]]


def test_an_output_is_meant_by_identity() -> None:
    graph = toy_graph()
    (out,) = graph.outputs
    assert is_output(graph, out)
    assert not is_output(graph, gs.Variable(out.name, out.dtype, out.shape))


def test_aliases_are_those_of_our_ops() -> None:
    graph = toy_graph()
    double, add, last = graph.nodes
    assert aliases(double, OPS) == aliases(add, OPS) == []
    assert aliases(last, OPS) == [(graph.outputs[0], graph.inputs[2])]


def test_tensors_without_type_or_shape_and_wrong_counts_are_our_bug() -> None:
    for bad in (gs.Variable("t", None, [1]), gs.Variable("t", np.dtype(np.complex64), [1])):
        with pytest.raises(GraphError, match="t has no dtype of ours"):
            spec_of(bad)
    with pytest.raises(GraphError, match="t has no shape"):
        spec_of(gs.Variable("t", np.dtype(np.float32)))
    with pytest.raises(GraphError, match="double has 1 outputs, not 2"):
        add_node(OPS, "n", "double", [toy_graph().inputs[0]], ["a", "b"])
