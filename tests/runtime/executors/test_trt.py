"""The `trt` executor: TensorRT compiles engines for three architectures, and the runtime
half equals onnxruntime, over a fake device and a fake TensorRT.

No test machine has a GPU that these engines are for; a marked test covers a real one.
"""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from spark_engine.builder.build import build
from spark_engine.builder.executors import trt as builder_half
from spark_engine.builder.fingerprint import producer
from spark_engine.builder.plan.options import RTX, Options, target_for
from spark_engine.device.trt_payload import TrtPayload
from spark_engine.engine_file import open_folder, read_manifest
from spark_engine.errors import CapacityError, EngineError, ExecutorError, GraphError, OptionError
from spark_engine.runtime.engine import detect
from spark_engine.runtime.engine import load as load_module
from spark_engine.runtime.engine.detect import runnable_targets
from spark_engine.runtime.engine.engine import Engine
from spark_engine.runtime.engine.load import load
from spark_engine.runtime.engine.request import Request, SamplingParams
from spark_engine.runtime.executors import trt as runtime_half
from spark_engine.runtime.executors.ort import random_step
from tests.checkpoints import write_checkpoint
from tests.runtime import fake_trt
from tests.runtime.engine.drive import said
from tests.runtime.fake_gpu import FakeGpu

SIZES = Options(target=RTX, decode=(1, 2), prefill=(64,), max_seqs=2, max_context=256)
PROMPTS = ([3, 4, 5, 6, 7], [9, 8, 7])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trt")
    return write_checkpoint(folder / "model", format="modelopt_mixed", moe=True).path


def version(number: str) -> Any:
    found: Any = ModuleType("tensorrt_rtx")
    found.__version__ = number
    return found


def tokens(folder: Path) -> list[list[int]]:
    """An engine's greedy tokens for the prompts."""
    engine = Engine(load(folder, threads=1))
    try:
        greedy = SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True)
        return said(engine, *(Request(tuple(prompt), greedy) for prompt in PROMPTS))
    finally:
        engine.close()


def stepped(folder: Path, number: int) -> dict[str, np.ndarray[Any, Any]]:
    """Outputs and states after a random step of one bucket."""
    loaded = load(folder, threads=1)
    try:
        key = sorted(loaded.executors)[number]
        executor = loaded.executors[key]
        header = open_folder(folder, read_manifest(folder).target)
        bucket = next(b for b in header.manifest.buckets if (b.family, b.rows) == key)
        arrays = random_step(header.engine(bucket).header)
        executor.run(arrays)
        return {s.name: arrays[s.name] for s in (*executor.specs.outputs, *executor.specs.states)}
    finally:
        loaded.close()


def build_with(patch: pytest.MonkeyPatch, checkpoint: Path, folder: Path) -> Path:
    """An engine built with the fake TensorRT."""
    patch.setattr(builder_half, "library", lambda *_: version("1.7.1"))
    patch.setattr(builder_half, "compile_engine", fake_trt.compile_engine)
    build(checkpoint, folder, SIZES, lambda text: None)
    return folder


def run_with(patch: pytest.MonkeyPatch, gpu: FakeGpu) -> None:
    patch.setattr(load_module, "runnable_targets", lambda hosts: (*hosts, RTX))
    patch.setitem(sys.modules, "tensorrt_rtx", fake_trt.module(gpu))
    patch.setattr(runtime_half, "_gpu", lambda: gpu)


class OneGpu(FakeGpu):
    """One GPU; each bucket closes its own context."""

    stream = 0

    def close(self) -> None:
        """The other buckets' contexts stay open."""


