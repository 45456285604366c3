"""Numpy quantisers for test checkpoints: FP8 per tensor, FP8 128x128 blocks, NVFP4, int4.

Written from the formats' definitions, apart from the package's own code, so that a test that
compares the two compares two things. Knows no tensor name and no file.
"""

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
F16 = NDArray[np.float16]
U8 = NDArray[np.uint8]
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_MIDPOINTS = (MAGNITUDES[1:] + MAGNITUDES[:-1]) / 2


@dataclass(frozen=True)
class Quantised:
    """Stored tensors by role, and the f32 values that they encode."""

    codes: NDArray[np.generic]
    scale: NDArray[np.generic]
    scale2: F32 | None
    values: F32


def e4m3(x: F32) -> NDArray[np.generic]:
    """Round to nearest even, saturating at 448."""
    return np.clip(x, -448, 448).astype(E4M3)


def e2m1(x: F32) -> NDArray[np.uint8]:
    """4-bit codes, nearest, ties to the even code, saturating at 6."""
    a = np.abs(x)
    index = np.searchsorted(_MIDPOINTS, a, side="left")
    tie_to_upper = (a[..., None] == _MIDPOINTS[1::2]).any(-1)
    codes: NDArray[np.uint8] = (index + tie_to_upper + 8 * np.signbit(x)).astype(np.uint8)
    return codes


def e2m1_values(codes: NDArray[np.uint8]) -> F32:
    """The f32 value of each 4-bit code."""
    sign = np.where(codes & 8, np.float32(-1), np.float32(1))
    values: F32 = (sign * MAGNITUDES[codes & 7]).astype(np.float32)
    return values


