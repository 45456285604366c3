"""The name of a page in the prefix cache: the only place that makes one.

A page's keys and values depend on its tokens, on all pages before it (its parents in the trie) and
on what `digest` summarises: the salt of a root, which has no tokens; later an image's content.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence


def page_name(tokens: bytes, digest: bytes = b"") -> bytes:
    """Names a page among its parent's children; `tokens`: ids as i32, all pages alike in number."""
    return tokens + digest


def page_names(
    tokens: array[int], size: int, known: Sequence[bytes] = (), end: int | None = None
) -> list[bytes]:
    """The names of all full pages of `tokens`, up to `end`, of which the first are `known`."""
    start = len(known) * size
    end = (len(tokens) if end is None else end) // size * size
    words, step = tokens[start:end].tobytes(), size * tokens.itemsize
    return [*known, *(page_name(words[at : at + step]) for at in range(0, len(words), step))]
