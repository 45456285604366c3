"""The protocol between rank 0 and the other ranks: message types, encoded as MessagePack.

A packet from rank 0 holds its calls on executors, states and tables since the last packet, in
order; arrays are raw bytes. A rank answers `Opening` while it opens its shard, then `Opened` or
`RankFailed`. Knows no transport.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec


class Begin(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Open this rank's shard of the engine: the first packet to a rank, which holds nothing else.

    `digest` and `version`: of rank 0's manifest and package; the rank's must be equal (`Stamp`).
    The other fields as in `load`.
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
    """The fields that a `Begin` of every version has, so that a rank can report which version it
    needs.
    """

    digest: str
    version: str


class LaunchBucket(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Launch this bucket over the step inputs in `inputs`, concatenated in the order of the specs.

    `part`: only the part before sampling; a `LaunchRest` launches the rest.
    """

    family: str
    rows: int
    inputs: bytes
    part: bool = False


class LaunchRest(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Launch the rest of the last partial launch."""


class Table(msgspec.Struct, array_like=True, frozen=True):
    """Rows of a table and their bytes."""

    name: str
    slots: list[int]
    data: bytes


class Tables(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Table rows; later launches see them."""

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
    """Keep a snapshot under this number."""

    number: int
    slot: int
    pages: list[int]


class Restore(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Write the snapshot of this number into a slot and pages, and keep it."""

    number: int
    slot: int
    pages: list[int]


class Drop(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Free the snapshot of this number."""

    number: int


class Leave(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Close the engine and exit."""


Order: TypeAlias = (
    LaunchBucket
    | LaunchRest
    | Tables
    | CopyRows
    | CopyPages
    | SetCounts
    | Save
    | Restore
    | Drop
    | Leave
)


class Opening(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The rank makes progress with opening its shard; `at`: the stage."""

    at: str


class Opened(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The rank's shard is open."""

    pid: int


class RankFailed(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The rank is about to exit. `user`: the cause is outside the program. `passing`: a retry may
    succeed.
    """

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
    """The sender's version and digest in a rank's first packet, read before the rest. Raises
    msgspec.DecodeError.
    """
    stamp: Stamp = _STAMP.decode(data)
    return stamp


def decode_begin(data: bytes | bytearray | memoryview) -> Begin:
    """A rank's first packet. Raises msgspec.DecodeError."""
    begin: Begin = _BEGIN.decode(data)
    return begin


def decode_orders(data: bytes | bytearray | memoryview) -> list[Order]:
    """A rank's later packets. Raises msgspec.DecodeError."""
    orders: list[Order] = _ORDERS.decode(data)
    return orders


def decode_answer(data: bytes | bytearray | memoryview) -> Answer:
    """An answer, in rank 0. Raises msgspec.DecodeError."""
    answer: Answer = _ANSWERS.decode(data)
    return answer
