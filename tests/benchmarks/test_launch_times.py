"""Timing of launches: over a fake GPU, and on a real one what is then predicted."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import time_step
from benchmarks.rehearsal import overlap
from benchmarks.rehearsal.gb10 import calibration, predict
from benchmarks.steps import launch_times
from spark_engine.kernel import Shape
from tests.repository import ROOT

TINY = ROOT / "models" / "tiny" / "checkpoint"


class Ticking:
    """A GPU on which an event takes 1 us and a graph 1 ms; and an engine's executor over it."""

    def __init__(self, payload: bytes) -> None:
        self.now, self.payload, self.gpu, self.inner = 0.0, payload, self, self
        self.multiprocessors, self.kind, self.l2_bytes, self.most_mhz = 48, "part", 50 << 20, 1980.0

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None

    def event(self, timed: bool = False) -> list[float]:
        return [0.0]

    def record(self, event: list[float]) -> None:
        self.now += 1e-3
        event[0] = self.now

    def replay(self, graph: object) -> None:
        self.now += 1.0

    def milliseconds(self, first: list[float], last: list[float]) -> float:
        return last[0] - first[0]

    def launches(self, payload: bytes) -> list[Any]:
        from spark_engine.builder.native.launches import launches
        from spark_engine.runtime.executors.bucket_graphs import QueuedLaunch

        assert payload == self.payload
        return [QueuedLaunch(n.node, n.symbol, lambda: None) for n in launches(payload)]


class Opened:
    """What is asked of an open engine: it notes how many drafts each step had."""

    def __init__(self, folder: Any) -> None:
        self.folder, self.engine, self.loaded, self.drafts = folder, self, self, 0
        files = {(b.family, b.rows): b for b in folder.manifest.buckets}
        self.executors = {k: Ticking(folder.engine(b).payload) for k, b in files.items()}
        self.steps: list[int] = []
        self.paved = False

    def run(self, npl: int, ctx: int, steps: int) -> dict[str, float]:
        self.steps += [self.drafts] * steps
        return {"step_ms": 7.0}

    def step(self) -> list[Any]:
        self.steps.append(self.drafts)
        return []

    def hold(self, k: int) -> None:
        self.drafts = k

    def bucket(self, family: str, rows: int) -> int:
        return min((r for f, r in self.executors if f == family and r >= rows), default=0)

    def pave(self) -> None:
        self.paved = True

    def finish(self) -> None:
        assert self.paved


def test_steps_and_rounds_are_timed_over_their_last_inputs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("cuda.bindings", reason="needs the extra `cuda`")
    from spark_engine.engine_file import open_folder
    from tests.builder.empty_cubins import built

    bench: Any = Opened(open_folder(built(tmp_path), "sm_90a"))
    first, second = launch_times.of_steps(bench, 8, (3, 9), 100, 2)
    assert bench.steps == [0, 0, 3, 3, 3]
    assert "no bucket verify_k9 holds 8 sequences" in capsys.readouterr().out
    assert (first["family"], first["rows"], first["npl"]) == ("decode", 32, 8)
    assert (second["family"], second["rows"]) == ("verify_k3", 32) and "step_ms" not in second
    assert first["graph_ms"] == pytest.approx(1.001) and first["step_ms"] == 7.0
    assert {us for _, us in first["launches"]} == {1.0}
    labels = {kind[0] for kind in first["kinds"]}
    assert "layers.*.mlp.expert_ids" in labels and not any("layers.0." in x for x in labels)
    head, *rest = launch_times.lines(first)
    assert "1.001 ms as a graph; 7.000 ms a step" in head and len(rest) == 12
    assert "x     1.00 us" in rest[0]
    count = len(first["launches"])
    parts = launch_times.parts(first, 8, 0.0005)
    assert parts["launches"] == count and parts["gap_us"] == pytest.approx(
        1 - 0.5 / count, abs=5e-3
    )
    assert sum(parts["parts_launches"].values()) == count
    assert sum(launch_times.parts(first, 8, 7.0)["parts_ms"].values()) == pytest.approx(count / 1e3)


