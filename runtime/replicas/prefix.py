"""How a request begins: digests of its prompt at places where another may part from it.

Knows the bodies of the APIs as far as a prompt stands in them; knows no tokens and no template. A
place is the end of a message (there the engines keep recurrent states) or, within a long text, a
grid like that of the pages. Two requests that share a beginning share the digests of its places,
because each digest is of everything before it.
"""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b
from typing import Any, NamedTuple

import msgspec

GRID = 2048  # bytes of text, about 512 tokens: several pages
IDS = 512  # token ids, of a prompt that is given so
BYTES_OF_ID = 4  # an id counts for as much text
MOST = 4 << 20  # bytes of a body that is read: longer ones, which no engine takes, go anywhere
FIRST, LAST = 96, 160  # places of one request that are kept
_BEFORE = ("tools", "functions", "system", "instructions")  # of the prompt, before its messages
_PROMPTS = ("messages", "input", "prompt")


class Place(NamedTuple):
    """A place in a prompt: the digest of all before it, and how many bytes those are."""

    digest: bytes
    length: int


def places(body: bytes) -> tuple[Place, ...]:
    """The places of a request's prompt, from its beginning on; none of what is not understood."""
    if len(body) > MOST:
        return ()
    try:
        found = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ()
    if not isinstance(found, dict):
        return ()
    digest, length = blake2b(digest_size=16), 0
    digest.update(str(found.get("model")).encode("utf-8", "replace"))
    made: list[Place] = []
    for piece in _pieces(found):
        for at in range(0, len(piece), GRID):
            part = piece[at : at + GRID]
            digest.update(part)
            length += len(part)
            made.append(Place(digest.digest(), length))
        digest.update(b"\0")  # pieces do not run into one another
    return tuple(made if len(made) <= FIRST + LAST else made[:FIRST] + made[-LAST:])


def _pieces(body: dict[str, Any]) -> Iterator[bytes]:
    before = {name: body[name] for name in _BEFORE if body.get(name)}
    if before:
        yield msgspec.json.encode(before)
    for name in _PROMPTS:
        prompt = body.get(name)
        if not prompt:
            continue
        if isinstance(prompt, str):
            yield prompt.encode("utf-8", "replace")
        elif isinstance(prompt, list) and all(type(i) is int for i in prompt):
            yield from _of_ids(prompt)
        elif isinstance(prompt, list):
            yield from map(msgspec.json.encode, prompt)


def _of_ids(ids: list[int]) -> Iterator[bytes]:
    """Of each id the lowest bytes: a digest of others would be no error, only a detour."""
    for at in range(0, len(ids), IDS):
        some = ids[at : at + IDS]
        yield b"".join((i & 0xFFFFFFFF).to_bytes(BYTES_OF_ID, "little") for i in some)
