"""How much prefill a step takes, by what launches take, and which prompt comes first."""

import sys
from collections.abc import Sequence as Several
from itertools import pairwise

import pytest

from spark_engine.errors import OptionError
from spark_engine.interface import DECODE, PREFILL
from spark_engine.runtime.engine.plan import Batch
from spark_engine.runtime.engine.policy.pacing import (
    BALANCED,
    LATENCY,
    THROUGHPUT,
    Pace,
    Pacing,
    PrefillPolicy,
)
from spark_engine.runtime.engine.policy.step_costs import StepCosts
from spark_engine.runtime.engine.request import Request
from spark_engine.runtime.engine.sequence import Sequence
from spark_engine.vision import VISION

TILE = 64
BUCKETS = (1, 4, 8, 16, 64)
# A dense model's: 6 ms of reading the weights, then 5 ms a tile; and what 1 and 64 rows take.
COSTS = {(PREFILL, b): 6_000.0 + 5_000.0 * b for b in BUCKETS}
COSTS |= {(DECODE, 1): 5_900.0, (DECODE, 64): 12_500.0}


class Scheduled(Pacing):
    """With what the scheduler does in a step: it notes the start and the end of each wait."""

    def tiles(
        self, order: Several[Sequence], decode: Batch | None, more: int = 0, since: float = 0.0
    ) -> int:
        for seq in order:
            seq.since = self.starts_waiting(seq) if seq.since is None else seq.since
        return super().tiles(order, decode, more, since)

    def launched(self, taken: list[Sequence]) -> None:
        for seq in taken:
            seq.since = None
        self.forget_prefilled()


def make(
    policy: PrefillPolicy = BALANCED, costs: dict[tuple[str, int], float] = COSTS
) -> Scheduled:
    return Scheduled(policy, BUCKETS, TILE, StepCosts(costs))


def waiting(tokens: int, at: int = 0, number: int = 0) -> Sequence:
    seq = Sequence(number, Request((0,) * (at + tokens)), 1 << 20, frozenset(), seed=0)
    seq.launched = at
    return seq


def launch(bucket: int, live: int, at: int = 0) -> Batch:
    seq = waiting(live * TILE, at)
    starts = [at + TILE * i for i in range(live)]
    return Batch(PREFILL, bucket, [seq] * live, starts, [TILE] * live, [False] * live)


def decode(rows: int = 64) -> Batch:
    seqs = [waiting(1) for _ in range(rows)]
    return Batch(DECODE, rows, seqs, [1] * rows, [1] * rows, [True] * rows)


LIVE = decode()


@pytest.mark.parametrize(
    ("policy", "tiles"),
    [
        (THROUGHPUT, 64),
        (BALANCED, 4),  # 90 % of the rate would be 16, in a step longer than 55 ms
        (LATENCY, 1),
        (PrefillPolicy(Pace.BALANCED, 20.0), 1),
        (PrefillPolicy(Pace.BALANCED, 12.5 + 26.0), 4),
        (PrefillPolicy(Pace.BALANCED, 12.5 + 25.9), 1),
        (PrefillPolicy(Pace.BALANCED, 1000.0), 16),
        (PrefillPolicy(Pace.THROUGHPUT, 12.5 + 86.0), 16),
        (PrefillPolicy(Pace.LATENCY, 12.5 + 46.0), 8),
        (PrefillPolicy(Pace.LATENCY, 0.001), 1),
    ],
)
def test_a_step_holds_the_prefill_that_the_policy_allows_with_decode(
    policy: PrefillPolicy, tiles: int
) -> None:
    assert make(policy).tiles([waiting(10_000)], LIVE) == tiles


def test_a_balanced_step_is_short_by_a_lone_rows_too() -> None:
    """A model ten times as fast: 12.5 lone steps are 7.4 ms, of which decode takes 1.25."""
    quick = {key: cost / 10 for key, cost in COSTS.items()}
    assert make(costs=quick).tiles([waiting(10_000)], LIVE) == 8
    quick[DECODE, 1] = 400.0
    assert make(costs=quick).tiles([waiting(10_000)], LIVE) == 4
    quick[DECODE, 1] = 100.0  # then at least what latency would take
    assert make(costs=quick).tiles([waiting(10_000)], LIVE) == 1
    quick[DECODE, 64] = 2_700.0
    pacing = make(costs=quick)
    assert pacing.tiles([waiting(10_000)], LIVE) == 4


def test_where_prompts_come_faster_than_calm_steps_prefill_them_the_rate_counts() -> None:
    """Calm steps make 256 tokens in 38.5 ms: six tenths are 1,995 tokens in half a second."""
    for tokens, brisk in ((1_900, False), (2_100, True)):
        pacing, gone = make(), waiting(tokens, number=0)
        pacing.tiles([gone], LIVE)
        assert pacing.tiles([gone, waiting(10_000, number=1)], LIVE) == 8, "it has not come by"
        gone.launched = gone.prefill_end
        assert pacing.tiles([waiting(10_000, number=2)], LIVE) == (16 if brisk else 4)
        pacing.took([], 500_000.0)
        assert pacing.tiles([waiting(10_000, number=3)], LIVE) == (16 if brisk else 4)
        pacing.took([], 1.0)
        assert pacing.tiles([waiting(10_000, number=4)], LIVE) == 4


