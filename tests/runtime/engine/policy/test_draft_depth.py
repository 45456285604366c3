"""Which k a round gets: by what drafts were worth, what rounds cost, and what is worth a look."""

import random
from itertools import pairwise

import numpy as np
import pytest

from spark_engine.interface import DECODE, verify_family
from spark_engine.runtime.engine.policy.draft_depth import EVERY, LATE, SHARE, DraftDepth
from spark_engine.runtime.engine.policy.step_costs import StepCosts
from spark_engine.runtime.engine.request import Request
from spark_engine.runtime.engine.sequence import Sequence

SLOTS, MOST = 128, 3
ROWS = (1, 8, 128)


def costs(*by_k: float, rows: tuple[int, ...] = ROWS) -> dict[tuple[str, int], float]:
    """Microseconds of a round of each k, whatever its rows."""
    families = (DECODE, *(verify_family(k + 1) for k in range(len(by_k) - 1)))
    return {(f, n): c for f, c in zip(families, by_k, strict=True) for n in rows}


class Rounds:
    """Plays the engine: every draft is kept with the probability of its request."""

    def __init__(self, depth: DraftDepth, rates: list[float], limit: int = 1 << 20) -> None:
        self.depth, self.rates, self.rng, self.brisk = depth, rates, random.Random(0), False
        self.seqs = [request(slot, limit) for slot in range(len(rates))]
        for seq in self.seqs:
            depth.forget(seq.slot)

    def step(self) -> int:
        k = self.depth.choose(self.seqs, self.brisk)
        offered = [min(k, s.held_drafts, s.drafts) for s in self.seqs]
        kept = [self._kept(n, rate) for n, rate in zip(offered, self.rates, strict=True)]
        for seq, got in zip(self.seqs, kept, strict=True):
            seq.launched += 1 + got
            seq.held_drafts = k
        live = [i for i, n in enumerate(offered) if n]
        if live:
            slots = np.array([self.seqs[i].slot for i in live])
            self.depth.observe(slots, np.array(offered)[live], np.array(kept)[live])
        return k

    def run(self, steps: int) -> list[int]:
        return [self.step() for _ in range(steps)]

    def _kept(self, offered: int, rate: float) -> int:
        return next((i for i in range(offered) if self.rng.random() >= rate), offered)


def request(slot: int, limit: int = 1 << 20, drafts: int = MOST) -> Sequence:
    seq = Sequence(slot, Request((0,)), limit, frozenset(), seed=0, drafts=drafts)
    seq.slot, seq.launched = slot, 1
    return seq


def make(
    cost: dict[tuple[str, int], float], verify: tuple[tuple[int, ...], ...] = (ROWS,) * MOST
) -> DraftDepth:
    return DraftDepth((ROWS, *verify), StepCosts(cost), SLOTS)


def test_an_engine_without_drafts_has_nothing_to_choose() -> None:
    depth = DraftDepth((ROWS,), StepCosts({(DECODE, 8): 5.0}), SLOTS)
    assert depth.choose([request(0)]) == 0 and depth.cost(8).tolist() == [5.0]


@pytest.mark.parametrize("rows", [1, 5, 128])
def test_cheap_rounds_of_good_drafts_go_deep(rows: int) -> None:
    rounds = Rounds(make(costs(100, 105, 110, 115)), [0.9] * rows)
    assert set(rounds.run(200)[20:]) == {3}


@pytest.mark.parametrize("rows", [1, 5, 128])
def test_bad_drafts_are_given_up_and_seldom_tried_again(rows: int) -> None:
    rounds = Rounds(make(costs(100, 150, 200, 250)), [0.1] * rows)
    ks = rounds.run(1500)[100:]
    assert ks.count(0) > 0.95 * len(ks)
    looks = [i for i, k in enumerate(ks) if k]
    assert looks, "never tried again"
    assert all(ks[i] == 3 for i in looks)
    spent = sum((100, 150, 200, 250)[k] - 100 for k in ks)
    assert spent <= 2 * SHARE * 100 * len(ks)  # what their tokens brought is in the share of it


def test_the_share_of_looks_is_bounded_where_they_bring_nothing() -> None:
    rounds = Rounds(make(costs(100, 1000, 2000, 3000)), [0.0] * 4)
    rounds.run(50)
    ks = rounds.run(8_000)
    lost = sum(2900 for k in ks if k)
    assert 0 < lost <= SHARE * 100 * len(ks) + 2 * 2900


