"""The loads and the reckoned server: what each policy promises holds over whole loads."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spark_engine.interface import DECODE, PREFILL, Limits
from spark_engine.runtime.engine.plan import Batch
from spark_engine.runtime.engine.policy.pacing import (
    BALANCED,
    LATENCY,
    THROUGHPUT,
    Pace,
    PrefillPolicy,
)
from spark_engine.runtime.engine.request import Request
from spark_engine.runtime.engine.sequence import Sequence
from tests.repository import ROOT
from tests.runtime.fake_executor import VOCAB, build_fake

sys.path.append(str(ROOT))  # the benchmarks are scripts and not installed

from benchmarks import launch_costs, loads, served_load  # noqa: E402
from benchmarks.pacing import Launches, Reckoned, reckon, stored  # noqa: E402

DECODES = (1, 8, 32, 64, 96, 128)
TILES = (1, 2, 4, 8, 16, 32, 64)


def rows(fixed: float, each: float, step: float, row: float) -> tuple[dict[str, Any], ...]:
    """Prefill takes `fixed` + `each` a tile, decode `step` + `row` a row, in milliseconds."""
    found = [(PREFILL, b, fixed + each * b) for b in TILES]
    found += [(DECODE, b, step + row * b) for b in DECODES]
    return tuple(
        {"family": f, "rows": b, "us": ms * 1e3, "built_us": ms * 1e3} for f, b, ms in found
    )


DENSE = Launches(rows(4.5, 5.0, 5.7, 0.107))  # reads much, and is bound by arithmetic soon
MIXTURE = Launches(rows(5.5, 0.6, 1.5, 0.09))  # reads all of its experts for a few tokens


def beside(launches: Launches, policy: PrefillPolicy, prompt: int) -> loads.Arrival:
    run = loads.Run(Reckoned(launches, policy))
    live = run.live(64, 128)
    return loads.arrival(run, live, prompt)


@pytest.mark.parametrize("launches", [DENSE, MIXTURE])
def test_no_token_waits_longer_than_its_policy_says(launches: Launches) -> None:
    lone = launches.table()[DECODE, 1] / 1e6
    calm = beside(launches, BALANCED, 8192)
    assert max(calm.gaps) <= 12 * lone and calm.beyond < 2
    swift = beside(launches, LATENCY, 4096)
    assert max(swift.gaps) <= 2 * swift.idle + 1e-3
    told = beside(launches, PrefillPolicy(Pace.THROUGHPUT, 30.0), 8192)
    assert max(told.gaps) <= 30.1e-3
    free = beside(launches, THROUGHPUT, 8192)
    assert max(free.gaps) > 2 * max(calm.gaps) and free.first < calm.first < swift.first * 2


@pytest.mark.parametrize("launches", [DENSE, MIXTURE])
def test_the_mixed_load_is_hardly_padded_and_balance_keeps_most_of_its_rate(
    launches: Launches,
) -> None:
    fast = loads.mixed(Reckoned(launches, THROUGHPUT), requests=128)
    calm = loads.mixed(Reckoned(launches, BALANCED), requests=128)
    assert calm.padding < 0.1 and fast.padding < 0.1
    assert calm.rate > 0.85 * fast.rate
    assert loads.share(calm.gaps, 90) < loads.share(fast.gaps, 99)
    assert len(calm.firsts) == 128 and len(calm.gaps) == len(fast.gaps)


def test_without_finer_buckets_the_mixed_load_is_padded() -> None:
    few = [r for r in MIXTURE.rows if r["family"] == DECODE or r["rows"] in (4, 16, 64)]
    padded = loads.mixed(Reckoned(Launches(tuple(few)), BALANCED), 8, 64)
    fine = loads.mixed(Reckoned(MIXTURE, BALANCED), 8, 64)
    assert padded.padding > fine.padding


def test_staggered_requests_come_as_fast_as_those_in_lockstep() -> None:
    lockstep, apart = loads.staggered(Reckoned(MIXTURE, BALANCED), 16)
    assert apart == pytest.approx(lockstep, rel=0.05)


def test_bursts_do_not_slow_down() -> None:
    rates = loads.bursts(Reckoned(MIXTURE, BALANCED), 8)
    assert len(rates) == 10 and min(rates[1:]) == pytest.approx(max(rates[1:]), rel=0.05)


def test_a_launch_costs_by_its_live_rows_and_by_how_far_they_are() -> None:
    row = {"family": PREFILL, "rows": 4, "us": 100.0, "half_us": 60.0, "us_at_16384": 140.0}
    launches, seq = Launches((row,)), Sequence(0, Request((0,)), 9, frozenset(), 0)

    def seconds(live: int, at: int) -> float:
        batch = Batch(PREFILL, 4, [seq] * live, [at] * live, [64] * live, [False] * live)
        return launches.seconds(batch) * 1e6

    assert [seconds(n, 0) for n in (1, 2, 4)] == pytest.approx([40, 60, 100])
    assert seconds(4, 32_768) == pytest.approx(180) and seconds(2, 16_384) == pytest.approx(80)
    assert replace(launches, faster=2.0).seconds(
        Batch(PREFILL, 4, [seq] * 4, [0] * 4, [64] * 4, [False] * 4)
    ) == pytest.approx(50e-6)


def test_lines_name_the_policy_and_rows_are_kept_by_model(tmp_path: Path) -> None:
    lines = reckon(MIXTURE, LATENCY)
    assert lines[0].startswith("latency") and "tok/s" in lines[0] and len(lines) == 3
    path = tmp_path / "rows.json"
    path.write_text('{"rows": [{"model": "a", "family": "decode", "rows": 2},'
                    '{"model": "a", "family": "prefill", "rows": 2},'
                    '{"model": "b", "family": "decode", "rows": 1}]}')  # fmt: skip
    assert {model: len(rows) for model, rows in stored(path, {}).items()} == {"a": 2, "b": 1}
    assert [r["family"] for r in stored(path, {DECODE: (1,)})["a"]] == ["prefill"]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loads that a fake engine runs in no time."""
    for name, value in {
        **{"LIVE_PROMPT": 64, "LONG_PROMPT": 512, "SHORT_PROMPT": 64, "BURSTS": 2},
        **{"PROMPTS": (32, 128), "OUTPUTS": (4, 16)},
    }.items():
        monkeypatch.setattr(loads, name, value)


