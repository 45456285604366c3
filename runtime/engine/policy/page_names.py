"""The name of a page in the prefix cache: the only place that makes one.

A page's keys and values depend on its tokens, on all pages before it (its parents in the trie) and
on digests: the salt of a root, which has no tokens, and the content of ranges of tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import repeat
from typing import NamedTuple


class DigestRange(NamedTuple):
    """The content of the tokens from `start` to `end` - 1, which their ids do not say: an image.
    All digests of a prompt have the same number of bytes."""

    start: int
    end: int
    digest: bytes


def page_name(tokens: bytes, digest: bytes = b"") -> bytes:
    """Names a page among its parent's children; `tokens`: ids as i32, all pages alike in number."""
    return tokens + digest


def page_names(
    tokens: array[int],
    size: int,
    known: Sequence[bytes] = (),
    end: int | None = None,
    digests: Sequence[DigestRange] = (),
) -> list[bytes]:
    """The names of all full pages of `tokens`, up to `end`, of which the first are `known`. A
    page's name has the digests of the ranges that it holds tokens of, and where those start."""
    start = len(known) * size
    end = (len(tokens) if end is None else end) // size * size
    words, step = tokens[start:end].tobytes(), size * tokens.itemsize
    pages = (words[at : at + step] for at in range(0, len(words), step))
    found = (
        (_digest(at, size, digests) for at in range(start, end, size)) if digests else repeat(b"")
    )
    return [*known, *map(page_name, pages, found)]


def _digest(at: int, size: int, digests: Sequence[DigestRange]) -> bytes:
    here = (one for one in digests if one.start < at + size and one.end > at)
    return b"".join(one.start.to_bytes(8, "little") + one.digest for one in here)
