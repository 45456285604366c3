"""The engine's promises to its caller, on the fake executor."""

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from spark_engine.errors import CapacityError, EngineError, InternalError, RequestError
from spark_engine.interface import Limits, drafts_of
from spark_engine.runtime.engine import step
from spark_engine.runtime.engine.engine import Engine, EngineOptions
from spark_engine.runtime.engine.request import Event, FinishReason, Request, SamplingParams
from spark_engine.tensors import Array
from tests.runtime.engine.drive import drain
from tests.runtime.engine.invariants import check_idle, check_scheduler
from tests.runtime.fake_executor import EOS, VOCAB, build_fake

LIMITS = Limits(4, 128, 32, VOCAB, page_size=16, bias_slots=8, top_logprobs=5)
BOTH = pytest.mark.parametrize("depth", [0, 1])


def make(depth: int = 0, limits: Limits = LIMITS, **options: object) -> Engine:
    loaded = build_fake(limits, (1, 2, 4), (1, 2))
    return Engine(loaded, EngineOptions(depth=depth, **options))  # type: ignore[arg-type]


def make_drafting(depth: int, most: int = 3, **options: object) -> Engine:
    """An engine to which a draft costs little, with a head that is right three times in four."""
    limits = replace(LIMITS, max_context=340, pages=99, drafts=most)
    loaded = build_fake(limits, (1, 2, 4), (1, 2))
    costs = {key: 10.0 + drafts_of(key[0]) / 10 for key in loaded.executors}
    return Engine(replace(loaded, costs=costs), EngineOptions(depth=depth, **options))  # type: ignore[arg-type]


def finish(engine: Engine) -> dict[int, list[Event]]:
    events = drain(engine)
    check_idle(engine)
    return events


def ask(engine: Engine, length: int = 5, **params: object) -> int:
    request = Request(
        tuple(i % VOCAB for i in range(length)), SamplingParams(**{"seed": 1, **params})
    )  # type: ignore[arg-type]
    return engine.submit(request)


def test_nothing_runs_ahead_on_the_host_by_default() -> None:
    """With states on a device the engine runs one step ahead: test_native_engine.py."""
    loaded = replace(build_fake(LIMITS, (1,), (1,)), device_states=None)
    assert Engine(loaded).depth == 0 and Engine(loaded, EngineOptions(depth=1)).depth == 1


@BOTH
def test_every_end_id_stops_by_default(depth: int) -> None:
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
    assert (stats["running"], stats["free_slots"], stats["slots"]) == (1, 3, 4), (
        "a launch holds one"
    )
    assert stats["waiting"] == 2 and stats["pages"] == 32 and stats["free_pages"] == 32 - 5
    finish(engine)
    stats = engine.stats()
    assert stats["sampled"] == 12 and stats["prefilled"] == 210 and stats["running"] == 0
    buckets = stats["buckets"]
    assert isinstance(buckets, dict) and buckets["prefill_2"] == 3
    age = stats["last_step_age"]
    assert isinstance(age, float) and 0 <= age < 60


def test_stats_show_every_bucket_from_the_start() -> None:
    names = ["decode_1", "decode_2", "decode_4", "prefill_1", "prefill_2"]
    assert make().stats()["buckets"] == dict.fromkeys(names, 0)


def test_an_admission_is_reported_once_with_its_time() -> None:
    engine = make()
    ids = [ask(engine, ignore_eos=True, seed=i) for i in range(2)]
    before = time.monotonic()
    engine.step()
    assert [number for number, _ in engine.started] == ids
    assert all(before <= at <= time.monotonic() for _, at in engine.started)
    engine.step()
    assert engine.started == []


