"""Number formats of quantised tensors in numpy: E4M3, E2M1, NVFP4, 128-wide FP8 blocks.

Knows no op and no file. A quantising step decides in float32, as every implementation does, so that
a reference and an executor round alike. Sources: NVIDIA TensorRT Model Optimizer
(`nvfp4_tensor.py`) for NVFP4 and per-tensor FP8; DeepSeek-V3's report, section 3.3, for FP8 blocks.
"""

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

F8 = np.dtype(ml_dtypes.float8_e4m3fn)
E4M3_MAX = 448.0
E2M1_MAX = 6.0
NVFP4_BLOCK = 16
FP8_BLOCK = 128
# A code's low three bits index the magnitude, bit 3 is the sign.
E2M1_MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
E2M1_VALUES = np.concatenate([E2M1_MAGNITUDES, -E2M1_MAGNITUDES])

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
U8 = NDArray[np.uint8]
Fp8 = NDArray[Any]  # float8_e4m3fn, which numpy's types cannot name


def e4m3(x: F32) -> Fp8:
    """`x` clamped to ±448 and rounded to nearest even. NaN stays NaN."""
    return np.clip(x, -E4M3_MAX, E4M3_MAX).astype(F8)


def e2m1_encode(x: F32) -> U8:
    """4-bit codes of `x` (one per byte): nearest, ties to the even code, saturating at ±6.

    Values below 0 that round to zero get code 8, minus zero; a NaN gets any code.
    """
    a = np.minimum(np.abs(x), np.float32(E2M1_MAX))
    # steps are 0.5 below 2, 1 below 4, 2 above; rint is half-to-even and so are the codes
    big = np.where(a < 4, np.rint(a) + 2, np.rint(a / 2) + 4)
    code = np.nan_to_num(np.where(a < 2, np.rint(a * 2), big)).astype(np.uint8)
    return code | np.where(x < 0, np.uint8(8), np.uint8(0))


def e2m1_decode(codes: U8) -> F32:
    """The values of 4-bit codes, one per byte."""
    return E2M1_VALUES[codes]


def pack(codes: U8) -> U8:
    """[..., K] codes -> [..., K/2] bytes, the even element in the low nibble."""
    return codes[..., 0::2] | (codes[..., 1::2] << np.uint8(4))


def unpack(packed: U8) -> U8:
    """The inverse of `pack`."""
    pairs = np.stack([packed & np.uint8(15), packed >> np.uint8(4)], axis=-1)
    return pairs.reshape(*packed.shape[:-1], 2 * packed.shape[-1])


def fp8_quantise(x: F32, scale: F32 | np.float32) -> Fp8:
    """e4m3(x / scale), by one scale, or one of each row."""
    return e4m3(np.asarray(x, np.float32) / np.float32(scale))


def fp8_weight(w: F32) -> tuple[Fp8, F32]:
    """A weight as (codes, f32 scale = amax/448; 1 for a weight of zeros)."""
    scale = np.asarray(or_one(np.abs(w).max() / np.float32(E4M3_MAX)), np.float32)
    return fp8_quantise(w, scale), scale


def fp8_token_quantise(x: F32) -> tuple[Fp8, F32]:
    """[rows, K] -> codes [rows, K], f32 scales [rows, 1]: amax/448 of a row (1 where that is 0)."""
    scale = or_one(np.abs(x).max(axis=1, keepdims=True) / np.float32(E4M3_MAX))
    return fp8_quantise(x, scale), scale


