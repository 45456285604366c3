"""FP8 E4M3 values as U8 codes, in plain ONNX: sign, 4 exponent bits (bias 7), 3 mantissa bits.

onnxruntime's CPU cannot gather or scatter float8 tensors and opset 23 cannot reinterpret bits, so
KV pages hold codes and bodies compute with them. Finite values are exact; values beyond ±448
saturate; −0 is stored as +0. The two NaN codes decode to 0: nothing reads them.
"""

import ml_dtypes
import numpy as np

from spark_engine.plugins.common.onnx_nodes import Text
from spark_engine.tensors import Array, DType

LARGEST = 448.0


_VALUES = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
_VALUES[[0x7F, 0xFF]] = 0.0
_VALUES.setflags(write=False)


def encode_array(values: Array) -> Array:
    """Codes u8 of the values, rounded to nearest even as the hardware does."""
    clipped = np.clip(values.astype(np.float32), -LARGEST, LARGEST) + np.float32(0)  # no -0
    codes: Array = clipped.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    return codes


def decode_array(codes: Array) -> Array:
    """float32 values of the codes."""
    values: Array = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    return values


def encode(f: Text, values: str) -> str:
    """u8 codes of an f32 tensor.

    After rounding, a halving search brings |x|·2⁶ into [1, 2) and counts the halvings e; the
    code is then 8·(e + |x|·2⁶⁻ᵉ), for subnormals too.
    """
    rounded = f.cast(f.cast(f("Clip", values, -LARGEST, LARGEST), DType.F8E4M3), DType.F32)
    rest: str = f("Mul", f("Abs", rounded), 64.0)
    exponent: str = ""
    for halvings in (8, 4, 2, 1):
        big = f("GreaterOrEqual", rest, float(2**halvings))
        rest = f("Where", big, f("Mul", rest, float(2**-halvings)), rest)
        part = f("Where", big, float(halvings), 0.0)
        exponent = f("Add", exponent, part) if exponent else part
    sign = f("Where", f("Less", values, 0.0), 128.0, 0.0)
    code = f("Add", f("Mul", f("Add", exponent, rest), 8.0), sign)
    return f.cast(code, DType.U8)


def decode(f: Text, codes: str, shape: list[int]) -> str:
    """f32 [*shape] values of u8 codes.

    A table look-up by GatherElements over the flat codes: here 5 times faster than Gather and
    than exact arithmetic on the bits.
    """
    flat = f("Reshape", f.cast(codes, DType.I32), [-1])
    return f("Reshape", f("GatherElements", _VALUES, flat, axis=0), shape)
