"""The pages of figures are those that the recorded rows make; so are their columns."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.repository import ROOT

sys.path.append(str(ROOT))  # the benchmarks are scripts and not installed

from benchmarks import checklist_rows, performance  # noqa: E402


@pytest.mark.parametrize("page", performance.PAGES, ids=lambda page: page.stem)
def test_the_page_is_current(page: Path) -> None:
    text = page.read_text()
    assert performance.filled(text) == text, "run python -m benchmarks.performance"


def test_every_table_has_its_place() -> None:
    pages = "".join(page.read_text() for page in performance.PAGES)
    for name in performance.TABLES:
        assert pages.count(f"<!-- {name} -->") == pages.count(f"<!-- end {name} -->") == 1


def test_every_baseline_is_a_column() -> None:
    header = performance.decode().split("\n")[2]
    assert header.endswith("| vLLM 0.23 | vLLM 0.26 | vLLM 0.33 |")
    rows = performance.baselines()
    assert rows["0.23"]["qwen36-27b", 128]["step_ms"] == 34.127
    assert rows["0.33"]["qwen36-35b-a3b", 128]["step_ms"] == 15.586
    assert ("qwen36-27b", 1) not in rows["0.33"], "it was not measured"


def test_a_row_of_figures_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = {
        "model": "qwen36-27b",
        "npl": 8,
        "gdn_state": "f32",
        "step_ms": 6.0,
        "decode_tok_s": 1333.3,
    }
    row |= {"floor_ms": 4.7, "ring_floor_ms": 4.5, "floor_parts_ms": {"gdn": 0.5, "norm": 0.1}}
    theirs = {"0.1": {("qwen36-27b", 8): {"step_ms": 12.345}}, "0.2": {}}
    cells = performance._decode_cells(row, {8: 6.2}, theirs)
    assert cells == [8, "6.00", "1,333", "4.50", "75%", 6.2, "12.35", "–"]
    assert performance._floors(row) == pytest.approx({"gdn": 0.3, "norm": 0.1})
    (tmp_path / "r.json").write_text(json.dumps({"rows": [row, row | {"gdn_state": "bf16"}]}))
    assert performance.rows_of(tmp_path / "r.json") == {("qwen36-27b", 8): row}
    assert performance.filled("a\n<!-- short -->\nold\n<!-- end short -->\nb").count("old") == 0


def test_rounds_of_drafts_are_told_by_model_and_acceptance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(performance, "DRAFTS", tmp_path / "r.json")
    assert performance.drafts() == "Not measured yet."
    base = {"model": "qwen36-27b", "npl": 8, "card": "C", "driver": "1", "commit": "c"}
    base |= {"date": "d", "gdn_ring": 8, "kv": "f8e4m3", "gdn_state": "f32", "command": "x"}
    given = [(0, [], 6.0, 1.0), (3, [0.8, 0.7], 8.0, 2.0), ("auto", [0.8, 0.7], 7.0, 2.5)]
    rows = [
        {**base, "k": k, "acceptance": asked, "round_ms": ms, "floor_ms": 4.0}
        | {"ms_per_token": ms / tokens, "tokens_per_round": tokens}
        for k, asked, ms, tokens in given
    ]
    (tmp_path / "r.json").write_text(json.dumps({"rows": rows}))
    text = performance.drafts()
    assert "| sequences | no drafts | k = 3 |\n" in text
    assert "\n| 8 | 6.00 (4.00) | 8.00 (4.00) |\n" in text
    assert "drafts right 80% / 70%" in text
    assert "| 8 | 6.00 (1.00) | 4.00 (2.00) | 2.80 (2.50) |" in text
    assert "Qwen3.6-35B-A3B" not in text and text.endswith("`x`")


def test_rows_of_the_checklist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checklist_rows, "RESULTS", tmp_path)
    wanted = (8, 19, 20, 22, 23, 24, 28, 29, 30, 31, 32, 35, 36, 37, 42, 46, 52, 58)
    assert tuple(row.number for row in checklist_rows.ROWS) == wanted
    assert all(row[3] != "``" for row in checklist_rows.checklist_rows()), "each has its command"
    bare = {row[0]: row[2] for row in checklist_rows.checklist_rows()}
    assert (
        bare[8] == "not measured" and bare[19] == "not measured; graphs are made at the start alone"
    )
    assert bare[31] == "held by generated traces"
    run = {"same": 15, "agreement": 0.9}
    parts = {"schedule": 60.0, "fill": 100.0, "wait": 1500.0, "idle": 9.0}
    wide = {"busy": 0.9, "host": 0.1, "host_us": 600.0, "parts_us": parts}
    widths = ((4, 2.0, True), (8, 2.1, True), (8, 3.0, False))
    steps = {"rows": [{"rows": n, "step_ms": ms, "graphs": g, **wide} for n, ms, g in widths]}
    row = {"idle": 0.01, "gaps": [0.02] * 99 + [0.05], "beyond": 1.5}
    loads = {"apart": 95.0, "lockstep": 100.0, "bursts": [200.0, 190.0]}
    mixed = {"rate": 1000.0, "gaps": [0.01, 0.02, 0.03]}
    loads |= {f"mixed, {name}": mixed for name in ("balanced", "throughput")}
    loads |= {f"beside, {n}": {"long": row, "short 0": row} for n in ("balanced", "latency")}
    files: dict[str, object] = {"steps": steps, "loads": loads}
    files |= {"prefix": {"computed": {"fork": 6144}}, "repeat": {"texts": 16, "runs": [run, run]}}
    for name, found in files.items():
        (tmp_path / f"{name}_35b.json").write_text(json.dumps(found))
    told = {row[0]: row[2] for row in checklist_rows.checklist_rows()}
    assert told[8] == "35B: 2.10 / 3.00 ms a step with / without at 8"
    assert told[22] == "35B: 0.60 ms a step at 8" and told[24] == "35B: 0.100 ms, 4.8% of a step"
    assert told[35] == "35B: at 8: schedule 60, fill 100, wait 1500 us"
    assert told[37] == "35B: 2 of 32 texts diverge, in the worst run after 90.0% of a text (mean)"
    assert told[42] == "35B: 2.10 ms of 8 rows, 1.05 times that of 4"
    assert told[20] == "35B: 95 tokens/s, 95.0% of lockstep"
    assert told[29] == "35B: 6,144 tokens computed"
    assert "balanced 50.0 ms p99, 5.0 idle steps" in str(told[30])
    assert told[46] == "35B: 1.5 steps beyond its chunks', the worst of 1"
    (tmp_path / "steps_27b.json").write_text(json.dumps(steps))
    assert str(dict(r[::2] for r in checklist_rows.checklist_rows())[42]).startswith("27B: 2.10 ms")
