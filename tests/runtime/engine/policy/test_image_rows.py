"""The pool of images' rows: what is given up, what is kept, and gaps."""

from spark_engine.runtime.engine.policy.image_rows import ImageRows
from spark_engine.vision import Image


def image(name: str, rows: int) -> Image:
    return Image(0, rows, 1, b"", name.encode())


A, B, C, D = image("a", 4), image("b", 3), image("c", 3), image("d", 5)


def test_the_least_recently_used_is_given_up() -> None:
    pool = ImageRows(10)
    assert pool.place([A, B, C], ()) == [A, B, C]
    assert [pool.first(i) for i in (A, B, C)] == [0, 4, 7]
    assert pool.place([A], ()) == []  # used again: B is the oldest
    assert pool.place([image("e", 3)], ()) == [image("e", 3)]
    assert pool.missing([A, B, C]) == [B] and pool.first(image("e", 3)) == 4


def test_equal_digests_are_one_image() -> None:
    pool = ImageRows(5)
    assert pool.place([A, A], ()) == [A] and pool.missing([A]) == []


def test_what_a_step_reads_is_kept() -> None:
    pool = ImageRows(10)
    pool.place([A, B, C], ())
    assert pool.place([D], {b"a", b"b", b"c"}) is None
    assert pool.place([image("e", 2), image("f", 6)], {b"a"}) is None
    assert len(pool.missing([image("e", 2), image("f", 6)])) == 2  # neither will be computed
    assert pool.place([B, C], {b"a"}) == [B, C]
    assert pool.place([D], {b"a"}) == [D] and pool.first(D) == 4
    assert pool.missing([A, B, C]) == [B, C]


def test_images_of_a_tile_move_together_where_no_gap_is_large_enough() -> None:
    pool = ImageRows(10)
    pool.place([B, A, C], ())  # A is in the middle: 3 to 6
    assert pool.place([A, D], ()) == [A, D]
    assert [pool.first(i) for i in (A, D)] == [0, 4]
