"""The scheduler's rules one by one; the traces test them together."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from spark_engine.errors import CapacityError, InternalError
from spark_engine.runtime.engine.plan import StepPlan
from spark_engine.runtime.engine.policy.pacing import LATENCY, THROUGHPUT, PrefillPolicy
from spark_engine.runtime.engine.policy.waiting import Waiting
from spark_engine.runtime.engine.request import FinishReason, Request, SamplingParams, Status
from spark_engine.runtime.engine.scheduler import Scheduler
from spark_engine.runtime.engine.sequence import Sequence
from spark_engine.runtime.engine.sizes import EngineSizes
from tests.runtime.engine.invariants import check_scheduler


def make(
    policy: PrefillPolicy = THROUGHPUT,
    costs: dict[tuple[str, int], float] | None = None,
    **changes: object,
) -> Scheduler:
    sizes: dict[str, object] = {
        **{"slots": 4, "pages": 20, "page_size": 64, "decode": (1, 2, 4), "prefill": (1, 4)},
        **{"tile": 64, "slot_bytes": 100, "page_bytes": 10, "swap_bytes": 1000, "max_waiting": 9},
    }
    return Scheduler(EngineSizes(**{**sizes, **changes}), policy, costs)  # type: ignore[arg-type]


MOST = 3


def drafting(*ks: int, **changes: object) -> Clients:
    """Clients of an engine whose rounds have these k, one after another, the last for ever."""
    clients, left = Clients(make(verify=((1, 2, 4),) * MOST, **changes)), list(ks)
    depth = clients.scheduler.depth
    depth.choose = lambda seqs, brisk=False: left.pop(0) if left[1:] else left[0]  # type: ignore[method-assign]
    return clients


class Clients:
    """Submits sequences and plays the loop: every sampled token is 0."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self._next = 0

    def add(
        self, prompt: int, limit: int = 1000, priority: int = 0, drafts: int = MOST
    ) -> Sequence:
        request = Request((0,) * prompt, SamplingParams(), priority)
        seq = Sequence(self._next, request, limit, frozenset(), seed=0, drafts=drafts)
        self._next += 1
        self.scheduler.add(seq)
        return seq

    def step(self) -> StepPlan:
        plan = self.scheduler.schedule(in_flight=0)
        self.collect(plan)
        return plan

    def collect(self, plan: StepPlan) -> None:
        self.scheduler.collected(plan.step)
        for batch in plan.batches:
            for row in batch.rows:
                if row.emit and row.seq.status is not Status.FINISHED:
                    row.seq.tokens.append(0)
                    if len(row.seq.tokens) == row.seq.limit:
                        self.scheduler.finish(row.seq, FinishReason.LENGTH)
        check_scheduler(self.scheduler)


def shape(plan: StepPlan) -> list[tuple[str, int, list[tuple[int, int, int, bool]]]]:
    """[(family, bucket, [(sequence, start, count, emit)])]"""
    return [
        (x.family, x.bucket, [(r.seq.id, r.start, r.count, r.emit) for r in x.rows])
        for x in plan.batches
    ]


def test_a_prompt_is_cut_on_its_own_grid_and_then_decodes() -> None:
    clients = Clients(make(prefill=(1, 2)))
    clients.add(150)
    tiles = [[(0, 0, 64, False), (0, 64, 64, False)], [(0, 128, 22, True)]]
    assert shape(clients.step()) == [("prefill", 2, tiles[0])]
    assert shape(clients.step()) == [("prefill", 1, tiles[1])]
    assert shape(clients.step()) == [("decode", 1, [(0, 150, 1, True)])]
    assert shape(clients.step()) == [("decode", 1, [(0, 151, 1, True)])]


def test_a_launch_ends_the_wait_for_it() -> None:
    clients = Clients(make(prefill=(1,)))
    seq = clients.add(150)
    clients.step()
    assert seq.prefilling and seq.since is None


def test_several_prompts_share_a_prefill_launch() -> None:
    clients = Clients(make())
    clients.add(65), clients.add(3), clients.add(200)
    rows = [(1, 0, 3, True), (0, 0, 64, False), (0, 64, 1, True), (2, 0, 64, False)]
    assert shape(clients.step()) == [("prefill", 4, rows)]


