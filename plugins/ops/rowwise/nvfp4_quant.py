"""Dynamic NVFP4 quantisation of activations, per token and 16 columns, under a static global.

G = 1/input_scale; s = e4m3(clamp((blockamax/6)·G, ±448)); code = e2m1(x·G/s), 0 where s is 0
(TensorRT Model Optimizer; vLLM's NVFP4 emulation agrees).
"""

import numpy as np

from spark_engine.op import Attrs, Op
from spark_engine.operand import Operand, Result, Role
from spark_engine.plugins.common import operands
from spark_engine.plugins.common.fragments import widen
from spark_engine.plugins.common.onnx_nodes import Text
from spark_engine.plugins.formats import numpy_codecs
from spark_engine.plugins.formats.format_fragments import nvfp4_quantise
from spark_engine.plugins.kernels.rowwise import act_quant_kernels
from spark_engine.plugins.launch import serve
from spark_engine.tensors import Array, TensorSpec


def reference(attrs: Attrs, arrays: tuple[Array, ...]) -> tuple[Array, ...]:
    """(x, input_scale) -> (packed, scale)."""
    x, input_scale = (a.astype(np.float32) for a in arrays)
    return numpy_codecs.nvfp4_quantise(x, input_scale)


def body(attrs: Attrs, specs: tuple[TensorSpec, ...]) -> str:
    """Block maxima, scales, codes, nibbles packed."""
    f = Text()
    k = OP.named(attrs, specs).dim("K")
    nvfp4_quantise(f, widen(f, "x"), "input_scale", k, ("packed", "scale"))
    return f.function("nvfp4_quant", ("x", "input_scale"), ("packed", "scale"))


OP = serve(
    Op(
        name="nvfp4_quant",
        operands=(operands.x(), Operand("input_scale", Role.SCALE, "f32[]")),
        results=(Result("packed", "u8[tokens,K/2]"), Result("scale", "f8[tokens,K/16]")),
        attrs={},
        reference=reference,
        body=body,
        quantises=True,
    ),
    act_quant_kernels.CANDIDATES,
    whole=act_quant_kernels.alone("none", "nvfp4"),
    called={"input_scale": "scales", "packed": "q0", "scale": "s0"},
)