def test_a_step_is_timed_in_every_form(tmp_path: Path) -> None:
    pytest.importorskip("cuda.bindings", reason="needs the extra `cuda`")
    from spark_engine.engine_file import open_folder
    from tests.builder.empty_cubins import built

    folder = open_folder(built(tmp_path), "sm_90a")
    (bucket,) = [b for b in folder.manifest.buckets if (b.family, b.rows) == ("decode", 32)]
    executor: Any = Ticking(folder.engine(bucket).payload)
    seen: list[tuple[bool, bool]] = []
    executor.smem_scale, executor.prepare = "crowded", lambda f, shape, a: shape.pdl
    inner = executor.launches

    def launches(payload: bytes) -> list[Any]:
        shape = Shape((1, 1, 1), (1, 1, 1), (), pdl=True)
        seen.append((executor.prepare(None, shape, ()), executor.smem_scale is None))
        return list(inner(payload))

    executor.launches = launches
    row = overlap.forms(executor, executor.payload)
    assert seen == [(True, False), (False, False), (True, True), (False, True)]
    assert executor.smem_scale == "crowded"
    assert row["pdl"] == row["plain_loose"] == 1.001 and row["alone_pdl"] > 0


def test_what_reads_memory_compiles(tmp_path: Path) -> None:
    nvrtc = pytest.importorskip("spark_engine.builder.native.nvrtc")
    from spark_engine.kernel import TARGETS

    (tmp_path / "read.cu").write_text(launch_times.READ)
    job = nvrtc.Job("read.cu", (), ("read_all",))
    assert nvrtc.compile(job, TARGETS["sm_90a"], None, tmp_path).code


@pytest.mark.gpu
def test_launches_of_the_embedded_model_are_timed_and_predicted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every launch of the engine takes some time, and laws predict it."""
    pytest.importorskip("cuda.bindings", reason="needs the extra `cuda`")
    from spark_engine.builder.build import build
    from spark_engine.builder.plan.options import Options
    from spark_engine.device.gpu import architecture

    here = architecture()
    if here is None:
        pytest.skip("needs a GPU with a target's name")
    sizes: dict[str, Any] = {"decode": (1, 8), "prefill": (128,), "verify": ((1, 1), (8, 1))}
    limits: dict[str, Any] = {"max_seqs": 8, "max_context": 512, "drafts": 1, "timing": False}
    options = Options(target=here, **sizes, **limits)
    build(TINY, tmp_path / "engine", options, lambda text: None)
    words = [str(tmp_path / "engine"), str(TINY), "--per-launch", "--out", str(tmp_path / "t.json")]
    asked = ["--rows", "1,8", "--drafts", "1", "--prefill", "128", "--ctx", "128", "--steps", "4"]
    time_step.main([*words, *asked])

    drawn = ["--out", str(tmp_path / "o.json"), "--rows", "8", "--ctx", "128"]
    overlap.main([*words[:2], *drawn])
    (found,) = json.loads((tmp_path / "o.json").read_text())
    assert found["pdl"] > 0 and found["plain"] > 0
    (run,) = json.loads((tmp_path / "t.json").read_text())["runs"]
    sizes_found = {(b["family"], b["rows"]) for b in run["buckets"]}
    assert sizes_found >= {("decode", 1), ("decode", 8), ("prefill", 2), ("verify_k1", 8)}
    for bucket in run["buckets"]:
        alone = sum(us for _, us in bucket["launches"]) / 1e3
        assert 0 < bucket["graph_ms"] < alone < 100
    known = run["machine"]
    assert known["sms"] > 0 and 200 < known["sm_mhz"] < 4000
    assert 0.1e12 < known["read"] < 10e12
    ((machine, measured),) = predict.learnt(tmp_path / "t.json")
    rows = calibration.held_to(measured, machine)
    print("\n".join(map(predict.held_line, rows)))
    assert all(abs(row["seen_error"]) < 0.5 for row in rows)
