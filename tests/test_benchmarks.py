"""The benchmarks' own arithmetic: floors, predictions, rows, and the protocol on a CPU engine."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from spark_engine.builder.build import build
from spark_engine.builder.plan.options import Options
from spark_engine.kernel import GB10, H200
from spark_engine.models.open_model import open_model
from spark_engine.runtime.engine.request import Event, FinishReason
from tests.models.test_synthetic import folder
from tests.repository import ROOT

sys.path.append(str(ROOT))  # the benchmarks are scripts and not installed

from benchmarks import bench_decode, bench_ops, lockstep  # noqa: E402
from benchmarks.floors import H200_BANDWIDTH, Floor, Work  # noqa: E402
from benchmarks.kernel_split import Timed, by_part, counts, part_of  # noqa: E402

CONFIGS = ROOT / "benchmarks" / "configs"
BATCHES = (1, 8, 32, 64, 128)
# ms of a step at 4.3 TB/s, context 1,024, f32 state, fp8 KV, counted once by another program
COUNTED = {
    "qwen36-27b": (4.17, 4.73, 6.65, 9.21, 14.32),
    "qwen36-35b-a3b": (0.56, 1.60, 4.13, 6.16, 8.74),
}


@pytest.mark.parametrize("model", COUNTED)
def test_floors_of_the_published_models(model: str) -> None:
    floor = Floor(open_model(CONFIGS / model))
    found = [floor.seconds(Work(n, 1024), H200_BANDWIDTH) * 1e3 for n in BATCHES]
    assert found == pytest.approx(COUNTED[model], rel=0.01)
    wide, narrow = floor.parts(Work(8, 1024)), floor.parts(Work(8, 1024, 2, 2))
    assert wide["attention"] * 2 == narrow["attention"]
    assert 1.9 < wide["gdn"] / narrow["gdn"] < 2  # the convolution's state stays bf16
    if "moe" in wide:
        parts = [floor.parts(Work(n, 1024))["moe"] for n in (1, 8, 10_000)]
        assert parts[0] < parts[1] < parts[2] == pytest.approx(30 * parts[0], rel=0.1)


class Clock:
    """A GPU whose replays take 1, 2, 3, … ms; events are the time at which they were recorded."""

    def __init__(self) -> None:
        self.now, self.replays, self.calls = 0.0, 0, [""]

    def __getattr__(self, name: str) -> Any:
        return lambda *_: self.calls.append(name)

    def event(self, timed: bool = False) -> list[float]:
        assert timed, "an event that is asked for a time"
        return [0.0]

    def record(self, event: list[float]) -> None:
        event[0] = self.now

    def replay(self, graph: object) -> None:
        self.replays += 1
        self.now += self.replays

    def milliseconds(self, first: list[float], last: list[float]) -> float:
        return last[0] - first[0]


def test_seconds_of_replays() -> None:
    pytest.importorskip("cuda.bindings", reason="needs the extra `cuda`")
    from benchmarks import graphs, prepared

    gpu: Any = Clock()
    assert graphs.each_seconds(gpu, lambda: gpu.launch(), 3) == [1e-3, 2e-3, 3e-3]
    captured = gpu.calls[1 : gpu.calls.index("end_capture")]
    assert captured == ["begin_capture", "launch"] and gpu.calls[-1] == "destroy_graph"
    assert graphs.mean_seconds(Clock(), lambda: None, 4) == pytest.approx((2 + 3 + 4 + 5) / 4e3)
    launches = [lambda: None] * 5
    assert prepared.timed(Clock(), launches, 7) == pytest.approx(5e-3 / 5), "of 2 … 7 ms"


def test_the_recorded_rows_are_whole() -> None:
    """Every model and batch of vLLM's table has a row of ours, with what it is to be read by."""
    rows = json.loads((ROOT / "benchmarks" / "results" / "decode_h200.json").read_text())["rows"]
    theirs = json.loads(bench_decode.VLLM.read_text())["rows"]
    ours = {(r["model"], r["npl"]): r for r in rows if r["gdn_state"] == "f32"}
    assert {(r["model"], r["npl"]) for r in theirs} <= set(ours)
    for row in rows:
        assert row["step_ms"] > row["floor_ms"] > 0 and row["commit"] != "unknown"
        assert {"card", "driver", "command", "start_to_ready_s", "prefill_tok_s"} <= set(row)


def test_rows_replace_those_of_the_same_work(tmp_path: Path) -> None:
    row = {"model": "m", "npl": 1, "ctx": 4, "gdn_state": "f32", "kv": "bf16", "step_ms": 1.0}
    bench_decode.save(tmp_path / "r.json", [row, row | {"npl": 8}])
    bench_decode.save(tmp_path / "r.json", [row | {"step_ms": 2.0}, row | {"gdn_state": "bf16"}])
    rows = json.loads((tmp_path / "r.json").read_text())["rows"]
    assert [(r["npl"], r["gdn_state"], r["step_ms"]) for r in rows] == [
        (8, "f32", 1.0),
        (1, "f32", 2.0),
        (1, "bf16", 1.0),
    ]


