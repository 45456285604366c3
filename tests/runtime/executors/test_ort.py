"""The onnxruntime executor on small models: weights, aliases, and refusals."""

import logging
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper, parser

from spark_engine.engine_file import EngineHeader
from spark_engine.errors import EngineError, ExecutorError
from spark_engine.interface import Limits, outputs, steps, tables
from spark_engine.runtime.executors.memory import allocate
from spark_engine.runtime.executors.ort import OrtExecutor
from spark_engine.tensors import Array, DType, TensorSpec

LIMITS = Limits(max_seqs=3, max_context=64, pages=2, vocab=5, bias_slots=2, top_logprobs=2)
ROWS = 2
DIMS = {"rows": ROWS, "tokens": ROWS}
INPUTS = tuple(s.bind(DIMS) for s in steps()) + tables(LIMITS)
STATE = TensorSpec("memory", DType.F32, (4, 5))
LOGITS = next(s for s in outputs(LIMITS) if s.name == "logits").bind(DIMS)
HEADER = EngineHeader(
    *("ort", "cpu", "decode", ROWS, 1),
    inputs=INPUTS,
    states=(STATE,),
    outputs=(LOGITS,),
    aliases={"memory.out": "memory"},
)
ORDERLY = """{
  at = Constant<value_ints: ints = [1]>()
  long = Cast<to: int = 7>(slots)
  where = Unsqueeze(long, at)
  old = Gather(memory, slots)
  new = Add(old, weight)
  logits = Identity(new)
  "memory.out" = ScatterND(memory, where, new)
}"""
# `logits` reads the old state after the new one was written: wrong if they share memory.
HASTY = """{
  at = Constant<value_ints: ints = [1]>()
  long = Cast<to: int = 7>(slots)
  where = Unsqueeze(long, at)
  old = Gather(memory, slots)
  new = Add(old, weight)
  "memory.out" = ScatterND(memory, where, new)
  sum = ReduceSum<keepdims: int = 1>("memory.out")
  none = Sub(sum, sum)
  late = Add(memory, none)
  logits = Gather(late, slots)
}"""

# Reverses the state's rows: wrong if written in place, though no output shows it.
TURNED = """{
  shape = Constant<value_ints: ints = [2, 5]>()
  logits = Expand(weight, shape)
  back = Constant<value_ints: ints = [3, 2, 1, 0]>()
  "memory.out" = Gather(memory, back)
}"""


def model(body: str, location: str = "weights.safetensors") -> bytes:
    """A bucket with `weight` [5] at byte 64 of the file `location`."""
    values = [helper.make_tensor_value_info(s.name, s.dtype.onnx, s.dims) for s in (*INPUTS, STATE)]
    results = [helper.make_tensor_value_info(LOGITS.name, LOGITS.dtype.onnx, LOGITS.dims)]
    results.append(helper.make_tensor_value_info("memory.out", STATE.dtype.onnx, STATE.dims))
    text = '<ir_version: 10, opset_import: ["" : 23]> g (float x) => (float y) ' + body
    nodes = parser.parse_model(text.replace('"memory.out"', "memory_out")).graph.node
    for node in nodes:
        node.input[:] = [n.replace("memory_out", "memory.out") for n in node.input]
        node.output[:] = [n.replace("memory_out", "memory.out") for n in node.output]
    weight = TensorProto(name="weight", data_type=1, dims=[5], data_location=TensorProto.EXTERNAL)
    for key, value in (("location", location), ("offset", "64"), ("length", "20")):
        weight.external_data.add(key=key, value=value)
    graph = helper.make_graph(list(nodes), "g", values, results, [weight])
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)
    return bytes(made.SerializeToString())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    data = bytes(64) + np.arange(1, 6, dtype=np.float32).tobytes()
    (tmp_path / "weights.safetensors").write_bytes(data)
    return tmp_path


def buffers() -> dict[str, Array]:
    made = {s.name: allocate(s) for s in (*INPUTS, STATE, LOGITS)}
    made["slots"][:] = [2, 0]
    made["memory"][:] = np.arange(20).reshape(4, 5)
    return made


