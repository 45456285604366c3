"""Figures by hand."""

import math
from typing import Any

import numpy as np
import pytest

from spark_engine.bench import figures as f
from spark_engine.bench.timings import ClientShare, RequestTiming
from spark_engine.errors import OptionError


def took(
    start: float, times: list[float], counts: list[int] | None = None, **more: Any
) -> RequestTiming:
    end = more.pop("end", times[-1] if times else start)
    due = more.pop("due", start)
    counts = counts or [1] * len(times)
    one = RequestTiming(more.pop("script", 0), more.pop("turn", 0), due, start, end, times, counts)
    for name, value in more.items():
        setattr(one, name, value)
    return one


def figures(*each: RequestTiming, start: float = 0.0, **targets: float) -> dict[str, Any]:
    return f.figures(start, [ClientShare(list(each), 0.1, [0.001])], targets)


def test_latencies_and_rates_by_hand() -> None:
    one = took(1.0, [1.5, 1.6, 1.8], [1, 2, 1], prompt_tokens=10, end=2.0)
    two = took(3.0, [4.0], [1], prompt_tokens=20, cached_tokens=16, end=11.0)
    row = figures(two, one, start=1.0)
    assert row["seconds"] == 10 and row["requests"] == 2 and row["requests_s"] == 0.2
    assert (row["input_tokens"], row["output_tokens"], row["cached_tokens"]) == (30, 5, 16)
    assert row["output_tok_s"] == 0.5 and row["total_tok_s"] == 3.5
    assert row["in_flight"] == pytest.approx((1 + 8) / 10)
    assert row["ttft"]["p50"] == pytest.approx(750) and row["ttft"]["max"] == pytest.approx(1000)
    assert row["itl"]["mean"] == pytest.approx(150) and row["itl"]["max"] == pytest.approx(200)
    assert row["tpot"]["mean"] == pytest.approx(100), "three tokens after the first event's"
    assert row["e2e"]["max"] == pytest.approx(8000)
    assert row["each"][0] == [0, 0, 0.0, pytest.approx(500), 1.0, 10, 4]


def test_the_middle_of_a_run_leaves_its_ends_out() -> None:
    times = [0.5, 1.5, 2.5, 8.5, 9.5]  # of ten seconds the first and the last are left out
    assert figures(took(0.0, times, end=10.0))["steady_tok_s"] == pytest.approx(3 / 8)


def test_of_a_burst_the_time_counts_in_which_all_decode() -> None:
    one = took(0.0, [1.0, 2.0, 3.0, 4.0], [1, 1, 2, 1], end=5.0)
    late = took(0.0, [2.0, 3.5, 6.0], end=7.0)
    assert figures(one, late)["full_tok_s"] == pytest.approx((1 + 2 + 1 + 1) / 2)
    assert figures(one, took(8.0, [9.0, 9.5], end=10.0))["full_tok_s"] is None


def test_what_failed_is_counted_and_in_no_latency() -> None:
    bad = took(0.0, [5.0], error="503: full", end=6.0)
    row = figures(bad, took(0.0, [1.0], end=2.0))
    assert row["failed"] == 1 and row["errors"] == {"503: full": 1}
    assert row["ttft"]["max"] == pytest.approx(1000) and row["requests_s"] == pytest.approx(1 / 6)
    row = figures(bad)
    assert row["ttft"] is None and row["by_turn"] == [] and row["failed"] == 1


def test_goodput_counts_requests_that_meet_every_target() -> None:
    fast = took(0.0, [0.1] + [0.2 + i / 100 for i in range(300)])
    slow_first = took(0.0, [0.9, 1.0])
    stutter = took(0.0, [0.1, 0.2, 0.9])
    failed = took(0.0, [0.1], error="x")
    row = figures(fast, slow_first, stutter, failed, ttft=500, itl=200, tpot=500, e2e=4000)
    assert row["good_share"] == 0.25 and row["goodput_s"] == pytest.approx(1 / row["seconds"])
    assert figures(fast, slow_first, stutter, ttft=500)["good_share"] == pytest.approx(2 / 3)
    assert figures(fast, slow_first, stutter)["good_share"] == 1


def test_turns_are_distinguished() -> None:
    rows = figures(
        took(0.0, [0.4], prompt_tokens=100, cached_tokens=0),
        took(0.0, [0.2], prompt_tokens=200, cached_tokens=0, script=1),
        took(1.0, [1.1], turn=1, prompt_tokens=300, cached_tokens=256),
    )["by_turn"]
    assert [row["ttft_p50_ms"] for row in rows] == [pytest.approx(300), pytest.approx(100)]
    assert [row["prompt_tokens"] for row in rows] == [150, 300]
    assert [row["cached_tokens"] for row in rows] == [0, 256] and rows[1]["requests"] == 1


def test_quantiles_are_numpys() -> None:
    values = sorted(np.random.default_rng(0).normal(size=57).tolist())
    for share in (0, 0.5, 0.9, 0.99, 1):
        assert f.quantile(values, share) == pytest.approx(np.quantile(values, share))
    found = f.distribution(values)
    assert found and found["p90"] == pytest.approx(np.percentile(values, 90))
    assert len(found["curve"]) == 101 and found["curve"][-1] == round(values[-1], 3)
    assert f.distribution([]) is None


@pytest.mark.parametrize(
    ("busy", "late", "sent_late", "warns"),
    [(0.5, 0.001, 0.0, False), (0.85, 0.001, 0.0, True), (0.5, 0.05, 0.0, True),
     (0.5, 0.001, 0.05, True)],
)  # fmt: skip
def test_a_client_that_cannot_keep_up_is_said(
    busy: float, late: float, sent_late: float, warns: bool
) -> None:
    one = took(1.0, [2.0], due=1.0 - sent_late)
    shares = [ClientShare([one], 0.2, [0.001]), ClientShare([], 2 * busy, [late] * 100)]
    found = f.client(shares, [one], wall=2.0)
    assert bool(found["warning"]) is warns and found["busy"] == [0.1, busy]
    assert not warns or "--processes" in found["warning"]


def test_spread_is_median_least_and_most() -> None:
    rows = [
        {"a": 1, "ttft": {"p50": 3.0, "curve": [1]}, "itl": {"p50": 1.0}, "client": {"busy": 1}},
        {"a": 5, "ttft": {"p50": 4.0, "curve": [2]}, "itl": None, "client": {"busy": 2}},
        {"a": 2, "ttft": {"p50": 9.0, "curve": [3]}, "itl": {"p50": 2.0}, "client": {"busy": 3}},
    ]
    assert f.spread(rows) == {"a": [2, 1, 5], "ttft.p50": [4.0, 3.0, 9.0]}


def test_targets() -> None:
    assert f.targets(["ttft=500", "itl=12.5"]) == {"ttft": 500, "itl": 12.5}
    for wrong in ("ttft", "ttft=", "ttft=x", "speed=5", "itl=0", "itl=-1", f"itl={math.nan}"):
        with pytest.raises(OptionError, match="--target is"):
            f.targets([wrong])
