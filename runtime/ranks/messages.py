"""The protocol between rank 0 and the other ranks: message types, encoded as MessagePack.

A packet from rank 0 holds its calls on executors, states and tables since the last packet, in
order; arrays are raw bytes. A rank answers `Opening` while it opens its shard, then `Opened` or
`RankFailed`. Knows no transport.
"""

from typing import TypeAlias

import msgspec


class LoadOptions(msgspec.Struct, array_like=True, frozen=True):
    """How an engine is opened: the options of `load`."""

    swap_bytes: int = 0
    threads: int = 0
    cache_bytes: int | None = None
    graphs: bool = True
    masks: bool = False
    least: bool = False
    host_bytes: int | None = None


class Begin(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Open this rank's shard of the engine: the first packet to a rank, which holds nothing else.

    `digest` and `version`: of rank 0's manifest and package; the rank's must be equal (`Stamp`).
    """

    digest: str
    version: str
    options: LoadOptions


class Stamp(msgspec.Struct, tag="Begin", array_like=True, frozen=True):
    """The fields that a `Begin` of every version has, so that a rank can report which version it
    needs."""

    digest: str
    version: str


class InputPiece(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The first bytes of the inputs of the next launch, which are too large for one packet."""

    data: bytes


class LaunchBucket(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Launch this bucket over the step inputs in `inputs`, concatenated in the order of the specs,
    behind those sent before.

    `part`: only the part before sampling; a `LaunchRest` launches the rest. `live`: of each input
    only so many rows are sent; None: all.
    """

    family: str
    rows: int
    inputs: bytes
    part: bool = False
    live: int | None = None


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
    InputPiece
    | LaunchBucket
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
    succeed."""

    message: str
    user: bool
    passing: bool = False


Answer: TypeAlias = Opening | Opened | RankFailed

# Of a rank's first packet, read before the rest of it: the sender's version and digest.
STAMP: msgspec.msgpack.Decoder[Stamp] = msgspec.msgpack.Decoder(Stamp)
BEGIN: msgspec.msgpack.Decoder[Begin] = msgspec.msgpack.Decoder(Begin)
ORDERS: msgspec.msgpack.Decoder[list[Order]] = msgspec.msgpack.Decoder(list[Order])  # later ones
ANSWER: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)
_ENCODER = msgspec.msgpack.Encoder()


def encode(message: Begin | list[Order] | Answer) -> bytes:
    return _ENCODER.encode(message)
