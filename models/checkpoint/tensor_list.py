"""What a network stores in its checkpoint: the name, shape and kind of each tensor.

A model family builds its network from blocks (`models/graph/`). A block's fields are the `Tensor`s
and `Linear`s that it reads; `tensors_of` lists them. The list determines the tensors that a file
must hold, the table of what is quantised, random checkpoints and the count of parameters. Names are
without the prefix that files put before them (`layout.py`). Knows no scheme and no file.
"""

import enum
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Protocol

from spark_engine.tensors import DType

Shape = tuple[int, ...]
PLAIN = (DType.BF16, DType.F16, DType.F32)  # of unquantised tensors


class ValueKind(enum.Enum):
    """The kind of a tensor's values: decides how random ones are drawn, and whether a file must
    have it."""

    MATRIX = enum.auto()
    EMBEDDING = enum.auto()
    ROUTER = enum.auto()
    GATE = enum.auto()  # of a shared expert
    NORM = enum.auto()  # a factor, as stored
    CENTRED_NORM = enum.auto()  # the deviation from one
    LOG_DECAY = enum.auto()
    DECAY_BIAS = enum.auto()
    STACKED_EXPERTS = enum.auto()  # of one layer; a file has these, or a `Linear` for each expert
    TIED_HEAD = enum.auto()  # a copy of the embedding, which few exporters store
    CACHE_SCALE = enum.auto()  # read if present


@dataclass(frozen=True)
class Split:
    """How ranks share a tensor: each has an equal share of every part of one axis."""

    axis: int  # of the tensor's shape in this list
    # (units, elements of a unit) of each part of that axis, in order. No unit is cut.
    parts: tuple[tuple[int, int], ...]
    shared: bool = False  # if there are fewer units than ranks, several ranks have the same one

    @property
    def length(self) -> int:
        """Elements of the whole axis."""
        return sum(units * size for units, size in self.parts)


@dataclass(frozen=True)
class Tensor:
    """A tensor that is never quantised. `part` is text, or one that is not in the graph. Every rank
    has all of it unless `split` divides it."""

    name: str
    shape: Shape
    kind: ValueKind = ValueKind.MATRIX
    part: str = "text"
    split: Split | None = None

    @property
    def module(self) -> str:
        """The name without its last word."""
        return self.name.rpartition(".")[0]

    @property
    def columns(self) -> int:
        """The length of a row."""
        return self.shape[-1] if self.shape else 1


@dataclass(frozen=True)
class Slice:
    """Rows of a matrix that files store for several projections.

    Attributes:
        module, rows: of the stored matrix; its scheme is that of all its slices.
        ranges: (first, last + 1) of the rows, in the projection's order.
    """

    module: str
    rows: int
    ranges: tuple[tuple[int, int], ...]

    def blocks(self, size: int) -> tuple[tuple[int, int], ...]:
        """The ranges in blocks of `size` rows; empty if one ends inside a block. The matrix's last
        block may be short, and is the last then."""
        if self.rows <= size:
            return ((0, 1),)
        *ends, last = (end for one in self.ranges for end in one)
        if any(end % size for end in ends) or (last % size and last != self.rows):
            return ()
        return tuple((first // size, -(-end // size)) for first, end in self.ranges)


@dataclass(frozen=True)
class Linear:
    """A projection, which may be quantised: weights [rows, columns], and their scales.

    `group`: the name of a group of experts, which are stored alike and which configs name as one;
        else empty. Ranks share the projection by `split`; without it each has all of it. `slice`:
        the rows that it is of a stored matrix; without it the file stores it under its name.
    """

    module: str
    rows: int
    columns: int
    group: str = ""
    split: Split | None = None
    slice: Slice | None = None

    @property
    def stored(self) -> Slice:
        """The stored matrix and this projection's rows of it."""
        return self.slice or Slice(self.module, self.rows, ((0, self.rows),))

    @property
    def table_key(self) -> str:
        """The key of its scheme in the quantisation table."""
        return self.group or self.stored.module


Row = Tensor | Linear


class Stored(Protocol):
    """A tensor's entry in a file (`files.StoredTensor`)."""

    @property
    def dtype(self) -> DType: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def file(self) -> str: ...


def by_rows(*parts: tuple[int, int], shared: bool = False) -> Split:
    """The outputs, divided among ranks."""
    return Split(0, parts, shared)


def by_columns(units: int, size: int) -> Split:
    """The inputs, divided among ranks, so that each has a part of every sum."""
    return Split(1, ((units, size),))


@dataclass(frozen=True)
class Experts:
    """The routed experts of one layer, in both forms of files."""

    name: str  # the group of their projections, and their name in quantisation configs
    each: tuple[tuple[Linear, Linear, Linear], ...]  # gate, up and down of each expert
    gate_up: Tensor  # all of them stacked, [E, 2·I, H]
    down: Tensor  # all down projections stacked, [E, H, I]


def tensors_of(block: object) -> Iterator[Row]:
    """Every tensor of a block and of the blocks in it, in order of the fields."""
    if isinstance(block, Row):
        yield block
    elif isinstance(block, tuple):
        for part in block:
            yield from tensors_of(part)
    elif is_dataclass(block):
        for field in fields(block):
            yield from tensors_of(getattr(block, field.name))


def linears(rows: Iterable[Row]) -> Iterator[Linear]:
    """The projections of a block."""
    return (row for row in rows if isinstance(row, Linear))


def of_kind(rows: Iterable[Row], kind: ValueKind) -> Iterator[Tensor]:
    """The tensors of one kind of a block."""
    return (row for row in rows if isinstance(row, Tensor) and row.kind is kind)
