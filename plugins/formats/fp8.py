"""FP8 weights and activations (W8A8): a scale for each row of a weight, and of the activations

    fp8            one, static (TensorRT Model Optimizer's FP8)
    fp8_channel    one for each token, dynamic: amax/448 (compressed-tensors' FP8_DYNAMIC)

Codes multiply and accumulate in f32, the scales come once at the end. A weight with one scale in
all has it per row too, so that merged projections keep their own.
"""

from dataclasses import replace

import numpy as np

from spark_engine.operand import Operand, Role, When
from spark_engine.plugins.common import operands
from spark_engine.plugins.formats import expert_layout, numpy_codecs
from spark_engine.plugins.formats import format_fragments as ff
from spark_engine.plugins.formats.format import ExpertKernels, Format, Inputs
from spark_engine.plugins.formats.numpy_codecs import E4M3_MAX, F32
from spark_engine.tensors import Array, DType


def _quantise(w: F32) -> tuple[Array, ...]:
    codes, scale = numpy_codecs.fp8_weight(w)
    return codes, np.full(len(w), scale)


def _quantise_rows(w: F32) -> tuple[Array, ...]:
    codes, scale = numpy_codecs.fp8_token_quantise(w)
    return codes, scale[:, 0]


STATIC = Format(
    name="fp8",
    op="fp8_linear",
    operands=(
        operands.x("f8[tokens,K]", name="xq"),
        Operand("w", Role.WEIGHT, "f8[N,K]", joins=1),
        Operand("x_scale", Role.SCALE, "f32[]", When("by_token", (0,))),
        Operand("w_scale", Role.SCALE, "f32[N]", joins=1),
    ),
    bits=8,
    quantise=_quantise,
    decode=lambda v: v["w"].astype(np.float64),
    decode_body=lambda f, v, shape: v["w"],
    rows=("x_scale", "w_scale"),
    inputs=Inputs(
        quant="fp8",
        op="fp8_quant",
        makes=("xq",),
        quantise=lambda x, scale: (numpy_codecs.fp8_quantise(x, scale),),
        quantise_body=lambda f, x, scale, k, outs: (ff.fp8_quantise(f, x, scale, outs[0]),),
        decode=lambda v: v["xq"].astype(np.float64),
        decode_body=lambda f, v, k: v["xq"],
        scale="x_scale",
        largest=E4M3_MAX,
    ),
    experts=ExpertKernels(2, 1, DType.F8E4M3, expert_layout.pack_fp8),
    linear_sizes={DType.F32: ((1, 64, 48), (3, 37, 35), (65, 96, 256)), DType.BF16: ((3, 32, 64),)},
    expert_sizes={DType.F32: ((1, 4, 2, 64, 32), (7, 5, 3, 40, 24))},
)
_XQ, _W, _, _W_SCALE = STATIC.operands
BY_TOKEN = replace(
    STATIC,
    name="fp8_channel",
    operands=(_XQ, _W, Operand("x_scale", Role.SCALE, "f32[tokens,1]", When("by_token")), _W_SCALE),
    quantise=_quantise_rows,
    inputs=Inputs(
        quant="fp8_token",
        op="fp8_quant",
        makes=("xq", "x_scale"),
        quantise=lambda x, scale: numpy_codecs.fp8_token_quantise(x),
        quantise_body=lambda f, x, scale, k, outs: ff.fp8_token_quantise(f, x, outs),
        decode=lambda v: v["xq"].astype(np.float64),
        decode_body=lambda f, v, k: v["xq"],
        attrs={"by_token": 1},
    ),
    attrs={"by_token": 1},
    experts=ExpertKernels(2, 4, DType.F8E4M3, expert_layout.pack_fp8),
    linear_sizes={
        DType.F32: ((1, 64, 48), (3, 37, 35), (65, 96, 256), (9, 144, 624), (130, 272, 768)),
        DType.BF16: ((3, 32, 64), (33, 16, 1088)),
    },
)
