"""Constrained requests in an engine of fakes: threads, bounds, and what others notice of them."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spark_engine.errors import RequestError
from spark_engine.interface import Limits
from spark_engine.runtime.engine import masks
from spark_engine.runtime.engine.constraint import ConstraintSpec, Grammars, Words
from spark_engine.runtime.engine.engine import Engine, EngineOptions
from spark_engine.runtime.engine.plan import StepPlan
from spark_engine.runtime.engine.request import Event, FinishReason, Request, SamplingParams
from spark_engine.runtime.engine.sequence import Sequence
from tests.lateness import Lateness
from tests.runtime.engine.drive import drain, tokens_of
from tests.runtime.engine.invariants import check_idle
from tests.runtime.fake_executor import EOS, VOCAB, build_fake

HANGS_S = 200.0  # a wait this long is for a grammar that hangs
PLAIN = SamplingParams(max_tokens=12, ignore_eos=True, seed=1)


class Only:
    """Allows one id, `left` times; each mask takes `seconds`, or until `gate` opens."""

    def __init__(
        self, token: int, left: int = 1000, seconds: float = 0, gate: threading.Event | None = None
    ) -> None:
        self.token, self.left, self.seconds, self.gate = token, left, seconds, gate

    def fill(self, row: Words) -> bool:
        time.sleep(self.seconds)
        if self.gate is not None:
            self.gate.wait(HANGS_S)
        row[:] = 0
        row[self.token // 32] = 1 << self.token % 32
        return True

    def advance(self, token: int) -> None:
        assert token == self.token
        self.left -= 1

    @property
    def done(self) -> bool:
        return self.left == 0


def engine(
    grammars: Grammars | None = None,
    depth: int = 1,
    drafts: int = 0,
    pages: int = 60,
    **options: Any,
) -> Engine:
    limits = Limits(4, 340, pages, VOCAB, page_size=16, bias_slots=8, top_logprobs=3, drafts=drafts)
    loaded = build_fake(limits, (1, 2, 4), (1, 2))
    return Engine(loaded, EngineOptions(depth=depth, grammars=grammars, **options))


def request(params: SamplingParams = PLAIN, **settings: Any) -> Request:
    return Request((1, 2, 5, 8), params, constraint=ConstraintSpec(**settings))


def run(one: Engine) -> dict[int, list[Event]]:
    events = drain(one)
    check_idle(one)
    one.close()
    return events


def counted(one: Engine) -> Counter[str]:
    """How often launches are in one part and in two."""
    calls: Counter[str] = Counter()
    for key, executor in one.loaded.executors.items():
        for name in ("launch", "launch_to_sample"):
            label, inner = f"{key[0]} {name}", getattr(executor, name)
            setattr(executor, name, partial(_called, calls, label, inner))
    return calls


def _called(
    calls: Counter[str], label: str, inner: Callable[..., Any], buffers: Mapping[str, Any]
) -> Any:
    calls[label] += 1
    return inner(buffers)


@pytest.mark.parametrize("drafts", [0, 3])
def test_forced_tokens_come_first_with_their_log_probabilities(drafts: int) -> None:
    """End ids among them end nothing, `min_tokens` counts what is behind; no launch is split."""
    params = SamplingParams(max_tokens=9, min_tokens=2, seed=3, logprobs=2, stop_token_ids=(11,))
    one = engine(drafts=drafts)
    calls = counted(one)
    forced = (EOS[0], 11, 60, EOS[1], 0)
    one.submit(request(params, forced=forced))
    (events,) = run(one).values()
    assert tuple(tokens_of(events)[:5]) == forced
    assert not {*tokens_of(events)[5:7]} & {11, *EOS}
    assert {*tokens_of(events)[5:]} != {forced[-1]}, "its mask is gone"
    assert all(e.logprob is not None and len(e.top) == 2 for e in events)
    assert not [name for name in calls if "to_sample" in name]


@pytest.mark.parametrize("swap_bytes", [0, 1 << 30])
def test_a_swapped_sequence_gets_its_mask_again(swap_bytes: int) -> None:
    """Three of a hundred tokens over pages for one and a half; also where they are recomputed."""
    one = engine(lambda text: Only(int(text)), pages=10, swap_bytes=swap_bytes)
    long = SamplingParams(max_tokens=100, ignore_eos=True, seed=1)
    for token in (17, 60, 33):
        one.submit(request(long, grammar=str(token)))
    events = run(one)
    assert [tokens_of(events[i]) for i in range(3)] == [[17] * 100, [60] * 100, [33] * 100]
    assert one.scheduler.preemptions["swap" if swap_bytes else "recompute"]


def test_forced_tokens_beyond_the_context_are_refused() -> None:
    one = engine()
    with pytest.raises(RequestError, match="forced is 337 tokens; it must be at most 336, what"):
        one.submit(request(forced=(1,) * 337))
    one.submit(request(SamplingParams(), forced=(1,) * 336))
    (events,) = run(one).values()
    assert len(events) == 336 and events[-1].finish is FinishReason.LENGTH


def test_forced_tokens_count_as_prompt_for_the_penalties() -> None:
    one = engine()
    one.submit(request(forced=(4, 5)))
    one.step()
    assert one.memory.tables["prompt_lens"][one.scheduler.running[0].slot] == 6
    run(one)


def test_only_steps_that_need_masks_of_unread_tokens_are_split() -> None:
    one = engine(lambda text: Only(17))
    calls = counted(one)
    one.submit(Request((9, 9), PLAIN))
    run(one)
    assert calls == {"prefill launch": 1, "decode launch": 11}
    calls.clear()
    two = engine(lambda text: Only(17))
    two._masks.slow = HANGS_S  # none runs between steps
    calls = counted(two)
    two.submit(request(grammar="g"))
    run(two)
    # the first decode follows a prefill that was not read yet
    assert calls["prefill launch"] == 1 and calls["prefill launch_to_sample"] == 0
    assert calls["decode launch_to_sample"] == 11


class Panic(BaseException):
    """As a library's that is no Exception of Python's."""


class Panics(Only):
    def fill(self, row: Words) -> bool:
        raise Panic("no such rule")


@pytest.mark.parametrize("made", [True, False])
def test_a_grammar_that_fails_ends_its_request_alone(made: bool) -> None:
    """While it is made, or when its mask is."""

    def grammars(text: str) -> Only:
        if text == "bad" and not made:
            raise ValueError("no such rule")
        return Panics(17) if text == "bad" else Only(17)

    one = engine(grammars)
    for text in ("bad", "good"):
        one.submit(request(grammar=text))
    events = run(one)
    assert events[0][-1].finish is FinishReason.ERROR and not tokens_of(events[0])
    assert events[0][-1].message == "the grammar failed: no such rule"
    assert tokens_of(events[1]) == [17] * 12


def test_grammars_that_hang_end_their_requests_and_leave_others_their_threads() -> None:
    """As many as there are threads, and then some: the others' masks are asked for once more."""
    gate = threading.Event()
    one = engine(lambda text: Only(17, gate=gate if text == "hangs" else None))
    one._masks.bound = one._masks.compiled = 0.5
    for text in ("hangs", "good") * 12:
        one.submit(request(grammar=text))
    start = time.monotonic()
    try:
        events = run(one)
        assert time.monotonic() - start < 100
    finally:
        gate.set()
    for number, of in events.items():
        if number % 2:
            assert tokens_of(of) == [17] * 12 and of[-1].finish is FinishReason.LENGTH
        else:
            assert of[-1].finish is FinishReason.ERROR
            assert "took longer than 0.5 s to say what may come next" in of[-1].message