def fp8_block_quantise(x: F32) -> tuple[Fp8, F32]:
    """Activations [rows, K] -> codes [rows, K], f32 scales [rows, ⌈K/128⌉].

    Per row and 128 columns: scale = amax/448 (1 where that is 0), code = e4m3(x / scale).
    """
    blocks = -(-x.shape[1] // FP8_BLOCK)
    wide = np.pad(np.asarray(x, np.float32), ((0, 0), (0, -x.shape[1] % FP8_BLOCK))).reshape(
        len(x), blocks, FP8_BLOCK
    )
    scale = or_one(np.abs(wide).max(axis=-1) / np.float32(E4M3_MAX))
    codes = e4m3(wide / scale[..., None]).reshape(len(x), blocks * FP8_BLOCK)
    return np.ascontiguousarray(codes[:, : x.shape[1]]), scale


def fp8_block_weight(w: F32) -> tuple[Fp8, F32]:
    """A weight [N, K] -> codes [N, K], f32 scales [⌈N/128⌉, ⌈K/128⌉], per 128×128 block."""
    scale = fp8_block_scale(w)
    return e4m3(w / fp8_block_expand(scale, w.shape)), scale


def fp8_block_scale(w: F32) -> F32:
    """The scales f32 [⌈N/128⌉, ⌈K/128⌉] of a weight [N, K]: amax/448 of each block."""
    rows, columns = (np.arange(0, size, FP8_BLOCK) for size in w.shape)
    largest = np.maximum.reduceat(np.abs(w), columns, axis=1)
    largest = np.maximum.reduceat(largest, rows, axis=0)
    return or_one(np.asarray(largest, np.float32) / np.float32(E4M3_MAX))


def fp8_block_expand(scale: F32, shape: tuple[int, ...]) -> F32:
    """Weight scales [..., ⌈N/128⌉, ⌈K/128⌉] repeated to [..., N, K]."""
    wide = scale.repeat(FP8_BLOCK, axis=-2).repeat(FP8_BLOCK, axis=-1)
    return wide[..., : shape[-2], : shape[-1]]


def nvfp4_quantise(x: F32, input_scale: F32 | np.float32) -> tuple[U8, Fp8]:
    """Activations [rows, K] -> bytes [rows, K/2], e4m3 block scales [rows, K/16].

    G = 1/input_scale; scale = e4m3((blockamax/6)·G), code = e2m1(x·G/scale), zeros where
    the scale rounds to 0.
    """
    blocks = np.asarray(x, np.float32).reshape(len(x), x.shape[1] // NVFP4_BLOCK, NVFP4_BLOCK)
    gain = np.float32(1.0) / np.float32(input_scale)
    scale = e4m3(np.abs(blocks).max(axis=-1) / np.float32(E2M1_MAX) * gain)
    wide = scale.astype(np.float32)[..., None]
    codes = e2m1_encode(np.where(wide == 0, np.float32(0), blocks * gain / or_one(wide)))
    return pack(codes.reshape(x.shape)), scale


def nvfp4_weight(w: F32, w_scale2: F32 | np.float32 | None = None) -> tuple[U8, Fp8, F32]:
    """A weight [N, K] -> bytes [N, K/2], e4m3 block scales [N, K/16], f32 global scale.

    Model Optimizer's rule: global = amax/2688 (unless given), block scale =
    e4m3(clamp(blockamax/(6·global), 2⁻⁹, 448)), 1 for a zero block; code = e2m1(w/(scale·global)).
    """
    blocks = np.asarray(w, np.float32).reshape(w.shape[0], -1, NVFP4_BLOCK)
    if w_scale2 is None:
        w_scale2 = or_one(np.abs(blocks).max() / np.float32(E2M1_MAX * E4M3_MAX))
    scale = nvfp4_scale(blocks, np.float32(w_scale2))
    codes = e2m1_encode(blocks / (scale.astype(np.float32)[..., None] * np.float32(w_scale2)))
    return pack(codes.reshape(w.shape)), scale, np.asarray(w_scale2, np.float32)


def nvfp4_scale(blocks: F32, w_scale2: np.float32) -> Fp8:
    """The e4m3 scales [..., K/16] of a weight's blocks [..., K/16, 16]."""
    raw = or_one(np.abs(blocks).max(axis=-1) / (np.float32(E2M1_MAX) * w_scale2))
    return e4m3(np.maximum(raw, np.float32(2.0**-9)))


def nvfp4_decode(packed: U8, scale: Fp8) -> F32:
    """code·block_scale [..., K], exact in f32; the global scale is not applied."""
    values = e2m1_decode(unpack(packed))
    return values * scale.astype(np.float32).repeat(NVFP4_BLOCK, axis=-1)


def nvfp4_decode_e4m3(packed: U8, scale: Fp8) -> F64:
    """8 · e4m3(code·block_scale / 8) [..., K]: an eighth of the largest, 6 · 448, is in range."""
    eighths: F64 = e4m3(nvfp4_decode(packed, scale) / np.float32(8)).astype(np.float64)
    return 8 * eighths


def halves(x: NDArray[Any], undo: bool = False) -> NDArray[Any]:
    """[rows, K] with the columns 8, 0, 9, 1, … of each 16, or back from there."""
    shape = (len(x), -1, 8, 2) if undo else (len(x), -1, 2, 8)
    turned = x.reshape(shape).swapaxes(2, 3)
    return (turned[:, :, ::-1] if undo else turned[..., ::-1]).reshape(x.shape)


def or_one(scale: F32) -> F32:
    """1 where the scale is 0 (a block of zeros, or one too small to have a scale)."""
    return np.where(scale == 0, np.float32(1), scale).astype(np.float32)
