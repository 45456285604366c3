"""Generated traces on the fake executor: every sequence's tokens equal its solo run."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, replace

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spark_engine.interface import DECODE, PREFILL, Limits, drafts_of, verify_family
from spark_engine.runtime.engine.engine import Engine, EngineOptions
from spark_engine.runtime.engine.plan import StepPlan
from spark_engine.runtime.engine.policy import prefix_admission
from spark_engine.runtime.engine.policy.pacing import (
    BALANCED,
    LATENCY,
    THROUGHPUT,
    TUNING,
    Pace,
    PrefillPolicy,
)
from spark_engine.runtime.engine.policy.step_costs import StepCosts
from spark_engine.runtime.engine.request import (
    Event,
    FinishReason,
    Request,
    SamplingParams,
    Status,
    capacity,
)
from spark_engine.runtime.engine.sequence import Sequence
from spark_engine.runtime.executors.memory import Snapshot
from tests.runtime.engine import automaton
from tests.runtime.fake_executor import VOCAB, build_fake, poison_free

MOST_PASSED = -(-340 // 64)  # tiles that go before those of the longest sequence
BOUNDED = (
    PrefillPolicy(itl_ms=1e-3),
    PrefillPolicy(Pace.THROUGHPUT, 1e9),
)  # below a step, and no bound
GRID = (63, 64, 65, 127, 128, 129, 192, 256)  # tokens: where tiles and pages end, and beside it
# owners and salts of requests, most of them alike
WHOSE = (
    ("", b""),
    ("", b""),
    ("a", b""),
    ("b", b""),
    ("a", b"salt"),
    ("b", b"salt"),
    ("", b"pepper"),
)
POISON_RATE = 199  # about every 199th answer is non-finite


@dataclass(frozen=True)
class Arrival:
    """A request, the step before which it comes, and after how many more it is cancelled.

    `follows`: its prompt goes on from the whole of the request that came so many before it, as far
    as that has come by then, if there is room.
    """

    request: Request
    step: int
    cancel_after: int | None
    follows: int = 0


@dataclass(frozen=True)
class Trace:
    """One engine and what happens to it. `depths`: a seed of the k of every round, or None.
    `invariant`: it takes over only what prefill made. `short`: before these steps the host's memory
    turns short, or is so no more."""

    limits: Limits
    decode: tuple[int, ...]
    prefill: tuple[int, ...]
    options: EngineOptions
    arrivals: tuple[Arrival, ...]
    depths: int | None = None
    invariant: bool = False
    short: tuple[int, ...] = ()


@st.composite
def params(draw: st.DrawFn) -> SamplingParams:
    most, least = draw(st.sampled_from(((1, 0), (2, 1), (11, 9), (40, 3), (90, 0), (None, 9))))
    return SamplingParams(
        temperature=draw(st.sampled_from((0.0, 0.7, 1.0))),
        top_k=draw(st.sampled_from((-1, 0, 5))),
        repetition=draw(st.sampled_from((1.0, 1.1))),
        presence=draw(st.sampled_from((0.0, 0.0, 0.5))),
        max_tokens=most,
        min_tokens=least,
        ignore_eos=draw(st.booleans()),
        stop_token_ids=draw(st.sampled_from(((), (5,), (5, 11, 30)))),
        logit_bias=draw(st.sampled_from(({}, {9: 1.5}))),
        seed=draw(st.integers(-(2**63), 2**63 - 1)),
        logprobs=draw(st.sampled_from((None, 0, 3))),
        drafts=draw(st.sampled_from((None, None, 0, 1, 2, 7))),
    )


@st.composite
def arrivals(draw: st.DrawFn, most: int) -> Arrival:
    length = min(draw(st.one_of(st.integers(1, 70), st.integers(1, 300))), most)
    first, stride = draw(st.sampled_from((0, 1, 30))), draw(st.sampled_from((1, 1, 7)))
    parts = draw(st.one_of(st.just(length), st.integers(0, length)))  # its own tokens behind that
    shift = draw(st.sampled_from((1, 2)))
    prompt = tuple(
        (first + i * stride + i // 5 + (i >= parts) * shift) % VOCAB for i in range(length)
    )
    marks = tuple(sorted(draw(st.lists(st.integers(0, length), max_size=2))))
    follows = draw(st.sampled_from((0, 0, 1, 2)))
    priority = draw(st.sampled_from((0, 0, 0, 1, 2)))
    cancel = draw(st.one_of(st.none(), st.none(), st.integers(0, 20)))
    bound = draw(st.one_of(st.none(), st.none(), automaton.specs()))
    request = Request(prompt, draw(params()), priority, marks, bound, *draw(st.sampled_from(WHOSE)))
    return Arrival(request, draw(st.integers(0, 60)), cancel, follows)


@st.composite
def traces(draw: st.DrawFn, most_drafts: int = 0) -> Trace:
    page = draw(st.sampled_from((8, 16, 64)))
    limits = Limits(
        max_seqs=draw(st.integers(1, 7)),
        max_context=draw(st.sampled_from((70, 128, 340))),
        pages=draw(st.integers(2, 30 if page < 64 else 12)),
        vocab=VOCAB,
        page_size=page,
        bias_slots=8,
        top_logprobs=3,
        drafts=draw(st.integers(1, most_drafts)) if most_drafts else 0,
        snapshots=draw(st.sampled_from((0, 1, 2, 5, 30))),
    )
    options = EngineOptions(
        drafts=draw(st.sampled_from((None, None, None, 2, 0))) if most_drafts else None,
        policy=draw(st.sampled_from((THROUGHPUT, LATENCY, BALANCED, *BOUNDED))),
        depth=draw(st.integers(0, 1)),
        swap_bytes=draw(st.sampled_from((0, 3000, 1 << 30))),
        cache_bytes=draw(st.sampled_from((None, None, None, 2000, 5000, 0))),
    )
    return Trace(
        limits,
        draw(st.sampled_from(((1, 2, 4, 8), (3, 7), (2,)))),
        draw(st.sampled_from(((1,), (1, 2, 4), (3,)))),
        options,
        tuple(draw(st.lists(arrivals(capacity(limits) - 1), min_size=1, max_size=9))),
        draw(st.one_of(st.none(), st.integers(0, 2**32))) if most_drafts else None,
        short=draw(st.sampled_from(((), (), (), (20,), (9, 30, 60)))),
    )


@st.composite
def forks(draw: st.DrawFn) -> Trace:
    """Prompts that part somewhere from one of two others, many at once, conversations, and several
    choices of a prompt, which may all be cancelled at once."""
    page, drafts = draw(st.sampled_from((8, 16, 64))), draw(st.sampled_from((0, 0, 2, 5)))
    limits = Limits(
        max_seqs=draw(st.integers(2, 7)),
        max_context=draw(st.sampled_from((200, 340))),
        pages=draw(st.integers(340 // page + 1, 1200 // page)),
        vocab=VOCAB,
        page_size=page,
        bias_slots=8,
        top_logprobs=3,
        drafts=drafts,
        snapshots=draw(st.sampled_from((1, 3, 8, 30))),
    )
    stems = [tuple((n + i * (3 + n) + i // 7) % VOCAB for i in range(400)) for n in (0, 1)]
    made = []
    for _ in range(draw(st.integers(2, 10))):
        cut = draw(st.one_of(st.integers(0, 260), st.sampled_from((0, *GRID))))
        whole = [length - cut for length in GRID if 0 < length - cut <= 70]
        own = draw(st.one_of(st.integers(1, 70), st.sampled_from(whole or [1])))
        tail = tuple(i * 5 % VOCAB for i in range(own))
        prompt = (*draw(st.sampled_from(stems))[:cut], *tail)[: capacity(limits) - 2]
        marks = tuple(sorted(draw(st.lists(st.integers(0, cut), max_size=2))))
        priority = draw(st.sampled_from((0, 0, 0, 1)))
        bound = draw(st.one_of(st.none(), st.none(), st.none(), automaton.specs()))
        whose = draw(st.sampled_from(WHOSE))
        request = Request(prompt, draw(params()), priority, marks, bound, *whose)
        step = draw(st.sampled_from((0, 0, 0, 1, 2, 9, 40)))
        cancel = draw(st.sampled_from((None, None, None, 1, 3)))
        follows = draw(st.sampled_from((0, 0, 1)))
        made.append(Arrival(request, step, cancel, follows))
        for number in range(draw(st.sampled_from((0, 0, 0, 1, 8)))):  # more than slots
            seed = (request.params.seed or 0) // 2 + number
            other = replace(request, params=replace(request.params, seed=seed))
            alone = draw(st.sampled_from((cancel, cancel, None, 0, 2)))
            made.append(Arrival(other, step, alone))
    options = EngineOptions(
        policy=draw(st.sampled_from((THROUGHPUT, LATENCY, BALANCED, *BOUNDED))),
        depth=draw(st.integers(0, 1)),
        swap_bytes=draw(st.sampled_from((0, 1 << 30))),
        cache_bytes=draw(st.sampled_from((None, None, None, 4000))),
    )
    buckets = draw(st.sampled_from(((1, 2, 4), (1,), (3,))))
    seed = draw(st.integers(0, 2**32)) if drafts else None
    exact = draw(st.sampled_from((False, False, True)))
    return Trace(limits, (1, 2, 4, 8), buckets, options, tuple(made), seed, exact)


class Watch:
    """Runs an engine step by step and checks what must hold after each."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.events: dict[int, list[Event]] = {}
        self._plan: StepPlan | None = None
        self._due: set[Sequence] = set()
        self._grids: dict[int, int] = {}
        self._stuck = 0
        self._mark: object = None
        inner = engine.scheduler.schedule

        def schedule(in_flight: int) -> StepPlan:
            self._due = {s for s in engine.scheduler.running if s.decodable}
            self._plan = inner(in_flight)
            uses = engine.scheduler.prefix._uses
            self._grids = {number: use.grid for number, use in uses.items()}
            return self._plan

        engine.scheduler.schedule = schedule  # type: ignore[method-assign]

    def submit(self, request: Request) -> int:
        number = self.engine.submit(request)
        self.events[number] = []
        return number

    def step(self) -> None:
        self._plan = None
        for event in self.engine.step():
            assert not (self.events[event.request_id] and self.events[event.request_id][-1].finish)
            self.events[event.request_id].append(event)
        self.engine.scheduler.check()
        self._check_snapshots()
        self._check_progress()
        if not self.engine.depth:  # every round was read
            live = [s for s in self.engine.scheduler.running if not s.prefilling]
            assert all(s.unverified == 0 and len(s.tokens) == s.launched + 1 for s in live)
        if self._plan:
            self._check_plan(self._plan)
        poison_free(self.engine)

    def _check_plan(self, plan: StepPlan) -> None:
        assert len({batch.family == PREFILL for batch in plan.batches}) == len(plan.batches)
        for batch in plan.batches:
            fitting = [b for b in self.engine.loaded.rows(batch.family) if b >= len(batch.rows)]
            assert batch.rows and batch.bucket == fitting[0]
            assert drafts_of(batch.family) <= self.engine.drafts
        rows = {batch.family == PREFILL: batch.rows for batch in plan.batches}
        decoded = {row.seq for row in rows.get(False, ())}
        assert len(decoded) == len(rows.get(False, ()))
        assert plan.drain or self._due - set(plan.preempted) <= decoded
        for row in rows.get(True, ()):
            assert (row.start - self._grids.get(row.seq.id, 0)) % 64 == 0 and row.seq not in decoded
            assert row.count == 64 or row.emit
        assert not (plan.preempted and self.engine.options.depth == 0 and plan.drain)

    def _check_snapshots(self) -> None:
        scheduler = self.engine.scheduler
        held = [s for s in scheduler.waiting if s.status is Status.SWAPPED]
        for seq in held:
            assert isinstance(seq.swap_copy, Snapshot)
            assert seq.swap_copy.nbytes == seq.swap_bytes
        assert scheduler.swap_used <= self.engine.options.swap_bytes
        assert all(s.swap_copy is None for s in scheduler.running)

    def _check_progress(self) -> None:
        """The most urgent that runs never waits longer than the turns before its own and what may
        overtake them, in tiles, each of which may be held back while others decode."""
        head = min(self.engine.scheduler.running, key=lambda s: s.rank, default=None)
        mark = head and (head.id, head.launched, len(head.tokens))
        self._stuck = self._stuck + 1 if head and mark == self._mark else 0
        self._mark = mark
        held = 0 if self.engine.options.policy == LATENCY else TUNING.max_held_steps
        assert self._stuck <= 3 * (MOST_PASSED + 1) * (1 + held) + 3