def pack(codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """[..., K] codes -> [..., K/2] bytes, even element in the low nibble."""
    return (codes[..., 0::2] | (codes[..., 1::2] << 4)).astype(np.uint8)


def fp8(w: F32) -> Quantised:
    """One scale for the tensor: amax / 448."""
    scale = np.float32(np.abs(w).max() / 448)
    codes = e4m3(w / scale)
    return Quantised(codes, np.array(scale), None, codes.astype(np.float32) * scale)


def fp8_channel(w: F32) -> Quantised:
    """One bf16 scale for each row, [N, 1]: amax / 448."""
    scale = (np.abs(w).max(axis=1, keepdims=True) / 448).astype(ml_dtypes.bfloat16)
    codes = e4m3(w / scale.astype(np.float32))
    return Quantised(codes, scale, None, codes.astype(np.float32) * scale.astype(np.float32))


def fp8_block(w: F32, block: int = 128) -> Quantised:
    """One bf16 scale (to multiply by) for each block x block tile, ragged at the edges."""
    rows, cols = -(-w.shape[0] // block), -(-w.shape[1] // block)
    scale = np.empty((rows, cols), ml_dtypes.bfloat16)
    codes = np.empty(w.shape, E4M3)
    values = np.empty_like(w)
    for i in range(rows):
        for j in range(cols):
            at = np.s_[i * block : (i + 1) * block, j * block : (j + 1) * block]
            scale[i, j] = np.abs(w[at]).max() / 448
            codes[at] = e4m3(w[at] / np.float32(scale[i, j]))
            values[at] = codes[at].astype(np.float32) * np.float32(scale[i, j])
    return Quantised(codes, scale, None, values)


def nvfp4(w: F32, divide: bool = False) -> Quantised:
    """Blocks of 16 along K with an e4m3 scale and one f32 global scale.

    The global scale multiplies (amax / 2688), or divides (2688 / amax) with `divide`.
    """
    amax = np.float32(np.abs(w).max())
    scale2 = np.float32(2688) / amax if divide else amax / np.float32(2688)
    factor = np.float32(1) / scale2 if divide else scale2
    blocks = w.reshape(*w.shape[:-1], -1, 16)
    raw = np.abs(blocks).max(-1) / (6 * factor)
    scale = np.clip(np.where(raw == 0, 1, raw), 2**-9, 448).astype(np.float32).astype(E4M3)
    wide = scale.astype(np.float32)[..., None]
    codes = e2m1((blocks / (wide * factor)).astype(np.float32))
    values = e2m1_values(codes) * wide
    values = values / scale2 if divide else values * scale2
    packed = pack(codes.reshape(w.shape))
    return Quantised(packed, scale, np.array(scale2), values.reshape(w.shape).astype(np.float32))


def nvfp4_as_fp8(w: F32) -> Quantised:
    """The values of `nvfp4` as e4m3 codes with one f32 scale for each row, [N, 1]: the global one,
    moved so that 6 times the largest block scale is a code."""
    q = nvfp4(w)
    factor = np.float32(8) * np.float32(q.scale2)
    codes = e4m3(q.values / factor)
    scale = np.full((len(w), 1), factor, np.float32)
    return Quantised(codes, scale, None, codes.astype(np.float32) * factor)


def int4(
    w: F32, group: int = 32, symmetric: bool = False, odd: bool = True
) -> tuple[U8, F16, U8, F32]:
    """(codes [N, K], scales [N, K/group], zero points likewise, values). `odd`: every third row has
    negative scales, every seventh one a group of zeros with the scale 0."""
    groups = w.reshape(len(w), -1, group).copy()
    if odd:
        groups[::7, 0] = 0
    low, high = np.minimum(groups.min(-1), 0), np.maximum(groups.max(-1), 0)
    wide = 2 * np.maximum(-low, high) if symmetric else high - low
    scale = (wide / 15).astype(np.float16)
    scale[::3] *= -1 if odd else 1
    with np.errstate(divide="ignore", invalid="ignore"):
        zero = np.where(scale > 0, -low / scale, -high / scale)
        codes = groups / scale.astype(np.float32)[..., None]
    zero = np.full(scale.shape, 8) if symmetric else np.clip(np.rint(np.nan_to_num(zero)), 0, 15)
    codes = np.clip(np.rint(np.nan_to_num(codes)) + zero[..., None], 0, 15)
    values = (codes - zero[..., None]) * scale.astype(np.float32)[..., None]
    flat = [x.reshape(w.shape) for x in (codes, values)]
    return flat[0].astype(np.uint8), scale, zero.astype(np.uint8), flat[1].astype(np.float32)


def eights(codes: U8, order: str = "01234567") -> NDArray[np.int32]:
    """u8 [..., 8n] -> i32 [..., n]: nibble i of a word is element order[i] of its eight."""
    words = np.zeros((*codes.shape[:-1], codes.shape[-1] // 8), np.uint32)
    for i, place in enumerate(order):
        words |= codes[..., int(place) :: 8].astype(np.uint32) << np.uint32(4 * i)
    return words.view(np.int32)


AWQ_ORDER = "02461357"


def int4_tensors(
    w: F32, packing: str, group: int = 32, odd: bool = True
) -> tuple[dict[str, Any], F32]:
    """({suffix: stored array}, the f32 values) in "gptq", "gptq_v2", "awq", "ct" or "ct_sym"."""
    codes, scale, zero, values = int4(w, group, packing == "ct_sym", odd)
    if packing.startswith("ct"):
        rows = {"weight_packed": eights(codes), "weight_scale": scale.astype(np.float32)}
        rows["weight_shape"] = np.array(w.shape, np.int64)
        if packing == "ct":
            padded = np.pad(zero, ((0, -len(zero) % 8), (0, 0)))
            rows["weight_zero_point"] = np.ascontiguousarray(eights(padded.T).T)
        return rows, values
    if packing == "awq":
        qweight = eights(np.ascontiguousarray(codes.T), AWQ_ORDER)
        qzeros = eights(np.ascontiguousarray(zero.T), AWQ_ORDER)
        return {"qweight": qweight, "qzeros": qzeros, "scales": scale.T.copy()}, values
    less = (zero - (packing == "gptq")) & 15
    qweight = np.ascontiguousarray(eights(codes).T)
    rows = {"qweight": qweight, "qzeros": eights(np.ascontiguousarray(less.T))}
    rows |= {"scales": scale.T.copy(), "g_idx": np.arange(w.shape[1], dtype=np.int32) // group}
    return rows, values
