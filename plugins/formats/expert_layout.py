"""Packed expert weights as the kernels of the experts read them: what a lane loads is its fragment.

A panel is 64 rows; in a panel the k-slabs of 64 k in order; in a k-slab four m16 tiles (16 rows
each). Lane 4g + t of an m16 tile holds, of rows g and g + 8, k 16t … 16t + 15: activations are read
in runs of eight, and one NVFP4 block scale serves all that a lane has of a row. `up` weights have
gate and up rows interleaved by eights, so that a lane holds both. (The linears' layout differs:
panels of 256 rows, and a lane's k are those of mma.sync; linear_layout.py.)
Knows arrays only, no op and no GPU.
"""

import numpy as np

from spark_engine.plugins.formats.weight_packing import (
    U8,
    U16,
    U32,
    WIDE,
    WORDS,
    check_scales,
    pad_columns,
    padded,
)
from spark_engine.tensors import Array

PANEL = 64  # rows
M16 = 16  # rows of an m16 tile
KSLAB = 64  # k
EIGHT = 8


def rows_of(n: int, up: bool) -> int:
    """Rows after packing of an expert's n."""
    return 2 * padded(n // 2, PANEL // 2) if up else padded(n, PANEL)


def arranged(rows: Array, up: bool) -> Array:
    """[N,·] -> whole panels of rows, filled up with zeros; gate and up rows interleaved."""
    n, width = rows.shape
    if not up:
        return np.pad(rows, ((0, rows_of(n, up) - n), (0, 0)))
    inner = rows_of(n, up) // 2
    both = np.zeros((2, inner, width), rows.dtype)
    both[:, : n // 2] = rows.reshape(2, n // 2, width)
    return both.reshape(2, inner // EIGHT, EIGHT, width).swapaxes(0, 1).reshape(-1, width)


def pack_codes(rows: U8, words: tuple[U32, ...] = WORDS) -> U8:
    """4-bit codes [N, K/2] (low nibble first): a lane's four words of an m16 tile.

    Word 2p + r: row g + 8r, the p-th eight k; its bits are placed as nvfp4_decode.cuh takes them,
    or with int4's `words` as int4_decode.cuh does.
    """
    whole = pad_columns(rows, KSLAB // 2)
    slabs = whole.shape[1] // (KSLAB // 2)
    pairs = whole.view(np.uint16).reshape(-1, 4, 2, 8, slabs, 4, 2, 2)  # panel m16 r g slab t p
    made = np.take(words[0], pairs[..., 0])  # several times faster than indexing
    made |= np.take(words[1], pairs[..., 1])
    packed = np.ascontiguousarray(made.transpose(0, 4, 1, 3, 5, 6, 2)).view(np.uint8)
    return packed.reshape(whole.shape)


def pack_scales(rows: U8) -> U8:
    """e4m3 block scales [N, K/16]: a lane's four of two m16 tiles, rows g and g + 8 of either.

    A byte becomes 5 bits of exponent and 3 of mantissa, subnormals normalised, so that a kernel
    adds a constant to have bf16. Zero becomes 0, which kernels read as 2^-22, too small to be
    seen next to the least scale, 2^-9. Raises GraphError for a negative scale or NaN.
    """
    check_scales(rows)
    whole = np.take(WIDE, pad_columns(rows, KSLAB // 16))
    return _by_lanes(whole, 4).reshape(whole.shape)


def pack_int4_scales(halves: U16) -> U8:
    """`int4_halves` [N, K/32]: of two m16 tiles a lane of even t has rows g and g + 8 of the first,
    the next one those of the second; both lanes read k of one group."""
    whole = pad_columns(halves.view(np.uint8), KSLAB // 16).view(np.uint16)
    return _by_lanes(whole, 2).reshape(len(halves), -1)


def _by_lanes(scales: Array, groups: int) -> U8:
    """Scales of `groups` parts of a k-slab, two m16 tiles together."""
    grid = scales.reshape(-1, 2, 2, 2, 8, scales.shape[1] // groups, groups)
    # panel pair m16 r g slab group -> panel slab pair g group m16 r
    return np.ascontiguousarray(grid.transpose(0, 5, 1, 4, 6, 2, 3)).view(np.uint8)


def pack_dense(rows: U8) -> U8:
    """bf16 rows as bytes [N, 2K]: of each step of 16 k, a lane's four registers."""
    whole = pad_columns(rows, KSLAB * 2)
    slabs = whole.shape[1] // (KSLAB * 2)
    grid = whole.reshape(-1, 4, 2, 8, slabs, 4, 2, 2, 2, 4)  # panel m16 r g slab t p s h byte
    packed = grid.transpose(0, 4, 1, 6, 7, 3, 5, 8, 2, 9)
    return np.ascontiguousarray(packed).reshape(whole.shape)


def pack_fp8(rows: U8) -> U8:
    """e4m3 codes [N, K]: a lane's first eight k of row g, then of g + 8; then its others."""
    whole = pad_columns(rows, KSLAB)
    slabs = whole.shape[1] // KSLAB
    grid = whole.reshape(-1, 4, 2, 8, slabs, 4, 2, 8)  # panel m16 r g slab t p byte
    return np.ascontiguousarray(grid.transpose(0, 4, 1, 6, 3, 5, 2, 7)).reshape(whole.shape)
