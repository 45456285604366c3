"""Static per-tensor FP8 quantisation: f8 = e4m3(clamp(x / scale, ±448)).

`scale` is the checkpoint's input_scale, amax/448 of calibration (TensorRT Model Optimizer).
"""

from __future__ import annotations

import numpy as np

from spark_engine.op import Attrs, Case, Inputs, Op
from spark_engine.operand import Operand, Result, Role
from spark_engine.plugins.common import operands, random_arrays
from spark_engine.plugins.common.fragments import widen
from spark_engine.plugins.common.onnx_nodes import Text
from spark_engine.plugins.formats import numpy_codecs
from spark_engine.plugins.formats.format_fragments import fp8_quantise
from spark_engine.plugins.kernels.rowwise import act_quant_kernels
from spark_engine.plugins.launch import serve
from spark_engine.tensors import Array, DType, TensorSpec


def reference(attrs: Attrs, arrays: tuple[Array, ...]) -> tuple[Array, ...]:
    """(x, scale) -> (codes,)."""
    x, scale = (a.astype(np.float32) for a in arrays)
    return (numpy_codecs.fp8_quantise(x, scale),)


def body(attrs: Attrs, specs: tuple[TensorSpec, ...]) -> str:
    """Divide, clamp, cast."""
    f = Text()
    fp8_quantise(f, widen(f, "x"), "scale", "codes")
    return f.function("fp8_quant", ("x", "scale"), ("codes",))


def _inputs(rows: int, width: int, dtype: DType = DType.F32) -> Inputs:
    def make(rng: np.random.Generator) -> tuple[Array, ...]:
        x = random_arrays.awkward(rng, rows, width, dtype)
        return x, np.asarray(rng.uniform(0.01, 1), np.float32)

    return make


NAN_ROW = random_arrays.ignore_rows(5)
CASES = (
    Case("one row", {}, _inputs(1, 64)),
    Case("awkward values, odd width", {}, _inputs(7, 37), ignore=NAN_ROW),
    Case("many rows", {}, _inputs(65, 256), ignore=NAN_ROW, bench=True),
    Case("bf16", {}, _inputs(6, 64, DType.BF16), ignore=NAN_ROW),
)

OP = serve(
    Op(
        name="fp8_quant",
        operands=(operands.x(), Operand("scale", Role.SCALE, "f32[]")),
        results=(Result("codes", "f8[tokens,K]"),),
        attrs={},
        reference=reference,
        body=body,
        cases=CASES,
        quantises="fp8",
    ),
    act_quant_kernels.CANDIDATES,
    whole=act_quant_kernels.alone("none", "fp8"),
    called={"scale": "scales", "codes": "q0"},
)
