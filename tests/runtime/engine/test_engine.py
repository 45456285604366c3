"""The engine's promises to its caller, on the fake executor."""

from __future__ import annotations

import pytest

from spark_engine.errors import CapacityError, EngineError, InternalError, RequestError
from spark_engine.interface import Limits
from spark_engine.runtime.engine.engine import Engine, EngineOptions
from spark_engine.runtime.engine.request import Event, FinishReason, Request, SamplingParams
from tests.runtime.fake import EOS, VOCAB, build_fake

LIMITS = Limits(4, 128, 32, VOCAB, page_size=16, bias_slots=8, top_logprobs=5)
BOTH = pytest.mark.parametrize("depth", [0, 1])


def make(depth: int = 0, limits: Limits = LIMITS, **options: object) -> Engine:
    loaded = build_fake(limits, (1, 2, 4), (1, 2))
    return Engine(loaded, EngineOptions(depth=depth, **options))  # type: ignore[arg-type]


def finish(engine: Engine) -> dict[int, list[Event]]:
    events: dict[int, list[Event]] = {}
    while not engine.idle:
        for event in engine.step():
            events.setdefault(event.request_id, []).append(event)
    engine.check_idle()
    return events


def ask(engine: Engine, length: int = 5, **params: object) -> int:
    request = Request(
        tuple(i % VOCAB for i in range(length)), SamplingParams(**{"seed": 1, **params})
    )  # type: ignore[arg-type]
    return engine.submit(request)


def test_nothing_runs_ahead_on_the_host_unless_told() -> None:
    """An engine whose states are a device's runs one step ahead: test_native_engine.py."""
    loaded = build_fake(LIMITS, (1,), (1,))
    assert Engine(loaded).depth == 0 and Engine(loaded, EngineOptions(depth=1)).depth == 1


@BOTH
def test_max_tokens_ends_with_length(depth: int) -> None:
    engine = make(depth)
    number = ask(engine, max_tokens=7, ignore_eos=True)
    events = finish(engine)[number]
    assert [e.finish for e in events] == [None] * 6 + [FinishReason.LENGTH]
    assert engine.stats()["surplus_rows"] == 0  # this end is known ahead


@BOTH
def test_the_context_ends_with_length(depth: int) -> None:
    engine = make(depth)
    number = ask(engine, length=100, ignore_eos=True)
    events = finish(engine)[number]
    assert len(events) == 28 and events[-1].finish is FinishReason.LENGTH


@BOTH
def test_every_end_id_stops_unless_told_otherwise(depth: int) -> None:
    engine = make(depth)
    free = {seed: ask(engine, max_tokens=100, ignore_eos=True, seed=seed) for seed in range(20)}
    stopped = {seed: ask(engine, max_tokens=100, seed=seed) for seed in range(20)}
    events = finish(engine)
    ends = set()
    for seed in range(20):
        full = [e.token for e in events[free[seed]]]
        cut = [e.token for e in events[stopped[seed]]]
        first = next((i for i, t in enumerate(full) if t in EOS), 99)
        assert cut == full[: first + 1]
        ends.add(cut[-1] if events[stopped[seed]][-1].finish is FinishReason.STOP else None)
    assert set(EOS) <= ends


@BOTH
def test_a_stop_id_stops(depth: int) -> None:
    engine = make(depth)
    free = ask(engine, max_tokens=20, ignore_eos=True)
    token = finish(engine)[free][7].token
    number = ask(engine, max_tokens=20, ignore_eos=True, stop_token_ids=(token,))
    events = finish(engine)[number]
    assert events[-1].token == token and events[-1].finish is FinishReason.STOP
    assert len(events) <= 8


@BOTH
def test_min_tokens_forbids_the_ends_and_then_lifts_the_ban(depth: int) -> None:
    engine = make(depth)
    banned = (0, 1, 2, 4, 5, 6)
    numbers = [ask(engine, min_tokens=9, stop_token_ids=banned, seed=s) for s in range(30)]
    heard = finish(engine)
    ends = {*banned, *EOS}
    for number in numbers:
        tokens = [e.token for e in heard[number]]
        assert len(tokens) > 9 and not ends & set(tokens[:9])
        assert heard[number][-1].finish is not FinishReason.STOP or tokens[-1] in ends
    assert any(heard[n][-1].finish is FinishReason.STOP for n in numbers)


@BOTH
def test_log_probabilities_come_when_asked_for(depth: int) -> None:
    engine = make(depth)
    none, chosen, three = (ask(engine, max_tokens=3, logprobs=k) for k in (None, 0, 3))
    events = finish(engine)
    assert all(e.logprob is None and e.top == () for e in events[none])
    assert all(e.logprob is not None and e.top == () for e in events[chosen])
    assert all(len(e.top) == 3 and e.top[0][0] == e.token for e in events[three])


@BOTH
@pytest.mark.parametrize("after", [0, 1, 4])
def test_cancel_ends_with_the_given_reason_once(depth: int, after: int) -> None:
    engine = make(depth)
    number, other = ask(engine, ignore_eos=True), ask(engine, max_tokens=9, ignore_eos=True)
    events: list[Event] = []
    for _ in range(after):
        events += engine.step()
    assert engine.cancel(number, FinishReason.STOP) and not engine.cancel(number)
    rest = finish(engine)
    events = [e for e in events if e.request_id == number] + rest[number]
    assert [e.finish for e in events if e.finish] == [FinishReason.STOP]
    assert rest[other][-1].finish is FinishReason.LENGTH
    assert not engine.cancel(number) and not engine.cancel(12345)


