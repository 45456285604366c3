"""The residual stream as outputs: every token's, once, of the `ort` executor's engines."""

from types import SimpleNamespace

import onnx
from onnx import TensorProto, helper

from spark_engine.check.engines.open_engines import expose_layers
from spark_engine.engine_file import EngineFile, EngineHeader
from spark_engine.interface import Precision
from spark_engine.tensors import DType, TensorSpec

MANIFEST = SimpleNamespace(
    dtypes=Precision(DType.F32, DType.F32, DType.F32), model=SimpleNamespace(hidden=8), ranks=1
)


def bucket(executor: str, *shown: str) -> EngineFile:
    """Two rows of 64 tokens; the residual stream after mixer and layer, some of it shown."""
    names = ["layers.0.mixed", "layers.0.mixed.y", "layers.0.out", "logits"]
    nodes = [helper.make_node("Identity", ["x"], [name], name=name) for name in names]
    values = {
        n: helper.make_tensor_value_info(n, TensorProto.FLOAT, (128, 8)) for n in ["x", *names]
    }
    outputs = [values[n] for n in (*shown, "logits")]
    graph = helper.make_graph(nodes, "g", [values["x"]], outputs)
    specs = tuple(TensorSpec(name, DType.F32, (128, 8)) for name in shown)
    header = EngineHeader(executor, "cpu", "prefill", 2, 64, (), (), specs, {})
    return EngineFile(header, helper.make_model(graph).SerializeToString())


def test_marks_are_outputs_of_all_tokens() -> None:
    made = expose_layers(bucket("ort"), MANIFEST)  # type: ignore[arg-type]
    specs = {s.name: s.shape for s in made.header.outputs}
    assert specs == {"layers.0.mixed": (128, 8), "layers.0.out": (128, 8)}
    shown = [v.name for v in onnx.load_from_string(made.payload).graph.output]
    assert shown == ["logits", "layers.0.mixed", "layers.0.out"]


def test_what_a_debug_engine_shows_is_shown_once() -> None:
    made = expose_layers(bucket("ort", "layers.0.out"), MANIFEST)  # type: ignore[arg-type]
    shown = [v.name for v in onnx.load_from_string(made.payload).graph.output]
    assert shown == ["layers.0.out", "logits", "layers.0.mixed"]
    assert [s.name for s in made.header.outputs] == ["layers.0.out", "layers.0.mixed"]


def test_another_executors_bytes_are_left_alone() -> None:
    file = bucket("native")
    assert expose_layers(file, MANIFEST) is file  # type: ignore[arg-type]