def test_looks_are_pairs_and_far_apart() -> None:
    """The first makes the drafts, the second verifies them."""
    rounds = Rounds(make(costs(100, 101, 180, 260)), [0.3])
    ks = rounds.run(2000)[200:]
    at = [i for i, k in enumerate(ks) if k == 3]
    starts = [b for a, b in pairwise([-9, *at]) if b - a != 1]
    assert at and len(at) == 2 * len(starts)
    assert all(b - a >= EVERY for a, b in pairwise(starts))


def test_looks_wait_where_steps_are_to_be_short_but_not_for_ever() -> None:
    rounds = Rounds(make(costs(100, 110, 180, 260)), [0.0])
    rounds.run(300)
    rounds.brisk = True
    ks = rounds.run(3 * LATE)
    starts = [i for i, k in enumerate(ks) if k == 3 and ks[i - 1] == 0]
    assert len(starts) in (2, 3) and all(b - a >= LATE for a, b in pairwise(starts))
    rounds.brisk = False
    assert rounds.run(2 * LATE).count(3) > 2 * 3


def test_a_look_that_is_half_done_waits_where_steps_are_to_be_short() -> None:
    rounds = Rounds(make(costs(100, 110, 180, 260)), [0.0])
    while rounds.step() != 3:
        pass
    rounds.brisk = True
    assert set(rounds.run(300)) == {0}
    while rounds.step() != 3:  # the one that comes at last is whole
        pass
    assert rounds.run(3) == [3, 0, 0]


def test_a_request_that_gets_better_is_found_out() -> None:
    rounds = Rounds(make(costs(100, 110, 120, 130)), [0.0])
    assert set(rounds.run(300)[-20:]) <= {0, 3}
    rounds.rates = [0.95]
    assert rounds.run(1500)[-50:].count(3) >= 48


def test_the_middle_is_chosen_where_the_later_drafts_are_bad() -> None:
    depth = make(costs(100, 110, 140, 170))
    rounds = Rounds(depth, [0.0])
    rounds._kept = lambda offered, rate: min(offered, 1)  # type: ignore[method-assign]
    ks = rounds.run(1000)[500:]
    assert ks.count(1) > 0.9 * len(ks)


def test_the_choice_does_not_flap_between_equals() -> None:
    """Costs at which two and three drafts are as good; looks change k in passing."""
    rate, chosen = 0.85, []
    tokens = [1, 1 + rate, 1 + rate + rate**2, 1 + rate + rate**2 + rate**3]
    rounds = Rounds(make(costs(1000, 1000, 100 * tokens[2], 100 * tokens[3])), [rate] * 8)
    for _ in range(1500):
        rounds.step()
        chosen.append(rounds.depth._last)
    assert set(chosen) <= {2, 3} and sum(a != b for a, b in pairwise(chosen)) <= 3


def test_no_k_without_a_bucket_is_chosen() -> None:
    depth = make(costs(100, 101, 102, 103), ((1, 8), (), (1,)))
    assert set(Rounds(depth, [0.9] * 100).run(200)) == {0}
    assert set(Rounds(depth, [0.9] * 8).run(200)) <= {0, 1}
    assert set(Rounds(depth, [0.9]).run(200)[50:]) == {3}


def test_without_costs_a_round_costs_its_tokens() -> None:
    """Then a draft is worth no more than it costs, and only looks go deeper."""
    ks = Rounds(make({}), [0.9] * 8).run(1000)
    assert ks.count(0) > 950
    partly = costs(100, 101, 102, 103)
    partly[verify_family(3), 8] = 0
    assert Rounds(make(partly), [0.9] * 8).run(1000).count(0) > 950


def test_requests_that_want_no_drafts_make_none() -> None:
    depth = make(costs(100, 101, 102, 103))
    seqs = [request(slot, drafts=0) for slot in range(4)]
    assert {depth.choose(seqs) for _ in range(300)} == {0}
    seqs[0].drafts = 1
    assert {depth.choose(seqs) for _ in range(300)} <= {0, 1}