def test_it_says_what_onnxruntime_says(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(checkpoint, tmp_path / "cpu", replace(SIZES, target="cpu", kv_dtype="bf16"), print)
    folder, gpu = build_with(monkeypatch, checkpoint, tmp_path / "rtx"), OneGpu({})
    run_with(monkeypatch, gpu)
    assert tokens(folder) == tokens(tmp_path / "cpu")
    for number in range(3):
        ours, theirs = (stepped(path, number) for path in (folder, tmp_path / "cpu"))
        for name, array in theirs.items():
            near = {"rtol": 0.01 if array.dtype.itemsize == 2 else 1e-4, "atol": 1e-4}
            made, wanted = (a.astype(np.float64) for a in (ours[name], array))
            np.testing.assert_allclose(made, wanted, **near, equal_nan=True, err_msg=name)
    assert gpu.held["memory"] == 0 and gpu.calls.count("wait") > 9


def test_the_network_ends_at_the_logits(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = open_folder(build_with(monkeypatch, checkpoint, tmp_path / "rtx"), RTX)
    for bucket in folder.manifest.buckets:
        made = TrtPayload.decode(folder.engine(bucket).payload)
        network = onnx.ModelProto.FromString(made.engine)
        behind = onnx.ModelProto.FromString(made.behind)
        assert not network.functions and "logits" in made.outputs
        assert not {"next_tokens", "token_counts.out"} & {*made.outputs}
        ops = {n.op_type for n in network.graph.node}
        types = {a.i for n in network.graph.node if n.op_type == "Cast" for a in n.attribute}
        assert {"QuantizeLinear", "DequantizeLinear"} <= ops
        assert not {TensorProto.FLOAT8E4M3FN, TensorProto.UINT8} & types
        text = {*builder_half.HOST} - {"store_rows"}  # the tower's
        assert {n.op_type.rsplit("_", 1)[0] for n in behind.graph.node} == text


def test_what_it_cannot_do_is_said(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(**change: Any) -> str:
        with pytest.raises(OptionError) as found:
            build(checkpoint, tmp_path / "x", replace(SIZES, **change), lambda text: None)
        assert not (tmp_path / "x").exists()
        return str(found.value)

    monkeypatch.setitem(sys.modules, "tensorrt_rtx", None)
    assert "install" in refused() and "tensorrt-rtx-cu13" in refused()
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", version("1.6.9"))
    assert "TensorRT-RTX 1.7 or later and below 2, and 1.6.9 is here" in refused()
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", version("1.7.0"))
    assert "--kv-dtype fp8" in refused(kv_dtype="fp8")
    assert "--drafts 3" in refused(drafts=3)


def test_the_executor_may_be_named_instead() -> None:
    assert target_for("trt", "auto") == target_for("trt", RTX) == RTX
    assert target_for("auto", "cpu") == target_for("ort", "auto") == "cpu"
    assert target_for("native", "sm_121a") == "sm_121a"
    for executor, target, words in (
        ("trt", "cpu", "--executor trt runs --target rtx, not cpu"),
        ("native", "auto", "--target sm_90a or sm_121a, not auto"),
        ("tensorrt", "auto", "--executor tensorrt is not known"),
        ("trt", "rxt", "--target rxt is not known"),
    ):
        with pytest.raises(OptionError, match=words):
            target_for(executor, target)


def test_an_engine_of_another_kind_is_refused(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, gpu = build_with(monkeypatch, checkpoint, tmp_path / "rtx"), OneGpu({})
    with pytest.raises(EngineError, match="rtx"):
        load(folder)  # this machine has no such GPU
    run_with(monkeypatch, gpu)
    with pytest.raises(EngineError, match="not TensorRT's"):
        TrtPayload.decode(b"nonsense")
    with pytest.raises(EngineError, match="not TensorRT's"):
        TrtPayload.decode(TrtPayload(b"a", b"b", ("c",)).encode() + b"d")
    header = open_folder(folder, RTX).engine(open_folder(folder, RTX).manifest.buckets[0])
    behind = TrtPayload.decode(header.payload).behind

    def refused(engine: bytes, by: str, kind: type[Exception] = EngineError) -> str:
        payload = TrtPayload(engine, behind, (), by).encode()
        with pytest.raises(kind) as found:
            runtime_half.TrtExecutor(header.header, payload, folder)
        assert gpu.held["memory"] == 0
        return str(found.value)

    words = refused(b"refused: version tag does not match", "1.8.0")
    assert "TensorRT-RTX 1.7.1 refuses the decode 1 bucket (made by 1.8.0), which may" in words
    assert words.endswith("TensorRT says: refused: version tag does not match")
    assert "made by" not in refused(b"refused", "1.7.1") + refused(b"refused", "")
    words = refused(b"refused: std::bad_alloc", "", CapacityError)
    assert "does not have enough memory for decode 1: stop other programs" in words
    refused(b"no context: OutOfMemory (requested 8 GiB)", "", CapacityError)
    assert "no execution context; TensorRT says: odd" in refused(
        b"no context: odd", "", ExecutorError
    )
    for library in (None, version("2.0.1")):
        monkeypatch.setitem(sys.modules, "tensorrt_rtx", library)
        with pytest.raises(EngineError, match=r"tensorrt-rtx-cu13"):
            runtime_half.TrtExecutor(header.header, header.payload, folder)


def test_what_is_no_bucket_takes_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that is opened before the refusal would never be closed."""
    opened: list[None] = []
    monkeypatch.setattr(runtime_half, "library", lambda *_: ModuleType("tensorrt_rtx"))
    monkeypatch.setattr(runtime_half, "_gpu", lambda: opened.append(None))
    header: Any = None
    with pytest.raises(EngineError, match="the bucket is not TensorRT's"):
        runtime_half.TrtExecutor(header, b"junk", Path())
    assert not opened


@pytest.mark.parametrize(("capability", "more"), [((12, 1), (RTX,)), ((9, 0), ()), (None, ())])
def test_the_gpus_that_it_runs_on(
    capability: tuple[int, int] | None, more: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    device = pytest.importorskip("spark_engine.device.gpu", reason="needs the extra `cuda`")
    monkeypatch.setattr(device, "architecture", lambda: None)
    monkeypatch.setattr(device, "capability", lambda: capability)
    spec = "spark_engine.runtime.engine.detect.find_spec"
    monkeypatch.setattr(spec, lambda name: object())
    assert runnable_targets(("cpu",)) == ("cpu", *more)
    monkeypatch.setattr(spec, lambda name: None)
    assert runnable_targets(("cpu",)) == ("cpu",), "without the library"


@pytest.mark.parametrize(
    ("found", "installed", "words"),
    [
        (None, True, "no GPU that can be used: build it for another"),
        (None, False, "no GPU that can be used (/"),
        ((9, 0), True, "one of 9.0: build"),
        ((12, 1), True, "and needs its library: /"),
    ],
)
def test_what_its_engines_lack_here_is_said(
    found: tuple[int, int] | None, installed: bool, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = SimpleNamespace(capability=lambda: found)
    monkeypatch.setattr(detect, "_gpu", lambda: gpu)
    monkeypatch.setattr(detect, "cuda_missing", lambda: "" if installed else "No module")
    monkeypatch.setattr(detect, "extra", lambda name: f"/python -m pip install {name}")
    said = detect.foreign(RTX, ("cpu",))
    assert words in said and "a GPU of compute capability 8.9, 12.0 or 12.1" in said
    assert detect.foreign(RTX, ("cpu", RTX)) == ""


def test_an_engine_of_another_library_is_not_the_same_build(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise the build that the refused engine asks for finds nothing to do."""
    made = []
    for number in ("1.7.0", "1.8.0"):
        monkeypatch.setitem(sys.modules, "tensorrt_rtx", version(number))
        made.append(producer(RTX))
    assert made[0] != made[1] and producer("cpu").keys() < made[0].keys()


@pytest.mark.parametrize("words", ["[E] std::bad_alloc", "Requested amount of memory 8 GiB"])
def test_a_build_that_lacks_memory_is_no_bug(words: str, tmp_path: Path) -> None:
    trt = fake_trt.module(None)

    class Builder:
        def __init__(self, log: Any) -> None:
            self.log = log

        def __getattr__(self, name: str) -> Any:
            return lambda *_: SimpleNamespace(clear_flag=print, set_compute_capability=print)

        def build_serialized_network(self, *_: object) -> None:
            self.log.log(trt.ILogger.Severity.ERROR, words)

    parser = SimpleNamespace(parse_from_file=lambda path: True)
    trt.Builder, trt.OnnxParser = Builder, lambda *_: parser  # type: ignore[attr-defined]
    trt.BuilderFlag = SimpleNamespace(TF32=0)  # type: ignore[attr-defined]
    trt.ComputeCapability = SimpleNamespace(SM89=0, SM120=1, SM121=2)  # type: ignore[attr-defined]
    (tmp_path / "weights").touch()
    model = helper.make_model(helper.make_graph([], "nothing", [], []))
    with pytest.raises(CapacityError, match="memory to build the toy bucket.*TensorRT says: "):
        builder_half.compile_engine(trt, model, tmp_path / "weights", "toy")


@pytest.mark.gpu
def test_a_card_says_what_the_cpu_says(checkpoint: Path, tmp_path: Path) -> None:
    """`spark-check --against` compares such an engine with the CPU's."""
    pytest.importorskip("tensorrt_rtx", reason="needs the extra `trt`")
    if RTX not in runnable_targets(()):
        pytest.skip("needs a GPU of SM89, SM120 or SM121")
    build(checkpoint, tmp_path / "rtx", SIZES, lambda text: None)
    build(checkpoint, tmp_path / "cpu", replace(SIZES, target="cpu", kv_dtype="bf16"), print)
    command = [sys.executable, "-m", "spark_engine.check.cli", str(tmp_path / "rtx")]
    subprocess.run([*command, "--against", str(tmp_path / "cpu")], check=True)


def test_fp8_is_cast_through_f32() -> None:
    values = np.array([0, -0.3, 17.25, 448, -448, 1e-3], np.float32)
    nodes = [
        helper.make_node("Cast", ["x"], ["code"], to=TensorProto.FLOAT8E4M3FN),
        helper.make_node("Cast", ["code"], ["y"], to=TensorProto.BFLOAT16),
        helper.make_node("Cast", ["y"], ["z"], to=TensorProto.FLOAT),
    ]
    ends = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [6]) for n in ("x", "z")]
    graph = helper.make_graph(nodes, "casts", ends[:1], ends[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=11)
    plain = builder_half.plain(model.SerializeToString())
    assert [n.op_type for n in plain.graph.node] == [
        *("Cast", "QuantizeLinear", "DequantizeLinear", "Cast", "Cast")
    ]
    before, after = (
        fake_trt.session(m.SerializeToString()).run(None, {"x": values})[0] for m in (model, plain)
    )
    np.testing.assert_array_equal(before, after)


def test_tensorrt_builds_the_ops_of_the_embedded_model(tmp_path: Path) -> None:
    """For SM89, SM120 and SM121 at once, without a GPU. The engines are not run."""
    trt = pytest.importorskip("tensorrt_rtx", reason="needs the extra `trt`")
    config = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    checkpoint = write_checkpoint(tmp_path / "m", config, "modelopt_mixed", moe=True).path
    sizes = replace(SIZES, decode=(1,), max_seqs=1, cache_gib=0)
    build(checkpoint, tmp_path / "rtx", sizes, lambda text: None)
    folder = open_folder(tmp_path / "rtx", RTX)
    for bucket in folder.manifest.buckets:
        made = TrtPayload.decode(folder.engine(bucket).payload)
        assert len(made.engine) > folder.manifest.memory.weights
    bad = helper.make_graph([helper.make_node("ScatterND", ["a", "b", "c"], ["d"])], "bad", [], [])
    (tmp_path / "weights").touch()
    with pytest.raises(GraphError, match="TensorRT does not read the toy bucket"):
        builder_half.compile_engine(trt, helper.make_model(bad), tmp_path / "weights", "toy")