def test_while_memory_is_short_nothing_of_the_host_is_kept() -> None:
    """Snapshots of swapped requests and the cache are freed, and no token changes."""
    limits = Limits(1, 340, 30, VOCAB, page_size=16, bias_slots=8, top_logprobs=5, snapshots=5)
    plain, found = Engine(build_fake(limits, (1,), (1,))), []
    for engine in (plain, Engine(build_fake(limits, (1,), (1,)))):
        low = engine.submit(
            Request((1, 2, 3) * 30, SamplingParams(max_tokens=60, seed=1, ignore_eos=True))
        )
        events = [engine.step() for _ in range(20)]
        engine.submit(
            Request((5,), SamplingParams(max_tokens=30, seed=1, ignore_eos=True), priority=1)
        )
        events += [engine.step() for _ in range(5)]
        assert engine.stats()["swapped"] == 1 and engine.scheduler.swap_used
        if engine is not plain:
            engine.save_memory(True)
            check_scheduler(engine.scheduler)
            assert not (engine.scheduler.swap_used or engine.stats()["swapped"])
            assert all(seq.swap_copy is None for seq in engine.scheduler.waiting)
            assert engine.stats()["snapshots"] == 0
        while low in engine._live:
            events.append(engine.step())
        found.append([e.token for step in events for e in step if e.request_id == low])
        engine.submit(Request((1, 2), SamplingParams(max_tokens=60, seed=1, ignore_eos=True)))
        engine.step(), engine.step()
        engine.submit(
            Request((5,), SamplingParams(max_tokens=3, seed=1, ignore_eos=True), priority=1)
        )
        engine.step(), engine.step()
        assert engine.stats()["preempted_swap"] == (2 if engine is plain else 1)
    assert found[0] == found[1] and len(found[0]) > 20


def test_a_swapped_request_is_not_counted_as_waiting() -> None:
    engine = make(limits=Limits(1, 128, 32, VOCAB, page_size=16, bias_slots=8, top_logprobs=5))
    ask(engine, ignore_eos=True)
    engine.step(), engine.step()
    engine.submit(Request((1, 2), SamplingParams(ignore_eos=True), priority=1))
    engine.step()
    stats = engine.stats()
    assert (stats["running"], stats["waiting"], stats["swapped"]) == (1, 0, 1)
    assert stats["preempted_swap"] == 1 and stats["swap_bytes"] != 0


def test_an_engine_without_a_family_is_refused() -> None:
    loaded = build_fake(LIMITS, (1,), ())
    with pytest.raises(EngineError, match="no prefill bucket"):
        Engine(loaded)


def test_close_may_be_called_twice() -> None:
    engine = make()
    engine.close()
    engine.close()
    assert all(e.closed for e in engine.loaded.executors.values())  # type: ignore[attr-defined]


# ---- rounds of drafts --------------------------------------------------------------------------


def numbers(engine: Engine, name: str) -> list[int]:
    found = engine.stats()[f"{name}_by_position"]
    assert isinstance(found, list)
    return found


@BOTH
@pytest.mark.parametrize("drafts", [0, 7])
def test_a_round_that_ends_a_request_in_its_midst_is_dropped_behind_the_end(
    depth: int, drafts: int
) -> None:
    """Every id in turn is the one that stops; each is met at every place of a round."""
    engine = make_drafting(depth, most=7, drafts=drafts)
    free = ask(engine, max_tokens=60, ignore_eos=True)
    tokens = [e.token for e in finish(engine)[free]]
    for stop in sorted({t for t in tokens if t is not None}):
        cut = tokens[: tokens.index(stop) + 1]
        number = ask(engine, max_tokens=60, ignore_eos=True, stop_token_ids=(stop,))
        events = finish(engine)[number]
        if len(cut) < 60:
            assert [e.finish for e in events] == [None] * (len(cut) - 1) + [FinishReason.STOP]
            assert [e.token for e in events] == cut
            assert events[-1].accepted < len(events), "drafts behind an end are not counted"


@BOTH
@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("most", [1, 2, 3, 4, 5, 6, 17])
def test_max_tokens_and_the_context_end_a_round_exactly(depth: int, drafts: int, most: int) -> None:
    engine = make_drafting(depth, drafts=drafts)
    short = ask(engine, max_tokens=most, ignore_eos=True)
    full = ask(engine, length=340 - most, ignore_eos=True)
    events = finish(engine)
    for number in (short, full):
        assert [e.finish for e in events[number]] == [None] * (most - 1) + [FinishReason.LENGTH]
    assert engine.stats()["surplus_rows"] == 0  # no row reaches beyond


