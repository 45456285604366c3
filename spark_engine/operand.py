"""What an op says of its operands and results: meaning, type, and what their values look like.

Everything that asks what an operand is (the verifier, merging, timing, spark-check, the tests, the
table of docs/graph.md) asks this declaration. Knows no op.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np

from spark_engine.interface import MOST_DRAFTS
from spark_engine.kernel import Attr, Attrs
from spark_engine.tensors import Array, DType, TensorSpec


class Role(enum.Enum):
    """The writer of an operand, and the time of the write."""

    ACTIVATION = "made by another node of the same launch"
    WEIGHT = "the same in every launch"
    SCALE = "positive factors: weights, or of each token"
    STEP = "written by the host before each launch"
    TABLE = "written by the host when a sequence comes, goes or gets a page"
    STATE = "kept from launch to launch, updated in place"


DTYPES: Mapping[str, tuple[DType, ...]] = {
    "A": (DType.F32, DType.BF16),  # an engine's activation dtype
    "W": (DType.F32, DType.F16, DType.BF16),  # a matrix as the checkpoint has it
    "KV": (DType.F32, DType.BF16, DType.U8),  # KV pages: activations or e4m3 codes
    "f8": (DType.F8E4M3,),
    **{d.value: (d,) for d in DType},
}
NARROW = ("A", "W", "KV")  # f32 on the CPU, bf16 on a GPU
UNITS = {
    "tokens": "token",
    "rows": "row",
    "S+1": "slot",
    "P+1": "page",
    "I+1": "image",
}  # by a first dimension


@cache
def _dtypes(names: str) -> tuple[DType, ...]:
    return tuple(d for name in names.split("/") for d in DTYPES[name])


@cache
def dims_of(spec: str) -> tuple[str, ...]:
    """The dimensions of a declared spec, by name or formula."""
    inside = spec.partition("[")[2].rstrip("]")
    return tuple(inside.split(",")) if inside else ()


@dataclass(frozen=True)
class When:
    """A condition on a node's attributes: one of `values`, or without any, not 0."""

    attr: str
    values: tuple[Attr, ...] = ()

    def holds(self, attrs: Attrs) -> bool:
        """True if the condition holds. An attribute that is not given counts as 0."""
        given = attrs.get(self.attr, 0)
        return given in self.values if self.values else bool(given)

    def __str__(self) -> str:
        return f"{self.attr} is {' or '.join(map(str, self.values))}" if self.values else self.attr


@dataclass(frozen=True)
class TimedLaunch:
    """The sequences of a timed launch: rows with `context` tokens behind them, or prefills."""

    specs: Mapping[str, TensorSpec]  # of the node's operands by name
    rows: int  # of the launch
    tile: int  # tokens of each row
    slots: int  # that the states have, without the one for scratch
    pages: int  # of one sequence
    page_size: int  # tokens of a page
    pool: int  # pages there are
    context: int  # tokens behind each row of a round, or of each prefill

    @property
    def capacity(self) -> int:
        """Positions that a sequence's pages hold."""
        return self.pages * self.page_size

    @property
    def round(self) -> bool:
        """True if each row is a sequence that continues: by one token, or by some of its drafts."""
        return self.tile <= 1 + MOST_DRAFTS

    @property
    def per_sequence(self) -> int:
        """Rows that one sequence has in the launch."""
        return 1 if self.round else max(1, min(self.context, self.capacity) // self.tile)

    def slot_of_rows(self) -> Array:
        """i32 [rows]; sequences share a slot only where there are too few."""
        return np.asarray(np.arange(self.rows) // self.per_sequence % self.slots, np.int32)


# (launch, the operand's shape, generator) -> its values, or a pattern of them to be repeated
Fill = Callable[[TimedLaunch, tuple[int, ...], np.random.Generator], Array]


@dataclass(frozen=True)
class Completes:
    """A state that holds the rest of another: spark-check shows the two as one."""

    state: str  # the other's name; its own, where it is laid out otherwise with drafts
    # (its entry of a slot in float64, this one's, tokens so far, most drafts of a round) -> what an
    # engine that keeps nothing apart has there, in float64.
    whole: Callable[[Array, Array, int, int], Array]


@dataclass(frozen=True)
class Operand:
    """One operand of an op."""

    name: str  # its formal name in the body; of a step, table or state also the engine's
    role: Role  # what writes it
    # Dtype and shape as docs/graph.md writes them, "A[tokens,K]"; dtypes that may be are joined by
    # "/". The first dimension tells the unit: tokens, rows, S+1 slots, P+1 pages, I+1 rows of
    # images.
    spec: str
    when: When | None = None  # nodes with such attributes have it; None: all
    optional: bool = False  # nodes may lack it whatever their attributes; only a last operand
    # Nodes over one input merge into one by joining it along its first dimension, one entry of
    # which serves so many columns of the result; 0: it must be the same in all.
    joins: int = 0
    completes: Completes | None = None  # of a state, the other one that it holds the rest of
    fill: Fill | None = None  # its values when a node is timed; None: by role and dtype
    note: str = ""  # of its meaning, for the table in docs/graph.md

    @property
    def dtypes(self) -> tuple[DType, ...]:
        return _dtypes(self.dtype)

    @property
    def dtype(self) -> str:
        return self.spec.partition("[")[0]

    @property
    def dims(self) -> tuple[str, ...]:
        return dims_of(self.spec)

    @property
    def unit(self) -> str | None:
        """The unit of the first dimension: token, row, slot, page; None: others."""
        return UNITS.get(self.dims[0]) if self.dims else None

    @property
    def narrow(self) -> bool:
        """True if what is f32 on the CPU is bf16 on a GPU."""
        return self.dtype in NARROW

    @property
    def constant(self) -> bool:
        return self.role in (Role.WEIGHT, Role.SCALE) and self.unit is None


@dataclass(frozen=True)
class Result:
    """One result of an op."""

    # Its formal name in the body. A last one ending in `*` is any number of results.
    name: str
    # As an operand's; of one that is several, a list for the table in docs/graph.md.
    spec: str = ""
    when: When | None = None  # nodes with such attributes have it; None: all
    updates: str = ""  # the state that it may share memory with
    note: str = ""  # of its meaning, for the table in docs/graph.md
    # Of one that is several: attributes -> these, by the names that kernels know them by.
    each: Callable[[Attrs], tuple[Result, ...]] | None = None

    @property
    def dtype(self) -> str:
        return self.spec.partition("[")[0]

    @property
    def dims(self) -> tuple[str, ...]:
        return dims_of(self.spec)