def tokens_of(events: list[Event]) -> list[int]:
    return [e.token for e in events if e.token is not None]


def solo(engine: Engine, request: Request) -> list[Event]:
    """The request alone in an engine that others used before it."""
    number, events = engine.submit(request), []
    while not engine.idle:
        events += engine.step()
    assert all(e.request_id == number for e in events)
    return events


def replay(trace: Trace) -> tuple[Watch, dict[int, Arrival]]:
    loaded = build_fake(trace.limits, trace.decode, trace.prefill, poison_rate=POISON_RATE)
    # Without a seed of k the engine chooses, and verifying costs it little.
    costs = {key: 10.0 + drafts_of(key[0]) for key in loaded.executors}
    options = replace(trace.options, grammars=automaton.Automaton)
    loaded = replace(loaded, costs=costs, invariant=trace.invariant)
    watch = Watch(automaton.at_once(Engine(loaded, options)))
    if trace.depths is not None:
        rng, most = random.Random(trace.depths), watch.engine.drafts
        depth = watch.engine.scheduler.depth
        depth.choose = lambda seqs, brisk=False: rng.randint(0, most)  # type: ignore[method-assign]
    arrived: dict[int, Arrival] = {}
    cancels: dict[int, int] = {}
    queue = sorted(trace.arrivals, key=lambda a: a.step)
    for now in range(20_000):
        while queue and queue[0].step <= now:
            arrival = fitted(follow(watch, arrived, queue.pop(0)), trace.limits)
            number = watch.submit(arrival.request)
            arrived[number] = arrival
            if arrival.cancel_after is not None:
                cancels[number] = now + arrival.cancel_after
        if now in trace.short:
            watch.engine.save_memory(not watch.engine.scheduler.frugal)
        for number in [n for n, at in cancels.items() if at == now]:
            watch.engine.cancel(number, FinishReason.CANCELLED)
        watch.step()
        if watch.engine.idle and not queue:
            return watch, arrived
    raise AssertionError("the trace does not end")


