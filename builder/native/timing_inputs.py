"""Input values for nodes that are timed: plausible, and cheap to make at any size.

Knows what roles mean; an op declares an operand's special values (`Operand.fill`). Only the op
knows how packed weights mix codes, scales and floats, so their bytes are random with bit 6 clear: a
finite number below 2 in e2m1, e4m3, bf16 and f32.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from spark_engine.builder.native.tactics import Work
from spark_engine.operand import Operand, Role, TimedLaunch
from spark_engine.tensors import Array, DType, TensorSpec

PATTERN = 1 << 20  # bytes generated for a large operand, which are then repeated
PLAIN = Operand("x", Role.ACTIVATION, "A[tokens,K]")  # of a standard operator


@dataclass(frozen=True)
class Filling:
    """The contents of an operand: `pattern` repeated over `nbytes`.

    `nbytes` may be less than the operand's bytes: a launch reads no more.
    """

    pattern: Array
    nbytes: int


def operands(work: Work) -> list[Operand]:
    if work.op is None:
        return [PLAIN] * len(work.ins)
    return list(work.op.given(work.attrs))[: len(work.ins)]


def launch_of(work: Work) -> TimedLaunch:
    """The sequences of the launch, from the operands' shapes."""
    pairs = list(zip(operands(work), work.ins, strict=True))
    by_unit = {unit: [s.dims for o, s in pairs if o.unit == unit] for unit in ("row", "slot")}
    rows = by_unit["row"][0][0] if by_unit["row"] else 1
    slots = min((dims[0] for dims in by_unit["slot"]), default=rows + 1) - 1
    pool, page_size = next(((s.dims[0], s.dims[2]) for o, s in pairs if o.unit == "page"), (2, 64))
    specs = {o.name: s for o, s in pairs}
    longest = specs["page_table"].dims[1] if "page_table" in specs else 1 << 30
    tile = int(work.attrs.get("tile", 1))
    pages = min(longest, -(-(work.context + tile) // page_size))
    return TimedLaunch(
        specs, rows, tile, max(1, slots), pages, page_size, pool - 1, context=work.context
    )


def fillings(work: Work, rng: np.random.Generator) -> list[Filling]:
    launch = launch_of(work)
    found = []
    for operand, spec in zip(operands(work), work.ins, strict=True):
        nbytes = _reached(operand, spec, launch)
        if operand.fill is not None:
            pattern = operand.fill(launch, spec.dims, rng)
        else:
            pattern = _by_dtype(operand, spec, nbytes)
        found.append(Filling(np.ascontiguousarray(pattern).reshape(-1).view(np.uint8), nbytes))
    return found


def _reached(operand: Operand, spec: TensorSpec, launch: TimedLaunch) -> int:
    """Bytes of a state in the slots and pages that the launch names; all bytes of another
    operand."""
    if operand.role is not Role.STATE:
        return spec.nbytes
    used = len(np.unique(launch.slot_of_rows()))
    if operand.unit == "page":
        used = min(used * launch.pages, launch.pool)
    return spec.nbytes // max(1, spec.dims[0]) * min(spec.dims[0], used)


def _by_dtype(operand: Operand, spec: TensorSpec, nbytes: int) -> Array:
    positive = spec.dtype is DType.F32 and operand.role in (Role.WEIGHT, Role.SCALE)
    count = max(1, min(nbytes, PATTERN) // spec.dtype.itemsize)
    return _drawn(spec.dtype, positive)[:count]


@lru_cache
def _drawn(dtype: DType, positive: bool) -> Array:
    """PATTERN bytes, the same for all operands of the dtype; read only."""
    rng, count = np.random.default_rng(0), PATTERN // dtype.itemsize
    found: Array
    if dtype in (DType.U8, DType.F8E4M3, DType.BOOL):
        found = rng.integers(0, 256, PATTERN, dtype=np.uint8)
        found &= np.uint8(1 if dtype is DType.BOOL else 0xBF)
    elif dtype.numpy.kind in "iu":
        found = np.zeros(count, dtype.numpy)
    else:
        found = rng.standard_normal(count, np.float32)
        if positive:
            found = np.abs(found) * np.float32(0.1) + np.float32(0.01)
        found = found.astype(dtype.numpy)
    found.setflags(write=False)
    return found
