"""The order of many that wait, in simulated steps: short before long, owner by owner, and none
waits for ever. Only the last test looks at a clock."""

import random
import time
from collections import Counter
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from spark_engine.interface import PREFILL
from spark_engine.runtime.engine.plan import StepPlan
from spark_engine.runtime.engine.policy.line import BURST
from spark_engine.runtime.engine.request import FinishReason, Request, SamplingParams, Status
from spark_engine.runtime.engine.scheduler import Scheduler
from spark_engine.runtime.engine.sequence import Sequence
from spark_engine.runtime.engine.sizes import EngineSizes
from tests.runtime.engine.invariants import check_scheduler

TILE = 64
LONG = 55  # tiles: 3,500 tokens


class World:
    """A scheduler of 32 slots and launches of `tiles`, and the loop around it."""

    def __init__(self, tiles: int = 4, slots: int = 32, **changes: object) -> None:
        sizes: dict[str, object] = {
            **{"slots": slots, "pages": 9999, "page_size": 64, "decode": (slots,), "tile": TILE},
            **{"prefill": (1, tiles), "slot_bytes": 1, "page_bytes": 1, "swap_bytes": 1 << 30},
            **{"max_waiting": 9999},
        }
        self.scheduler = Scheduler(EngineSizes(**{**sizes, **changes}))  # type: ignore[arg-type]
        self.steps = self._next = 0
        self.given: Counter[str] = Counter()  # tiles by owner
        self.widest = 0  # sequences that hold a slot and are still prefilled, behind a step

    def add(
        self, tiles: int, owner: str = "", answer: int = 1, priority: int = 0, **more: Any
    ) -> Sequence:
        first = self._next * 7919 % 60_000  # nothing is alike
        prompt = (first,) + (0,) * (tiles * TILE - 1)
        request = Request(prompt, SamplingParams(), priority, owner=owner, **more)
        seq = Sequence(self._next, request, tiles * TILE + answer, frozenset(), seed=0)
        self._next += 1
        self.scheduler.add(seq)
        return seq

    def step(self) -> StepPlan:
        self.steps += 1
        plan = self.scheduler.schedule(0)
        self.scheduler.collected(plan.step)
        for batch in plan.batches:
            for row in batch.rows:
                self.given[row.seq.request.owner] += batch.family == PREFILL
                if row.emit:
                    row.seq.tokens.append(0)
                    if len(row.seq.tokens) == row.seq.limit:
                        self.scheduler.finish(row.seq, FinishReason.LENGTH)
        self.scheduler.prefix.release_pins()
        if self.steps % 16 == 0:
            check_scheduler(self.scheduler)
        self.widest = max(self.widest, sum(s.prefilling for s in self.scheduler.running))
        return plan

    def until(self, *seqs: Sequence, most: int = 20_000) -> int:
        """Steps until these have ended."""
        before = self.steps
        while any(seq.status is not Status.FINISHED for seq in seqs):
            self.step()
            assert self.steps - before <= most, "it does not end"
        return self.steps - before


OWNERS = ("all of one", "the short by another", "each its own")


def owner(kind: str, number: int | None) -> str:
    """Of the long request of that number, or of a short one."""
    if kind == OWNERS[1]:
        return "short" if number is None else "long"
    return "" if kind == OWNERS[0] else f"{number}"


@pytest.mark.parametrize("kind", OWNERS)
@pytest.mark.parametrize("tiles", [1, 4, 64])
@pytest.mark.parametrize("count", [24, 40, 100])
def test_a_short_prompt_waits_for_a_few_steps_among_any_number_of_long_ones(
    kind: str, tiles: int, count: int
) -> None:
    world = World(tiles)
    for n in range(count):
        world.add(LONG, owner(kind, n), answer=8)
    for _ in range(3):
        world.step()
    waits = []
    for _ in range(25):
        waits.append(world.until(world.add(1, owner(kind, None))))
        for _ in range(5):
            world.step()
    assert max(waits) <= 2, waits
    assert world.widest <= 1 + 64 // LONG + 1, "a slot is taken when prefill begins"