def follow(watch: Watch, arrived: dict[int, Arrival], arrival: Arrival) -> Arrival:
    """With the prompt that it has when it comes."""
    if not 0 < arrival.follows <= len(arrived):
        return arrival
    number = list(arrived)[-arrival.follows]
    before = [*arrived[number].request.prompt, *tokens_of(watch.events[number])]
    own = arrival.request.prompt[: capacity(watch.engine.loaded.limits) - 1 - len(before)]
    if len(before) + len(own) >= capacity(watch.engine.loaded.limits):
        return arrival
    return replace(arrival, request=replace(arrival.request, prompt=(*before, *own)))


def fitted(arrival: Arrival, limits: Limits) -> Arrival:
    """With no more forced ids than its prompt leaves room for."""
    bound, room = arrival.request.constraint, capacity(limits) - len(arrival.request.prompt)
    if bound is None or len(bound.forced) <= room:
        return arrival
    bound = msgspec.structs.replace(bound, forced=bound.forced[:room])
    return replace(arrival, request=replace(arrival.request, constraint=bound))


def check_trace(trace: Trace) -> None:
    watch, arrived = replay(trace)
    watch.engine.check_idle()
    watch.engine.clear_cache()
    assert watch.engine.scheduler.pages.free == trace.limits.pages
    assert watch.engine.scheduler.prefix.rows.free == trace.limits.snapshots
    verified = watch.engine._loop.counts.drafts_by_position
    assert sum(events[-1].drafted for events in watch.events.values()) == sum(verified)
    limits = replace(trace.limits, drafts=0, snapshots=0)
    plain = build_fake(limits, (1,), (1,), lazy=False, poison_rate=POISON_RATE)
    options = EngineOptions(swap_bytes=0, grammars=automaton.Automaton)
    alone = automaton.at_once(Engine(plain, options))
    for number, arrival in arrived.items():
        events, expected = watch.events[number], solo(alone, arrival.request)
        assert events[-1].finish and not any(e.finish for e in events[:-1])
        if events[-1].finish is FinishReason.CANCELLED:
            assert arrival.cancel_after is not None
            assert tokens_of(events) == tokens_of(expected)[: len(tokens_of(events))]
        else:
            strip = [(e.token, e.logprob, e.top, e.finish, e.message) for e in events]
            assert strip == [(e.token, e.logprob, e.top, e.finish, e.message) for e in expected]
        if arrival.request.constraint is not None:
            automaton.follows(arrival.request.constraint, tokens_of(events))