LINEAR = {("prefill", 1): 10.0, ("prefill", 2): 15.0, ("prefill", 4): 25.0}


@pytest.mark.parametrize(("idle", "tiles"), [(25.0, 4), (24.0, 2), (15.0, 2), (14.0, 1), (9.0, 1)])
def test_with_decode_latency_takes_what_twice_an_idle_step_holds_and_never_nothing(
    idle: float, tiles: int
) -> None:
    clients = Clients(make(LATENCY, LINEAR | {("decode", 1): idle}, prefill=(1, 2, 4)))
    clients.add(1)
    clients.step()
    clients.add(64 * 8)
    plans = [shape(clients.step()) for _ in range(8 // tiles)]
    assert [(p[0][0], p[1][1]) for p in plans] == [("decode", tiles)] * (8 // tiles)


def test_alone_a_prompt_takes_the_largest_bucket() -> None:
    clients = Clients(make(LATENCY, LINEAR, prefill=(1, 4)))
    clients.add(64 * 8)
    assert [len(clients.step().batches[0].rows) for _ in range(2)] == [4, 4]


def test_short_prompts_pass_a_long_one_until_they_took_as_much_as_it_had_and_then_take_half() -> (
    None
):
    clients = Clients(make(prefill=(2,), slots=20, pages=40, decode=(20,), max_waiting=20))
    clients.add(64 * 5, limit=330)
    clients.step()
    found: list[list[int]] = []
    for _ in range(6):
        clients.add(64, limit=66), clients.add(64, limit=66)
        plan = clients.step()
        found.append([r.seq.id for b in plan.batches if b.family == "prefill" for r in b.rows])
    assert found == [[1, 2], [3, 4], [5, 0], [6, 0], [0, 7], [8, 9]]


def test_the_urgent_go_before_the_short() -> None:
    clients = Clients(make(prefill=(1,)))
    clients.add(90), clients.add(20), clients.add(60, priority=1)
    order = [clients.step().batches[-1].seqs[0].id for _ in range(4)]
    assert order == [2, 1, 0, 0]


def test_the_queue_is_priority_then_arrival_and_its_head_is_not_passed_over() -> None:
    clients = Clients(make(slots=1, pages=4))
    clients.add(10, limit=12)
    clients.step()
    big, small = clients.add(200), clients.add(5)
    urgent = clients.add(5, limit=7, priority=1)
    assert [*clients.scheduler.waiting] == [big, small, urgent]
    order: list[int] = []
    for _ in range(12):
        order += [s.id for s in clients.step().admitted]
    assert order == [urgent.id, 0, big.id]  # 0 was preempted, and comes back before the others


def test_a_full_queue_refuses_with_its_size() -> None:
    clients = Clients(make(max_waiting=2))
    clients.add(1), clients.add(1)
    with pytest.raises(CapacityError, match="2 requests wait already"):
        clients.add(1)
    clients.step()  # both are admitted
    clients.add(1)


def test_waiting_requests_are_counted_without_a_walk() -> None:
    """In every step and for every new request: thousands may wait."""
    clients = Clients(make(slots=1, max_waiting=50))
    looked: list[int] = []

    class Seen(Waiting):
        def __iter__(self) -> Iterator[Sequence]:
            looked.append(len(self))
            return super().__iter__()

    def step() -> None:
        plan = clients.scheduler.schedule(in_flight=0)
        clients.scheduler.collected(plan.step)

    waiting = clients.scheduler.waiting
    waiting.__class__ = Seen
    seqs = [clients.add(10) for _ in range(50)]
    step()
    assert (len(waiting), waiting.fresh, waiting.swapped) == (49, 49, 0)
    clients.add(10, priority=1)
    for seq in (seqs[7], seqs[49]):
        clients.scheduler.finish(seq, FinishReason.CANCELLED)
    step()
    assert (len(waiting), waiting.fresh, waiting.swapped) == (48, 47, 1)
    assert not looked
    check_scheduler(clients.scheduler)
    waiting.swapped = 0
    with pytest.raises(InternalError, match="47 new and 1 swapped wait, counted 47 new and 0"):
        check_scheduler(clients.scheduler)


def test_over_the_swap_budget_a_sequence_restarts_with_all_its_tokens() -> None:
    clients = Clients(make(slots=1, swap_bytes=109))  # a slot and one page take 110
    seq = clients.add(10)
    for _ in range(5):
        clients.step()
    clients.add(5, limit=6, priority=1)
    assert clients.step().preempted == [seq]
    assert seq.status is Status.WAITING and (seq.launched, seq.prefill_end) == (0, 15)
    assert shape(clients.step())[0] == ("prefill", 1, [(0, 0, 15, True)])


def test_a_step_in_flight_forbids_preemption_and_asks_to_drain() -> None:
    clients = Clients(make(slots=1))
    low = clients.add(10)
    clients.step()
    running = clients.scheduler.schedule(in_flight=0)
    clients.add(5, priority=1)
    plan = clients.scheduler.schedule(in_flight=1)
    assert plan.drain and not plan.preempted and low.status is Status.RUNNING
    clients.collect(running), clients.collect(plan)
    assert clients.scheduler.schedule(in_flight=0).preempted == [low]


def test_what_a_finished_sequence_held_returns_after_the_last_launched_step() -> None:
    clients = Clients(make())
    scheduler = clients.scheduler
    seq = clients.add(10)
    clients.step()
    first, second = scheduler.schedule(0), scheduler.schedule(1)
    scheduler.collected(first.step)
    scheduler.finish(seq, FinishReason.STOP)
    assert (scheduler.slots.free, scheduler.pages.free) == (3, 19)
    check_scheduler(scheduler)
    scheduler.collected(second.step)
    assert (scheduler.slots.free, scheduler.pages.free) == (4, 20)


def test_a_preemption_that_would_not_help_does_not_happen() -> None:
    clients = Clients(make(pages=6))
    equal, low = clients.add(64 * 3), clients.add(10)
    clients.step()
    urgent_but_huge = clients.add(64 * 5)
    assert not clients.step().preempted
    assert urgent_but_huge.status is Status.WAITING
    assert equal.status is low.status is Status.RUNNING


def test_no_more_sequences_run_than_one_decode_launch_holds() -> None:
    clients = Clients(make(slots=8, decode=(1, 3)))
    for _ in range(5):
        clients.add(1)
    clients.step()
    assert shape(clients.step())[0][:2] == ("decode", 3)
    assert len(clients.scheduler.running) == 3


def test_a_page_is_spare_next_to_others_and_none_is_wanted_alone() -> None:
    clients = Clients(make(pages=4))
    second = clients.add(64 * 3)
    assert clients.step().admitted == [second] and len(second.pages) == 4, "alone it may take all"
    clients = Clients(make(pages=4))
    clients.add(10)
    clients.step()
    second = clients.add(64 * 2)  # three pages, of three
    assert not clients.step().admitted
    clients.scheduler.finish(second, FinishReason.CANCELLED)
    third = clients.add(64)  # two pages, of three
    assert clients.step().admitted == [third]


@pytest.mark.parametrize(("prompt", "limit", "pages"), [(63, 99, 1), (64, 99, 2), (64, 65, 1)])
def test_pages_reach_to_the_first_decode_row_if_there_is_one(
    prompt: int, limit: int, pages: int
) -> None:
    clients = Clients(make())
    seq = clients.add(prompt, limit=limit)
    clients.scheduler.schedule(in_flight=0)
    assert len(seq.pages) == pages


def test_a_page_that_is_not_there_waits_for_the_step_in_flight() -> None:
    clients = Clients(make(pages=3))
    first, last = clients.add(63), clients.add(62)
    clients.step(), clients.step()  # `first` has taken the spare page
    clients.step()
    assert clients.scheduler.pages.free == 0
    plan = clients.scheduler.schedule(in_flight=1)
    assert plan.drain and not plan.preempted and last.status is Status.RUNNING
    assert [row.seq for batch in plan.batches for row in batch.rows] == [first]
    clients.collect(plan)
    assert clients.step().preempted == [last]


def test_a_sequence_that_yielded_gets_no_page() -> None:
    clients = Clients(make(pages=4))
    first, second, last = (clients.add(63) for _ in range(3))
    clients.step(), clients.step()
    plan = clients.step()  # two want a page, and one is there
    assert plan.preempted == [last] and clients.scheduler.running == [first, second]
    assert last.pages == [] and [s for s, _ in plan.grown] == [first, second]


def test_no_sequence_is_preempted_for_pages_that_the_step_in_flight_frees() -> None:
    clients = Clients(make(slots=2))
    ending, going = clients.add(10), clients.add(10)
    clients.step()
    first = clients.scheduler.schedule(in_flight=0)
    clients.scheduler.finish(ending, FinishReason.STOP)
    urgent = clients.add(5, priority=1)
    plan = clients.scheduler.schedule(in_flight=1)
    assert not plan.drain and not plan.admitted
    clients.collect(first), clients.collect(plan)
    assert clients.step().admitted == [urgent] and going.status is Status.RUNNING


def preempted(swap_bytes: int) -> tuple[Clients, Sequence]:
    """A sequence of one page that has yielded to an urgent one."""
    clients = Clients(make(slots=1, swap_bytes=swap_bytes))
    seq = clients.add(10)
    clients.step()
    clients.add(5, limit=6, priority=1)
    assert clients.step().preempted == [seq]
    return clients, seq


def test_a_snapshot_may_take_the_whole_swap_budget_and_frees_it() -> None:
    clients, seq = preempted(110)  # a slot and a page
    assert seq.status is Status.SWAPPED and clients.scheduler.swap_used == 110
    assert clients.step().restores[0].seq is seq
    assert clients.scheduler.swap_used == 0


def test_all_that_were_swapped_come_back_in_one_step_where_pages_suffice() -> None:
    clients = Clients(make(slots=2))
    seqs = [clients.add(10), clients.add(10)]
    clients.step()
    for _ in seqs:
        clients.add(5, limit=6, priority=1)
    assert len(clients.step().preempted) == 2
    assert [s.status for s in seqs] == [Status.SWAPPED] * 2
    assert [move.seq for move in clients.step().restores] == seqs


def test_a_swapped_sequence_that_is_cancelled_gives_its_snapshot_back() -> None:
    clients, seq = preempted(1000)
    clients.scheduler.finish(seq, FinishReason.CANCELLED)
    assert clients.scheduler.swap_used == 0 and seq.swap_copy is None
    check_scheduler(clients.scheduler)


# ---- rounds of drafts --------------------------------------------------------------------------


def settle(plan: StepPlan, *accepted: int) -> None:
    """What the loop does with the results of a round."""
    [batch] = plan.batches
    for row, kept in zip(batch.rows, accepted, strict=True):
        row.seq.launched -= row.count - kept
        row.seq.unverified -= row.count - 1


def test_a_row_has_as_many_drafts_as_its_slot_holds() -> None:
    """None after prefill and after decode, k after a round of k; the round's k may be less."""
    clients = drafting(3, 3, 1, 3, 0, 2)
    clients.add(10)
    assert shape(clients.step())[0][0] == "prefill"
    found = []
    for _ in range(6):
        [(family, _, [(_, start, count, emit)])] = shape(plan := clients.scheduler.schedule(0))
        settle(plan, count)
        found.append((family, start, count))
        assert emit
    assert found == [
        *(("verify_k3", 10, 1), ("verify_k3", 11, 4), ("verify_k1", 15, 2)),
        *(("verify_k3", 17, 2), ("decode", 19, 1), ("verify_k2", 20, 1)),
    ]


def test_a_requests_own_drafts_bound_its_row_alone() -> None:
    clients = drafting(3)
    for drafts in (0, 1, 2, 3):
        clients.add(10, drafts=drafts)
    clients.step()
    settle(clients.scheduler.schedule(0), 1, 1, 1, 1)
    assert clients.scheduler.schedule(0).batches[0].counts == [1, 2, 3, 4]


def test_behind_a_round_in_flight_a_row_starts_where_the_state_says() -> None:
    clients = drafting(3)
    seq = clients.add(10)
    clients.step()
    first = clients.scheduler.schedule(0)
    second = clients.scheduler.schedule(1)  # the first had one token: nothing is unsure
    third = clients.scheduler.schedule(1)
    assert [p.batches[0].starts for p in (first, second, third)] == [[10], [11], [-1]]
    assert (seq.launched, seq.unverified) == (19, 6)
    settle(second, 2)
    assert (seq.launched, seq.unverified) == (17, 3)
    settle(third, 1)
    assert (seq.launched, seq.unverified) == (14, 0)
    assert clients.scheduler.schedule(0).batches[0].starts == [14]


def test_no_row_exceeds_its_limit_and_one_that_may_have_reached_it_waits() -> None:
    """Positions up to 17 are fed, so that the token at 18 is the last of 19."""
    clients = drafting(3)
    seq = clients.add(10, limit=19)
    other = clients.add(10)
    clients.step()
    scheduler = clients.scheduler
    plans = [scheduler.schedule(0)]
    plans += [scheduler.schedule(1) for _ in range(3)]
    assert [p.batches[0].counts for p in plans] == [[1, 1], [4, 4], [3, 4], [4]]
    assert seq.launched == 18 and not seq.decodable and plans[3].batches[0].seqs == [other]
    settle(plans[1], 1, 4)
    settle(plans[2], 1, 4)
    assert seq.launched == 13 and seq.decodable
    assert scheduler.schedule(1).batches[0].counts == [4, 4]


@pytest.mark.parametrize(("free", "count"), [(1, 4), (0, 2)])
def test_drafts_take_a_page_where_one_is_free(free: int, count: int) -> None:
    """A row of four from position 62 on, the first page ending behind 63."""
    clients = drafting(3, pages=1 + free)
    seq = clients.add(61)
    clients.step()
    settle(clients.scheduler.schedule(0), 1)
    plan = clients.scheduler.schedule(0)
    assert plan.batches[0].counts == [count] and not plan.preempted and not plan.drain
    assert len(seq.pages) == 1 + free


def test_a_page_is_taken_as_early_as_the_chain_behind_the_row_needs_it() -> None:
    """It reads and writes up to 2 k positions from the row's first, but none that is never fed."""
    for prompt, limit, pages in ((58, 1000, 1), (59, 1000, 2), (59, 65, 1), (59, 66, 2)):
        clients = drafting(3)
        seq = clients.add(prompt, limit)
        clients.step()
        plan = clients.scheduler.schedule(0)
        assert len(seq.pages) == pages, (prompt, limit)
        assert plan.grown == [(seq, 1)][: pages - 1]


def test_a_draft_without_a_page_preempts_no_sequence_and_the_next_token_does() -> None:
    clients = drafting(3, pages=3, page_size=16)
    first, last = clients.add(13), clients.add(3)
    clients.step()
    found = []
    while not (plan := clients.scheduler.schedule(0)).preempted:
        counts = plan.batches[0].counts
        found.append((first.launched - counts[0], counts[0]))
        settle(plan, counts[0], 1)  # the other stays where it is, one token a round
    assert found == [(13, 1), (14, 4), (18, 4), (22, 4), (26, 4), (30, 2)]
    assert plan.preempted == [last] and plan.batches[0].counts == [4]


def test_a_swapped_sequence_keeps_its_drafts_and_a_restarted_one_has_none() -> None:
    for swap_bytes, held in ((1000, 3), (0, 0)):
        clients = drafting(3, slots=1, swap_bytes=swap_bytes)
        seq = clients.add(10)
        clients.step()
        settle(clients.scheduler.schedule(0), 1)
        clients.add(5, limit=6, priority=1)
        assert clients.scheduler.schedule(0).preempted == [seq]
        assert seq.held_drafts == held and seq.unverified == 0


def test_a_slot_keeps_nothing_of_its_last_sequence() -> None:
    clients, forgotten = Clients(make(slots=1)), []
    clients.scheduler.depth.forget = forgotten.append  # type: ignore[method-assign]
    clients.add(10, limit=12), clients.add(10, limit=12)
    for _ in range(6):
        clients.step()
    assert forgotten == [0, 0]
