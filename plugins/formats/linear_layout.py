"""Packed weights as the linear kernels read them: what a lane loads at once is its mma fragment.

A panel is 256 rows; in a panel the k-slabs (the k of 128 bytes of a bf16 or e4m3 activation row) in
order of k; in a k-slab the m16 tiles (16 rows each); in an m16 tile 16-byte pieces in the order of
the 32 lanes: lane 4g + t holds rows g and g + 8. The last panel may have fewer m16 tiles. Rows are
filled up with zeros to a whole m16 tile, k to a whole k-slab. Knows arrays, no op and no GPU.
"""

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

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

M16 = 16  # rows of an m16 tile, the A side of mma.sync
PANEL = 256  # rows
KSLAB = 128  # bytes of an activation row
_PANELS_AT_ONCE = 2


def row_width(rows: int, width: int) -> int:
    """What a row of `rows` holds so that all hold the whole m16 tiles of rows of `width`."""
    return -(-padded(rows, M16) * width // rows)


def as_rows(packed: Array, rows: int) -> Array:
    """Packed m16 tiles as [rows, row_width]: the shape tells how many rows are real."""
    if len(packed) == rows:
        return packed
    flat = np.zeros(rows * row_width(rows, packed.shape[1]), packed.dtype)
    flat[: packed.size] = packed.reshape(-1)
    return flat.reshape(rows, -1)


def pack_bytes(rows: U8) -> U8:
    """Fragments of m16n8k16 (bf16) or m16n8k32 (e4m3), from the bytes [N, ·] of the rows.

    Register 2h + r of a lane: bytes 16h + 4t … + 3 of a 32-byte step, row g + 8r.
    """

    def arrange(part: U8, m16_tiles: int) -> U8:
        grid = part.reshape(-1, m16_tiles, 2, 8, part.shape[1] // KSLAB, 4, 2, 4, 4)
        return grid.transpose(0, 4, 1, 5, 3, 7, 6, 2, 8)

    return _by_panels(pad_columns(rows, KSLAB), arrange)


def pack_fp4(codes: U8, words: tuple[U32, ...] = WORDS) -> U8:
    """4-bit codes [N, K/2] (low nibble first): a lane's four words of a 16 x 64 tile.

    Word 2p + r: row g + 8r, steps 2p and 2p + 1 of k = 16. Its pairs are k 2t, 2t + 1 and
    2t + 8, 2t + 9 of the even step, then of the odd step; a pair is one byte of the checkpoint.
    """

    def arrange(part: U8, m16_tiles: int) -> U8:
        four = part.view(np.uint32).reshape(len(part), -1, 2, 4)  # row, k-slab, p, j of all t
        # Several times faster than indexing.
        made = np.take(words[0], _zip(four[..., 0], four[..., 1]))
        made |= np.take(words[1], _zip(four[..., 2], four[..., 3]))
        lanes = made.reshape(-1, m16_tiles, 2, 8, made.shape[1], 2, 4)
        return np.ascontiguousarray(lanes.transpose(0, 4, 1, 3, 6, 5, 2)).view(np.uint8)

    return _by_panels(pad_columns(codes, KSLAB // 4), arrange)


def pack_scales(scales: U8) -> U8:
    """e4m3 block scales [N, K/16]: for each row pair g, g + 8 of an m16 tile, four blocks each.

    A byte becomes 5 bits of exponent and 3 of mantissa, subnormals normalised, so that a kernel
    adds a constant to have bf16; in a word the first two scales are where bf16 has them, the
    other two a rotation by 8 away. Zero becomes 0, which kernels read as 2^-22, too small to be
    seen next to the least scale, 2^-9. Raises GraphError for a negative scale or NaN.
    """
    check_scales(scales)

    def arrange(part: U8, m16_tiles: int) -> U8:
        s0, s1, s2, s3 = np.moveaxis(
            np.take(WIDE, part).reshape(len(part), -1, 4).astype(np.uint32), -1, 0
        )
        words = s0 << 4 | s1 << 20 | s2 >> 4 | (s2 & 15) << 28 | (s3 >> 4) << 16 | (s3 & 15) << 12
        return _row_words(words, m16_tiles)

    return _by_panels(pad_columns(scales, KSLAB // 32), arrange)


def pack_int4_scales(halves: U16) -> U8:
    """`int4_halves` [N, K/32]: for each row pair g, g + 8 of an m16 tile, two groups each."""

    def arrange(part: U8, m16_tiles: int) -> U8:
        words: U32 = part.view(np.uint32)
        return _row_words(words, m16_tiles)

    return _by_panels(pad_columns(halves.view(np.uint8), KSLAB // 32), arrange)


def _row_words(words: Array, m16_tiles: int) -> U8:
    """A word for each row and k-slab, those of rows g and g + 8 together."""
    grid = words.reshape(-1, m16_tiles, 2, 8, words.shape[1]).transpose(0, 4, 1, 3, 2)
    return np.ascontiguousarray(grid).view(np.uint8)


def pack_step_scales(scales: U8) -> U8:
    """e4m3 block scales [N, K/16] for block-scaled FP4 mma, their bytes as they are.

    Of an m16 tile's k-slab, four steps of 64 k: lane 4g + 2p + r holds row g + 8r's four scales of
    step p, then those of step 2 + p.
    """

    def arrange(part: U8, m16_tiles: int) -> U8:
        grid = part.reshape(-1, m16_tiles, 2, 8, part.shape[1] // 16, 2, 2, 4)  # r, g, ·, s/2, p
        return grid.transpose(0, 4, 1, 3, 6, 2, 5, 7)

    return _by_panels(pad_columns(scales, 16), arrange)


def _by_panels(rows: U8, arrange: Callable[[U8, int], U8]) -> U8:
    """`arrange(rows of whole panels, m16 tiles in each)` over all rows, a few panels at a time."""
    if len(rows) % M16:
        rows = np.pad(rows, ((0, -len(rows) % M16), (0, 0)))
    out = np.empty_like(rows, order="C")
    for begin, end, m16_tiles in _parts(len(rows)):
        out[begin:end] = arrange(rows[begin:end], m16_tiles).reshape(end - begin, -1)
    return out


def _parts(rows: int) -> Iterator[tuple[int, int, int]]:
    whole = rows - rows % PANEL
    for begin in range(0, whole, PANEL * _PANELS_AT_ONCE):
        yield begin, min(begin + PANEL * _PANELS_AT_ONCE, whole), PANEL // M16
    if whole < rows:
        yield whole, rows, (rows - whole) // M16


def _zip(low: U32, high: U32) -> NDArray[np.uint16]:
    """The bytes of two words in turn, [..., 4]."""
    wide = []
    for word in (low, high):
        spread = word.astype(np.uint64)
        spread = (spread | spread << np.uint64(16)) & np.uint64(0x0000FFFF0000FFFF)
        wide.append((spread | spread << np.uint64(8)) & np.uint64(0x00FF00FF00FF00FF))
    pairs = wide[0] | wide[1] << np.uint64(8)
    return pairs.view(np.uint16).reshape(*low.shape, 4)
