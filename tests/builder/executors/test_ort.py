"""Compiling a graph for onnxruntime: functions, weights by offset, the header."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from spark_engine.builder.executors import ort
from spark_engine.builder.graph.edit import variable
from spark_engine.errors import GraphError
from spark_engine.tensors import DType, TensorSpec
from spark_engine.weights_file import plan_weights
from tests.builder.toy import OPS, toy_graph
from tests.spark_engine.written_weights import write_weights

DIMS = {"rows": 2}
FOLDER = "session.model_external_initializers_file_folder_path"


def compile_toy() -> onnx.ModelProto:
    layout = plan_weights([TensorSpec("w", DType.F32, (2, 3))])
    return onnx.load_from_string(ort.encode(toy_graph(), DIMS, layout.entries, OPS))


def test_weights_are_read_by_offset(tmp_path: Path) -> None:
    specs = [TensorSpec("other", DType.U8, (1,)), TensorSpec("w", DType.F32, (2, 3))]
    layout = plan_weights(specs)
    w = np.arange(6, dtype=np.float32).reshape(2, 3)
    write_weights(tmp_path / "weights.safetensors", layout, [np.zeros(1, np.uint8), w])
    payload = ort.encode(toy_graph(), DIMS, layout.entries, OPS)
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry(FOLDER, str(tmp_path))
    session = onnxruntime.InferenceSession(payload, options, ["CPUExecutionProvider"])
    x, total = np.ones((2, 3), np.float32), np.full((2, 3), 10, np.float32)
    (out,) = session.run(None, {"x": x, "total": total})
    assert np.array_equal(out, 2 * x + w + total)


def test_shapes_are_bound_and_names_kept() -> None:
    model = compile_toy()
    dims = [d.dim_value for d in model.graph.input[0].type.tensor_type.shape.dim]
    assert dims == [2, 3] and model.opset_import[0].version == 23
    assert [v.name for v in model.graph.input] == ["x", "total"]
    assert [v.name for v in model.graph.output] == ["total.out"]
    assert [i.name for i in model.graph.initializer] == ["w"]


def test_equal_bodies_are_one_function() -> None:
    graph = toy_graph()
    twin = variable(TensorSpec("twin", DType.F32, ("rows", 3)))
    graph.nodes.insert(
        1, type(graph.nodes[0])("double", "twin", {}, [graph.inputs[0]], [twin], domain="spark")
    )
    graph.outputs.append(twin)
    entries = plan_weights([TensorSpec("w", DType.F32, (2, 3))]).entries
    model = onnx.load_from_string(ort.encode(graph, DIMS, entries, OPS))
    names = [f.name for f in model.functions]
    assert len(names) == len(set(names)) == 2
    assert [n.op_type for n in model.graph.node].count(names[0]) == 2


def test_attributes_and_shapes_tell_bodies_apart() -> None:
    text = '<domain: "spark", opset_import: ["" : 23]> f (x) => (y) {y = Mul(x, x)}'
    body = lambda attrs, specs: text.replace("Mul", attrs["by"])  # noqa: E731
    functions = ort.Functions({**OPS, "double": replace(OPS["double"], body=body)})
    specs = [(TensorSpec("x", DType.F32, (n,)),) for n in (2, 3)]
    names = [functions.name("double", {"by": by}, s) for by in ("Mul", "Add") for s in specs]
    assert names[0] == names[1] != names[2] == names[3], "named by the body's text, not by the op"
    assert sorted(functions.protos) == sorted({names[0], names[2]})


def test_a_body_that_does_not_parse_is_our_bug() -> None:
    ops = {**OPS, "double": replace(OPS["double"], body=lambda attrs, specs: "nonsense")}
    with pytest.raises(GraphError, match="body of double_.* does not parse"):
        ort.encode(toy_graph(), DIMS, {}, ops)


def test_a_graph_that_is_not_onnx_is_our_bug() -> None:
    graph = toy_graph()
    graph.nodes[1].op = "NoSuchOperator"
    with pytest.raises(GraphError, match="not valid ONNX"):
        ort.encode(graph, DIMS, {}, OPS)
