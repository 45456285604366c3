"""Finer buckets are built where a launch of them takes less, and nowhere else."""

import pytest

from spark_engine.builder.plan.bucket_choice import PAYS, choose

POWERS = (1, 2, 4, 8, 16, 32, 64, 128)
BETWEEN = (12, 24, 40, 48, 56, 80, 96, 112)


class Cost:
    """`fixed + each * size`, rounded up to whole `grain`s; remembers what it was asked."""

    def __init__(self, fixed: float, each: float, grain: int = 1) -> None:
        self.fixed, self.each, self.grain, self.asked = fixed, each, grain, list[int]()

    def __call__(self, size: int) -> float:
        self.asked.append(size)
        return self.fixed + self.each * -(-size // self.grain) * self.grain


def test_where_a_step_costs_by_its_rows_there_are_sizes_between() -> None:
    """From 64 to 128 rows the dense model's step goes from 12.5 ms to 19.5: three sizes save 11 to
    18 % of 128's, and 112, of which 19.5 is 10 % more, is the last."""
    cost = Cost(5.5, 0.11)
    found = choose(POWERS, BETWEEN, cost, splits=False)
    assert set(POWERS) < set(found) and found == tuple(sorted(found))
    for low, high in zip(found, found[1:], strict=False):
        for size in (s for s in BETWEEN if low < s < high):
            assert cost(high) / cost(size) < 1 + PAYS + 0.01
    assert {80, 96} <= set(found) and 12 not in found


def test_where_rows_cost_nothing_nothing_is_added_or_timed() -> None:
    cost = Cost(5.5, 0.0)
    assert choose(POWERS, BETWEEN, cost, splits=False) == POWERS
    assert cost.asked == list(POWERS)


def test_a_size_that_takes_as_long_as_the_larger_is_timed_and_left_out() -> None:
    """Kernels of 32 rows a tile."""
    cost = Cost(1.0, 1.0, grain=32)
    found = choose((32, 64, 128), (40, 80, 96), cost, splits=False)
    assert found == (32, 64, 96, 128) and set(cost.asked) == {32, 40, 64, 80, 96, 128}, cost.asked
    assert len(cost.asked) == len(set(cost.asked))


@pytest.mark.parametrize(("fixed", "kept"), [(7.0, True), (0.05, False)])
def test_a_launch_of_prefill_saves_what_a_second_one_would_add(fixed: float, kept: bool) -> None:
    """24 tiles are one of 16 and one of 8 unless reading the weights again costs much."""
    found = choose((1, 4, 8, 16, 32), (24,), Cost(fixed, 1.0), splits=True)
    assert (24 in found) is kept


def test_work_that_cannot_be_split_runs_in_the_larger() -> None:
    assert 24 in choose((8, 16, 32), (24,), Cost(0.05, 1.0), splits=False)
