"""How a request begins: digests of its prompt at places where another may part from it.

Knows the bodies of the APIs as far as a prompt stands in them; knows no tokens and no template. A
place is the end of a message (there the engines keep recurrent states) or, within a long text, a
grid like that of the pages. Two requests that share a beginning share the digests of its places,
because each digest is of everything before it.

No key was looked at when a body comes here, so its cost is bounded whatever it holds: its JSON is
gone over without building anything of it, and only the bytes of some messages are made objects.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from typing import NamedTuple

import msgspec

GRID = 2048  # bytes of JSON, about 512 tokens: several pages
MOST = 2 << 20  # bytes of a body that is read; a longer one, which few engines take, goes anywhere
MOST_PARTS = 1 << 16  # commas in messages that are taken apart; others are one text
MOST_MESSAGES = 1 << 12  # whose ends are places; of more only the first are
FIRST, LAST = 96, 160  # places of one request that are kept
_NOTHING = (b"", b"null", b"[]", b"{}", b'""', b"false", b"0")


class Place(NamedTuple):
    """A place in a prompt: the digest of all before it, and how many bytes those are."""

    digest: bytes
    length: int


class _Body(msgspec.Struct):
    """What a prompt is made of, in its order, as JSON. `cache_salt` parts all that follows."""

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
        """What a template puts before the messages."""
        return self.tools, self.functions, self.system, self.instructions

    @property
    def prompts(self) -> Iterable[msgspec.Raw]:
        """The conversation or the text; one of them as a rule."""
        return self.messages, self.input, self.prompt


def places(body: bytes) -> tuple[Place, ...]:
    """The places of a request's prompt, from its beginning on; none of what is not understood."""
    if len(body) > MOST:
        return ()
    try:
        found = msgspec.json.decode(body, type=_Body)
        pieces = list(_pieces(found))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ()
    salt = bytes(found.cache_salt)
    return tuple(_marked(pieces, bytes(found.model) + (b"" if salt in _NOTHING else b"\0" + salt)))


def _marked(pieces: Sequence[bytes], root: bytes) -> Iterator[Place]:
    """The first and the last places of these pieces, whose digests begin with `root`."""
    ends = [-(-len(piece) // GRID) for piece in pieces]  # places of each
    total, number, length = sum(ends), 0, 0
    digest = blake2b(root, digest_size=16)
    for piece, count in zip(pieces, ends, strict=True):
        at = 0
        while at < len(piece):
            if FIRST <= number < total - LAST:  # not kept: hashed up to where one is, or the end
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
    """Texts of JSON, each of which shows where it ends."""
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
    """A list's elements; its text as a whole where it is one of token ids, or has too many."""
    begin = raw[1:65].lstrip()[:1]
    if begin.isdigit() or raw.count(b",") > MOST_PARTS:
        yield raw[1:-1]
        return
    elements = msgspec.json.decode(raw, type=list[msgspec.Raw])
    if len(elements) > MOST_MESSAGES:
        del elements[FIRST:]
    yield from map(bytes, elements)
