"""A prefill's kinds of nodes and their floors: what is kept, printed and shown."""

import json
from pathlib import Path

import pytest

from benchmarks.rehearsal import prefill_floor, reporter
from benchmarks.rehearsal import tables as rehearsal_tables
from benchmarks.rehearsal.prefill_floor import Kind
from benchmarks.result_files import write

MACHINE = {"card": "NVIDIA H200", "part": "green context", "sms": 48, "read": 4.5e12}
MACHINE |= {"mma": 240e12, "l2_bytes": 1 << 20}
ROWS = [
    Kind("layers.*.norm", "norm_quant", "row", 4, 20.0, 5.0, 0.0),
    Kind("layers.*.mlp.y", "grouped_moe", "tiles_128", 4, 300.0, 50.0, 200.0),
    Kind("embed", "embed", "rows", 1, None, 2.0, 0.0),
]


def run(tokens: int) -> dict[str, object]:
    measured, floor = prefill_floor.summed(ROWS)
    known = {"model": "m", "tokens": tokens, "layers": 4, "machine": MACHINE}
    rows = [kind.__dict__ for kind in ROWS]
    return known | {"ms": measured, "floor_ms": floor, "rows": rows}


def test_a_floor_is_bytes_or_products_whichever_takes_longer() -> None:
    assert [kind.floor_us for kind in ROWS] == [5.0, 200.0, 2.0]
    assert prefill_floor.summed(ROWS) == pytest.approx((1.28, 0.822))


def test_what_could_be_saved_most_is_printed_first_and_the_sum_last() -> None:
    first, second, _, last = prefill_floor.lines(ROWS, 4)
    assert "layers.*.mlp.y" in first and "(products)" in first and " 1.50: " in first
    assert "layers.*.norm" in second and "(bytes)" in second
    assert "1.3 ms, 0.32 a layer; floor 0.8 ms, 0.21 a layer: 1.56 times" in last


def test_a_run_takes_the_place_of_one_of_the_same_model_and_tokens(tmp_path: Path) -> None:
    path = tmp_path / "some" / reporter.PREFILLS
    for tokens in (64, 128, 64):
        prefill_floor.keep(path, run(tokens))
    assert [r["tokens"] for r in json.loads(path.read_text())["runs"]] == [128, 64]


def test_the_page_names_the_ratio_and_leaves_out_what_was_not_timed(tmp_path: Path) -> None:
    prefill_floor.keep(tmp_path / reporter.PREFILLS, run(4096))
    write(tmp_path / "ops.json.xz", {"rows": []})
    page = rehearsal_tables.rehearsed(tmp_path)
    assert "**1.56 times the floor** of 0.8 ms" in page and "4,096 tokens" in page
    assert "| layers.*.mlp.y | grouped_moe | tiles_128 | 4 | 300 | 200 | products | 1.50 |" in page
    assert "| embed |" not in page