def test_events_count_the_drafts_of_their_request() -> None:
    engine = make_drafting(1)
    asked = ask(engine, max_tokens=80, ignore_eos=True)
    none = ask(engine, max_tokens=80, ignore_eos=True, drafts=0)
    one = ask(engine, max_tokens=80, ignore_eos=True, drafts=1)
    heard = finish(engine)
    for number in (asked, one):
        counts = [(e.drafted, e.accepted) for e in heard[number]]
        assert counts == sorted(counts) and 0 < counts[-1][1] < counts[-1][0]
        assert counts[-1][1] < len(counts)
    assert {(e.drafted, e.accepted) for e in heard[none]} == {(0, 0)}
    lasts = [events[-1] for events in heard.values()]
    assert sum(e.drafted for e in lasts) == sum(numbers(engine, "drafts"))
    assert sum(e.accepted for e in lasts) == sum(numbers(engine, "accepted"))
    # a row with two drafts is of the one request that may have them
    assert numbers(engine, "drafts")[1] <= heard[asked][-1].drafted


def test_the_last_event_of_a_cancelled_request_counts_its_drafts() -> None:
    engine = make_drafting(1)
    number, before = ask(engine, ignore_eos=True), []
    for _ in range(12):
        before += engine.step()
    engine.cancel(number)
    [last] = finish(engine)[number]
    assert (last.drafted, last.accepted) == (before[-1].drafted, before[-1].accepted) > (0, 0)


@pytest.mark.parametrize(("asked", "most"), [(None, 3), (0, 0), (2, 2), (7, 3)])
def test_a_run_has_at_most_the_drafts_it_is_given(asked: int | None, most: int) -> None:
    engine = make_drafting(1, drafts=asked)
    number = ask(engine, max_tokens=60, ignore_eos=True, drafts=7)
    assert engine.drafts == most and len(finish(engine)[number]) == 60
    rounds = engine.stats()["rounds_by_k"]
    assert (
        isinstance(rounds, dict) and max(rounds, default=0) == most and bool(rounds) == bool(most)
    )
    assert len(numbers(engine, "drafts")) == most


def test_a_fixed_number_of_drafts_is_verified_in_every_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Though none pays; otherwise that number is a bound."""
    stopped_clock = SimpleNamespace(perf_counter=lambda: 0.0, monotonic=time.monotonic)
    monkeypatch.setattr(step, "time", stopped_clock)  # else a step that stalls makes drafts pay
    rounds = {}
    for fixed in (False, True):
        engine = make_drafting(0, drafts=2, fixed_drafts=fixed)
        dear = {key: 10.0 ** (1 + drafts_of(key[0])) for key in engine.loaded.executors}
        engine = Engine(replace(engine.loaded, costs=dear), engine.options)
        for _ in range(3):
            ask(engine, max_tokens=60, ignore_eos=True)
        finish(engine)
        found = engine.stats()["rounds_by_k"]
        assert isinstance(found, dict)
        rounds[fixed] = found
    assert not rounds[False].get(2) and rounds[True][2] > 10
    assert rounds[True].get(0, 0) <= 1, "a last token may need none"


def test_a_k_without_buckets_is_left_out() -> None:
    loaded = make_drafting(0).loaded
    few = {k: e for k, e in loaded.executors.items() if k[0] not in ("verify_k1", "verify_k3")}
    engine = Engine(replace(loaded, executors=few))
    number = ask(engine, max_tokens=60, ignore_eos=True)
    assert engine.drafts == 2 and len(finish(engine)[number]) == 60
    rounds = engine.stats()["rounds_by_k"]
    assert isinstance(rounds, dict) and set(rounds) <= {0, 2} and 2 in rounds


@pytest.mark.parametrize("wrong", [0, 5])
def test_an_impossible_number_of_accepted_tokens_is_a_bug(wrong: int) -> None:
    engine = make_drafting(0)
    ask(engine, ignore_eos=True)
    for _ in range(4):
        engine.step()
    for key, executor in engine.loaded.executors.items():
        if drafts_of(key[0]):
            inner = executor.launch  # type: ignore[attr-defined]

            def launch(buffers: Mapping[str, Array], inner: Any = inner) -> Callable[[], None]:
                wait = inner(buffers)

                def after() -> None:
                    wait()
                    buffers["accepted"][0] = wrong

                return after

            executor.launch = launch  # type: ignore[attr-defined]
    with pytest.raises(InternalError, match=f"of .* tokens .{wrong}. were accepted"):
        engine.step()
