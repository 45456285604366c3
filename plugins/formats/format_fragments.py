"""The number formats of `numpy_codecs.py` as fragments of ONNX bodies, bit for bit the same.

Knows no op. onnxruntime's CPU provider casts between f32 and e4m3 and reshapes e4m3, nothing
else, so everything is computed in f32 and cast last. What depends on weights alone is folded
to constants when a session is loaded: a weight always ends as the constant 2-D right operand
of one product, for which onnxruntime gives a row the same bits whatever the other rows are.
"""

from collections.abc import Sequence

import numpy as np

from spark_engine.plugins.common.fragments import columns
from spark_engine.plugins.common.onnx_nodes import Text
from spark_engine.plugins.formats.numpy_codecs import (
    E2M1_MAX,
    E2M1_VALUES,
    E4M3_MAX,
    FP8_BLOCK,
    NVFP4_BLOCK,
)
from spark_engine.tensors import DType

# byte -> (value of its low nibble, value of its high nibble)
NIBBLES = np.stack([np.tile(E2M1_VALUES, 16), np.repeat(E2M1_VALUES, 16)], axis=-1)


def e4m3(f: Text, x: str, out: str = "") -> str:
    """e4m3 of f32 `x`, clamped to ±448, rounded to nearest even."""
    return f.cast(f("Clip", x, -E4M3_MAX, E4M3_MAX), DType.F8E4M3, out)


def e2m1_codes(f: Text, x: str) -> str:
    """4-bit codes of f32 `x` as u8, one per byte (`numpy_codecs.e2m1_encode`)."""
    a = f("Min", f("Abs", x), E2M1_MAX)
    middle = f("Add", f("Round", a), 2.0)
    top = f("Add", f("Round", f("Mul", a, 0.5)), 4.0)
    big = f("Where", f("Less", a, 4.0), middle, top)
    code = f("Where", f("Less", a, 2.0), f("Round", f("Mul", a, 2.0)), big)
    sign = f("Where", f("Less", x, 0.0), np.uint8(8), np.uint8(0))
    return f("BitwiseOr", f.cast(code, DType.U8), sign)


def or_one(f: Text, scale: str, out: str = "") -> str:
    """1 where the f32 `scale` is 0."""
    return f("Where", f("Equal", scale, 0.0), 1.0, scale, out=out)


def fp8_quantise(f: Text, x: str, scale: str, out: str = "") -> str:
    """f32 [rows, K] -> e4m3 codes by one scale, or one of each row."""
    return e4m3(f, f("Div", x, scale), out)


def fp8_token_quantise(f: Text, x: str, outs: Sequence[str]) -> tuple[str, str]:
    """f32 [rows, K] -> (e4m3 codes, f32 scales [rows, 1])."""
    amax = f("ReduceMax", f("Abs", x), [-1], keepdims=1)
    scale = or_one(f, f("Div", amax, E4M3_MAX), outs[1])
    return fp8_quantise(f, x, scale, outs[0]), scale


def fp8_block_quantise(f: Text, x: str, width: int, outs: Sequence[str]) -> tuple[str, str]:
    """f32 [rows, width] -> (e4m3 codes, f32 scales [rows, ⌈width/128⌉])."""
    wide = f("Pad", x, [0, 0, 0, -width % FP8_BLOCK], 0.0)
    blocks = f("Reshape", wide, [0, -1, FP8_BLOCK])
    amax = f("ReduceMax", f("Abs", blocks), [-1], keepdims=1)
    scale = or_one(f, f("Div", amax, E4M3_MAX))
    scaled = f("Reshape", f("Div", blocks, scale), [0, width + -width % FP8_BLOCK])
    codes = e4m3(f, columns(f, scaled, 0, width), outs[0])
    return codes, f("Reshape", scale, [0, -1], out=outs[1])


def nvfp4_quantise(
    f: Text, x: str, input_scale: str, width: int, outs: Sequence[str]
) -> tuple[str, str]:
    """f32 [rows, width] -> (u8 [rows, width/2], e4m3 scales [rows, width/16])."""
    blocks = f("Reshape", x, [0, width // NVFP4_BLOCK, NVFP4_BLOCK])
    gain = f("Reciprocal", input_scale)
    amax = f("ReduceMax", f("Abs", blocks), [-1], keepdims=1)
    small = e4m3(f, f("Mul", f("Div", amax, E2M1_MAX), gain))
    scale = f.cast(small, DType.F32)
    scaled = f("Div", f("Mul", blocks, gain), or_one(f, scale))
    codes = e2m1_codes(f, f("Where", f("Equal", scale, 0.0), 0.0, scaled))
    pairs = f("Reshape", codes, [0, width // 2, 2])
    low, high = columns(f, pairs, 0, 1), columns(f, pairs, 1, 2)
    byte = f("BitwiseOr", low, f("BitShift", high, np.uint8(4), direction="LEFT"))
    packed = f("Reshape", byte, [0, width // 2], out=outs[0])
    return packed, f("Reshape", small, [0, width // NVFP4_BLOCK], out=outs[1])


def nvfp4_decode(f: Text, packed: str, scale: str, width: int) -> str:
    """u8 [rows, width/2], f32 block scales [rows, width/16] -> f32 code·scale [rows, width]."""
    blocks = f("Reshape", packed, [0, width // NVFP4_BLOCK, NVFP4_BLOCK // 2])
    values = f("Gather", NIBBLES, f.cast(blocks, DType.I32), axis=0)
    return f("Reshape", f("Mul", values, f("Unsqueeze", scale, [-2, -1])), [0, width])


def nvfp4_decode_e4m3(f: Text, packed: str, scale: str, width: int) -> str:
    """The same, each rounded to e4m3 at an eighth of it."""
    exact = f("Mul", nvfp4_decode(f, packed, scale, width), 0.125)
    return f("Mul", f.cast(f.cast(exact, DType.F8E4M3), DType.F32), 8.0)


def halves(f: Text, x: str, undo: bool = False) -> str:
    """f32 [rows, K] with the columns 8, 0, 9, 1, … of each 16, or back from there."""
    split = f("Reshape", x, [0, -1, 8, 2] if undo else [0, -1, 2, 8])
    turned = f("Transpose", split, perm=[0, 1, 3, 2])
    other = f("Gather", turned, np.array([1, 0]), axis=2 if undo else 3)
    return f("Reshape", other, f("Shape", x))


def fp8_block_decode(f: Text, codes: str, scale: str, width: int) -> str:
    """f32 codes [rows, width] times per-row block scales [rows, ⌈width/128⌉]."""
    count = -(-width // FP8_BLOCK)
    wide = f("Expand", f("Unsqueeze", scale, [-1]), [1, count, FP8_BLOCK])
    flat = f("Reshape", wide, [0, count * FP8_BLOCK])
    return f("Mul", codes, columns(f, flat, 0, width))


def fp8_block_weight(f: Text, codes: str, scale: str, shape: tuple[int, int]) -> str:
    """f32 codes [N, K] times scales [⌈N/128⌉, ⌈K/128⌉] of 128×128 blocks."""
    for axis in (1, 0):  # the columns first, of few rows
        block = f("Div", f("Range", 0, shape[axis], 1), FP8_BLOCK)
        scale = f("Gather", scale, block, axis=axis)
    return f("Mul", codes, scale)


def times(f: Text, x: str, weight: str) -> str:
    """x [rows, K] · weightᵀ for f32 weight [N, K]."""
    return f("Gemm", x, weight, transB=1)