@pytest.mark.parametrize("kind", OWNERS)
def test_short_prompts_in_a_row_pass_long_ones_and_take_half_at_most(kind: str) -> None:
    """The one next to the other, as an impatient client would; all of the long ones are done in
    little more than twice the time that they would take alone."""
    world = World(4)
    long = [world.add(LONG, owner(kind, n)) for n in range(20)]
    waits = []
    while any(seq.status is not Status.FINISHED for seq in long):
        waits.append(world.until(world.add(1, owner(kind, None))))
    share = 2 if kind == OWNERS[0] else 2 + (len(long) + 4) // 4  # an even one
    assert max(waits) <= share and world.steps <= 2 * len(long) * LONG // 4 + BURST


@pytest.mark.parametrize("names", [["one"], ["one", "two"], [str(n) for n in range(5000)]])
@pytest.mark.parametrize("tiles", [1, 4])
def test_a_long_prompt_is_overtaken_by_no_more_tiles_than_it_has(
    names: list[str], tiles: int
) -> None:
    """By a stream of short prompts that would fill every launch, of its owner, of another or of a
    new one each."""
    world = World(tiles)
    for n in range(3):
        world.add(1, names[-1 - n % len(names)])
    long, sent = world.add(40, "one"), 0
    while long.prefilling:
        for _ in range(tiles):
            world.add(1, names[sent % len(names)])
            sent += 1
        world.step()
    most = (2 * 40 + BURST) * (2 if len(names) == 2 else 1)  # owners share evenly
    assert world.steps <= (most + tiles - 1) // tiles + 2


@pytest.mark.parametrize("others", [1, 4])
def test_an_owners_short_prompts_do_not_keep_its_long_one_waiting(others: int) -> None:
    """Though they alone use up its share, next to owners with long prompts without end."""
    world = World(4)
    for n in range(others):
        for _ in range(20):
            world.add(LONG, f"other {n}")
    long = world.add(40, "one")
    while long.prefilling and world.steps < 2000:
        for _ in range(4):
            world.add(1, "one")
        world.step()
    share = (2 * 40 + BURST) * (1 + others) // 4
    assert world.steps <= share + LONG


@pytest.mark.parametrize("slots", [1, 2, 3, 32])
def test_a_long_prompt_gets_every_second_slot_that_is_free(slots: int) -> None:
    """Where slots are what is short: answers of many tokens, and short prompts without end."""
    world = World(64, slots=slots)
    running = [world.add(1, answer=10 + n) for n in range(slots)]
    world.step()
    long, passed = [world.add(9, answer=20) for _ in range(3)], []
    while any(seq.slot < 0 and seq.status is Status.WAITING for seq in long):
        world.add(1, answer=20), world.add(1, answer=20)
        passed += [seq in long for seq in world.step().admitted]
    assert len(running) == slots
    assert passed == [True, False, True, False, True]