@pytest.mark.usefixtures("small")
def test_an_engine_runs_all_loads(capsys: pytest.CaptureFixture[str]) -> None:
    limits = Limits(8, 4096, 600, VOCAB, bias_slots=8, top_logprobs=3)
    loaded = build_fake(limits, (1, 2, 4, 8), (1, 2, 4))
    loaded = replace(loaded, costs=dict.fromkeys(loaded.executors, 1000.0))
    given = {"engine": Path("x"), "width": 4, "requests": 8, "burst": 4, "itl_ms": [5.0]}
    given |= {"aims": "35b", "loads": [*served_load.LOADS]}
    found = served_load.measure(loaded, argparse.Namespace(**given))
    assert {"beside, balanced", "beside, latency", "beside, itl 5 ms"} <= found.keys()
    assert found["mixed, balanced"]["rate"] > 0 and len(found["bursts"]) == 2
    out = capsys.readouterr().out
    assert "aim: p99 <= 20 ms" in out and "(aim 3,330, 10 %)" in out
    served_load.Live(loaded, BALANCED).engine.check_idle()


def test_launches_are_timed_by_bucket_and_context(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_costs, "CONTEXTS", (128, 4096))
    monkeypatch.setattr(launch_costs, "DEPTH", 64)
    limits = Limits(4, 2048, 128, VOCAB, bias_slots=8, top_logprobs=3)
    loaded = build_fake(limits, (1, 4), (1, 4))
    engine = served_load.Live(replace(loaded, costs=dict.fromkeys(loaded.executors, 7.0)), BALANCED)
    found = launch_costs.Launches(engine.engine).rows()
    assert [(r["family"], r["rows"]) for r in found] == [
        *((DECODE, 1), (DECODE, 4), (PREFILL, 1), (PREFILL, 4)),
    ]
    assert all(r["us"] > 0 and r["built_us"] == 7.0 for r in found)
    assert ["half_us" in r for r in found] == [False, True, False, True]
    assert all(("us_at_128" in r) == (r["family"] == PREFILL) for r in found)
    assert not any("us_at_4096" in r for r in found)
    assert "tok/s" in launch_costs.line(found[-1])


@pytest.mark.usefixtures("small")
def test_loads_that_are_not_run_stay_in_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = Limits(8, 4096, 600, VOCAB, bias_slots=8, top_logprobs=3)
    loaded = build_fake(limits, (1, 2, 4, 8), (1, 2, 4))
    monkeypatch.setattr(served_load, "load", lambda folder: loaded)
    path = tmp_path / "loads.json"
    path.write_text('{"bursts": [1.0], "lockstep": 2.0}')
    words = ["engine", "--width", "2", "--loads", "staggered", "--out", str(path)]
    served_load.main(words)
    found = json.loads(path.read_text())
    assert found.keys() == {"engine", "bursts", "lockstep", "apart"}
    assert found["bursts"] == [1.0] and found["lockstep"] != 2.0
    with pytest.raises(SystemExit):
        served_load.main(["engine", "--loads", "staggered,most"])
