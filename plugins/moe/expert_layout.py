"""Stacked expert weights as the mixture kernels read them: what a lane loads is its fragment.

Rows come in groups of 64; in a group the units of 64 k in order; in a unit four strips of 16 rows.
Lane 4g + t of a strip holds, of rows g and g + 8, k 16t … 16t + 15: activations are read in runs
of eight, and one NVFP4 block scale serves all that a lane has of a row. `up` weights have gate and
up rows interleaved by eights, so that a lane holds both.
Knows arrays only, no op and no GPU.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from spark_engine.errors import GraphError
from spark_engine.tensors import Array

U8 = NDArray[np.uint8]
U32 = NDArray[np.uint32]

GROUP = 64
UNIT = 64
EIGHT = 8

# Where the bits of a code (sign, 2, 1, 0) stand in the low half of a bf16: the code · 2^-126.
_TARGETS = (15, 8, 7, 6)
# Left rotations that bring the bits of each of a word's four pairs there (nvfp4.cuh).
_ROTATIONS = ((0,) * 4, (6,) * 4, (10,) * 4, (12, 4, 12, 12))


def padded(count: int, multiple: int) -> int:
    """`count` rounded up."""
    return -(-count // multiple) * multiple


def rows_of(n: int, up: bool) -> int:
    """Rows after packing of an expert's n."""
    return 2 * padded(n // 2, GROUP // 2) if up else padded(n, GROUP)


def arranged(rows: Array, up: bool) -> Array:
    """[N,·] -> whole groups of rows, filled up with zeros; gate and up rows interleaved."""
    n, width = rows.shape
    if not up:
        return np.pad(rows, ((0, rows_of(n, up) - n), (0, 0)))
    inner = rows_of(n, up) // 2
    both = np.zeros((2, inner, width), rows.dtype)
    both[:, : n // 2] = rows.reshape(2, n // 2, width)
    return both.reshape(2, inner // EIGHT, EIGHT, width).swapaxes(0, 1).reshape(-1, width)


def pack_codes(rows: U8) -> U8:
    """NVFP4 codes [N, K/2] (low nibble first): a lane's four words of a strip.

    Word 2p + r: row g + 8r, the p-th eight k; its bits stand as nvfp4.cuh takes them.
    """
    whole = _pad(rows, UNIT // 2)
    units = whole.shape[1] // (UNIT // 2)
    pairs = whole.view(np.uint16).reshape(-1, 4, 2, 8, units, 4, 2, 2)  # group strip r g unit t p
    words = np.take(_WORDS[0], pairs[..., 0])  # several times faster than indexing
    words |= np.take(_WORDS[1], pairs[..., 1])
    packed = np.ascontiguousarray(words.transpose(0, 4, 1, 3, 5, 6, 2)).view(np.uint8)
    return packed.reshape(whole.shape)


def pack_scales(rows: U8) -> U8:
    """e4m3 block scales [N, K/16]: a lane's four of two strips, rows g and g + 8 of either.

    A byte becomes 5 bits of exponent and 3 of mantissa, subnormals normalised, so that a kernel
    adds a constant to have bf16. Zero becomes 0, which kernels read as 2^-22, too small to be
    seen beside the least scale, 2^-9. Raises GraphError for a negative scale or NaN.
    """
    if rows.max(initial=0) >= 0x7F:
        raise GraphError("an NVFP4 block scale is negative or NaN: refuse it where it is read")
    whole = np.take(_WIDE, _pad(rows, UNIT // 16))
    grid = whole.reshape(-1, 2, 2, 2, 8, whole.shape[1] // 4, 4)  # group pair strip r g unit t
    return np.ascontiguousarray(grid.transpose(0, 5, 1, 4, 6, 2, 3)).reshape(whole.shape)


def pack_dense(rows: U8) -> U8:
    """bf16 rows as bytes [N, 2K]: of each step of 16 k, a lane's four registers."""
    whole = _pad(rows, UNIT * 2)
    units = whole.shape[1] // (UNIT * 2)
    grid = whole.reshape(-1, 4, 2, 8, units, 4, 2, 2, 2, 4)  # group strip r g unit t p s h byte
    packed = grid.transpose(0, 4, 1, 6, 7, 3, 5, 8, 2, 9)
    return np.ascontiguousarray(packed).reshape(whole.shape)


def pack_fp8(rows: U8) -> U8:
    """e4m3 codes [N, K]: a lane's first eight k of row g, then of g + 8; then its others."""
    whole = _pad(rows, UNIT)
    units = whole.shape[1] // UNIT
    grid = whole.reshape(-1, 4, 2, 8, units, 4, 2, 8)  # group strip r g unit t p byte
    return np.ascontiguousarray(grid.transpose(0, 4, 1, 6, 3, 5, 2, 7)).reshape(whole.shape)


def _pad(rows: U8, multiple: int) -> U8:
    return np.pad(rows, ((0, 0), (0, -rows.shape[1] % multiple)))


def _word_table(j: int) -> U32:
    """The bits in a word of each byte (two codes) as its pair j."""
    byte = np.arange(256, dtype=np.uint32)
    word = np.zeros(256, np.uint32)
    for nibble, half in enumerate((0, 16)):
        for i, (target, left) in enumerate(zip(_TARGETS, _ROTATIONS[j], strict=True)):
            bit = byte >> np.uint32(4 * nibble + 3 - i) & np.uint32(1)
            word |= bit << np.uint32((target + half - left) % 32)
    return word


def _both(low: U32, high: U32) -> U32:
    """One table for two bytes, the first in the low half of the index."""
    return (high[:, None] | low[None, :]).reshape(-1)


def _wide_table() -> U8:
    """e4m3 byte -> exponent + 15 in 5 bits, mantissa in 3; subnormals normalised."""
    table = np.arange(256, dtype=np.uint8) + np.uint8(120)
    table[:8] = (0, 104, 112, 116, 120, 122, 124, 126)
    return table


# The bits of two pairs at a time, by their two bytes: half the lookups of a table a pair.
_WORDS = tuple(_both(_word_table(j), _word_table(j + 1)) for j in (0, 2))
_WIDE = _wide_table()
