"""Values for operands of a node that is timed: plausible, and cheap to make at any size.

Knows the operands' names in docs/graph.md and what their values mean; knows no CUDA. What a name
says nothing about is filled by dtype. Packed weights mix codes, scales and floats in ways that
only their op knows: their bytes are random with bit 6 clear, which is a finite number below 2 in
e2m1, e4m3, bf16 and f32 alike.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from spark_engine.builder.native.tactics import Work
from spark_engine.tensors import Array, DType, TensorSpec

PATTERN = 4 << 20  # bytes made of a large operand, which are then repeated
BY_SLOT = frozenset(("conv_state", "gdn_state", "gdn_ring", "token_counts"))
BY_PAGE = frozenset(("k_pages", "v_pages"))


@dataclass(frozen=True)
class Filling:
    """What an operand holds: `pattern` again and again over `nbytes`.

    `nbytes` may be less than the operand has: only so much of it is reached.
    """

    pattern: Array
    nbytes: int


@dataclass(frozen=True)
class Scene:
    """The sequences of one launch: decode rows of `context` tokens, or prefills of as many."""

    rows: int
    tile: int
    slots: int
    pages: int  # of one sequence
    page_size: int
    page_units: int
    context: int

    @classmethod
    def of(cls, work: Work) -> Scene:
        """From the operands' shapes."""
        by_name = dict(zip(names(work), work.ins, strict=True))
        rows = by_name["slots"].dims[0] if "slots" in by_name else 1
        states = [by_name[n].dims[0] for n in by_name if n in BY_SLOT or n == "page_table"]
        paged = by_name.get("k_pages")
        size = paged.dims[2] if paged else 64
        tile = int(work.attrs.get("tile", 1))
        table = by_name["page_table"].dims[1] if "page_table" in by_name else 1 << 30
        pages = min(table, -(-(work.context + tile) // size))
        slots = max(1, min(states, default=rows + 1) - 1)
        units = paged.dims[0] - 1 if paged else 1
        return cls(rows, tile, slots, pages, size, units, work.context)

    @property
    def per_sequence(self) -> int:
        """Rows that one sequence has in the launch."""
        return 1 if self.tile == 1 else max(1, min(self.context, self.room) // self.tile)

    @property
    def room(self) -> int:
        """Positions that a sequence's pages hold."""
        return self.pages * self.page_size

    def slot_of_rows(self) -> Array:
        """i32 [rows]; sequences share a slot only where there are too few."""
        return np.asarray(np.arange(self.rows) // self.per_sequence % self.slots, np.int32)

    def starts(self) -> Array:
        """i32 [rows]."""
        if self.tile == 1:
            return np.full(self.rows, max(0, min(self.context, self.room - 1)), np.int32)
        return np.asarray(np.arange(self.rows) % self.per_sequence * self.tile, np.int32)


def names(work: Work) -> list[str]:
    """The operands' names in docs/graph.md; a repeated last name is that of all it stands for."""
    if work.op is None:
        return ["x"] * len(work.ins)
    fixed = [name for name in work.op.inputs if not name.endswith("*")]
    rest = work.op.inputs[-1].rstrip("*")
    return fixed[: len(work.ins)] + [rest] * (len(work.ins) - len(fixed))


def fillings(work: Work, rng: np.random.Generator) -> list[Filling]:
    """One for each operand."""
    scene = Scene.of(work)
    found = []
    for name, spec in zip(names(work), work.ins, strict=True):
        nbytes = _reached(name, spec, scene)
        exact = _integers(name, spec, scene, work, rng)
        pattern = _by_dtype(name, spec, nbytes, rng) if exact is None else exact
        found.append(Filling(np.ascontiguousarray(pattern).reshape(-1).view(np.uint8), nbytes))
    return found


def _reached(name: str, spec: TensorSpec, scene: Scene) -> int:
    """Bytes of the units that the scene's slots and pages name."""
    used = len(np.unique(scene.slot_of_rows()))
    if name in BY_PAGE:
        used = min(used * scene.pages, scene.page_units)
    elif name not in BY_SLOT:
        return spec.nbytes
    return spec.nbytes // max(1, spec.dims[0]) * min(spec.dims[0], used)


def _integers(
    name: str, spec: TensorSpec, scene: Scene, work: Work, rng: np.random.Generator
) -> Array | None:
    """Integers that mean something; None for what is no such operand."""
    if spec.dtype is not DType.I32:
        return None
    dims = spec.dims
    if name == "slots":
        return scene.slot_of_rows()
    if name == "starts":
        return scene.starts()
    if name == "counts":
        return np.full(dims, scene.tile, np.int32)
    if name == "emit":
        return np.ones(dims, np.int32)
    if name == "page_table":
        slot, at = np.indices(dims)
        table = (slot * scene.pages + at) % max(1, scene.page_units)
        return np.asarray(np.where(at < scene.pages, table, -1), np.int32)
    if name == "ids":
        return _experts(dims, work, rng)
    if name == "bias_ids":
        return np.full(dims, -1, np.int32)
    if name == "token_ids":
        return np.asarray(rng.integers(0, 1000, dims), np.int32)
    return np.zeros(1, np.int32)


def _experts(dims: tuple[int, ...], work: Work, rng: np.random.Generator) -> Array:
    """i32 [tokens, k]: distinct experts; the last column is the last expert, as if shared."""
    experts = max(spec.dims[0] for spec in work.ins if len(spec.dims) == 3)
    order = np.argsort(rng.random((dims[0], experts - 1)), axis=1)
    ids = np.concatenate([order[:, : dims[1] - 1], np.full((dims[0], 1), experts - 1)], axis=1)
    return np.asarray(ids, np.int32)


def _by_dtype(name: str, spec: TensorSpec, nbytes: int, rng: np.random.Generator) -> Array:
    size = spec.dtype.itemsize
    count = max(1, min(nbytes, PATTERN) // size)
    if spec.dtype in (DType.U8, DType.F8E4M3, DType.BOOL):
        raw = rng.integers(0, 256, count * size, dtype=np.uint8) & np.uint8(0xBF)
        return raw & np.uint8(1) if spec.dtype is DType.BOOL else raw
    if name == "sampling_f":  # greedy: temperature 0, top_p and repetition 1
        row = np.zeros(spec.dims[-1], np.float32)
        row[[1, 3]] = 1
        return row
    if spec.dtype.numpy.kind in "iu":
        return np.zeros(count, spec.dtype.numpy)
    drawn = rng.standard_normal(count, np.float32)
    if name == "gdn_ring":  # decays' logarithms and `base` are among it: neither grows, all is live
        drawn = -np.abs(drawn) * np.float32(0.1)
    if spec.dtype is DType.F32 and ("scale" in name or name in ("weight", "weights", "inv_freq")):
        drawn = np.abs(drawn) * np.float32(0.1) + np.float32(0.01)
    return np.asarray(drawn.astype(spec.dtype.numpy))
