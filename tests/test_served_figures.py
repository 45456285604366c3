"""The benchmarks of served steps: who a step waits for, and bursts over HTTP."""

from __future__ import annotations

import sys
from pathlib import Path
from random import Random
from typing import Any

import pytest

pytest.importorskip("aiohttp", reason="needs the extra `bench`")

from spark_engine.bench.prompts import Ids, Shape  # noqa: E402
from tests.repository import ROOT  # noqa: E402
from tests.runtime import small_engine  # noqa: E402

sys.path.append(str(ROOT))  # the benchmarks are scripts and not installed

from benchmarks import checklist_rows, served_rows, step_shares  # noqa: E402


def test_a_steps_time_is_shared_out(tmp_path: Path) -> None:
    engine = small_engine.build(tmp_path, tokenizer=False)
    shares = step_shares.Shares(engine, graphs=True, steps=5)
    try:
        for rows in (4, 1):
            row = shares.run(rows, context=20)
            assert row["rows"] == rows and row["busy"] + row["host"] == pytest.approx(1, abs=1e-3)
            parts = {k: v for k, v in row["parts_us"].items() if k != "idle"}
            assert sum(parts.values()) / 1e3 == pytest.approx(row["step_ms"], abs=0.01)
            assert row["host_us"] == pytest.approx(sum(parts.values()) - parts["wait"], abs=0.5)
            assert parts["launch"] / 1e3 == pytest.approx(row["step_ms"] * row["busy"], rel=0.2)
        shares.engine.check_idle()
    finally:
        shares.engine.close()


def test_a_step_by_hand() -> None:
    told: Any = step_shares.Shares.__new__(step_shares.Shares)
    told.graphs, told.steps = False, 10
    before = {"wall_s": 1.0, "seconds": {"busy": 0.5}, "parts_s": {"wait": 0.2}}
    after = {"wall_s": 1.1, "seconds": {"busy": 0.58}, "parts_s": {"wait": 0.28, "fill": 0.02}}
    row = told._row(8, before, after)
    assert row["step_ms"] == 10 and row["busy"] == 0.8 and row["host"] == 0.2
    assert row["parts_us"] == {"wait": 8000, "fill": 2000} and row["host_us"] == 2000
    assert "no graph" in step_shares.line(row) and "busy 80.0%" in step_shares.line(row)


def test_bursts_over_http_by_hand() -> None:
    load = served_rows.burst(5, Shape((128, 128), output=(160, 160)), Ids(50), 2, Random(0), "")
    assert [script.at_s for script in load.scripts] == [0] * 5
    turns = [script.turns[0] for script in load.scripts]
    assert {len(turn.new) for turn in turns} == {128} and {turn.most for turn in turns} == {160}
    names = ("output_tok_s", "ttft.p50", "ttft.p99", "itl.p99")
    spread = {name: [2.0, 1.0, 4.0] for name in names} | {"tpot.p50": [10.0, 8.0, 20.0]}
    runs = [{"client": {"warning": w}, "card": None} for w in (None, "late")]
    assert served_rows.row_of(8, {"spread": spread, "runs": runs})["full_tok_s"] is None
    spread["full_tok_s"] = [760.0, 750.0, 770.0]
    row = served_rows.row_of(8, {"spread": spread, "runs": runs})
    assert "760 (750 to 770) while all decode" in served_rows.line(row)
    assert row["tok_s_each"] == [100, 50, 125] and row["warning"] == "late"
    assert "100.0 (50.0 to 125.0) tokens/s each" in served_rows.line(row)
    rows = [{**row, "rows": n, "ttft_p50_ms": [10.0 * n, 0, 0]} for n in (8, 32, 64, 128)]
    assert checklist_rows._each({"rows": rows}).startswith("100.0 / 100.0 / 100.0 / 100.0")
    assert "p50 0.08 / 0.32 / 1.28 s" in checklist_rows._firsts({"rows": rows})