def test_one_that_hangs_ends_once_however_it_came_to_be_waited_for() -> None:
    """Its first mask is there just when it is admitted, the second is slow, the third hangs."""
    gate, admitted = threading.Event(), threading.Event()

    class Slower(Only):
        def fill(self, row: Words) -> bool:
            if self.left == 1000:
                admitted.wait(HANGS_S)
            elif self.left == 999:
                time.sleep(0.05)
            else:
                one._masks.bound = 0.1
                gate.wait(HANGS_S)
            return super().fill(row)

    one = engine(lambda text: Slower(17), depth=0)
    one._masks.slow = 0.04
    plan, jobs = one.scheduler.schedule, []

    def schedule(in_flight: int) -> StepPlan:
        guide = next(iter(one._live.values())).constraint
        assert guide is not None and guide.job is not None
        jobs.append(guide.job)
        admitted.set()
        jobs[0].result()
        return plan(in_flight)

    one.scheduler.schedule = schedule  # type: ignore[method-assign]
    one.submit(request(grammar="g"))
    try:
        (events,) = run(one).values()
    finally:
        gate.set()
    assert tokens_of(events) == [17] * 2
    assert [e.finish for e in events if e.finish] == [FinishReason.ERROR]


def test_one_that_hangs_while_it_has_no_slot_ends() -> None:
    one = engine(lambda text: Only(int(text)), pages=10)
    preempt, hung = one.scheduler._preempt, list[int]()

    def preempted(seq: Sequence, plan: StepPlan) -> None:
        preempt(seq, plan)
        if not hung and seq.constraint is not None:
            hung.append(seq.id)
            seq.constraint.job, seq.constraint.asked = Future(), time.monotonic() - one._masks.bound
            seq.constraint.job.set_running_or_notify_cancel()

    one.scheduler._preempt = preempted  # type: ignore[method-assign]
    long = SamplingParams(max_tokens=100, ignore_eos=True, seed=1)
    for token in (17, 60, 33):
        one.submit(request(long, grammar=str(token)))
    ends = {number: of[-1].finish for number, of in run(one).items()}
    assert len(hung) == 1 and ends.pop(hung[0]) is FinishReason.ERROR
    assert [*ends.values()] == [FinishReason.LENGTH] * 2


