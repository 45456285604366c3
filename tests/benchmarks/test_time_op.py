"""The op timer: shapes, floors and what is printed, with a timer that needs no GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cuda.bindings", reason="needs the extra `cuda`")

from benchmarks import graphs, time_op
from spark_engine.builder.native.tactics import Work
from spark_engine.kernel import GB10, H200
from spark_engine.plugins.registry import OPS, REGISTRY
from spark_engine.tensors import DType, TensorSpec
from tests.plugins import cuda_node
from tests.plugins.cases.seeded import seeded

DENSE, MIXTURE = "qwen36-27b", "qwen36-35b-a3b"


class Clock:
    """A GPU that replays in 1, 2, 3, … ms; events are the time at which they were recorded."""

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
    gpu: Any = Clock()
    assert graphs.each_seconds(gpu, lambda: gpu.launch(), 3) == [1e-3, 2e-3, 3e-3]
    captured = gpu.calls[1 : gpu.calls.index("end_capture")]
    assert captured == ["begin_capture", "launch"] and gpu.calls[-1] == "destroy_graph"
    assert graphs.mean_seconds(Clock(), lambda: None, 4) == pytest.approx((2 + 3 + 4 + 5) / 4e3)


def test_the_shapes_of_a_served_model() -> None:
    sizes = time_op.sizes_of("decode:8,prefill:1024")
    assert sizes == {"decode": (8,), "prefill": (1024,)}
    found = list(time_op.shapes([MIXTURE], sizes, H200, {"moe_router"}, 16_448))
    assert {one.label.split()[1]: one.work.context for one in found} == {
        "decode:8": 1024,
        "prefill:1024": 17_472,
    }
    assert sorted(one.work.ins[0].dims[0] for one in found) == [8, 1024]
    assert {one.count for one in found} == {40}, "one a layer"


@pytest.fixture(scope="module")
def linears() -> list[time_op.Shape]:
    """The 27B's gate_up at 1 and 128 rows."""
    op, attrs, (n, k) = REGISTRY["nvfp4_linear"], {"dtype": "bf16"}, (34816, 5120)
    weights = (("w", "u8", (n, k // 2)), ("w_scale", "f8e4m3", (n, k // 16)), ("w2", "f32", (n,)))
    found = []
    for rows in (1, 128):
        given = (("x", "bf16", (rows, k)), *weights)
        specs = tuple(TensorSpec(name, DType(dtype), dims) for name, dtype, dims in given)
        ins, outs = cuda_node.packed_specs(op, attrs, specs), op.infer(attrs, specs)
        work = Work(op.name, op, attrs, ins, outs, frozenset({1, 2, 3}))
        found.append(time_op.Shape(f"{DENSE} decode:{rows} layers.*.mlp.gate_up", work, 64))
    return found


def test_the_floor_is_bytes_or_products_whichever_takes_longer(
    linears: list[time_op.Shape],
) -> None:
    """34816 x 5120 by hand: 45.6 GFLOP at 128 rows and 100 TFLOP/s; 100 MB at 243 GB/s."""
    (one, by_bytes), (many, by_products) = (time_op.floor_of(s.work, GB10) for s in linears)
    assert one == pytest.approx(413.2e-6, rel=1e-3) and by_bytes == "bytes"
    assert many == pytest.approx(456.3e-6, rel=1e-3) and by_products == "products"


def test_a_fake_timer_takes_the_tactics_in_turns(
    linears: list[time_op.Shape], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second round runs backwards; a tactic that cannot be timed is left out."""
    seen: list[list[str]] = []

    class Timer:
        def __init__(self, target: object, cubins: Path, known: Path) -> None:
            assert not known.exists(), "times of another round would be taken for this one's"
            known.touch()
            seen.append([])

        def __enter__(self) -> Timer:
            return self

        def __exit__(self, *error: object) -> None:
            """As the real one."""

        def __call__(self, work: object, tactic: Any, plan: object) -> float | None:
            seen[-1].append(tactic.name)
            return None if tactic.name == "skinny" else 1e-6 * len(seen)

    monkeypatch.setattr(time_op, "GpuTimer", Timer)
    monkeypatch.setattr(time_op.nvrtc, "compile_all", lambda *given: None)
    shape = linears[0]
    plans = time_op.takers(shape.work, H200)
    names = [tactic.name for tactic, _ in plans]
    assert "skinny" in names and len(names) > 1
    times = time_op.time_at(shape.work, plans, H200, 3, tmp_path)
    assert seen == [names, names[::-1], names]
    assert set(times) == {*names} - {"skinny"} and all(
        us == [1.0, 2.0, 3.0] for us in times.values()
    )
    line = time_op.line(shape, times, H200)
    assert f"*{next(iter(times))} 1.00" in line and "floor" in line and "of the best" in line


def test_declared_cases_are_timed_as_nodes() -> None:
    ops = [op for op in OPS if any(case.bench for case in seeded(op))]
    assert len(ops) > 15
    for op in ops:
        for case in (case for case in seeded(op) if case.bench):
            work = time_op.of_case(op, case).work
            given = op.given(case.attrs)
            needed = [operand for operand in given if not operand.optional]
            assert work.op is op and work.outs, case
            assert len(needed) <= len(work.ins) <= len(given), case
            assert time_op.floor_of(work, H200)[0] >= 0
    assert any(time_op.takers(one.work, H200) for one in time_op.asked(
        time_op.arguments(["nvfp4_linear", "--cases"]), H200))  # fmt: skip
    quantised = next(c for c in seeded(REGISTRY["nvfp4_linear"]) if c.bench)
    assert 1 in time_op.of_case(REGISTRY["nvfp4_linear"], quantised).work.cold, "its weights"