def test_a_fixed_depth_is_the_largest_that_any_row_can_use_whatever_it_costs() -> None:
    known = StepCosts(costs(100, 900, 1700, 2500) | {(verify_family(3), 128): 0})
    verify = (ROWS, ROWS, ROWS[:2])
    depth = DraftDepth((ROWS, *verify), known, SLOTS, fixed=True)
    assert Rounds(depth, [0.0] * 8).run(300) == [3] * 300
    many = [request(slot) for slot in range(9)]
    assert depth.choose(many) == 2, "no bucket verifies three drafts of so many"
    assert depth.choose([request(0, drafts=1)]) == 1
    assert depth.choose([request(0, limit=5), request(1, drafts=0)]) == 1, "the end is near"
    assert depth.choose([request(0, drafts=0)]) == 0
    assert DraftDepth((ROWS,), known, SLOTS, fixed=True).choose([request(0)]) == 0


def test_a_text_that_matches_is_drafted_from_at_once_and_each_source_has_its_own_rates() -> None:
    """Bad drafts of the head do not hold back those of the text, nor these those; without
    a match and a head nothing is drafted."""
    one, none = np.array([0]), np.array([0])
    for headless in (False, True):
        depth = DraftDepth((ROWS, *(ROWS,) * MOST), StepCosts(costs(100, 105, 110, 115)), SLOTS,
                           makers=("text",) if headless else ())  # fmt: skip
        rounds = Rounds(depth, [0.0])
        for _ in range(120):
            last = rounds.step()
            depth.drafted(one, last, none)
        assert last == 0
        rounds.step()
        depth.drafted(one, 0, np.array([9]))
        assert depth.held(rounds.seqs[0]) == MOST and depth.choose(rounds.seqs) == MOST
        for _ in range(30):
            depth.observe(one, np.array([MOST]), none)
        assert depth.choose(rounds.seqs) == 0
        depth.drafted(one, 0, none)
        for _ in range(2):
            depth.choose(rounds.seqs)
            depth.drafted(one, 2, none)
        assert depth.held(rounds.seqs[0]) == 0 and depth._drafted[0] == (0 if headless else 2)
        seen = depth._seen.copy()
        depth.observe(
            one, np.array([MOST]), none
        )  # the first of 2 drafts was wrong, or there was none
        assert (depth._seen[:, 0] != seen[:, 0]).any() == (not headless)
        depth.drafted(one, 0, np.array([9]))
        depth.forget(0)
        assert not depth._seen[:, 0].any() and depth._drafted[0] == MOST
        assert depth.held(rounds.seqs[0]) == 0


def test_two_more_tokens_are_not_worth_a_first_round_of_drafts() -> None:
    """The first round gives one token in any case, and the second ends it."""
    depth = make(costs(100, 120, 140, 160))
    assert depth.choose([request(0, limit=4)]) == 0
    assert depth.choose([request(0, limit=400)]) == 3


def test_a_slots_next_request_starts_from_the_mean() -> None:
    depth = make(costs(100, 130, 160, 190))
    good = Rounds(depth, [0.95] * 16)
    good.run(100)
    bad = Rounds(depth, [0.0])
    ks = bad.run(60)
    assert ks[0] == 3 and ks[-1] == 0
    depth.forget(0)
    again = request(0)
    assert max(depth.choose([again]) for _ in range(2)) >= 1


def test_after_bad_drafts_a_new_request_starts_without() -> None:
    depth = make(costs(100, 130, 160, 190))
    Rounds(depth, [0.0] * 16).run(60)
    depth.forget(20)
    assert depth.choose([request(20)]) == 0


def test_drafts_at_hand_count_in_the_round_at_hand() -> None:
    """At this cost one draft pays from the first round on, but not from the next."""
    for held, k in ((0, 0), (1, 1)):
        depth, seq = make(costs(100, 165, 999, 999)), request(0)
        seq.held_drafts = held
        assert depth.choose([seq]) == k


def test_what_rounds_really_take_corrects_the_table() -> None:
    """By the table three drafts pay for 128 rows; their rounds take half as long again."""
    known = StepCosts(costs(100.0, 170.0, 190.0, 200.0))
    depth = DraftDepth((ROWS,) * (1 + MOST), known, SLOTS)
    rounds, took = Rounds(depth, [0.75] * 128), {0: 100.0, 1: 190.0, 2: 290.0, 3: 390.0}
    assert rounds.run(20)[-1] == 3
    for _ in range(60):
        k = rounds.step()
        known.ran((verify_family(k) if k else DECODE, 128), took[k])
    assert rounds.run(EVERY)[:-2].count(0) >= EVERY - 4
    assert 260 < depth.cost(128)[3] <= 390  # what runs no more is measured no more
    assert depth.cost(8)[3] == 200  # another bucket's
