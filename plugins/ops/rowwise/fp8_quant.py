"""FP8 quantisation: f8 = e4m3(clamp(x / scale, ±448)), by one scale for all tokens or `by_token`.

`scale` is the checkpoint's input_scale, amax/448 of calibration (TensorRT Model Optimizer). That of
a token is its own amax/448 (1 if 0), a result (compressed-tensors' FP8_DYNAMIC). With `halves` the
codes of each 16 columns are those of 8, 0, 9, 1, … (plugins/formats/nvfp4.py).
"""

import numpy as np

from spark_engine.named import Named
from spark_engine.op import Attrs, Op
from spark_engine.operand import Operand, Result, Role, When
from spark_engine.plugins.common import operands
from spark_engine.plugins.common.fragments import widen
from spark_engine.plugins.common.onnx_nodes import Text
from spark_engine.plugins.formats import numpy_codecs
from spark_engine.plugins.formats.format_fragments import fp8_quantise, fp8_token_quantise, halves
from spark_engine.plugins.formats.numpy_codecs import NVFP4_BLOCK
from spark_engine.plugins.formats.quantised import quant_of
from spark_engine.plugins.kernels.rowwise import act_quant_kernels
from spark_engine.plugins.launch import serve
from spark_engine.tensors import Array, TensorSpec


def reference(attrs: Attrs, arrays: tuple[Array, ...]) -> tuple[Array, ...]:
    """(x, [scale]) -> (codes, [x_scale])."""
    x, *scale = (a.astype(np.float32) for a in arrays)
    x = numpy_codecs.halves(x) if attrs.get("halves") else x
    return (numpy_codecs.fp8_quantise(x, *scale),) if scale else numpy_codecs.fp8_token_quantise(x)


def body(attrs: Attrs, specs: tuple[TensorSpec, ...]) -> str:
    """Divide, clamp, cast."""
    f = Text()
    if attrs.get("by_token"):
        x = halves(f, widen(f, "x")) if attrs.get("halves") else widen(f, "x")
        fp8_token_quantise(f, x, ("codes", "x_scale"))
        return f.function("fp8_quant", ("x",), ("codes", "x_scale"))
    fp8_quantise(f, widen(f, "x"), "scale", "codes")
    return f.function("fp8_quant", ("x", "scale"), ("codes",))


def _check(node: Named) -> str | None:
    k, halves = node.dim("K"), node.number("halves")
    if halves and (k % NVFP4_BLOCK or not node.number("by_token")):
        return f"K is {k}; halves is for scales by token and for whole blocks of {NVFP4_BLOCK}"
    return None


OP = serve(
    Op(
        name="fp8_quant",
        operands=(operands.x(), Operand("scale", Role.SCALE, "f32[]", When("by_token", (0,)))),
        results=(
            Result("codes", "f8[tokens,K]"),
            Result("x_scale", "f32[tokens,1]", When("by_token")),
        ),
        attrs={"by_token": 0, "halves": 0},
        check=_check,
        reference=reference,
        body=body,
        quantises=True,
    ),
    act_quant_kernels.CANDIDATES,
    whole=lambda attrs: act_quant_kernels.alone("none", quant_of("fp8_quant", attrs))(attrs),
    called={"scale": "scales", "codes": "q0", "x_scale": "s0"},
)