def test_a_default_build_is_built_first_and_measured_between_its_buckets(tmp_path: Path) -> None:
    args = bench_decode.arguments(["e", "benchmarks/configs/m", "--default-build"])
    assert args.npl == "1,8,32,64,65,96,128"
    assert bench_decode.command(args).endswith("--steps 48 --default-build")
    assert bench_decode.arguments(["e", "c"]).npl == "1,8,32,64,128"
    assert bench_decode.arguments(["e", "c", "--default-build", "--npl", "3"]).npl == "3"
    before = bench_decode.arguments(["e", "benchmarks/configs/m", "--built-in", "41"])
    assert bench_decode.command(before) == bench_decode.command(args)
    assert before.npl == args.npl and before.built_in == 41
    ran: list[tuple[list[str], bool]] = []

    def run(words: list[str], check: bool) -> None:
        ran.append((words[1:], check))

    assert bench_decode.build_default(Path("c"), Path("e"), run) >= 0
    assert ran == [(["-P", "-m", "spark_engine.builder.cli", "c", "-o", "e"], True)], (
        "no option is given"
    )
    row = {"model": "m", "npl": 1, "ctx": 4, "gdn_state": "f32", "kv": "bf16", "step_ms": 1.0}
    bench_decode.save(tmp_path / "r.json", [row])
    bench_decode.save(tmp_path / "r.json", [row | {"build": "default"}])
    assert len(json.loads((tmp_path / "r.json").read_text())["rows"]) == 2


def test_vllms_row_for_the_same_state() -> None:
    assert bench_decode.baseline("qwen36-27b", 128, "f32")["step_ms"] == 34.127
    assert bench_decode.baseline("qwen36-35b-a3b", 128, "bf16")["step_ms"] == 15.189
    assert bench_decode.baseline("qwen36-27b", 3, "f32") == {}


def test_the_protocol_on_a_small_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lockstep, "IDS", 512)
    options = Options("cpu", decode=(1, 4), prefill=(64,), max_context=192, max_seqs=4)
    path = folder(tmp_path / "m", "bf16", False)
    build(path, tmp_path / "e", options, lambda text: None)
    bench = lockstep.Bench(tmp_path / "e")
    for npl in (1, 3):
        row = bench.run(npl, 100, 6)
        assert (row["npl"], row["bucket"], row["ctx"]) == (npl, 1 if npl == 1 else 4, 100)
        assert 0 < row["host_ms"] <= row["step_ms"] and row["prefill_tok_s"] > 0
        assert 0 < row["distinct_tokens"] <= 1
        bench.finish()
    counts = bench.engine.stats()
    assert counts["prefilled"] == 4 * 100 and counts["running"] == 0
    assert bench.ready > 0
    bench.engine.close()


def test_a_failed_sequence_is_no_measurement() -> None:
    failed = Event(3, finish=FinishReason.ERROR, message="non-finite logits")
    with pytest.raises(RuntimeError, match="request 3: non-finite"):
        lockstep.checked([failed])


def test_launches_belong_to_parts() -> None:
    timed = [Timed("a", "norm_quant", 3.0), Timed("b", "moe_up", 9.0), Timed("c", "moe_down", 5.0)]
    assert by_part(timed, 1.0) == {"moe": 0.012, "norm": 0.002}
    assert counts(timed) == {"moe": 2, "norm": 1}
    symbols = {"nvfp4_linear": "linear-nvfp4", "moe_router": "router", "paged_decode": "attention"}
    symbols |= {"moe_norm": "moe", "moe_combine": "moe"}
    assert {s: part_of(s) for s in symbols} == symbols


def test_every_family_runs_though_one_fails(capsys: pytest.CaptureFixture[str]) -> None:
    ran: list[tuple[str, ...]] = []

    def run(words: Any) -> int:
        ran.append(tuple(words))
        return int(words == ("sampling",))

    assert bench_ops.main([], run) == 1
    assert ran == [words for family in bench_ops.FAMILIES.values() for words in family]
    assert "failed: sampling" in capsys.readouterr().err
    assert bench_ops.main(["experts"], run) == 0 and ran[-1] == ("moe",)
    for words in ran:
        assert (ROOT / "benchmarks" / f"{words[0]}.py").exists()


def test_a_wrong_family_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_ops.main(["norms"], lambda words: 0) == 2
    assert "no family norms; there are linears" in capsys.readouterr().err


def test_linears_takes_the_tactic_that_an_untimed_build_takes() -> None:
    linears = pytest.importorskip("benchmarks.linears", reason="needs the extra `cuda`")

    class Bench:
        target = H200

    for m, name in ((1, "skinny"), (128, "stream-k")):
        x = linears.activations("nvfp4_linear", m, 17408)
        operands = [x, *linears.weights("nvfp4_linear", 5120, 17408)]
        work = linears.planned(Bench(), linears.OPS["nvfp4_linear"], {"dtype": "bf16"}, operands)
        assert work.tactic.name == name


def test_what_holds_a_linear_up_on_a_gb10_is_reckoned() -> None:
    """34816 x 5120 at 128 rows by hand: 45.6 GFLOP at 100 TFLOP/s; 100 MB and 10 MB at 243 GB/s."""
    linears = pytest.importorskip("benchmarks.linears", reason="needs the extra `cuda`")
    lines = list(linears.reckoned(GB10, (128, 512)))

    def held(model: str, layer: str, m: int) -> str:
        (line,) = [
            x
            for x in lines
            if x.split()[: len(model.split()) + 2] == [*model.split(), layer, str(m)]
        ]
        return str(line.rpartition(" ")[2])

    assert any("gate_up" in x and "454.7 us, products    456.3 us" in x for x in lines)
    assert held("27b", "gate_up", 128) == held("27b", "down", 512) == "products"
    assert held("27b", "qkvz", 512) == held("27b W4A4", "gate_up", 512) == "bytes"
    scales = linears.inputs("nvfp4_linear_a4", 3, 512)[1]
    assert scales.shape == (3, 32) and linears.problem_of(linears.A4_LAYERS[0], 3).k == 2560
