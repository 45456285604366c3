"""A trace: parts that cover their steps, launches on the device, one file of two processes."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spark_engine.errors import OptionError
from spark_engine.interface import Limits
from spark_engine.runtime.cli import profile
from spark_engine.runtime.engine import trace
from spark_engine.runtime.engine.engine import Engine, EngineOptions
from spark_engine.runtime.engine.request import Request, SamplingParams
from spark_engine.runtime.engine.trace import ENGINE, HTTP, REQUESTS, NoTrace, Trace, trace_of
from tests.runtime.engine.drive import drain
from tests.runtime.fake_executor import VOCAB, build_fake

LIMITS = Limits(4, 128, 32, VOCAB, page_size=16, bias_slots=8, top_logprobs=5)
PARTS = ["schedule", "prepare", "fill", "launch", "wait", "finish"]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A clock that a test sets."""
    made = SimpleNamespace(now=0.0, perf_counter=lambda: made.now)
    monkeypatch.setattr(trace, "time", made)
    return made


def _read(file: Path) -> dict[str, Any]:
    row: dict[str, Any] = json.loads(file.read_text())
    return row


@pytest.mark.parametrize("depth", [0, 1])
def test_every_part_of_every_step_is_there(depth: int, tmp_path: Path) -> None:
    recorder = Trace(ENGINE, tmp_path / "t.engine.0.part")
    engine = Engine(build_fake(LIMITS, (1, 2, 4), (1, 2)), EngineOptions(depth=depth), recorder)
    params = SamplingParams(seed=1, max_tokens=5, ignore_eos=True)
    for _ in range(2):
        drain(engine, *(Request(tuple(i % VOCAB for i in range(n)), params) for n in (3, 100)))
    recorder.save()
    shares = trace.merge(str(tmp_path / "t"), (ENGINE, HTTP))[ENGINE]
    events = _read(tmp_path / "t")["traceEvents"]
    spans = [e for e in events if e["ph"] == "X"]
    tracks = {e["args"]["name"]: e["tid"] for e in events if e["name"] == "thread_name"}
    steps = [e for e in spans if e["tid"] == tracks["steps"]]
    assert {e["name"] for e in steps} == {*PARTS, "idle", "between steps"}
    counted = [e["name"] for e in steps]
    assert counted.count("schedule") == shares["steps"] == counted.count("finish")
    assert counted.count("idle") == 2, "at the start, and between two batches of requests"
    for one, next_one in zip(steps, steps[1:], strict=False):  # no hole, no overlap
        assert next_one["ts"] == pytest.approx(one["ts"] + one["dur"], abs=0.01)
    assert sum(shares["parts_s"].values()) == pytest.approx(shares["wall_s"])
    launches = [e for e in steps if e["name"] == "launch"]
    ran = [e for e in spans if e["tid"] == tracks["device"]]
    launched = sum(engine.stats()["buckets"].values())  # type: ignore[attr-defined]
    assert len(ran) == len(launches) == counted.count("wait") == launched
    assert [e["args"]["of"] for e in ran] == [e["args"]["of"] for e in launches]
    assert {e["args"]["of"] for e in ran} <= {"decode_1", "decode_2", "prefill_1", "prefill_2"}
    assert shares["shares"]["busy"] > 0 and sum(shares["shares"].values()) == pytest.approx(1)
    assert not list(tmp_path.glob("*.part"))


def test_shares_by_hand(clock: SimpleNamespace, tmp_path: Path) -> None:
    recorder = Trace(ENGINE, tmp_path / "p")
    clock.now = 10.0
    recorder.begin()
    clock.now = 11.0
    recorder.done("schedule")
    recorder.ran(("decode", 1), 11.0, 13.0)
    clock.now = 14.0
    recorder.done("finish")
    recorder.end(idle=True)
    clock.now = 17.0
    recorder.begin()
    clock.now = 18.0
    recorder.done("schedule")
    recorder.end(idle=False)
    clock.now = 20.0
    recorder.begin()
    shares = recorder.shares()
    assert shares["parts_s"] == {"idle": 3, "schedule": 2, "finish": 3, "between steps": 2}
    assert shares["wall_s"] == 10 and shares["steps"] == 3
    assert shares["shares"] == pytest.approx({"busy": 0.2, "host": 0.5, "idle": 0.3})