def test_cancelling_the_only_waiting_request_still_reports_it() -> None:
    engine = make()
    number = ask(engine)
    engine.cancel(number)
    assert not engine.idle
    assert engine.step() == [Event(number, finish=FinishReason.CANCELLED)]
    assert engine.idle


def test_refused_requests_leave_nothing_behind() -> None:
    engine = make(max_waiting=1)
    ask(engine)
    with pytest.raises(CapacityError):
        ask(engine)
    with pytest.raises(RequestError):
        engine.submit(Request((VOCAB,)))
    assert engine.stats()["waiting"] == 1
    assert list(finish(engine)) == [0]


def test_ids_are_the_callers_and_grow() -> None:
    engine = make()
    engine.add(7, Request((1, 2), SamplingParams(max_tokens=2)))
    for number in (3, 7):
        with pytest.raises(InternalError, match=f"request {number} comes after request 7"):
            engine.add(number, Request((1, 2)))
    assert ask(engine) == 8
    assert list(finish(engine)) == [7, 8]


@BOTH
def test_fail_ends_every_request_with_an_error(depth: int) -> None:
    engine = make(depth)
    numbers = [ask(engine, ignore_eos=True) for _ in range(6)]
    for _ in range(3):
        engine.step()
    events = engine.fail("the device is gone")
    assert sorted(e.request_id for e in events) == numbers
    assert {(e.finish, e.message) for e in events} == {(FinishReason.ERROR, "the device is gone")}


def test_fail_ends_what_the_queues_have_lost() -> None:
    engine = make()
    numbers = [ask(engine, ignore_eos=True) for _ in range(2)]
    engine.step()
    engine.scheduler.running.pop()  # a step that raised between two queues
    assert [e.request_id for e in engine.fail("lost")] == numbers and not engine._live


@BOTH
def test_an_end_id_at_the_limit_is_an_end_and_not_a_cut(depth: int) -> None:
    engine = make(depth)
    free = ask(engine, max_tokens=100, ignore_eos=True)
    first = next(i for i, e in enumerate(finish(engine)[free]) if e.token in EOS)
    ended, cut = ask(engine, max_tokens=first + 1), ask(engine, max_tokens=first)
    events = finish(engine)
    assert events[ended][-1].finish is FinishReason.STOP
    assert events[cut][-1].finish is FinishReason.LENGTH


def test_seeds_are_drawn_once_per_request_and_repeat_with_the_engines_seed() -> None:
    def tokens(seed: int) -> list[list[int | None]]:
        engine = make(seed=seed)
        for _ in range(3):
            ask(engine, seed=None, max_tokens=8, ignore_eos=True)
        return [[e.token for e in events] for events in finish(engine).values()]

    first = tokens(5)
    assert first == tokens(5) != tokens(6)
    assert first[0] != first[1]


def test_stats_count_what_happened() -> None:
    engine = make()
    for i in range(3):
        ask(engine, length=70, max_tokens=4, ignore_eos=True, seed=i)
    engine.step()
    stats = engine.stats()
    assert (stats["running"], stats["free_slots"], stats["slots"]) == (3, 1, 4)
    assert stats["pages"] == 32 and stats["free_pages"] == 32 - 3 * 5
    finish(engine)
    stats = engine.stats()
    assert stats["sampled"] == 12 and stats["prefilled"] == 210 and stats["running"] == 0
    buckets = stats["buckets"]
    assert isinstance(buckets, dict) and buckets["prefill_2"] == 3
    age = stats["last_step_age"]
    assert isinstance(age, float) and 0 <= age < 60


def test_a_swapped_request_is_not_counted_as_waiting() -> None:
    engine = make(limits=Limits(1, 128, 32, VOCAB, page_size=16, bias_slots=8, top_logprobs=5))
    ask(engine, ignore_eos=True)
    engine.step(), engine.step()
    engine.submit(Request((1, 2), SamplingParams(ignore_eos=True), priority=1))
    engine.step()
    stats = engine.stats()
    assert (stats["running"], stats["waiting"], stats["swapped"]) == (1, 0, 1)
    assert stats["preempted_swap"] == 1 and stats["swap_bytes"] != 0


def test_check_idle_names_what_is_left() -> None:
    engine = make()
    ask(engine)
    with pytest.raises(InternalError, match="requests.*queue"):
        engine.check_idle()
    finish(engine)
    engine.scheduler.pages.take()
    with pytest.raises(InternalError, match="a leak"):
        engine.check_idle()


def test_an_engine_without_a_family_is_refused() -> None:
    loaded = build_fake(LIMITS, (1,), ())
    with pytest.raises(EngineError, match="no prefill bucket"):
        Engine(loaded)


def test_close_may_be_called_twice() -> None:
    engine = make()
    engine.close()
    engine.close()
    assert all(e.closed for e in engine.loaded.executors.values())  # type: ignore[attr-defined]
