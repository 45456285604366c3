"""Recorded times: how a file of measured times becomes rows, and what a build loses by them."""

import json
from typing import Any

import pytest

pytest.importorskip("cuda.bindings", reason="needs the extra `cuda`")

from benchmarks import recorded_times
from spark_engine.kernel import CARDS


def _file(op: str, machine: str = "NVIDIA H200", **us: list[float]) -> dict[str, Any]:
    row = {"op": op, "shape": "s", "count": 2, "size": 64, "tokens": 8, "floor_us": 1.0, "us": us}
    return {"machine": machine, "commit": "abc", "date": "2026-11-28", "rows": [row]}


def test_measured_times_replace_those_of_their_op() -> None:
    known = {"card": "h200", "source": ["old"], "rows": [
        {"op": "linear", "size": 9, "tokens": 1, "us": {"skinny": 1.0}},
        {"op": "embed", "size": 0, "tokens": 1, "us": {"rows": 1.0}},
    ]}  # fmt: skip
    made = recorded_times.merged(known, [_file("linear", skinny=[3.0, 2.5], wide=[4.0])])
    row = {"op": "linear", "size": 64, "tokens": 8, "us": {"skinny": 2.5, "wide": 4.0}}
    assert made["rows"] == [known["rows"][1], row] and made["card"] == "h200"
    assert made["source"] == ["old", "linear: benchmarks.time_op, abc, 2026-11-28, NVIDIA H200"]
    with pytest.raises(ValueError, match="files of one machine"):
        recorded_times.merged(known, [_file("linear", x=[1.0]), _file("embed", "other", x=[1.0])])


def test_the_recorded_file_is_as_it_is_written() -> None:
    text = (recorded_times.TUNING / "sm_90a.json").read_text()
    assert recorded_times.text_of(json.loads(text)) == text


def test_a_build_loses_nothing_at_recorded_nodes_and_something_by_formulas() -> None:
    rows = [*recorded_times.losses(["qwen36-27b"], CARDS["h200"])]
    assert len(rows) > 40 and {op for op, _ in rows} >= {"fp8_linear", "gdn_decode", "linear"}
    assert all(found[recorded_times.OWN] == 0 for _, found in rows)
    assert max(found[recorded_times.FORMULAS] for _, found in rows) > 0.1
