"""The pool of units: what is taken, returned, held, and lost."""

import pytest

from spark_engine.errors import InternalError
from spark_engine.runtime.engine.pool import Pool
from tests.runtime.engine.invariants import check_pool


def test_units_are_handed_out_once_and_come_back() -> None:
    pool = Pool("page", 4)
    first, rest = pool.take(), pool.take(3)
    assert sorted(first + rest) == [0, 1, 2, 3] and pool.free == 0
    pool.give(rest)
    assert pool.free == 3
    assert sorted(pool.take(3)) == sorted(rest)


def test_taking_more_than_there_is_takes_nothing() -> None:
    pool = Pool("page", 2)
    with pytest.raises(InternalError, match="3 page taken, 2 of 2 free"):
        pool.take(3)
    assert pool.free == 2


@pytest.mark.parametrize("unit", [-1, 5, 0])
def test_a_unit_that_was_not_taken_cannot_be_returned(unit: int) -> None:
    with pytest.raises(InternalError, match=f"page {unit} returned"):
        Pool("page", 5).give([unit])


def test_a_unit_cannot_be_returned_twice() -> None:
    pool = Pool("page", 5)
    taken = pool.take(2)
    with pytest.raises(InternalError, match="returned"):
        pool.give([taken[0], taken[0]])


def test_check_finds_leaks_and_double_holders() -> None:
    pool = Pool("page", 3)
    a, b = pool.take(2)
    check_pool(pool, [a, b])
    with pytest.raises(InternalError, match="a leak"):
        check_pool(pool, [a])
    with pytest.raises(InternalError, match="held twice"):
        check_pool(pool, [a, b, b])
    pool.share([a])
    check_pool(pool, [a, a, b])
    with pytest.raises(InternalError, match="a leak"):
        check_pool(pool, [a, b])  # one of its users ended without a release
    pool.give([a])
    pool.give([b])
    with pytest.raises(InternalError, match="held twice, or held and free"):
        check_pool(pool, [a, b])


def test_a_kept_unit_is_spare_until_it_is_dropped_as_often() -> None:
    pool = Pool("page", 3)
    a, b = pool.take(2)
    pool.keep(a)
    pool.keep(a)
    assert (pool.kept, pool.spare, pool.free, pool.keeps(a)) == (1, 0, 1, 2)
    pool.give([a])
    assert (pool.kept, pool.spare, pool.free, pool.unused([a, b])) == (1, 1, 1, 1)
    check_pool(pool, [b], [a, a])
    with pytest.raises(InternalError, match="a leak"):
        check_pool(pool, [b], [a])
    pool.drop(a)
    assert (pool.kept, pool.spare, pool.free) == (1, 1, 1)
    pool.drop(a)
    assert (pool.kept, pool.spare, pool.free) == (0, 0, 2)
    check_pool(pool, [b])


@pytest.mark.parametrize("unit", [-1, 3, 0])
def test_a_unit_that_is_not_there_is_neither_kept_nor_dropped(unit: int) -> None:
    pool = Pool("page", 3)
    with pytest.raises(InternalError, match=f"page {unit} kept, but it is free"):
        pool.keep(unit)
    with pytest.raises(InternalError, match=f"page {unit} dropped, but it was not kept"):
        pool.drop(unit)
    with pytest.raises(InternalError, match=f"page {unit} is held"):
        check_pool(pool, [unit])
