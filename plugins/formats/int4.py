"""Int4 weights: 4-bit codes; of 32 of them a scale and a zero point (W4A16).

y[t,n] = w_scale2[n] · Σ_k x[t,k] · (code[n,k] − zero[n,k/32]) · scale[n,k/32]

`w_scale` has scale and zero in turn. A file's wider groups are repeated, its symmetric codes have
zero 8, a scale may be negative. w_scale2 is a power of two, so that a row's largest scale is in
[1/2, 1): a kernel's packed form has few bits for exponents. All of this is exact in f32. Over bf16
activations the scale is rounded to bf16, and then the weight (int4_decode.cuh).
"""

import numpy as np

from spark_engine.operand import Operand, Role
from spark_engine.plugins.common import operands
from spark_engine.plugins.common.onnx_nodes import Text
from spark_engine.plugins.formats import expert_layout, numpy_codecs
from spark_engine.plugins.formats.format import F64, ExpertKernels, Format, Names, Values
from spark_engine.plugins.formats.numpy_codecs import F32
from spark_engine.plugins.formats.weight_packing import INT4_GROUP, INT4_WORDS, int4_halves
from spark_engine.tensors import Array, DType

_BYTES = np.arange(256, dtype=np.uint8)[:, None]
_NIBBLES = numpy_codecs.unpack(_BYTES).astype(np.float32)  # of a byte, the low one first


def row_factors(scales: F32) -> F32:
    """f32 [N] of scales [N, groups]: the power of two above the largest; 0 for a row of zeros."""
    largest = np.abs(scales).max(axis=1)
    power = np.ldexp(np.float32(1), np.frexp(largest)[1])
    return np.where(largest > 0, power, np.float32(0)).astype(np.float32)


def paired(scales: F32, zeros: F32) -> F32:
    """`w_scale` [N, 2 · groups] of both [N, groups]: scales over their row's factor, and zeros."""
    own = scales / numpy_codecs.or_one(row_factors(scales))[:, None]
    return np.stack([own, zeros], axis=-1).astype(np.float32).reshape(len(scales), -1)


def _quantise(w: F32) -> tuple[Array, ...]:
    groups = w.reshape(len(w), -1, INT4_GROUP)
    low, high = np.minimum(groups.min(-1), 0), np.maximum(groups.max(-1), 0)
    scale = numpy_codecs.or_one((high - low) / np.float32(15))
    scale = scale.astype(DType.BF16.numpy).astype(np.float32)
    zero = np.clip(np.rint(-low / scale), 0, 15)
    codes = np.clip(np.rint(groups / scale[..., None]) + zero[..., None], 0, 15)
    packed = numpy_codecs.pack(codes.astype(np.uint8).reshape(w.shape))
    return packed, paired(scale, zero), row_factors(scale)


def _decode(v: Values) -> F64:
    scale, zero = np.moveaxis(v["w_scale"].reshape(len(v["w"]), -1, 2).astype(np.float64), -1, 0)
    rounds = "x" in v and v["x"].dtype == DType.BF16.numpy
    scale = _bf16(scale) if rounds else scale
    codes = numpy_codecs.unpack(v["w"].astype(np.uint8))
    groups = codes.reshape(*scale.shape, INT4_GROUP).astype(np.float64)
    values: F64 = ((groups - zero[..., None]) * scale[..., None]).reshape(codes.shape)
    return _bf16(values) if rounds else values


def _bf16(values: F64) -> F64:
    rounded: F64 = values.astype(np.float32).astype(DType.BF16.numpy).astype(np.float64)
    return rounded


def _decode_body(f: Text, v: Names, shape: tuple[int, int]) -> str:
    count = shape[1] // INT4_GROUP
    groups = f("Reshape", v["w"], [0, count, INT4_GROUP // 2])
    codes = f("Gather", _NIBBLES, f.cast(groups, DType.I32), axis=0)
    pairs = f("Reshape", v["w_scale"], [0, count, 2, 1])
    scale, zero = (f("Gather", pairs, [i], axis=2) for i in (0, 1))
    return f("Reshape", f("Mul", f("Sub", codes, zero), scale), [0, shape[1]])


FORMAT = Format(
    name="int4",
    op="int4_linear",
    operands=(
        operands.x(note="W4A16"),
        Operand("w", Role.WEIGHT, "u8[N,K/2]", joins=1),
        Operand("w_scale", Role.SCALE, "f32[N,K/16]", joins=1, note="scale, zero of 32 codes"),
        Operand("w_scale2", Role.SCALE, "f32[N]", joins=1),
    ),
    bits=4.5,
    quantise=_quantise,
    decode=_decode,
    decode_body=_decode_body,
    rows=("w_scale2",),
    experts=ExpertKernels(
        3,
        0,
        DType.U8,
        lambda rows: expert_layout.pack_codes(rows, INT4_WORDS),
        lambda rows: expert_layout.pack_int4_scales(int4_halves(rows.view(np.float32))),
    ),
    linear_sizes={
        DType.F32: ((1, 64, 64), (3, 37, 96), (65, 96, 256), (1, 33, 32)),
        DType.BF16: ((3, 32, 160),),
    },
    expert_sizes={
        DType.F32: ((1, 8, 3, 64, 32), (65, 16, 4, 128, 96), (3, 4, 4, 32, 32)),
        DType.BF16: ((3, 4, 2, 64, 32),),
    },
)
