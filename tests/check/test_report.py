"""What is told of a check: the worst figure, the first failure, and the row of the coarsest."""

from __future__ import annotations

import io
from types import SimpleNamespace

import pytest
from rich.console import Console

from spark_engine.check.compare import Verdict
from spark_engine.check.report import Finding, Level, Report, show
from spark_engine.check.thresholds import thresholds_for
from spark_engine.interface import Precision
from spark_engine.tensors import DType


def finding(name: str, *verdicts: Verdict) -> Finding:
    made = Finding(name, "kind")
    for i, verdict in enumerate(verdicts):
        made.add(verdict, f"launch {i}")
    return made


def test_the_worst_figures_of_all_launches_are_kept() -> None:
    both = [{"cosine": 0.7, "rel_l2": 0.1, "same": 3}, {"cosine": 0.9, "rel_l2": 0.4, "same": 2}]
    kept = finding("x", *(Verdict("x", True, figures=f) for f in both)).figures
    assert kept == {"cosine": 0.7, "rel_l2": 0.4, "same": 2}
    one, two = (finding("x", Verdict("x", True, figures=f, rows=5, strays=1)) for f in both)
    one.merge(two)
    assert one.figures == kept and (one.rows, one.strays) == (10, 2)


def test_a_hard_failure_fails_though_all_rows_may_stray() -> None:
    hard = finding("x", Verdict("x", False, "NaN", hard=True), Verdict("x", True))
    hard.settle(1)
    assert not hard.passed and hard.where == "launch 0" and "NaN" in hard.reason


def failed(name: str, reason: str = "far off") -> Finding:
    return finding(name, Verdict(name, False, reason, strays=1, hard=True))


def test_the_first_that_failed_is_named() -> None:
    level = Level(
        "layer", "reference", {}, [finding("a", Verdict("a", True)), failed("b"), failed("c")]
    )
    level.settle(lambda f: f"<{f.name}>", 0)
    assert level.first == "<b>" and not level.passed


def test_every_failure_is_shown_with_or_without_words() -> None:
    level = Level("layer", "reference", {}, [failed("silent", ""), failed("loud")])
    level.settle(lambda f: f.name, 0)
    report = Report("engine", "reference", [level])
    out = io.StringIO()
    show(report, Console(file=out, width=200))
    assert "silent" in out.getvalue() and "loud" in out.getvalue()
    assert "first divergence at silent" in out.getvalue()


def manifest(activation: DType, kv: DType, *formats: str) -> SimpleNamespace:
    rows = tuple(SimpleNamespace(format=f) for f in formats)
    return SimpleNamespace(dtypes=Precision(activation, kv, DType.F32), quantisation=rows)


@pytest.mark.parametrize(
    ("engines", "row"),
    [
        ([manifest(DType.F32, DType.F32, "nvfp4")], "f32"),
        ([manifest(DType.F32, DType.F32), manifest(DType.BF16, DType.BF16)], "bf16"),
        ([manifest(DType.BF16, DType.F8E4M3), manifest(DType.F32, DType.F32)], "bf16 quantised"),
        ([manifest(DType.F32, DType.F32, "bf16", "fp8")], "f32 quantised"),
    ],
)
def test_the_coarsest_engine_decides(engines: list[SimpleNamespace], row: str) -> None:
    assert thresholds_for(engines).name == row  # type: ignore[arg-type]