def test_spans_are_bounded_and_shares_are_not(
    monkeypatch: pytest.MonkeyPatch, clock: SimpleNamespace, tmp_path: Path
) -> None:
    monkeypatch.setattr(trace, "MOST_SPANS", 2)
    recorder = trace_of(str(tmp_path / "t"), ENGINE)
    for _ in range(4):
        recorder.begin()
        clock.now += 1
        recorder.done("schedule")
    recorder.save()
    words = profile.finish(str(tmp_path / "t"))
    assert "4 steps in 4.00 s" in words and "the last 6 spans" in words
    assert "schedule 1000.000" in words and "idle 0.0" in words
    kept = [e for e in _read(tmp_path / "t")["traceEvents"] if e["ph"] == "X"]
    assert len(kept) == 2


def test_two_processes_make_one_file(clock: SimpleNamespace, tmp_path: Path) -> None:
    file = str(tmp_path / "t.json")
    http, engine = trace_of(file, HTTP), trace_of(file, ENGINE)
    for number, start, end in ((7, 1.0, 4.0), (8, 2.0, 3.0)):
        clock.now = end
        http.span(REQUESTS, "to the first token", start, number, 90)
    http.span("loop", "send", 2.5)
    clock.now = 5.0
    engine.begin()
    for recorder in (http, engine, engine):  # a second save changes nothing
        recorder.save()
    words = profile.finish(file)
    assert "1 steps" in words and "of HTTP for a step: send 500.000" in words
    events = _read(Path(file))["traceEvents"]
    names = {e["args"]["name"]: e["pid"] for e in events if e["name"] == "process_name"}
    assert set(names) == {ENGINE, HTTP}
    pairs = [(e["id"], e["ph"], e["ts"]) for e in events if e.get("cat") == "request"]
    assert pairs == [(7, "b", 1e6), (7, "e", 4e6), (8, "b", 2e6), (8, "e", 3e6)]
    assert all(e["pid"] == names[HTTP] for e in events if e.get("cat") == "request")


def test_every_life_of_an_engine_is_in_the_trace(clock: SimpleNamespace, tmp_path: Path) -> None:
    """One that is started again adds to what those before it did, and removes nothing of it."""
    file = str(tmp_path / "t")
    for left in ("engine.0", "http.0"):  # by a server that was killed before
        (tmp_path / f"t.{left}.part").write_text("old")
    http = trace_of(file, HTTP)
    for life in range(3):
        engine = trace_of(file, ENGINE, first=False)
        clock.now = 10.0 * life
        engine.begin()
        clock.now += 1 + life
        engine.done("schedule")
        engine.ran(("decode", 1), clock.now - 1, clock.now)
        engine.save()
    http.save()
    words = profile.finish(file)
    assert "3 steps of 3 lives of the engine in 6.00 s: launches ran 50.0%" in words
    assert "schedule 2000.000" in words
    row = _read(Path(file))
    ran = [e["ts"] for e in row["traceEvents"] if e["ph"] == "X" and e["name"] == "schedule"]
    assert ran == [0, 10e6, 20e6]
    assert row["otherData"][ENGINE]["lives"] == 3
    assert [path.name for path in tmp_path.iterdir()] == ["t"]


def test_without_a_file_nothing_is_kept(tmp_path: Path) -> None:
    recorder = trace_of(None, ENGINE)
    assert type(recorder) is NoTrace and not recorder.on and recorder.now() == 0.0
    recorder.begin()
    recorder.save()
    trace_of(str(tmp_path / "t"), HTTP).save()
    assert list(tmp_path.iterdir()) == [], "nor where nothing was done"
    with pytest.raises(OptionError, match=r"--profile .*none/t: No such file or directory"):
        trace_of(str(tmp_path / "none" / "t"), HTTP)
    (tmp_path / "kept").write_text("before")
    trace_of(str(tmp_path / "kept"), HTTP).save()
    assert (tmp_path / "kept").read_text() == "before", "until there is another"


def test_what_the_processes_kept_stays_until_the_trace_is_written(tmp_path: Path) -> None:
    recorder = trace_of(str(tmp_path / "t"), ENGINE)
    recorder.begin()
    recorder.done("schedule")
    recorder.save()
    (tmp_path / "t").mkdir()
    with pytest.raises(OSError):
        profile.finish(str(tmp_path / "t"))
    (tmp_path / "t").rmdir()
    assert "1 steps" in profile.finish(str(tmp_path / "t"))
    assert [path.name for path in tmp_path.iterdir()] == ["t"]