@pytest.mark.parametrize("pages", [12, 20])
def test_a_prompt_that_waits_for_pages_is_overtaken_a_little(pages: int) -> None:
    world = World(4, pages=pages)
    big = [world.add(pages // 2 + 1, answer=200), world.add(pages // 2 + 1, answer=9)]
    taken: set[Sequence] = set()
    while big[1].status is Status.WAITING:
        world.add(1, answer=300)
        taken |= {*world.step().admitted} - {*big}
    world.until(big[1])
    assert 0 < len(taken) <= big[0].tiles + big[1].tiles


@pytest.mark.parametrize("sizes", [(1, 1), (1, 10), (3, LONG), (10, 11), (LONG, 1)])
@pytest.mark.parametrize("answer", [1, 30])
def test_two_owners_share_evenly(sizes: tuple[int, int], answer: int) -> None:
    """Whatever the lengths of their prompts, and with hundreds of them against a few; also where
    answers hold the slots."""
    world, names = World(4), ("many", "few")
    waiting = {
        name: [world.add(size, name, answer)] for name, size in zip(names, sizes, strict=True)
    }
    wanted = {"many": 90, "few": 40}

    def fill() -> None:
        for name, size in zip(names, sizes, strict=True):
            waiting[name] = [s for s in waiting[name] if s.status is not Status.FINISHED]
            while len(waiting[name]) < wanted[name]:
                waiting[name].append(world.add(size, name, answer))

    for _ in range(700):
        fill()
        world.step()
    assert world.given["many"] == pytest.approx(world.given["few"], rel=0.1), world.given


def test_one_owner_with_a_thousand_delays_another_by_one_turn() -> None:
    world = World(4)
    for _ in range(1000):
        world.add(LONG, "many")
    for _ in range(30):
        world.step()
    other = [world.add(LONG, "other") for _ in range(3)]
    alone = -(-LONG // 4)
    assert world.until(other[0]) <= 2 * alone + 1
    assert world.until(*other) <= 4 * alone + 2


def test_time_without_requests_saves_nothing_up() -> None:
    """One that decoded for long, or came back, has no more turns than others."""
    world = World(4)
    idle = world.add(1, "idle", answer=100_000)
    for _ in range(100):
        world.add(LONG, "busy")
    for _ in range(600):
        world.step()
    assert idle.status is Status.RUNNING
    before = world.given.copy()
    for _ in range(100):
        world.add(LONG, "idle")
    for _ in range(200):
        world.step()
    taken = world.given - before
    assert taken["idle"] == pytest.approx(taken["busy"], abs=2 * LONG)


def test_priority_goes_before_turns_and_lengths() -> None:
    world = World(4)
    for n in range(40):
        world.add(1 + n % 3, f"{n % 7}")
    urgent = world.add(40, "urgent", priority=1)
    later = world.add(1, "later", priority=-1)
    assert world.until(urgent) <= 11
    world.until(later)
    assert not world.scheduler.waiting


def test_owners_and_lines_are_forgotten() -> None:
    world, rng = World(4), random.Random(3)
    waiting = world.scheduler.waiting
    for n in range(200):
        world.add(rng.randint(1, 9), f"{n}", priority=n)
    seqs = [*waiting]
    for seq in seqs[::3]:
        world.scheduler.finish(seq, FinishReason.CANCELLED)
    assert len(waiting.shares) == 200 - len(seqs[::3])
    world.until(*seqs)
    world.until(world.add(1, priority=1000))
    assert len(waiting.shares) == len(waiting) == 0 and len(waiting._lines) <= 1


def test_one_that_waits_for_its_grammar_lets_others_pass_and_is_not_asked_in_every_step() -> None:
    world = World(1)
    job: Future[None] = Future()
    asked: list[int] = []

    class State(SimpleNamespace):
        @property
        def ready(self) -> bool:
            asked.append(1)
            return bool(self.job.done())

    seq = world.add(1)
    free = {"dependency": lambda *_: False, "drafts_from": lambda *_: 0, "flagged": False}
    free["paused"] = False
    seq.constraint = State(job=job, **free)  # type: ignore[assignment]
    others = [world.add(2) for _ in range(5)]
    assert world.until(*others) == 10 and len(asked) == 1 and seq.status is Status.WAITING
    job.set_result(None)
    assert seq in world.step().admitted
    late = world.add(1)
    late.constraint = State(job=Future(), **free)  # type: ignore[assignment]
    world.step()
    world.scheduler.finish(late, FinishReason.CANCELLED)
    assert not world.scheduler.waiting


def step_seconds(waiting: int, kind: str) -> list[float]:
    """CPU seconds of `schedule` while so many wait, of one owner or of one owner each."""
    rng, world, taken = random.Random(1), World(16, slots=128, snapshots=8, cache_bytes=1 << 20), []
    for _ in range(40):
        while len(world.scheduler.waiting) < waiting:
            world.add(rng.randint(1, 5), "one" if kind == "one" else f"{world._next}")
        start = time.thread_time()
        plan = world.scheduler.schedule(0)
        taken.append(time.thread_time() - start)
        world.scheduler.collected(plan.step)
        for seq in [s for s in world.scheduler.running if not s.prefilling]:
            world.scheduler.finish(seq, FinishReason.CANCELLED)
        world.scheduler.prefix.release_pins()
    start = time.thread_time()
    for seq in [*world.scheduler.waiting]:
        world.scheduler.finish(seq, FinishReason.CANCELLED)
    assert (time.thread_time() - start) / waiting < 0.001
    check_scheduler(world.scheduler)
    return sorted(taken)


@pytest.mark.parametrize("kind", ["one", "its own"])
def test_five_thousand_that_wait_cost_a_step_little(kind: str) -> None:
    few, many = step_seconds(50, kind), step_seconds(5000, kind)
    assert many[20] < 2 * few[20] + 0.001 and many[20] < 0.005, (few, many)
