"""What a network keeps in its checkpoint: the name, shape and kind of each tensor, written once.

A model family builds its network of blocks (`models/graph/`), whose fields are the `Tensor`s and
`Linear`s that they read; `tensors_of` lists them. From that list follow the tensors that a file
must hold, the table of what is quantised, random checkpoints and the count of parameters. Names
are without the prefix that files put before them (`layout.py`). Knows no scheme and no file.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, is_dataclass

Shape = tuple[int, ...]


class Kind(enum.Enum):
    """What a tensor's values are: how a random one is drawn, and whether a file must have it."""

    MATRIX = enum.auto()
    EMBEDDING = enum.auto()
    ROUTER = enum.auto()
    NORM = enum.auto()  # multiplies as it is stored
    CENTRED_NORM = enum.auto()  # the deviation from one
    LOG_DECAY = enum.auto()
    DECAY_BIAS = enum.auto()
    STACKED_EXPERTS = enum.auto()  # of one layer; a file has these, or a `Linear` for each
    TIED_HEAD = enum.auto()  # a copy of the embedding, which few exporters store
    CACHE_SCALE = enum.auto()  # read if it is there


@dataclass(frozen=True)
class Split:
    """How ranks share a tensor: each has an equal share of every part of one axis.

    Attributes:
        axis: of the tensor as this list has it.
        parts: (units, elements of one) of each stretch of that axis, in order. No unit is cut.
        shared: where units are fewer than ranks, several ranks have the same one.
    """

    axis: int
    parts: tuple[tuple[int, int], ...]
    shared: bool = False

    @property
    def length(self) -> int:
        """Elements of the whole axis."""
        return sum(units * size for units, size in self.parts)


@dataclass(frozen=True)
class Tensor:
    """A tensor that is never quantised. `part` is text, or one that is left out of the graph.
    Every rank has all of it unless `split` says how they share it."""

    name: str
    shape: Shape
    kind: Kind = Kind.MATRIX
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
class Linear:
    """A projection, which may be quantised: weights [rows, columns], and scales beside them.

    `group` names the experts that are all stored alike, and that configs name as one; else it
    is empty. Ranks share it as `split` says; without one each has all of it.
    """

    module: str
    rows: int
    columns: int
    group: str = ""
    split: Split | None = None

    @property
    def weight(self) -> str:
        """The weight's name, unless a scheme has another."""
        return f"{self.module}.weight"

    @property
    def table_key(self) -> str:
        """Where the quantisation table has its scheme."""
        return self.group or self.module


Row = Tensor | Linear


def by_rows(*parts: tuple[int, int], shared: bool = False) -> Split:
    """Each rank makes some of the outputs."""
    return Split(0, parts, shared)


def by_columns(units: int, size: int) -> Split:
    """Each rank reads some of the inputs, and makes a part of each sum."""
    return Split(1, ((units, size),))


@dataclass(frozen=True)
class Experts:
    """The routed experts of one layer, in both forms that files have.

    Attributes:
        name: the group of their projections, and what quantisation configs call them.
        each: gate, up and down of each expert.
        gate_up: all of them stacked, [E, 2·I, H].
        down: likewise, [E, H, I].
    """

    name: str
    each: tuple[tuple[Linear, Linear, Linear], ...]
    gate_up: Tensor
    down: Tensor


def tensors_of(block: object) -> Iterator[Row]:
    """Every tensor among the fields of a block, blocks within it included, in their order."""
    if isinstance(block, Row):
        yield block
    elif isinstance(block, tuple):
        for part in block:
            yield from tensors_of(part)
    elif is_dataclass(block):
        for field in fields(block):
            yield from tensors_of(getattr(block, field.name))


def linears(rows: Iterable[Row]) -> Iterator[Linear]:
    """The projections among them."""
    return (row for row in rows if isinstance(row, Linear))


def of_kind(rows: Iterable[Row], kind: Kind) -> Iterator[Tensor]:
    """The tensors of one kind among them."""
    return (row for row in rows if isinstance(row, Tensor) and row.kind is kind)
