"""The report of a check: the worst figure, the first failure, and the row of the coarsest."""

import io
from dataclasses import asdict, fields, replace
from types import SimpleNamespace

import pytest
from rich.console import Console

from spark_engine.check.verdicts.compare import Verdict
from spark_engine.check.verdicts.report import (
    FIGURES,
    LEGEND,
    LIMITS,
    CheckReport,
    Finding,
    Level,
    show,
)
from spark_engine.check.verdicts.thresholds import NodeLimits, Thresholds, load, thresholds_for
from spark_engine.interface import Precision
from spark_engine.tensors import DType


def finding(name: str, *verdicts: Verdict) -> Finding:
    made = Finding(name, "kind")
    for i, verdict in enumerate(verdicts):
        made.add(verdict, f"launch {i}")
    return made


def test_the_worst_figures_of_all_launches_are_kept() -> None:
    both = [{"cosine": 0.7, "rel_l2": 0.1, "same": 3}, {"cosine": 0.9, "rel_l2": 0.4, "same": 2}]
    kept = finding("x", *(Verdict("x", figures=f) for f in both)).figures
    assert kept == {"cosine": 0.7, "rel_l2": 0.4, "same": 2}
    one, two = (finding("x", Verdict("x", figures=f, rows=5, outliers=1)) for f in both)
    one.merge(two)
    assert one.figures == kept and (one.rows, one.outliers) == (10, 2)


def test_a_hard_failure_fails_though_all_rows_may_be_outliers() -> None:
    hard = finding("x", Verdict("x", "NaN", hard=True), Verdict("x"))
    hard.settle(1)
    assert not hard.passed and hard.where == "launch 0" and "NaN" in hard.reason


def failed(name: str, reason: str = "far off") -> Finding:
    return finding(name, Verdict(name, reason, outliers=1, hard=True))


def test_the_first_that_failed_is_named() -> None:
    level = Level("layer", "reference", {}, [finding("a", Verdict("a")), failed("b"), failed("c")])
    level.settle(lambda f: f"<{f.name}>", 0)
    assert level.first == "<b>" and not level.passed


def test_every_failure_is_shown_with_or_without_words() -> None:
    level = Level("layer", "reference", {}, [failed("silent", ""), failed("loud")])
    level.settle(lambda f: f.name, 0)
    report = CheckReport("engine", "reference", [level])
    out = io.StringIO()
    show(report, Console(file=out, width=200))
    assert "silent" in out.getvalue() and "loud" in out.getvalue()
    assert "first divergence at silent" in out.getvalue()


def manifest(
    activation: DType, kv: DType, *formats: str, state: DType = DType.F32
) -> SimpleNamespace:
    rows = tuple(SimpleNamespace(format=f) for f in formats)
    return SimpleNamespace(dtypes=Precision(activation, kv, state), quantisation=rows)


@pytest.mark.parametrize(
    ("engines", "row"),
    [
        ([manifest(DType.F32, DType.F32, "nvfp4")], "f32"),
        ([manifest(DType.F32, DType.F32), manifest(DType.BF16, DType.BF16)], "bf16"),
        ([manifest(DType.BF16, DType.F8E4M3), manifest(DType.F32, DType.F32)], "bf16 quantised"),
        ([manifest(DType.F32, DType.F32, "bf16", "fp8")], "f32 quantised"),
        ([manifest(DType.F32, DType.BF16, "int4")], "bf16"),
        ([manifest(DType.F32, DType.F32, state=DType.F16)], "bf16"),
        ([manifest(DType.F32, DType.F8E4M3, state=DType.BF16)], "bf16 quantised"),
    ],
)
def test_the_coarsest_engine_decides(engines: list[SimpleNamespace], row: str) -> None:
    assert thresholds_for(engines).name == row  # type: ignore[arg-type]


def test_limits_and_a_legend_come_with_the_figures() -> None:
    limits = load("bf16 quantised")
    figures = {"rel_l2": 0.11, "cosine": 0.99, "kl": 0.0098, "flips": 1, "near_ties": 1}
    levels = [
        Level(name, "reference", asdict(limits), [finding("logits", Verdict("logits", **row))])
        for name, row in (("model", {"figures": figures}), ("layer", {"figures": figures}))
    ]
    levels[1].findings.append(finding("layers.0.x", Verdict("layers.0.x", figures=figures)))
    out = io.StringIO()
    show(CheckReport("engine", "reference", levels), Console(file=out, width=120))
    said = out.getvalue()
    wanted = "limits: cosine >= 0.97, rel_l2 <= 0.25, kl <= 0.1, tie <= 0.08, outliers <= 0.1"
    assert said.count(wanted) == 2
    for key in (*figures, "tie", "outliers"):
        assert f"  {key:<10} " in said
    layer = said.partition("layer: ")[2]
    assert said.count("kind") == 2 and "kind (2)" not in layer, "logits are shown once"
    levels.append(replace(levels[0], name="text"))
    show(CheckReport("engine", "reference", levels), Console(file=out, width=120))
    assert "near ties, by" not in said and "; 1 tokens of texts differ at near" in out.getvalue()


def test_every_figure_and_limit_has_words() -> None:
    assert set(LEGEND) == set(FIGURES)
    limits = {f.name for kind in (Thresholds, NodeLimits) for f in fields(kind)} - {"name"}
    assert limits <= {*LEGEND, *LIMITS}
