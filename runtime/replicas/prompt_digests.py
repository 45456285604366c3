"""Digests of a prompt's prefixes, at positions where another prompt may differ.

Knows where the APIs' bodies contain the prompt; knows no tokens and no template. A position is the
end of a message (where engines keep recurrent states) or, within a long text, a point of a grid
like that of the pages. Each digest covers everything before it, so requests with a common beginning
share digests.

The body's sender is not authenticated yet, so the cost is bounded for every body: the JSON is
scanned without building objects, and only some messages are decoded.
"""

from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from typing import NamedTuple

import msgspec

GRID = 2048  # bytes of JSON, about 512 tokens: several pages
MOST = 2 << 20  # bytes of a body that is read; a longer body may go to any replica
MOST_PARTS = 1 << 16  # commas in messages that are split; longer ones are one text
MOST_MESSAGES = 1 << 12  # messages with a position at their end; later ones have none
FIRST, LAST = 96, 160  # positions of one request that are kept
_NOTHING = (b"", b"null", b"[]", b"{}", b'""', b"false", b"0")


class Place(NamedTuple):
    """A position in a prompt: the digest and the number of all bytes before it."""

    digest: bytes
    length: int


class _Body(msgspec.Struct):
    """The parts of a body that form the prompt, in order, as JSON. `cache_salt` changes all
    digests."""

    model: msgspec.Raw = msgspec.Raw()
    cache_salt: msgspec.Raw = msgspec.Raw()
    tools: msgspec.Raw = msgspec.Raw()
    functions: msgspec.Raw = msgspec.Raw()
    system: msgspec.Raw = msgspec.Raw()
    instructions: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()

    @property
    def before(self) -> Iterable[msgspec.Raw]:
        """The text that a template renders before the messages."""
        return self.tools, self.functions, self.system, self.instructions

    @property
    def prompts(self) -> Iterable[msgspec.Raw]:
        """The conversation or the text; usually one."""
        return self.messages, self.input, self.prompt


def places(parts: Sequence[bytes | bytearray]) -> tuple[Place, ...]:
    """The positions of a request's prompt in order; none for an invalid body. `parts`: its body."""
    if sum(map(len, parts)) > MOST:
        return ()
    try:
        found = msgspec.json.decode(b"".join(parts), type=_Body)
        pieces = list(_pieces(found))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ()
    salt = bytes(found.cache_salt)
    return tuple(_marked(pieces, bytes(found.model) + (b"" if salt in _NOTHING else b"\0" + salt)))


def _marked(pieces: Sequence[bytes], root: bytes) -> Iterator[Place]:
    """The first and last positions of these pieces; their digests start from `root`."""
    ends = [-(-len(piece) // GRID) for piece in pieces]  # grid points of each piece
    total, number, length = sum(ends), 0, 0
    digest = blake2b(root, digest_size=16)
    for piece, count in zip(pieces, ends, strict=True):
        at = 0
        while at < len(piece):
            if FIRST <= number < total - LAST:  # not kept: hashed with the next one
                skipped = min(total - LAST - number, count - at // GRID)
                step = skipped * GRID
            else:
                skipped, step = 1, GRID
            part = piece[at : at + step]
            digest.update(part)
            at, number, length = at + step, number + skipped, length + len(part)
            if number <= FIRST or number > total - LAST:
                yield Place(digest.digest(), length)


def _pieces(body: _Body) -> Iterator[bytes]:
    """Delimited JSON texts of the prompt's parts."""
    before = [b"" if raw in _NOTHING else raw for raw in map(bytes, body.before)]
    if any(before):
        yield b"\0".join(before)
    for raw in map(bytes, body.prompts):
        if raw in _NOTHING:
            continue
        if raw[:1] == b'"':
            yield raw[1:-1]
        elif raw[:1] == b"[":
            yield from _parts(raw)


def _parts(raw: bytes) -> Iterator[bytes]:
    """A list's elements; the whole text for a list of token ids, or for too many elements."""
    begin = raw[1:65].lstrip()[:1]
    if begin.isdigit() or raw.count(b",") > MOST_PARTS:
        yield raw[1:-1]
        return
    elements = msgspec.json.decode(raw, type=list[msgspec.Raw])
    if len(elements) > MOST_MESSAGES:
        del elements[FIRST:]
    yield from map(bytes, elements)
