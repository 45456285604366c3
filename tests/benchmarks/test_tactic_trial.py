"""Old and new tactics compared: which are new, and which are worth keeping."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("cuda.bindings", reason="needs the extra `cuda`")

from tests.repository import ROOT  # noqa: E402

sys.path.append(str(ROOT))  # the benchmarks are scripts and not installed

from benchmarks import tactic_trial  # noqa: E402
from benchmarks.tactic_trial import Judged  # noqa: E402


def test_a_tactic_is_kept_where_it_is_surely_faster() -> None:
    good = Judged("op", "new one", 3, at={"a": {"new one": [90.0, 95.0], "old": [100.0, 101.0]}})
    assert good.gains == {"a": pytest.approx(0.05)} and good.line().startswith("keep op/new_one:")
    noisy = Judged("op", "new one", 3, at={"a": {"new one": [90.0, 99.0], "old": [100.0, 120.0]}})
    assert noisy.line().startswith("drop op/new_one: right in 3 cases; best at a")
    wrong = Judged("op", "new one", 2, "case: far", at=good.at)
    assert wrong.line() == "drop op/new_one: wrong: case: far" and not wrong.keeps
    pair = {"a": {"x": [9.0], "y": [8.0], "old": [10.0]}}
    assert Judged("op", "x", 1, at=pair, new=frozenset("xy")).keeps, "y is as new as x"
    assert not Judged("op", "x", 1, at=pair).keeps
    assert "never timed with another" in Judged("op", "x", 2, at={"a": {"x": [1.0]}}).line()
    assert "takes no case" in Judged("op", "x").line()


def test_a_kernel_changed_in_place_has_its_own_past_for_a_rival() -> None:
    times = tactic_trial.with_rival({"t": [80.0]}, {"t": [100.0], "u": [1.0]}, "t")
    assert times == {"t": [80.0], "t, before": [100.0]}
    assert Judged("op", "t", 1, at={"a": times}).keeps


def test_what_no_result_names_waits(tmp_path: Path) -> None:
    rows = [
        {"op": "linear", "microseconds": {"skinny": 1.0}},
        {"label": "embed/rows/a case"},
        {"op": "sample", "tactic": "one"},
    ]
    (tmp_path / "r.json").write_text(json.dumps({"rows": rows}))
    known = tactic_trial.named(["r.json", "none.json"], tmp_path)
    assert known == {("linear", "skinny"), ("embed", "rows"), ("sample", "one")}
    assert ("paged_attention", "pairs") in tactic_trial.named(), "it ran before"


def test_a_name_that_no_tactic_has_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        tactic_trial.arguments(["moe_router", "--new", "fast"])
    assert "moe_router has no tactic fast; it has cluster" in capsys.readouterr().err
