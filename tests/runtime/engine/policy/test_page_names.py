"""Names of pages: equal for equal tokens and digests, and for nothing else."""

from array import array

from spark_engine.runtime.engine.policy.page_names import DigestRange, page_names

TOKENS = array("i", range(19))
PLAIN = page_names(TOKENS, 4)


def names(*digests: tuple[int, int, bytes]) -> list[bytes]:
    return page_names(TOKENS, 4, digests=[DigestRange(*one) for one in digests])


def differ(one: list[bytes], other: list[bytes]) -> list[int]:
    return [i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b]


def test_a_name_has_the_pages_tokens() -> None:
    assert len(PLAIN) == 4 and PLAIN[1] == TOKENS[4:8].tobytes()
    assert page_names(TOKENS, 4, PLAIN[:2]) == PLAIN
    assert page_names(TOKENS, 4, end=11) == PLAIN[:2]
    assert page_names(TOKENS, 4, [b"known"], 8) == [b"known", PLAIN[1]]


def test_a_digest_names_the_pages_of_its_range() -> None:
    assert differ(names((5, 12, b"cat")), PLAIN) == [1, 2]
    assert differ(names((4, 8, b"cat")), PLAIN) == [1]
    assert differ(names((5, 12, b"cat")), names((5, 12, b"dog"))) == [1, 2]
    assert page_names(TOKENS, 4, names((5, 12, b"cat"))[:1]) == PLAIN, "pages before it are shared"


def test_where_a_digest_starts_is_part_of_the_name() -> None:
    """Placeholder ids of two images are equal: only the start tells them apart."""
    one, other = names((4, 6, b"cat"), (6, 8, b"dog")), names((4, 7, b"cat"), (7, 8, b"dog"))
    assert differ(one, other) == [1]
    assert differ(one, names((4, 6, b"dog"), (6, 8, b"cat"))) == [1]