def test_masks_do_not_wait_for_grammars_that_are_made() -> None:
    gate = threading.Event()

    def grammars(text: str) -> Only:
        if text == "hangs":
            gate.wait(HANGS_S)
        return Only(17)

    one = engine(grammars)
    one._masks.bound = 30.0
    first = one.submit(request(grammar="good"))
    while not one.scheduler.running:
        one.step()
    others = [one.submit(request(grammar="hangs")) for _ in range(masks.THREADS)]
    start, found = time.monotonic(), list[Event]()
    while not found or not found[-1].finish:
        found += [e for e in one.step() if e.request_id == first]
    assert time.monotonic() - start < one._masks.bound / 2
    assert found[-1].finish is FinishReason.LENGTH
    for number in others:
        one.cancel(number)
    gate.set()
    run(one)


def test_a_grammar_that_is_made_keeps_no_slot_and_no_page() -> None:
    """More of them than slots, each as long as all pages: one behind them all runs meanwhile."""
    gate = threading.Event()

    def grammars(text: str) -> Only:
        gate.wait(HANGS_S)
        return Only(17)

    one = engine(grammars, pages=22)
    one._masks.bound = 30.0
    long = (1, 2, 5, 8) * 75
    spec = ConstraintSpec(grammar="g")
    hanging = [one.submit(Request(long, PLAIN, constraint=spec)) for _ in range(6)]
    last, found = one.submit(Request((1, 2, 5, 8), PLAIN)), list[Event]()
    start = time.monotonic()
    while not found or not found[-1].finish:
        found += [e for e in one.step() if e.request_id == last]
        assert time.monotonic() - start < one._masks.bound / 2
    gate.set()
    assert {of[-1].finish for n, of in run(one).items() if n in hanging} == {FinishReason.LENGTH}


def test_a_step_waits_twice_the_bound_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four that hang, one thread: each waits for the one before."""
    gate, armed = threading.Event(), threading.Event()

    class Hangs(Only):
        def fill(self, row: Words) -> bool:
            if armed.is_set():
                gate.wait(HANGS_S)
            return super().fill(row)

    monkeypatch.setattr(masks, "THREADS", 1)
    one = engine(lambda text: Hangs(17))
    for _ in range(4):
        one.submit(request(grammar="g"))
    while len(one.scheduler.running) < 4 or any(s.prefilling for s in one.scheduler.running):
        one.step()
    events, over = list[Event](), 0.0
    one._masks.bound = bound = 0.5
    armed.set()
    try:
        while not one.idle:
            with Lateness() as late:
                start = time.monotonic()
                events += one.step()
                took = time.monotonic() - start
            over = max(over, took - late.seconds)
    finally:
        gate.set()
    assert over < 2.7 * bound
    assert [e.finish for e in events if e.finish] == [FinishReason.ERROR] * 4


def test_a_slow_grammar_is_waited_for_once_and_then_by_itself() -> None:
    """Its masks take 300 ms each; a request without a grammar has a step in far less."""
    one = engine(lambda text: Only(17, seconds=0.3))
    one._masks.slow = 0.1
    one.submit(request(grammar="g"))
    while not one.scheduler.running or not one.scheduler.running[0].paused:
        one.step()
    one.submit(Request((9, 9), SamplingParams(max_tokens=200, ignore_eos=True, seed=2)))
    before = one._loop.counts.sampled
    took = []
    for _ in range(40):
        start = time.monotonic()
        one.step()
        took.append(time.monotonic() - start)
    assert float(np.median(took)) < 0.15, "no other request waits for it"
    assert one._loop.counts.sampled - before >= 20
    events = run(one)
    assert len(tokens_of(events[0])) <= 12 and len(tokens_of(events[1])) <= 200


def test_what_waits_for_a_mask_waits_without_turning() -> None:
    one = engine(lambda text: Only(17, seconds=0.03))
    one._masks.slow = 0.01
    one.submit(request(grammar="g"))
    steps = 0
    while not one.idle:
        one.step()
        steps += 1
    assert steps < 12 * 60


def test_a_request_is_cancelled_while_its_grammar_is_made() -> None:
    gate = threading.Event()
    one = engine(lambda text: Only(17, gate=gate))
    number = one.submit(request(grammar="g"))
    one.step()
    assert not one.scheduler.running and one.cancel(number)
    (events,) = run(one).values()
    gate.set()
    assert [e.finish for e in events] == [FinishReason.CANCELLED]


@pytest.mark.parametrize("grammars", [None, Only])
def test_an_engine_that_takes_grammars_is_loaded_for_masks(
    monkeypatch: pytest.MonkeyPatch, grammars: Any
) -> None:
    arguments: dict[str, Any] = {}

    def load(*_: Any, **how: Any) -> Any:
        arguments.update(how)
        return engine().loaded

    monkeypatch.setattr("spark_engine.runtime.engine.engine.load", load)
    Engine.open(Path("engine"), EngineOptions(grammars=grammars)).close()
    assert arguments["masks"] is (grammars is not None)


def test_an_engine_without_grammars_refuses_them() -> None:
    one = engine()
    with pytest.raises(RequestError, match="opened without any: give EngineOptions.grammars"):
        one.submit(request(grammar="g"))
    one.submit(request(forced=(1,)))
    run(one)
