"""NVFP4 weights: 4-bit codes, an e4m3 scale for 16 of them, and an f32 scale a row.

    nvfp4       activations as they are (W4A16): y = w_scale2 · Σ_k x · (code·w_scale)
    nvfp4_a4    activations in NVFP4 too (W4A4): y = alpha · Σ_k (xq·x_scale) · (code·w_scale)
    nvfp4_a8    activations in FP8 by token (W4A8): y = w_scale2 · x_scale · Σ_k xq · w8, with
                w8 = 8 · e4m3(code·w_scale/8)

code·w_scale is exact in bf16 and f32. e4m3 rounds a quarter of the products, once, to nearest even:
1.5, 3 and 6 with five of the eight mantissas of a scale, and what is below 2⁻³, to multiples of
2⁻⁶. Of each 16 columns xq has the second eight and the first in turn, as the kernels' registers.
The file's global scale comes once at the end, per row, so that merged projections keep their own
(TensorRT Model Optimizer's W4A16_NVFP4). alpha = input scale · w_scale2 is one f32 product, made
when the graph is lowered.
"""

from dataclasses import replace

import numpy as np

from spark_engine.operand import Operand, Role
from spark_engine.plugins.common import operands
from spark_engine.plugins.formats import expert_layout, numpy_codecs
from spark_engine.plugins.formats import format_fragments as ff
from spark_engine.plugins.formats.format import F64, ExpertKernels, Format, Inputs
from spark_engine.plugins.formats.numpy_codecs import E2M1_MAX, E4M3_MAX, F32
from spark_engine.tensors import Array, DType

_STORED = (
    Operand("w", Role.WEIGHT, "u8[N,K/2]", joins=1),
    Operand("w_scale", Role.SCALE, "f8[N,K/16]", joins=1),
    Operand("w_scale2", Role.SCALE, "f32[N]", joins=1),
)


def _quantise(w: F32) -> tuple[Array, ...]:
    codes, scale, scale2 = numpy_codecs.nvfp4_weight(w)
    return codes, scale, np.full(len(w), scale2)


def _values(codes: Array, scale: Array) -> F64:
    return numpy_codecs.nvfp4_decode(codes.astype(np.uint8), scale).astype(np.float64)


W4A16 = Format(
    name="nvfp4",
    op="nvfp4_linear",
    operands=(operands.x(note="W4A16"), *_STORED),
    bits=4.5,
    quantise=_quantise,
    decode=lambda v: _values(v["w"], v["w_scale"]),
    decode_body=lambda f, v, shape: ff.nvfp4_decode(f, v["w"], v["w_scale"], shape[1]),
    rows=("w_scale2",),
    experts=ExpertKernels(1, 0, DType.U8, expert_layout.pack_codes, expert_layout.pack_scales),
    linear_sizes={
        DType.F32: ((1, 64, 64), (3, 37, 48), (65, 96, 256), (1, 33, 16)),
        DType.BF16: ((3, 32, 80),),
    },
    expert_sizes={
        DType.F32: ((1, 8, 3, 64, 32), (65, 16, 4, 128, 48), (3, 4, 4, 32, 16)),
        DType.BF16: ((3, 4, 2, 64, 32),),
    },
)
A8_COLUMNS = 128  # of k that a kernel multiplies at a time
W4A8 = replace(
    W4A16,
    name="nvfp4_a8",
    op="nvfp4_linear_a8",
    operands=(
        operands.x("f8[tokens,K]", name="xq"),
        Operand("x_scale", Role.SCALE, "f32[tokens,1]"),
        *_STORED,
    ),
    decode=lambda v: numpy_codecs.nvfp4_decode_e4m3(v["w"].astype(np.uint8), v["w_scale"]),
    decode_body=lambda f, v, shape: ff.nvfp4_decode_e4m3(f, v["w"], v["w_scale"], shape[1]),
    rows=("x_scale", "w_scale2"),
    inputs=Inputs(
        quant="fp8_halves",
        op="fp8_quant",
        makes=("xq", "x_scale"),
        quantise=lambda x, scale: numpy_codecs.fp8_token_quantise(numpy_codecs.halves(x)),
        quantise_body=lambda f, x, scale, k, outs: ff.fp8_token_quantise(f, ff.halves(f, x), outs),
        decode=lambda v: numpy_codecs.halves(v["xq"].astype(np.float64), undo=True),
        decode_body=lambda f, v, k: ff.halves(f, v["xq"], undo=True),
        attrs={"by_token": 1, "halves": 1},
    ),
    experts=None,
    linear_sizes={
        DType.F32: ((1, 64, 64), (3, 37, 128), (65, 96, 256)),
        DType.BF16: ((3, 32, 128), (33, 16, 1152), (130, 272, 768)),
    },
    expert_sizes={},
)
W4A4 = replace(
    W4A16,
    name="nvfp4_a4",
    op="nvfp4_linear_a4",
    operands=(
        operands.x("u8[tokens,K/2]", name="xq"),
        Operand("x_scale", Role.SCALE, "f8[tokens,K/16]"),
        *_STORED[:2],
        Operand("alpha", Role.SCALE, "f32[N]", joins=1),
    ),
    rows=("alpha",),
    inputs=Inputs(
        quant="nvfp4",
        op="nvfp4_quant",
        makes=("xq", "x_scale"),
        quantise=numpy_codecs.nvfp4_quantise,
        quantise_body=ff.nvfp4_quantise,
        decode=lambda v: _values(v["xq"], v["x_scale"]),
        decode_body=lambda f, v, k: ff.nvfp4_decode(f, v["xq"], v["x_scale"], k),
        scale="alpha",
        largest=E2M1_MAX * E4M3_MAX,
    ),
    experts=ExpertKernels(1, 3, DType.U8, expert_layout.pack_codes, expert_layout.pack_scales),
    linear_sizes={
        DType.F32: ((1, 64, 64), (3, 37, 48), (65, 96, 256), (9, 144, 624), (130, 272, 768)),
        DType.BF16: ((3, 32, 80), (33, 16, 1088)),
    },
    expert_sizes={DType.F32: ((1, 4, 2, 64, 32), (7, 4, 2, 48, 16), (512, 4, 2, 64, 32))},
)
