"""FP8 weights in blocks of 128×128, activations quantised per token and 128 columns.

y[t,n] = Σ_kb x_scale[t,kb] · w_scale[⌊n/128⌋,kb] · Σ_{k in kb} xq·w (DeepSeek-V3, section 3.3).
N and K need not be multiples of 128. The CPU dequantises both sides and multiplies once.
"""

import numpy as np

from spark_engine.operand import Operand, Role
from spark_engine.plugins.common import operands
from spark_engine.plugins.formats import expert_layout, numpy_codecs
from spark_engine.plugins.formats import format_fragments as ff
from spark_engine.plugins.formats.format import F64, ExpertKernels, Format, Inputs, Values
from spark_engine.tensors import DType


def _decode(v: Values) -> F64:
    scale = numpy_codecs.fp8_block_expand(v["w_scale"].astype(np.float32), v["w"].shape)
    return v["w"].astype(np.float64) * scale


def _decode_input(v: Values) -> F64:
    columns = v["x_scale"].astype(np.float64).repeat(numpy_codecs.FP8_BLOCK, axis=1)
    return v["xq"].astype(np.float64) * columns[:, : v["xq"].shape[1]]


FORMAT = Format(
    name="fp8_block",
    op="fp8_block_linear",
    operands=(
        operands.x("f8[tokens,K]", name="xq"),
        Operand("x_scale", Role.SCALE, "f32[tokens,⌈K/128⌉]"),
        Operand("w", Role.WEIGHT, "f8[N,K]", joins=1),
        Operand("w_scale", Role.SCALE, "f32[⌈N/128⌉,⌈K/128⌉]", joins=128),
    ),
    bits=8,
    quantise=numpy_codecs.fp8_block_weight,
    decode=_decode,
    decode_body=lambda f, v, shape: ff.fp8_block_weight(f, v["w"], v["w_scale"], shape),
    inputs=Inputs(
        quant="fp8_block",
        op="fp8_block_quant",
        makes=("xq", "x_scale"),
        quantise=lambda x, scale: numpy_codecs.fp8_block_quantise(x),
        quantise_body=lambda f, x, scale, k, outs: ff.fp8_block_quantise(f, x, k, outs),
        decode=_decode_input,
        decode_body=lambda f, v, k: ff.fp8_block_decode(f, v["xq"], v["x_scale"], k),
    ),
    experts=ExpertKernels(2, 2, DType.F8E4M3, expert_layout.pack_fp8),
    linear_sizes={
        DType.F32: ((1, 128, 128), (3, 37, 200), (1, 130, 48), (65, 256, 256), (9, 144, 1232)),
        DType.BF16: ((3, 32, 384), (33, 16, 2064)),
    },
    expert_sizes={DType.F32: ((1, 4, 2, 128, 128), (7, 3, 2, 200, 72))},
)
