"""Timing of launches: over a GPU that is made up, and on a real one what is then predicted."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.repository import ROOT

sys.path.append(str(ROOT))  # the benchmarks are scripts and not installed

from benchmarks import calibration, launch_overlap, launch_times, predict_gb10  # noqa: E402
from spark_engine.kernel import Shape  # noqa: E402

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
    """What the timer asks of an open engine: it notes how many drafts each step had."""

    def __init__(self, folder: Any) -> None:
        self.folder, self.engine, self.loaded = folder, self, self
        self.scheduler = self.depth = SimpleNamespace(choose=None)
        self.scheduler.depth = self.depth
        files = {(b.family, b.rows): b for b in folder.manifest.buckets}
        self.executors = {k: Ticking(folder.engine(b).payload) for k, b in files.items()}
        self.steps: list[int] = []

    def run(self, npl: int, ctx: int, steps: int) -> dict[str, float]:
        self.steps += [self.depth.choose([])] * steps
        return {"step_ms": 7.0}

    def step(self) -> list[Any]:
        self.steps.append(self.depth.choose([]))
        return []

    def buckets(self, family: str) -> tuple[int, ...]:
        return tuple(sorted(r for f, r in self.executors if f == family))

    def bucket(self, family: str, rows: int) -> int:
        return next(r for r in self.buckets(family) if r >= rows)

    def pave(self) -> None:
        self.paved = True

    def finish(self) -> None:
        assert self.paved and self.depth.choose([]) == 0


def test_steps_and_rounds_are_timed_over_their_last_inputs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("cuda.bindings", reason="needs the extra `cuda`")
    from spark_engine.engine_file import open_folder
    from tests.builder.empty_cubins import built

    bench: Any = Opened(open_folder(built(tmp_path), "sm_90a"))
    first, second = launch_times.Timer(bench).decode(8, (3, 9), 100, 2)
    assert (
        bench.steps == [0, 0, 3, 3, 3] and "no bucket verifies 9 drafts" in capsys.readouterr().out
    )
    assert (first["family"], first["rows"], first["npl"]) == ("decode", 32, 8)
    assert (second["family"], second["rows"]) == ("verify_k3", 32) and "step_ms" not in second
    assert first["graph_ms"] == pytest.approx(1.001) and first["step_ms"] == 7.0
    assert {us for _, us in first["launches"]} == {1.0}
    labels = {kind[0] for kind in first["kinds"]}
    assert "layers.*.mlp.expert_ids" in labels and not any("layers.0." in x for x in labels)
    assert "1.001 ms as a graph, 7.000 ms a step" in launch_times.line(first)


def test_a_step_is_timed_in_every_form_and_kind_by_kind(tmp_path: Path) -> None:
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
    overlap = launch_overlap.Overlap(executor, executor.payload)
    assert seen == [(True, True), (True, False), (False, True), (False, False)]
    assert executor.smem_scale == "crowded"
    whole = overlap.whole()
    assert whole["pdl"] == whole["plain_loose"] == 1.001 and whole["alone_pdl"] > 0
    common = overlap.common()
    assert common[-1] == "logits nvfp4_linear" and len(common) == launch_overlap.KINDS + 1
    row = overlap.of_kind(common[0])
    assert row["launches"] == overlap.kinds.count(common[0]) and row["step_late"] == 1.001
    row |= overlap.chains(common[0])
    assert row["warm"] == pytest.approx(1.001 / launch_overlap.WARM * row["launches"], abs=1e-4)
    assert common[0] in launch_overlap.line(row)


def test_a_kind_that_is_given_ids_is_not_run_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it would read for ids is whatever came to lie there since: on a GPU it traps."""
    ops = {"mlp.experts": "grouped_moe", "attn.qkv": "linear"}
    made = [SimpleNamespace(node=n, symbol="kernel", op=op) for n, op in ops.items()]
    run: list[Any] = []
    monkeypatch.setattr(launch_overlap, "launches", lambda payload: made)
    monkeypatch.setattr(launch_overlap.Overlap, "seconds", lambda self, own: run.append(own) or 1.0)
    gpu = SimpleNamespace(smem_scale=None, prepare=None)
    executor = SimpleNamespace(gpu=gpu, launches=lambda payload: [*made])
    overlap = launch_overlap.Overlap(executor, b"")
    row = overlap.chains("mlp.experts kernel")
    assert not run and "ids that another launch makes" in row["alone"]
    assert launch_overlap.line(row) == " : "
    assert overlap.chains("attn.qkv kernel")["pdl"] == 1e3 and run


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
    """From an engine to what is held: every launch took some time, and laws stand for them."""
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
    words = [str(tmp_path / "engine"), str(TINY), "--out", str(tmp_path / "t.json")]
    asked = ["--rows", "1,8", "--drafts", "1", "--prefill", "128", "--ctx", "128", "--steps", "4"]
    launch_times.main([*words, *asked])
    launch_times.main([*words, "--rows", "8", "--drafts", "1", "--ctx", "128", "--drawn"])
    drawn = ["--out", str(tmp_path / "o.json"), "--rows", "8", "--ctx", "128", "--drawn"]
    launch_overlap.main([*words[:2], *drawn])
    (overlap,) = json.loads((tmp_path / "o.json").read_text())
    assert overlap["pdl"] > 0 and all(kind["step_late"] > 0 for kind in overlap["kinds"])
    (run,) = json.loads((tmp_path / "t.json").read_text())["runs"]
    sizes_found = {(b["family"], b["rows"]) for b in run["buckets"]}
    assert sizes_found >= {("decode", 1), ("decode", 8), ("prefill", 2), ("verify_k1", 8)}
    for bucket in run["buckets"]:
        alone = sum(us for _, us in bucket["launches"]) / 1e3
        assert 0 < bucket["graph_ms"] < alone < 100
    known = run["machine"]
    assert known["sms"] > 0 and 200 < known["sm_mhz"] < 4000
    assert 0.1e12 < known["read"] < 10e12
    ((machine, measured),) = predict_gb10.learnt(tmp_path / "t.json")
    rows = calibration.held_to(measured, machine)
    print("\n".join(map(predict_gb10.held_line, rows)))
    assert all(abs(row["seen_error"]) < 0.5 for row in rows)
