"""What requests take over from each other, rule by rule; the traces test that no token changes."""

from dataclasses import replace
from typing import Any

import pytest

from spark_engine.interface import PREFILL, Limits
from spark_engine.runtime.engine.engine import Engine, EngineOptions
from spark_engine.runtime.engine.masks import EndedSequences
from spark_engine.runtime.engine.plan import StepPlan
from spark_engine.runtime.engine.policy.prefix_admission import EVERY
from spark_engine.runtime.engine.policy.prefix_trie import Hit
from spark_engine.runtime.engine.request import Event, FinishReason, Request, SamplingParams, Status
from spark_engine.runtime.engine.scheduler import Scheduler
from spark_engine.runtime.engine.sequence import Sequence
from spark_engine.runtime.engine.sizes import EngineSizes
from tests.runtime.engine import automaton
from tests.runtime.engine.drive import drain, tokens_of
from tests.runtime.engine.invariants import check_idle, check_scheduler
from tests.runtime.fake_executor import VOCAB, build_fake, poison_free

LIMITS = Limits(8, 1000, 300, VOCAB, page_size=16, bias_slots=8, top_logprobs=3, snapshots=40)
STEM = tuple((i * 7 + i // 9) % VOCAB for i in range(600))


def make(limits: Limits = LIMITS, invariant: bool = False, **options: object) -> Engine:
    loaded = build_fake(limits, (1, 4, 8), (1, 2, 4))
    chosen = EngineOptions(**{"depth": 1, **options})  # type: ignore[arg-type]
    return Engine(replace(loaded, invariant=invariant), chosen)


def ask(
    engine: Engine,
    prompt: tuple[int, ...],
    marks: tuple[int, ...] = (),
    salt: bytes = b"",
    **more: object,
) -> int:
    params = SamplingParams(**{"max_tokens": 4, "ignore_eos": True, "seed": 1, **more})  # type: ignore[arg-type]
    return engine.submit(Request(prompt, params, marks=marks, salt=salt))


def finish(engine: Engine) -> dict[int, list[Event]]:
    events = drain(engine, after=lambda: (check_scheduler(engine.scheduler), poison_free(engine)))
    check_idle(engine)
    return events


def cached(engine: Engine, prompt: tuple[int, ...], **more: object) -> int:
    """How many tokens of the prompt are not computed, asked now and alone."""
    number = ask(engine, prompt, **more)  # type: ignore[arg-type]
    return finish(engine)[number][-1].cached


def answer(engine: Engine, prompt: tuple[int, ...], **more: object) -> tuple[int, ...]:
    number = ask(engine, prompt, **more)  # type: ignore[arg-type]
    return tuple(tokens_of(finish(engine)[number]))


def own(n: int, count: int = 9) -> tuple[int, ...]:
    return tuple((n * 11 + i * 3 + 1) % VOCAB for i in range(count))


def test_many_with_one_beginning_compute_it_once() -> None:
    engine = make()
    for n in range(30):  # more than there are slots
        ask(engine, STEM[:256] + own(n))
    events = finish(engine)
    stats = engine.stats()
    assert stats["prefilled"] == 256 + 30 * 9
    assert (stats["prefix_queries"], stats["prefix_hits"]) == (30 * 265, 29 * 256)
    assert [e[-1].cached for e in events.values()] == [0] + [256] * 29


def test_several_answers_to_one_prompt_compute_it_once() -> None:
    engine = make()
    for n in range(5):
        ask(engine, STEM[:200], seed=n)
    finish(engine)
    assert engine.stats()["prefilled"] == 200 + 4 * (200 - 192)


def test_one_that_waits_lets_others_pass_and_keeps_its_place() -> None:
    for slots, states in ((4, [False, False, False]), (5, [False, True, False])):
        engine = make(replace(LIMITS, max_seqs=slots))
        engine.scheduler.pacing.tiles = lambda *_: 1  # type: ignore[method-assign]
        for n in (8, 9):
            ask(engine, own(n), max_tokens=90)
            engine.step()
        ask(engine, STEM + own(0, 390), max_tokens=90)
        engine.step()
        ask(engine, STEM[:500] + own(1))
        engine.step()
        leader, second = [*engine._live.values()][2:]
        use = engine.scheduler.prefix._uses[second.id]
        assert use.leader is leader and use.leader_end == 448
        ask(engine, own(2), max_tokens=90)
        ask(engine, own(3), max_tokens=90)
        engine.step()
        found = [s.status is Status.RUNNING for s in engine._live.values()]
        assert found == [True, True, True, *states], "one slot is the second's"
        while not second.cached:
            engine.step()
        assert second.cached == 448


def test_a_waiter_continues_alone_when_the_leader_ends() -> None:
    engine = make()
    first = ask(engine, STEM + own(0, 300))
    engine.step()
    second = ask(engine, STEM + own(1))
    engine.step()
    assert engine.scheduler.prefix._uses[second].leader is engine._live[first]
    engine.cancel(first)
    events = finish(engine)
    # what the first had launched by then, in whole tiles, had no state
    assert events[second][-1].cached == 0 and len(events[second]) == 4
    assert engine.stats()["prefix_lost_for_state"] != 0


def test_an_urgent_one_does_not_wait_for_a_later_one() -> None:
    engine = make(replace(LIMITS, max_seqs=2))
    ask(engine, STEM[:500] + own(0))
    engine.step()
    urgent = Request(STEM[:500] + own(1), SamplingParams(max_tokens=4, seed=1), priority=1)
    number = engine.submit(urgent)
    first = engine._live[0]
    assert first.prefilling
    engine.step()
    assert engine.scheduler.prefix._uses[number].leader is None
    assert engine._live[number].launched > 0


def test_a_state_is_saved_where_two_prompts_parted_at_the_second_sighting() -> None:
    engine = make()
    assert cached(engine, STEM[:400]) == 0
    assert cached(engine, STEM[:200] + own(1, 100)) == 0
    assert engine.stats()["prefix_lost_for_state"] == 192
    assert cached(engine, STEM[:200] + own(2, 100)) == 192


def test_marks_say_where_states_are_kept() -> None:
    engine = make()
    assert cached(engine, STEM[:400], marks=(130, 300)) == 0
    assert cached(engine, STEM[:140] + own(1)) == 128
    assert cached(engine, STEM[:310] + own(1)) == 256
    assert cached(engine, STEM[:399]) == 256, "none before the last tile"
    engine = make()
    cached(engine, STEM[:400])
    assert cached(engine, STEM[:399]) == 384, "without marks there is"


@pytest.mark.parametrize("depth", [0, 1])
def test_a_conversation_resumes_from_its_last_token(depth: int) -> None:
    """All tokens of an answer are fed but for the last one, and the next answer is that of one
    that computed all."""
    engine, cold = make(depth=depth), make(cache_bytes=0)
    prompt = STEM[:100]
    for turn in range(4):
        said = answer(engine, prompt, max_tokens=30)
        assert said == answer(cold, prompt, max_tokens=30)
        fed = len(prompt) + len(said) - 1
        prompt += (*said, *own(turn))
        assert cached(engine, prompt, max_tokens=1) == fed
    stop = answer(engine, STEM[:100] + own(1), max_tokens=40)
    at = next(i for i, token in enumerate(stop) if i > 5 and token not in stop[:i])
    prompt = STEM[:100] + own(1)
    engine = make(depth=depth)
    said = answer(engine, prompt, max_tokens=40, stop_token_ids=(stop[at],))
    assert said == stop[: at + 1]
    assert cached(engine, (*prompt, *said, 5)) == len(prompt) + len(said) - 1 + depth


def test_an_invariant_engine_takes_over_prefill_on_the_grid_alone() -> None:
    engine = make(invariant=True)
    prompt = STEM[:100]
    said = answer(engine, prompt, max_tokens=150)
    assert cached(engine, (*prompt, *said, 5)) == 64


def test_a_request_that_lost_its_pages_begins_where_it_was() -> None:
    """Two outgrow the pages; without a swap budget the later one prefills what is still needed."""
    engine = make(replace(LIMITS, pages=30), swap_bytes=0)
    ask(engine, STEM[:200], max_tokens=120)
    ask(engine, own(1, 100), max_tokens=120)
    finish(engine)
    stats = engine.stats()
    assert stats["preempted_recompute"] == 1
    assert stats["prefix_queries"] == 300, "it was looked up for the client once"


def test_a_grammar_that_fails_takes_nothing_from_others() -> None:
    engine = make(grammars=automaton.Automaton)
    number = ask(engine, STEM[:300])
    while not engine._live[number].tokens[300:]:
        engine.step()
    engine._loop._end(EndedSequences(failed=[(engine._live.pop(number), "the grammar failed")]))
    finish(engine)
    assert cached(engine, STEM[:310]) == 256


def test_a_prompt_that_others_wait_for_is_no_longer_than_what_they_wait_for() -> None:
    """The second needs seven tiles of the first; shorter ones keep coming and pass that."""
    made = scheduler(prefill=(1,), slots=4, decode=(4,))
    leader = sequence(0, tuple(i % 251 for i in range(3000)))
    second = sequence(1, leader.request.prompt[:460] + (300,) * 40)
    made.add(leader)
    step(made)
    made.add(second)
    for n in range(2, 40):
        made.add(sequence(n, tuple((n * 31 + i) % 251 for i in range(640))))
        step(made)
        if second.status is Status.RUNNING:
            break
    assert second.cached == 448 and n - 1 <= 7


@pytest.mark.parametrize(
    ("changed", "salt"), [(0, b""), (100, b""), (329, b"b")], ids=["first page", "second", "salt"]
)
def test_a_prompt_does_not_wait_for_pages_that_it_cannot_use(changed: int, salt: bytes) -> None:
    """All other pages are alike; the first is launched already."""
    made = scheduler(prefill=(1,))
    prompt = tuple(i % 251 for i in range(500))
    made.add(sequence(0, prompt))
    step(made)
    second = sequence(1, (*prompt[:changed], 77, *prompt[changed + 1 : 330]))
    second.request = replace(second.request, salt=salt)
    made.add(second)
    step(made)
    assert [made.prefix._uses[seq.id].leader for seq in made.running] == [None, None]


def test_without_a_budget_nothing_is_kept() -> None:
    engine = make(cache_bytes=0)
    for _ in range(2):
        assert cached(engine, STEM[:300]) == 0
    stats = engine.stats()
    assert stats["prefix_queries"] == stats["cache_budget"] == stats["snapshots"] == 0
    assert stats["free_pages"] == LIMITS.pages == engine.scheduler.pages.free


def test_the_cache_is_what_is_left_and_is_freed() -> None:
    engine = make()
    cached(engine, STEM[:300])
    stats, pages = engine.stats(), engine.scheduler.pages
    assert stats["free_pages"] == LIMITS.pages > pages.free and stats["snapshots"] == 2
    held = stats["cache_bytes"]
    memory = engine.memory
    assert held == pages.kept * memory.store.page_bytes + 2 * memory.store.snapshot_bytes
    engine.clear_cache()
    check_idle(engine)
    assert pages.free == LIMITS.pages and engine.stats()["cache_bytes"] == 0
    assert cached(engine, STEM[:300]) == 0


def test_running_requests_take_the_pages_that_the_cache_keeps() -> None:
    engine = make(replace(LIMITS, pages=40))
    cached(engine, STEM[:500])
    assert engine.scheduler.pages.free < 10
    assert cached(engine, own(5, 500)) == 0
    assert engine.stats()["preempted_swap"] == 0 and engine.stats()["evicted_pages"] != 0


def test_a_launch_does_not_write_the_row_that_it_reads() -> None:
    """There is one, and what the launch could keep in it is worth more."""
    engine = make(replace(LIMITS, snapshots=1))
    assert cached(engine, STEM[:66], marks=(65,)) == 0
    prefix = engine.scheduler.prefix
    start = prefix.start

    def start_long_ago(seq: Sequence, hit: Hit, *more: Any) -> list[int]:
        pages = start(seq, hit, *more)
        assert hit.snapshot
        hit.snapshot.used -= 1e6
        return pages

    prefix.start = start_long_ago  # type: ignore[method-assign]
    assert cached(engine, STEM[:64] + own(1, 200), max_tokens=1) == 64


def test_states_are_kept_on_the_grid_of_a_prompt_that_began_off_it() -> None:
    engine = make()
    prompt = STEM[:100]
    prompt += (*answer(engine, prompt, max_tokens=30), *STEM[:300])
    assert cached(engine, prompt, marks=(300,)) == 129
    assert cached(engine, (*prompt[:310], *own(3))) == 129 + 128


@pytest.mark.parametrize("depth", [0, 1])
def test_a_round_that_went_beyond_an_end_leaves_nothing_wrong(depth: int) -> None:
    """Ends in the middle of a round, one after another, and what resumes from each."""
    limits = replace(LIMITS, drafts=5)
    engine, cold = make(limits, depth=depth), make(LIMITS, cache_bytes=0)
    most = len(engine.scheduler.sizes.verify)
    engine.scheduler.depth.choose = lambda seqs, brisk=False: most  # type: ignore[method-assign]
    hits = 0
    for n in range(25):
        prompt = own(n, 30)
        free = answer(cold, prompt, max_tokens=40)
        stop = free[7 + n % 9]
        said = answer(engine, prompt, max_tokens=40, stop_token_ids=(stop,))
        assert said == free[: free.index(stop) + 1]
        prompt += (*said, *own(n + 1, 5))
        number = ask(engine, prompt, max_tokens=12)
        events = finish(engine)[number]
        hits += events[-1].cached > 30
        assert tuple(e.token for e in events) == answer(cold, prompt, max_tokens=12)
    assert hits > 5


@pytest.mark.parametrize("length", [30, 400])  # less than a page is kept behind the root
def test_prompts_share_with_those_of_the_same_salt_alone(length: int) -> None:
    engine, prompt = make(replace(LIMITS, page_size=64, pages=90)), STEM[:length] + own(1, 70)
    hits = cached(engine, prompt, salt=b""), cached(engine, prompt + own(2), salt=b"")
    assert hits[0] == 0 < hits[1]
    for salt in (b"a", b"b", b"\0"):
        assert cached(engine, prompt, salt=salt) == 0
        assert cached(engine, prompt + own(2), salt=salt) == hits[1]
    assert cached(engine, prompt + own(3), salt=b"") == hits[1]
    assert len(engine.scheduler.prefix.cache._roots) == 4
    engine.clear_cache()
    assert not engine.scheduler.prefix.cache._roots and engine.stats()["cache_bytes"] == 0
    assert cached(engine, prompt + own(2), salt=b"a") == 0


def test_a_fork_with_another_salt_reuses_nothing() -> None:
    engine = make()
    for n, salt in enumerate((b"a", b"b", b"a", b"", b"b", b"")):
        ask(engine, STEM[:256] + own(n), salt=salt)
    events = finish(engine)
    assert [e[-1].cached for _, e in sorted(events.items())] == [0, 0, 256, 0, 256, 256]
    assert engine.stats()["prefilled"] == 3 * 256 + 6 * 9


def test_what_gave_no_finite_answer_is_forgotten_of_its_salt_alone() -> None:
    engine = make()
    for salt in (b"a", b"b"):
        cached(engine, STEM[:300], salt=salt)
    number = ask(engine, STEM[:310], salt=b"a", max_tokens=9)
    while not engine._live[number].tokens[310:]:
        engine.step()
    engine.scheduler.finish(engine._live.pop(number), FinishReason.ERROR, sound=False)
    finish(engine)
    assert [cached(engine, STEM[:310], salt=salt) for salt in (b"a", b"b")] == [0, 256]


# ---- by the numbers alone ----------------------------------------------------------------------


def scheduler(**changes: object) -> Scheduler:
    sizes: dict[str, object] = {
        **{"slots": 4, "pages": 400, "page_size": 64, "decode": (1, 4), "prefill": (1, 64)},
        **{"tile": 64, "slot_bytes": 9, "page_bytes": 10, "swap_bytes": 0, "max_waiting": 9},
        **{"snapshots": 30, "snapshot_bytes": 50, "cache_bytes": 1 << 20},
    }
    return Scheduler(EngineSizes(**{**sizes, **changes}))  # type: ignore[arg-type]


def prefill(made: Scheduler, seq: Sequence) -> list[tuple[int, int, int]]:
    """(end, source, save) of its tiles that begin or keep something."""
    made.add(seq)
    tiles = []
    while seq.prefilling:
        plan = made.schedule(0)
        for batch in [b for b in plan.batches if b.family == PREFILL]:
            rows = zip(batch.rows, batch.sources, batch.saves, strict=True)
            tiles += [(r.start + r.count, source, save) for r, source, save in rows]
        made.collected(plan.step)
        made.prefix.release_pins()
        check_scheduler(made)
    return [tile for tile in tiles if tile[1] != seq.slot or tile[2] >= 0]


def sequence(number: int, prompt: tuple[int, ...]) -> Sequence:
    return Sequence(number, Request(prompt), len(prompt) + 99, frozenset(), seed=0)


def test_long_prompts_keep_a_state_every_so_often() -> None:
    made = scheduler()
    prompt = tuple(i % 251 for i in range(2 * EVERY + 100))
    kept = prefill(made, sequence(0, prompt))
    assert [(end, source) for end, source, _ in kept] == [
        *((end, 0) for end in (EVERY, 2 * EVERY, 2 * EVERY + 64))
    ]
    rows = [save for _, _, save in kept]
    assert len({*rows}) == 3 and min(rows) >= 4, "behind the slots' rows"
    seq = sequence(1, (*prompt[: EVERY + 10], 7, *prompt[:70]))
    [(_, source, _)] = prefill(made, seq)
    assert (source, seq.cached) == (rows[0], EVERY)


def test_a_model_without_recurrence_resumes_from_its_pages() -> None:
    made = scheduler(snapshots=0, snapshot_bytes=0)
    prompt = tuple(i % 251 for i in range(500))
    assert prefill(made, sequence(0, prompt)) == []
    second = sequence(1, (*prompt[:300], *prompt[:99]))
    assert prefill(made, second) == [] and second.cached == 256
    assert second.pages[:4] == made.running[0].pages[:4]


def test_penalties_distinguish_prompt_and_generated_tokens() -> None:
    made = scheduler()
    prompt = tuple(i % 251 for i in range(500))
    prefill(made, sequence(0, prompt))
    for params, known in (
        (SamplingParams(), ((), ())),
        (SamplingParams(repetition=1.1), (prompt[:200], prompt[200:448])),
        (SamplingParams(presence=0.5), (prompt[:200], prompt[200:448])),
    ):
        seq = Sequence(1, Request(prompt[:200], params), 900, frozenset(), seed=0)
        seq.tokens.extend(prompt[200:460])
        seq.restart(same_bits=False)
        made.add(seq)
        plan = made.schedule(0)
        assert plan.counts == [(seq.slot, *known)]
        made.collected(plan.step)
        made.prefix.release_pins()
        made.finish(seq, FinishReason.CANCELLED)


def test_a_slot_that_nothing_was_written_to_is_not_swapped_out() -> None:
    made = scheduler(slots=2, prefill=(1,), swap_bytes=1 << 20)
    prompt = tuple(i % 251 for i in range(500))
    first = sequence(0, prompt)
    prefill(made, first)
    made.finish(first, FinishReason.LENGTH)
    long, hit = sequence(1, prompt[1:]), sequence(2, prompt)
    long.request = replace(long.request, priority=1)
    made.add(long), made.add(hit)
    made.pacing.order = lambda behind: sorted(behind, key=lambda s: s.rank)  # type: ignore[method-assign]
    plan = made.schedule(0)
    assert plan.admitted == [long, hit] and hit.launched == 448
    assert made.prefix.reads_snapshot(hit)
    made.collected(plan.step)
    made.prefix.release_pins()
    urgent = sequence(3, (5,))
    urgent.request = replace(urgent.request, priority=2)
    made.add(urgent)
    plan = made.schedule(0)
    assert plan.preempted == [hit] and not plan.saves
    assert not made.prefix.reads_snapshot(hit)
    assert (hit.status, hit.launched) == (Status.WAITING, 0)
    check_scheduler(made)
    for seq in (*made.running,):
        made.finish(seq, FinishReason.CANCELLED)
    made.collected(plan.step)
    while hit.prefilling:
        step(made)
    assert made.prefix.queries == 500 + 499 + 1 + 500, "it was looked up twice and counts once"
    assert made.prefix.hits == 448 == hit.cached


def waiting_pair(**changes: object) -> tuple[Scheduler, Sequence, Sequence]:
    """A scheduler, two that run, and one that waits for the first of them."""
    made = scheduler(prefill=(1,), **{"slots": 5, "decode": (5,), **changes})
    prompt = tuple(i % 251 for i in range(1000))
    leader, other, second = sequence(0, prompt), sequence(1, (9, 9)), sequence(2, prompt[:500])
    for seq, priority in ((leader, 1), (other, -1), (second, 1)):
        seq.request = replace(seq.request, priority=priority)
        made.add(seq)
        step(made)
    assert made.running == [leader, other] and [*made.waiting] == [second]
    use = made.prefix._uses[second.id]
    assert use.leader is leader and use.leader_end == 448
    return made, leader, second


def step(made: Scheduler) -> StepPlan:
    plan = made.schedule(0)
    made.collected(plan.step)
    made.prefix.release_pins()
    for batch in plan.batches:
        for row in batch.rows:
            row.seq.tokens.extend([0] * row.emit)
    check_scheduler(made)
    return plan


def test_a_waiter_continues_in_the_step_after_its_leader_arrives() -> None:
    made, leader, second = waiting_pair()
    while leader.launched < 448:
        assert second.status is Status.WAITING
        step(made)
    assert step(made).admitted == [second] and second.cached == 448


def test_a_cancelled_waiter_changes_no_order() -> None:
    made, leader, second = waiting_pair()
    third = sequence(3, second.request.prompt[:480])
    third.request = replace(third.request, priority=1)
    made.add(third)
    made.pacing.most_tiles = lambda *_: 9  # type: ignore[method-assign]
    step(made)
    uses = made.prefix._uses
    assert uses[leader.id].waiter_positions == [448, 448]
    made.finish(second, FinishReason.CANCELLED)
    assert uses[leader.id].waiter_positions == [448] and uses[third.id].leader is leader
    made.finish(third, FinishReason.CANCELLED)
    assert uses[leader.id].waiter_positions == [] and leader.launched < 448


def test_one_that_passes_preempts_no_other_and_leaves_pages() -> None:
    # pages: 16 of the leader and 1 of the other; the second will want 8 - 7; and one is spare
    for slots, pages, tokens, passes in ((4, 20, 60, True), (3, 20, 60, False), (4, 19, 60, False)):
        made, _, second = waiting_pair(slots=slots, pages=pages)
        late = sequence(3, tuple(range(7, 7 + tokens)))
        late.request = replace(late.request, priority=1)
        made.add(late)
        plan = step(made)
        assert not plan.preempted and second.status is Status.WAITING
        assert (late.status is Status.RUNNING) == passes, (slots, pages)


def test_one_that_waits_for_pages_is_looked_up_when_something_changed() -> None:
    made, calls = scheduler(pages=12), []
    inner = made.prefix.cache.match
    made.prefix.cache.match = lambda *a, **k: calls.append(1) or inner(*a, **k)  # type: ignore
    first = sequence(0, tuple(range(500)))
    prefill(made, first)
    late = sequence(1, tuple(range(7, 407)))
    made.add(late)
    seen = len(calls)
    for _ in range(5):
        step(made)
    assert late.status is Status.WAITING and len(calls) == seen, "when it came"
    made.finish(first, FinishReason.LENGTH)
    made.prefix.release_pins()
    assert step(made).admitted == [late] and len(calls) == seen + 1


def test_a_look_up_is_made_when_a_request_is_admitted_and_not_in_every_step() -> None:
    made = scheduler(slots=1)
    prefill(made, sequence(0, tuple(range(100))))
    made.add(sequence(1, tuple(range(200))))
    made.prefix.find = None  # type: ignore[assignment, method-assign]
    for _ in range(3):
        made.schedule(0)
