"""Operands that several ops share, and their values in timed nodes.

docs/graph.md defines names, types and meanings.
"""

from functools import cache

import numpy as np

from spark_engine.interface import PREFILL_TILE
from spark_engine.operand import Fill, Operand, Role, TimedLaunch, When
from spark_engine.tensors import Array

Rng = np.random.Generator
Dims = tuple[int, ...]


@cache
def constant(value: int) -> Fill:
    """The same int32 everywhere."""
    return lambda launch, dims, rng: np.full(dims, value, np.int32)


def _slots(launch: TimedLaunch, dims: Dims, rng: Rng) -> Array:
    return launch.slot_of_rows()


def _starts(launch: TimedLaunch, dims: Dims, rng: Rng) -> Array:
    if launch.round:
        start = max(0, min(launch.context, launch.capacity - launch.tile))
        return np.full(launch.rows, start, np.int32)
    behind = max(0, launch.per_sequence - launch.rows)  # tiles of earlier launches
    tiles = behind + np.arange(launch.rows) % launch.per_sequence
    return np.asarray(tiles * launch.tile, np.int32)


def tokens(launch: TimedLaunch, dims: Dims, rng: Rng) -> Array:
    """Ids of any tokens."""
    return np.asarray(rng.integers(0, 1000, dims), np.int32)


def _counts(launch: TimedLaunch, dims: Dims, rng: Rng) -> Array:
    return np.full(dims, launch.tile, np.int32)


def ids_of(weight: str) -> Fill:
    """Ids of any rows of a weight."""
    return lambda launch, dims, rng: rng.integers(0, launch.specs[weight].dims[0], dims, np.int32)


def _pages(launch: TimedLaunch, dims: Dims, rng: Rng) -> Array:
    slot, at = np.indices(dims)
    table = (slot * launch.pages + at) % max(1, launch.pool)
    return np.asarray(np.where(at < launch.pages, table, -1), np.int32)


SLOTS = Operand("slots", Role.STEP, "i32[rows]", fill=_slots)
STARTS = Operand("starts", Role.STEP, "i32[rows]", fill=_starts)
COUNTS = Operand("counts", Role.STEP, "i32[rows]", fill=_counts)
ROWS = (SLOTS, STARTS, COUNTS)
# Added to a position before it turns a query or key: three numbers a token in prefill, else one.
ROPE_OFFSETS = Operand("rope_offsets", Role.STEP, "i32[rows,turns]", fill=constant(0))
# Of ops over recurrent states: the row of the state from which a prompt's first tile begins, and
# the further row to which a tile writes it.
_PREFILL = When("tile", (PREFILL_TILE,))
SOURCES = Operand("sources", Role.STEP, "i32[rows]", _PREFILL, fill=_slots)
SAVES = Operand("saves", Role.STEP, "i32[rows]", _PREFILL, fill=constant(-1))
TOKEN_IDS = Operand("token_ids", Role.STEP, "i32[tokens]", fill=tokens)
LAST_TOKENS = Operand("last_tokens", Role.STATE, "i32[S+1]")
# Of engines that read images: an id V + r means row r of it. Its last row is scratch.
IMAGE_ROWS = Operand("image_rows", Role.STATE, "A[I+1,H]", optional=True)
PAGE_TABLE = Operand("page_table", Role.TABLE, "i32[S+1,MP]", fill=_pages)


def x(spec: str = "A[tokens,K]", note: str = "", name: str = "x") -> Operand:
    """The activations of an op."""
    return Operand(name, Role.ACTIVATION, spec, note=note)


def weight(name: str, spec: str, note: str = "") -> Operand:
    """A weight that no merge joins."""
    return Operand(name, Role.WEIGHT, spec, note=note)


# A static scale for each of n quantised copies.
SCALES = Operand("scales", Role.SCALE, "f32[n]", When("quant", ("fp8", "nvfp4")))
