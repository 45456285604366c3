"""What the layouts of packed weights share: padding, and the bits of 4-bit codes and their scales.

A word holds eight codes as four pairs. A rotation and a mask bring a pair's bits to where bf16 has
sign, exponent and mantissa, so that a kernel dequantises with two instructions a pair
(nvfp4_decode.cuh, linear_nvfp4_mma.cu; int4_decode.cuh). Knows arrays only: no layout, no op and
no GPU.
"""

import numpy as np
from numpy.typing import NDArray

from spark_engine.errors import GraphError
from spark_engine.tensors import DType

U8 = NDArray[np.uint8]
U16 = NDArray[np.uint16]
U32 = NDArray[np.uint32]
F32 = NDArray[np.float32]
INT4_GROUP = 32  # codes with one scale and zero

# Where the bits of a code (sign, 2, 1, 0) are in the low half of a bf16: the code · 2^-126.
_TARGETS = (15, 8, 7, 6)
# Left rotations that bring the bits of each of a word's four pairs there. A search over all
# rotations found none with one rotation a pair; with one pair taking two there are 16.
_ROTATIONS = ((0,) * 4, (6,) * 4, (10,) * 4, (12, 4, 12, 12))


def padded(count: int, multiple: int) -> int:
    """`count` rounded up."""
    return -(-count // multiple) * multiple


def pad_columns(rows: U8, multiple: int) -> U8:
    """The rows with zeros up to a multiple of `multiple` bytes."""
    extra = -rows.shape[1] % multiple
    return np.pad(rows, ((0, 0), (0, extra))) if extra else np.ascontiguousarray(rows)


def check_scales(scales: U8) -> None:
    """Raises GraphError for a negative e4m3 block scale or NaN, which have no packed form."""
    if scales.max(initial=0) >= 0x7F:
        raise GraphError("an NVFP4 block scale is negative or NaN: refuse it where it is read")


def _places(j: int) -> list[list[int]]:
    """The bits in a word of pair j's codes: [first or second][sign, 2, 1, 0]."""
    return [
        [(bit + half - turn) % 32 for bit, turn in zip(_TARGETS, _ROTATIONS[j], strict=True)]
        for half in (0, 16)
    ]


def _word_table(j: int) -> U32:
    """The bits in a word of each byte (two codes) as its pair j."""
    byte = np.arange(256, dtype=np.uint32)
    word = np.zeros(256, np.uint32)
    for nibble, places in enumerate(_places(j)):
        for i, place in enumerate(places):
            word |= (byte >> np.uint32(4 * nibble + 3 - i) & np.uint32(1)) << np.uint32(place)
    return word


def _int4_table(j: int) -> U32:
    """The same of int4. Pairs 0 and 2 are the codes; 1 and 3 have a sign and seven magnitudes,
    those of 2c - 15, before bits that stay; 2 and 3 are a byte away (int4_decode.cuh)."""
    byte = np.arange(256, dtype=np.uint32)
    bits = np.zeros(256, np.uint32)
    for half, code in enumerate((byte & 15, byte >> 4)):
        below = code < 8
        signed = np.where(below, 7 - code, code - 8) << 4 | below << 15
        bits |= (signed if j % 2 else code).astype(np.uint32) << np.uint32(16 * half)
    return bits >> np.uint32(8) | bits << np.uint32(24) if j >= 2 else bits


def int4_halves(scales: F32) -> U16:
    """int4's `w_scale` [N, 2 · groups] -> [N, groups]: sign, four bits of zero, four of exponent
    and seven of mantissa, those of bf16 without the exponent's leading 0111.

    The least scale is 2^-15 (of the row's largest, which is in [1/2, 1)), and less is read as that.
    Raises GraphError for what has no such form.
    """
    scale, zero = scales[:, 0::2], scales[:, 1::2]
    if not (np.abs(scale) <= 1).all() or not np.isin(zero, np.arange(16)).all():
        raise GraphError("int4 scales beyond 1, or zeros that are no codes: make them by `paired`")
    least = np.copysign(np.maximum(np.abs(scale), np.float32(2**-15)), scale)
    bits = least.astype(DType.BF16.numpy).view(np.uint16)
    return np.asarray((bits & 0x87FF) | zero.astype(np.uint16) << 11, np.uint16)


def _both(low: U32, high: U32) -> U32:
    """One table for two bytes, the first in the low half of the index."""
    return (high[:, None] | low[None, :]).reshape(-1)


def _wide_table() -> U8:
    """e4m3 byte -> exponent + 15 in 5 bits, mantissa in 3; subnormals normalised."""
    table = np.arange(256, dtype=np.uint8) + np.uint8(120)
    table[:8] = (0, 104, 112, 116, 120, 122, 124, 126)
    return table


# The bits of two pairs at a time, by their two bytes: half the lookups of a table a pair.
WORDS = tuple(_both(_word_table(j), _word_table(j + 1)) for j in (0, 2))
INT4_WORDS = tuple(_both(_int4_table(j), _int4_table(j + 1)) for j in (0, 2))
WIDE = _wide_table()
