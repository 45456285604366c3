"""The protocol between rank 0 and the other ranks: message types, encoded as MessagePack.

A packet from rank 0 holds its calls on executors, states and tables since the last one, in order;
arrays travel as raw bytes. A rank answers `Opening` as long as it opens its part, then `Opened`, or
`RankFailed`. Knows no transport.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec


class Begin(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Open your part of the engine: the first packet that a rank gets, alone.

    `digest` and `version`: of rank 0's manifest and package, which must be the rank's too
    (`Stamp`).
    The others as of `load`.
    """

    digest: str
    version: str
    threads: int
    cache_bytes: int | None
    graphs: bool
    masks: bool
    least: bool
    host_bytes: int | None = None


class Stamp(msgspec.Struct, tag="Begin", array_like=True, frozen=True):
    """The beginning of a `Begin` of any version: whatever follows in another one, these are there,
    so that a rank can say what is to be installed."""

    digest: str
    version: str


class Launch(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Launch this bucket over the step inputs in `inputs`, one after the other as specified.

    `part`: the whole of it, or what comes before sampling, whose rest a `LaunchRest` starts.
    """

    family: str
    rows: int
    inputs: bytes
    part: bool = False


class LaunchRest(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Launch the rest of the part that was launched last."""


class Table(msgspec.Struct, array_like=True, frozen=True):
    """Rows of a table and their bytes."""

    name: str
    slots: list[int]
    data: bytes


class Tables(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Table rows, for every launch from here on."""

    tables: list[Table]


class CopyRows(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """See `States.copy_rows`."""

    pairs: list[tuple[int, int]]


class CopyPages(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """See `States.copy_pages`."""

    pairs: list[tuple[int, int]]


class SetCounts(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """See `States.set_counts`."""

    slot: int
    ids: list[int]
    generated: list[int]


class Save(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Keep a snapshot under a number."""

    number: int
    slot: int
    pages: list[int]


class Restore(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Write the snapshot of this number into a slot and pages; it is kept."""

    number: int
    slot: int
    pages: list[int]


class Drop(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Forget a snapshot."""

    number: int


class Leave(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Close the engine and end."""


Order: TypeAlias = (
    Launch | LaunchRest | Tables | CopyRows | CopyPages | SetCounts | Save | Restore | Drop | Leave
)


class Opening(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The rank goes on with opening its part of the engine, and what it is at."""

    at: str


class Opened(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The rank has its part of the engine open."""

    pid: int


class RankFailed(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The rank is about to end. `user`: something outside the program is wrong; `passing`: it may
    be right later."""

    message: str
    user: bool
    passing: bool = False


Answer: TypeAlias = Opening | Opened | RankFailed

_ENCODER = msgspec.msgpack.Encoder()
_STAMP = msgspec.msgpack.Decoder(Stamp)
_BEGIN = msgspec.msgpack.Decoder(Begin)
_ORDERS = msgspec.msgpack.Decoder(list[Order])
_ANSWERS = msgspec.msgpack.Decoder(Answer)


def encode(message: Begin | list[Order] | Answer) -> bytes:
    """Bytes of a packet or an answer."""
    return _ENCODER.encode(message)


def decode_stamp(data: bytes | bytearray | memoryview) -> Stamp:
    """Whose packet a rank's first one is, before the rest is read. Raises msgspec.DecodeError."""
    stamp: Stamp = _STAMP.decode(data)
    return stamp


def decode_begin(data: bytes | bytearray | memoryview) -> Begin:
    """The inverse in a rank, of its first packet. Raises msgspec.DecodeError."""
    begin: Begin = _BEGIN.decode(data)
    return begin


def decode_orders(data: bytes | bytearray | memoryview) -> list[Order]:
    """The inverse in a rank. Raises msgspec.DecodeError."""
    orders: list[Order] = _ORDERS.decode(data)
    return orders


def decode_answer(data: bytes | bytearray | memoryview) -> Answer:
    """The inverse in rank 0. Raises msgspec.DecodeError."""
    answer: Answer = _ANSWERS.decode(data)
    return answer