@settings(
    max_examples=3 * settings().max_examples,  # 300; 3,000 in `make soak`
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(traces())
def test_traces_equal_solo_runs(trace: Trace) -> None:
    check_trace(trace)


@settings(
    max_examples=settings().max_examples,  # 100; 1,000 in `make soak`
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(traces(most_drafts=7))
def test_traces_of_rounds_of_drafts_equal_solo_runs_without(trace: Trace) -> None:
    check_trace(trace)


@settings(
    max_examples=2 * settings().max_examples,  # 200; 2,000 in `make soak`
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(trace=forks())
def test_traces_of_shared_beginnings_equal_solo_runs(
    monkeypatch: pytest.MonkeyPatch, trace: Trace
) -> None:
    """States are kept every 128 tokens, which no prompt here would see at the usual distance."""
    monkeypatch.setattr(prefix_admission, "EVERY", 128)
    check_trace(trace)


@pytest.mark.parametrize("swap_bytes", [0, 6_000, 1 << 30])
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("drafts", [0, 3])
def test_page_pressure_preempts_and_loses_nothing(swap_bytes: int, depth: int, drafts: int) -> None:
    """Sixteen long sequences over pages for four; the kinds of preemption are seen."""
    limits = Limits(8, 340, 40, VOCAB, page_size=16, bias_slots=8, top_logprobs=3, drafts=drafts)
    arrivals = tuple(
        Arrival(
            Request(
                tuple((i * 7 + j) % VOCAB for j in range(60 + 9 * i)),
                SamplingParams(max_tokens=90, ignore_eos=True, seed=i),
                priority=i // 14,
            ),
            step=3 * i,
            cancel_after=None,
        )
        for i in range(16)
    )
    options = EngineOptions(depth=depth, swap_bytes=swap_bytes)
    trace = Trace(limits, (1, 2, 4, 8), (1, 2, 4), options, arrivals)
    check_trace(trace)
    watch, _ = replay(trace)
    stats = watch.engine.stats()
    assert (stats["preempted_swap"] != 0) == (swap_bytes > 0)
    assert (stats["preempted_recompute"] != 0) == (swap_bytes < 1 << 30)
    assert bool(sum(stats["accepted_by_position"])) == bool(drafts)  # type: ignore[call-overload]


def test_drafts_are_kept_as_often_as_the_head_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three in four of each position, given those before it: what the head reads, its pages and the
    tokens that prefill tells it, is never lost, and a chain may run into the page behind its row.
    """
    # What the fake takes by the clock says nothing of k.
    monkeypatch.setattr(StepCosts, "ran", lambda costs, bucket, microseconds: None)
    for depth, most in ((0, 1), (1, 3), (1, 7)):
        limits = Limits(4, 340, 199, VOCAB, page_size=8, bias_slots=8, top_logprobs=5, drafts=most)
        loaded = build_fake(limits, (1, 2, 4), (1, 2))
        costs = {key: 10.0 + drafts_of(key[0]) / 10 for key in loaded.executors}
        engine = Engine(replace(loaded, costs=costs), EngineOptions(depth=depth))
        for i in range(12):
            prompt = tuple((i * 7 + j) % VOCAB for j in range(5 + 11 * i))
            params = SamplingParams(max_tokens=150, ignore_eos=True, seed=i)
            engine.submit(Request(prompt, params))
        last: dict[int, Event] = {}
        while not engine.idle:
            last |= {event.request_id: event for event in engine.step()}
        counts = engine._loop.counts
        offered, kept = counts.drafts_by_position, counts.accepted_by_position
        assert len(offered) == len(kept) == most
        for i, n in enumerate(kept):
            # those offered behind a kept draft: all but where a row was cut short
            reached = kept[i - 1] * offered[i] / offered[i - 1] if i else offered[0]
            assert n / reached == pytest.approx(0.75, abs=1.5 / reached**0.5), (most, i)
        assert sum(event.drafted for event in last.values()) == sum(offered)
        assert sum(event.accepted for event in last.values()) == sum(kept)
        assert counts.sampled == 12 * 150 and counts.surplus_rows == 0
        assert counts.steps < 12 * 150 / 4 / (1.6, 2.2, 2.6)[(1, 3, 7).index(most)]


def test_drafts_of_a_sequence_that_had_ended_are_not_counted() -> None:
    """The round after its last token was launched before that token was read."""
    limits = Limits(4, 340, 199, VOCAB, page_size=8, bias_slots=8, top_logprobs=5, drafts=2)
    options = EngineOptions(depth=1, drafts=2, fixed_drafts=True)
    engine = Engine(build_fake(limits, (1, 2, 4), (1, 2)), options)
    stops = tuple(range(0, VOCAB, 9))
    for i in range(12):
        params = SamplingParams(max_tokens=90, stop_token_ids=stops, seed=i)
        engine.submit(Request(tuple((i * 7 + j) % VOCAB for j in range(5 + i)), params))
    last: dict[int, Event] = {}
    while not engine.idle:
        last |= {event.request_id: event for event in engine.step()}
    counts = engine._loop.counts
    assert sum(event.finish is FinishReason.STOP for event in last.values()) > 6
    assert sum(event.drafted for event in last.values()) == sum(counts.drafts_by_position) > 0


@pytest.mark.parametrize("depth", [0, 1])
def test_the_costs_hear_of_rounds_that_ran_alone_and_of_prefill(
    depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[tuple[tuple[str, int], float]] = []
    monkeypatch.setattr(StepCosts, "ran", lambda self, *told: heard.append(told))
    limits = Limits(4, 340, 199, VOCAB, page_size=8, bias_slots=8, top_logprobs=5, drafts=1)
    loaded = build_fake(limits, (1, 2, 4), (1, 2))
    costs = dict.fromkeys(loaded.executors, 10.0)
    engine = Engine(replace(loaded, costs=costs), EngineOptions(depth=depth))
    for i in range(3):
        params = SamplingParams(max_tokens=30, ignore_eos=True, seed=i)
        engine.submit(Request(tuple(range(1, 20 + i)), params))
    start = time.perf_counter()
    while not engine.idle:
        engine.step()
    counts = engine._loop.counts
    rounds = sum(n for (family, _), n in counts.buckets.items() if family != PREFILL)
    alone = [(key[0], us) for key, us in heard if key[0] != PREFILL]
    assert {family for family, _ in alone} <= {DECODE, verify_family(1)} and len(alone) < len(heard)
    assert rounds - 4 <= len(alone) <= rounds  # all but those beside a prefill
    total = sum(us for _, us in alone) / 1e6
    assert 0 < total <= time.perf_counter() - start