def test_a_prompt_of_several_launches_came_once() -> None:
    """1,900 tokens, which are too few for haste; twice as many would not be."""
    pacing, gone = make(), waiting(1_900)
    for _ in range(3):
        pacing.tiles([gone], LIVE)
        gone.launched += 4 * TILE
        pacing.launched([gone] * 4)
    gone.launched = gone.prefill_end
    assert pacing.tiles([waiting(10_000)], LIVE) == 4


def test_no_reference_to_a_prefilled_prompt_is_kept() -> None:
    pacing, gone = make(), waiting(1_900)
    before = sys.getrefcount(gone)
    pacing.tiles([gone], LIVE)
    assert sys.getrefcount(gone) > before
    gone.launched = gone.prefill_end
    pacing.launched([gone])
    assert sys.getrefcount(gone) == before


def test_then_a_launch_waits_for_half_as_many_steps_as_throughputs() -> None:
    pacing, gone = make(), waiting(5_000)
    pacing.tiles([gone], LIVE)
    gone.launched = gone.prefill_end
    assert [pacing.tiles([waiting(1)], LIVE) for _ in range(6)] == [0, 0, 0, 0, 1, 0]


def test_what_the_cache_had_was_not_prefilled() -> None:
    pacing, gone = make(), waiting(5_000)
    gone.launched = gone.cached = 4_000
    pacing.tiles([gone], LIVE)
    gone.launched = gone.prefill_end
    assert pacing.tiles([waiting(10_000)], LIVE) == 4


def test_after_a_second_without_prefill_latency_yields() -> None:
    pacing, order = make(LATENCY), [waiting(10_000, number=n) for n in range(3)]
    for _ in range(40):
        assert pacing.tiles(order, LIVE) == 1
        pacing.launched(order[:1])
        pacing.took([LIVE, launch(1, 1)], 24_000.0)
    pacing.took([LIVE], 12_000.0), pacing.took([LIVE], 28_000.0)
    assert pacing.tiles(order, LIVE) == 1  # 1 s to the microsecond
    pacing.took([], 1.0)
    assert pacing.tiles(order, LIVE) == 8  # two have waited, the first has not
    pacing.launched(order)
    assert pacing.tiles(order, LIVE) == 1


def test_prompts_that_wait_for_a_slot_count_as_those_that_have_one() -> None:
    """For how long a step may be; for latency's sake as soon as the first of them waits long."""
    assert [make().tiles([waiting(10_000)], LIVE, more) for more in (0, 1, 2)] == [4, 8, 16]
    pacing, order = make(LATENCY), [waiting(10_000)]
    pacing.took([], 2e6)
    assert [pacing.tiles(order, LIVE, more, 1e6) for more in (0, 1, 9)] == [1, 1, 1]
    assert [pacing.tiles(order, LIVE, more, 1e6 - 1) for more in (0, 1, 2, 9)] == [1, 4, 8, 16]
    assert [pacing.most_tiles(order, 64, more, 1e6 - 1) for more in (0, 1, 2, 9)] == [1, 4, 8, 16]
    assert pacing.most_tiles([], 0) == 16


def test_throughput_waits_for_a_fuller_launch_and_not_for_long() -> None:
    """One tile costs 11 ms where a 64th of the largest launch would cost 5.1: 5.9 ms are saved. A
    prompt that waits costs 0.2 ms a step, which is 64 rows' 12.5."""
    pacing = make(THROUGHPUT)
    for _ in range(2):
        assert [pacing.tiles([waiting(1)], LIVE) for _ in range(9)] == [0] * 8 + [1]
    crowd = [waiting(1, number=n) for n in range(4)]  # 26 ms for 20.4, at 0.8 a step
    assert [pacing.tiles(crowd, LIVE) for _ in range(9)] == [0] * 7 + [4] + [0]
    assert pacing.tiles([waiting(1)], None) == 1  # no other sequence gains from a wait
    assert pacing.tiles([waiting(10_000)], LIVE) == 64


def test_without_decode_a_launch_is_short_where_that_costs_no_rate() -> None:
    assert make().tiles([waiting(10_000)], None) == 16
    assert make(THROUGHPUT).tiles([waiting(10_000)], None) == 64
    quick = {key: cost / 10 for key, cost in COSTS.items()}
    assert make(costs=quick).tiles([waiting(10_000)], None) == 64
    slow = {key: cost * 10 for key, cost in COSTS.items()}
    assert make(costs=slow).tiles([waiting(10_000)], None) == 16


def test_what_waits_is_split_into_the_launches_that_take_least() -> None:
    """Of five tiles four go, and one is left, which is not padded to eight."""
    pacing = make(PrefillPolicy(Pace.THROUGHPUT, 1000.0))
    assert pacing.tiles([waiting(5 * TILE)], LIVE) == 4
    assert pacing.tiles([waiting(4 * TILE), waiting(1)], LIVE) == 4
    assert pacing.tiles([waiting(1)], LIVE) == 1


