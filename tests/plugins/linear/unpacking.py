"""The inverses of the layouts of linear_layout.py."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from spark_engine.plugins.formats import linear_layout as wt
from spark_engine.plugins.formats import weight_packing
from spark_engine.plugins.formats.weight_packing import U8, U32, WIDE

NARROW = np.zeros(256, np.uint8)  # the inverse of WIDE
NARROW[WIDE[:128]] = np.arange(128, dtype=np.uint8)


def unpack_pair(words: U32, j: int) -> U8:
    """The byte (two codes) that is pair j of each word."""
    byte = np.zeros(words.shape, np.uint8)
    for nibble, places in enumerate(weight_packing._places(j)):
        for i, place in enumerate(places):
            bit = (words >> np.uint32(place) & np.uint32(1)).astype(np.uint8)
            byte |= bit << np.uint8(4 * nibble + 3 - i)
    return byte


def rotated(words: U32) -> Iterator[tuple[int, int, NDArray[np.float64]]]:
    """(j, i, values) of the FP4 codes of words, as a kernel finds them: pair j by a rotation and
    a mask, its half i as bf16 · 2^-126."""
    for j, turns in enumerate(((0, 0), (6, 6), (10, 10), (12, 4))):
        masks = (0x81C081C0, 0) if j < 3 else (0x80C080C0, 0x01000100)
        pair = np.zeros_like(words)
        for turn, mask in zip(turns, masks, strict=True):
            turned = words << np.uint32(turn) | words >> np.uint32((32 - turn) % 32)
            pair |= turned & np.uint32(mask)
        for i in range(2):
            bits = (pair >> np.uint32(16 * i) & np.uint32(0xFFFF)) << np.uint32(16)
            yield j, i, bits.view(np.float32).astype(np.float64) * 2.0**126


def unpack_bytes(packed: U8, width: int) -> U8:
    """The inverse of `pack_bytes` for rows of `width` bytes."""

    def arrange(part: U8, m16_tiles: int) -> U8:
        grid = part.reshape(-1, part.shape[1] // wt.KSLAB, m16_tiles, 4, 8, 4, 2, 2, 4)
        return grid.transpose(0, 2, 7, 4, 1, 3, 6, 5, 8)

    return wt._by_panels(packed, arrange)[:, :width]


def unpack_fp4(packed: U8, width: int) -> U8:
    """The inverse of `pack_fp4` for rows of `width` bytes."""

    def arrange(part: U8, m16_tiles: int) -> U8:
        slabs = part.shape[1] // (wt.KSLAB // 4)
        words = np.ascontiguousarray(part).view(np.uint32)
        grid = words.reshape(-1, slabs, m16_tiles, 8, 4, 2, 2).transpose(0, 2, 6, 3, 1, 5, 4)
        pairs = np.stack([unpack_pair(grid, j) for j in range(4)], axis=-2)
        return pairs.reshape(-1, slabs * (wt.KSLAB // 4))

    return wt._by_panels(packed, arrange)[:, :width]


def unpack_scales(packed: U8, width: int) -> U8:
    """The inverse of `pack_scales` for rows of `width` blocks."""

    def arrange(part: U8, m16_tiles: int) -> U8:
        words = np.ascontiguousarray(part).view(np.uint32)
        grid = words.reshape(-1, part.shape[1] // 4, m16_tiles, 8, 2)
        w = grid.transpose(0, 2, 4, 3, 1)
        four = (w >> 4, w >> 20, (w & 15) << 4 | w >> 28, w >> 12 & 0xF0 | w >> 12 & 15)
        return NARROW[np.stack([s.astype(np.uint8) for s in four], axis=-1)]

    return wt._by_panels(packed, arrange)[:, :width]
