"""The pages of figures are those that the recorded rows make; so are their columns."""

import json
from pathlib import Path

import pytest

from benchmarks import performance


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
    assert rows["vLLM 0.23"]["qwen36-27b", 128]["step_ms"] == 34.127
    assert rows["vLLM 0.33"]["qwen36-35b-a3b", 128]["step_ms"] == 15.586
    assert ("qwen36-27b", 1) not in rows["vLLM 0.33"], "it was not measured"


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


def test_rounds_of_drafts_are_shown_by_model_and_acceptance(
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