def test_far_into_a_context_a_launch_is_smaller() -> None:
    """There attention takes as long again: a step of 65 ms holds half the tiles."""
    pacing = make(PrefillPolicy(Pace.THROUGHPUT, 65.0))
    assert pacing.tiles([waiting(10_000, 120_000)], LIVE) == 8
    for _ in range(200):
        pacing.took([launch(8, 8, 120_000)], 92_000.0)
        pacing.took([launch(8, 8)], 46_000.0)
    assert pacing.cost(8, 120_000) == pytest.approx(92_000, rel=0.02)
    assert pacing.cost(8) == pytest.approx(46_000, rel=0.02)
    assert pacing.tiles([waiting(10_000, 120_000)], LIVE) == 4
    assert pacing.tiles([waiting(10_000)], LIVE) == 8


def test_launches_that_take_longer_than_the_build_said_become_smaller() -> None:
    """Those that were not run are thought to be as much slower."""
    pacing = make(PrefillPolicy(Pace.THROUGHPUT, 12.5 + 50.0))
    assert pacing.tiles([waiting(10_000)], LIVE) == 8
    for _ in range(40):
        pacing.took([decode(), launch(8, 8)], 12_500.0 + 69_000.0)
    assert pacing.cost(8) == pytest.approx(69_000, rel=0.02)
    assert pacing.cost(4) == pytest.approx(39_000, rel=0.02)
    assert pacing.tiles([waiting(10_000)], LIVE) == 4


def test_what_prefill_took_is_the_rest_of_the_step() -> None:
    costs = StepCosts(COSTS)
    pacing = Pacing(BALANCED, BUCKETS, TILE, costs)
    for _ in range(40):
        pacing.took([decode()], 10_000.0)
    assert costs.of((DECODE, 64)) == pytest.approx(10_000, rel=0.01)
    for _ in range(40):
        pacing.took([decode(), launch(4, 4)], 40_000.0)
    assert costs.of((PREFILL, 4)) == pytest.approx(30_000, rel=0.01)
    assert costs.of((DECODE, 64)) == pytest.approx(10_000, rel=0.01)


def test_a_launch_that_is_mostly_padding_says_nothing_of_its_bucket() -> None:
    pacing = make()
    for live, cost in ((11, 86_000.0), (12, 86_000.0 - 0.25 * 43_000.0)):
        pacing.took([launch(16, live)], 40_000.0)
        assert pacing.cost(16) == pytest.approx(cost, rel=1e-2)


def test_what_the_tower_took_is_the_rest_of_the_step() -> None:
    costs = COSTS | {(VISION, 16): 9_000.0, (VISION, 64): 30_000.0}
    for itl, tiles in ((68.0, 8), (12.5 + 9 + 26, 4), (12.5 + 9 + 25, 1), (30.0, 0)):
        pacing = make(PrefillPolicy(itl_ms=itl), costs)
        pacing.tiles([waiting(64 * TILE)], LIVE)
        assert [n for n in range(1, 9) if pacing.fits(n, [9])] == [*range(1, tiles + 1)]
    pacing.tiles([waiting(64 * TILE)], None)
    assert pacing.fits(64, [64]), "no sequence decodes"
    for _ in range(20):
        pacing.took([LIVE, launch(4, 4)], 12_500.0 + 26_000.0 + 15_000.0, [(VISION, 16)])
    assert pacing._costs.of((VISION, 16)) == pytest.approx(15_000, rel=0.01)
    assert pacing._costs.of((PREFILL, 4)) == 26_000 and pacing.clock == 20 * 53_500
    pacing = make(PrefillPolicy(itl_ms=500.0))
    pacing.tiles([waiting(64 * TILE)], LIVE)
    assert not pacing.fits(2, [9]), "of an engine without a table for its tower"


def test_without_a_table_all_that_waits_is_taken() -> None:
    pacing = make(PrefillPolicy(Pace.LATENCY, 1.0), {})
    for _ in range(2):
        assert pacing.tiles([waiting(10_000)], LIVE) == 64
        assert pacing.tiles([waiting(100)], None) == 2
        pacing.took([launch(64, 64)], 320_000.0)
        pacing.took([decode()], 10_000.0)


@pytest.mark.parametrize("itl", [0.0, -1.0, float("nan"), float("inf")])
def test_a_bound_that_is_none_is_refused(itl: float) -> None:
    with pytest.raises(OptionError, match="--itl-ms .*: give milliseconds above 0"):
        PrefillPolicy(itl_ms=itl)


def test_a_tighter_bound_never_takes_more() -> None:
    chosen = [
        make(PrefillPolicy(Pace.THROUGHPUT, float(ms))).tiles([waiting(10_000)], LIVE)
        for ms in range(1, 400)
    ]
    assert all(a <= b for a, b in pairwise(chosen)) and set(chosen) == set(BUCKETS)
