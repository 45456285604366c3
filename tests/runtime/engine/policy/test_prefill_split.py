"""Which launches a waiting prompt is cut into: least time over all, by the buckets' costs."""

from itertools import combinations_with_replacement

import pytest

from spark_engine.runtime.engine.policy.prefill_split import PrefillSplit

BUCKETS = (4, 16, 64)  # tiles: 256, 1,024 and 4,096 tokens
COSTS = {4: 7_000.0, 16: 18_000.0, 64: 66_000.0}


def launches(waiting: int, buckets: tuple[int, ...], costs: dict[int, float]) -> list[int]:
    """The buckets that run until nothing waits."""
    split, made = PrefillSplit(buckets, costs), []
    while waiting:
        tiles = split.first(min(waiting, buckets[-1]))
        made.append(next(b for b in buckets if b >= tiles))
        waiting -= tiles
    return made


def test_a_prompt_is_not_padded_to_four_times_its_length() -> None:
    assert launches(20, BUCKETS, COSTS) == [16, 4]
    assert launches(1, BUCKETS, COSTS) == [4]
    assert launches(63, BUCKETS, COSTS) == [64]
    assert launches(84, BUCKETS, COSTS) == [64, 16, 4]


@pytest.mark.parametrize("costs", [(7.0, 18.0, 66.0), (1.0, 5.0, 30.0), (9.0, 9.5, 10.0)])
def test_no_other_launches_take_less(costs: tuple[float, ...]) -> None:
    buckets = (1, 4, 12)
    cost = dict(zip(buckets, costs, strict=True))
    for waiting in range(1, 13):
        least = min(
            sum(cost[b] for b in some)
            for n in range(1, 13)
            for some in combinations_with_replacement(buckets, n)
            if sum(some) >= waiting
        )
        assert sum(cost[b] for b in launches(waiting, buckets, cost)) == pytest.approx(least)


def test_without_costs_all_that_waits_is_taken_at_once() -> None:
    for costs in ({}, {4: 7.0, 16: 18.0}, {4: 7.0, 16: 18.0, 64: 0.0}):
        assert launches(20, BUCKETS, costs) == [64]