def test_states_are_updated_in_place_and_weights_come_from_the_folder(folder: Path) -> None:
    executor, b = OrtExecutor(HEADER, model(ORDERLY), folder, 1), buffers()
    assert executor.in_place
    for times in (1, 2, 3):
        executor.run(b)
        expected = np.arange(20, dtype=np.float32).reshape(4, 5)
        expected[[2, 0]] += times * np.arange(1, 6)
        assert (b["memory"] == expected).all()
        assert (b["logits"] == expected[[2, 0]]).all()


@pytest.mark.parametrize(
    "location",
    ["../beside", "folder/../../beside", "link", "linked/beside", "/etc/passwd", "/absolute"],
)
def test_weights_outside_the_folder_are_not_read(location: str, folder: Path) -> None:
    """onnxruntime itself refuses them from the oldest supported version on; 1.23 reads them."""
    inner = folder / "engine"
    inner.mkdir()
    for path in (folder / "beside", inner / "weights.safetensors"):
        path.write_bytes((folder / "weights.safetensors").read_bytes())
    (inner / "link").symlink_to(folder / "beside")
    (inner / "linked").symlink_to(folder)
    (inner / "folder").mkdir()
    OrtExecutor(HEADER, model(ORDERLY), inner, 1).close()
    place = str(folder / "beside") if location == "/absolute" else location
    with pytest.raises(EngineError, match="refuses"):
        OrtExecutor(HEADER, model(ORDERLY, place), inner, 1)


def test_a_model_that_does_not_bear_aliases_is_found_out_and_still_right(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        executor = OrtExecutor(HEADER, model(HASTY), folder, 1)
    assert not executor.in_place and "cannot update states in place" in caplog.text
    b = buffers()
    before = b["memory"].copy()
    executor.run(b)
    assert (b["logits"] == before[[2, 0]]).all()
    assert (b["memory"][[2, 0]] == before[[2, 0]] + np.arange(1, 6)).all()
    assert (b["memory"][[1, 3]] == before[[1, 3]]).all()


def test_a_state_that_does_not_bear_its_alias_is_found_out_by_itself(folder: Path) -> None:
    executor, b = OrtExecutor(HEADER, model(TURNED), folder, 1), buffers()
    assert not executor.in_place
    before = b["memory"].copy()
    executor.run(b)
    assert (b["memory"] == before[::-1]).all()


def test_launch_has_run_when_it_returns(folder: Path) -> None:
    executor, b = OrtExecutor(HEADER, model(ORDERLY), folder, 1), buffers()
    wait = executor.launch(b)
    assert b["logits"][0, 0] == 11
    wait()


def test_many_sets_of_buffers_are_served_and_not_kept(folder: Path) -> None:
    executor = OrtExecutor(HEADER, model(ORDERLY), folder, 1)
    for i in range(20):
        b = buffers()
        b["memory"] += i
        executor.run(b)
        assert b["logits"][0, 0] == 11 + i
    assert len(executor._bound._known) <= 4


@pytest.mark.parametrize("change", ["missing", "shape", "dtype", "strided"])
def test_a_wrong_buffer_is_named(folder: Path, change: str) -> None:
    executor, b = OrtExecutor(HEADER, model(ORDERLY), folder, 1), buffers()
    wrong = {
        "shape": np.zeros((5, 5), np.float32),
        "dtype": np.zeros((4, 5), np.float64),
        "strided": np.zeros((4, 10), np.float32)[:, ::2],
    }
    b.pop("memory")
    if change != "missing":
        b["memory"] = wrong[change]
    with pytest.raises(ExecutorError, match="buffer memory"):
        executor.run(b)


def test_bytes_that_are_no_model_are_refused_with_the_remedy(folder: Path) -> None:
    with pytest.raises(EngineError, match="decode 2 bucket.*rebuild"):
        OrtExecutor(HEADER, b"not a model", folder, 1)


def test_a_closed_executor_does_not_run(folder: Path) -> None:
    executor = OrtExecutor(HEADER, model(ORDERLY), folder, 1)
    executor.close()
    executor.close()
    with pytest.raises(ExecutorError, match="closed"):
        executor.run(buffers())
