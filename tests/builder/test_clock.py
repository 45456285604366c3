"""Seconds by stage: the progress display and the log use the same names."""

import pytest

from spark_engine.builder import clock
from spark_engine.builder.clock import StageClock


def test_a_stages_turns_are_added_and_shown_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter((1.0, 3.0, 7.0, 8.0))
    monkeypatch.setattr(clock.time, "perf_counter", lambda: next(times))
    said: list[str] = []
    made = StageClock(said.append)
    made.start("verify", "the lowered graphs")
    made.start("rewrite", "the graphs")
    made.start("verify", "the rewritten graphs")
    assert made.seconds() == {"verify": 3.0, "rewrite": 4.0}
    assert said == [
        "verify the lowered graphs",
        "rewrite the graphs",
        "verify the rewritten graphs",
    ]
