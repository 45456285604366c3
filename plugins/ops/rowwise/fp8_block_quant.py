"""Dynamic FP8 quantisation per token and 128 columns: s = amax/448 (1 if 0), f8 = e4m3(x/s).

The activation side of the official 128×128-block FP8 checkpoints (DeepSeek-V3, section 3.3).
A last block narrower than 128 is legal.
"""

import numpy as np

from spark_engine.op import Attrs, Op
from spark_engine.operand import Result
from spark_engine.plugins.common import operands
from spark_engine.plugins.common.fragments import widen
from spark_engine.plugins.common.onnx_nodes import Text
from spark_engine.plugins.formats import numpy_codecs
from spark_engine.plugins.formats.format_fragments import fp8_block_quantise
from spark_engine.plugins.kernels.rowwise import act_quant_kernels
from spark_engine.plugins.launch import serve
from spark_engine.tensors import Array, TensorSpec


def reference(attrs: Attrs, arrays: tuple[Array, ...]) -> tuple[Array, ...]:
    """(x,) -> (codes, scale)."""
    return numpy_codecs.fp8_block_quantise(arrays[0].astype(np.float32))


def body(attrs: Attrs, specs: tuple[TensorSpec, ...]) -> str:
    """Pad, block maxima, divide, clamp, cast."""
    f = Text()
    k = OP.named(attrs, specs).dim("K")
    fp8_block_quantise(f, widen(f, "x"), k, ("codes", "scale"))
    return f.function("fp8_block_quant", ("x",), ("codes", "scale"))


OP = serve(
    Op(
        name="fp8_block_quant",
        operands=(operands.x(),),
        results=(Result("codes", "f8[tokens,K]"), Result("scale", "f32[tokens,⌈K/128⌉]")),
        attrs={},
        reference=reference,
        body=body,
        quantises=True,
    ),
    act_quant_kernels.CANDIDATES,
    whole=act_quant_kernels.alone("none", "fp8_block"),
    called={"codes": "q0", "scale": "s0"},
)
