"""The seeded cases of norms, quantisers and other ops over rows."""

import numpy as np

from spark_engine.op import Attrs, Case, Inputs, rtol_of
from spark_engine.plugins.common import random_arrays
from spark_engine.plugins.formats import numpy_codecs, quantised
from spark_engine.plugins.ops.rowwise import sigmoid_gate
from spark_engine.plugins.ops.rowwise.sigmoid_gate import arrays
from spark_engine.tensors import Array, DType
from tests.plugins.cases.awkward import awkward
from tests.plugins.cases.scales import static_scales


def _norm_quant_inputs(attrs: Attrs, rows: int, width: int, dtype: DType = DType.F32) -> Inputs:
    def make(rng: np.random.Generator) -> tuple[Array, ...]:
        x = awkward(rng, rows, width, dtype)
        operands = [x, random_arrays.positive(rng, width)]
        if attrs["add"]:
            operands.append(random_arrays.normal(rng, rows, width, dtype=dtype))
        if quantised.takes_scales(attrs):
            operands.append(static_scales(rng, int(attrs["n"])))
        return tuple(operands)

    return make


def _norm_quant(
    rows: int,
    width: int,
    quant: str,
    n: int = 1,
    add: int = 0,
    keep: int = 0,
    bench: bool = False,
    dtype: DType = DType.F32,
) -> Case:
    attrs: Attrs = {"eps": 1e-6, "add": add, "keep": keep, "quant": quant, "n": n}
    nan = random_arrays.ignore_rows(5) if rows > 5 else None
    label = f"{rows}x{width} {quant} n{n} add{add} keep{keep} {dtype}"
    inputs = _norm_quant_inputs(attrs, rows, width, dtype)
    return Case(label, attrs, inputs, rtol=rtol_of(dtype), ignore=nan, bench=bench)


NORM_QUANT = (
    _norm_quant(1, 64, "fp8", add=1),
    _norm_quant(7, 48, "fp8", n=3, add=1, keep=1, bench=True),
    _norm_quant(3, 37, "fp8"),
    _norm_quant(7, 200, "fp8_block", add=1, keep=1),
    _norm_quant(1, 256, "fp8_block"),
    _norm_quant(7, 48, "nvfp4", n=2, add=1, bench=True),
    _norm_quant(1, 16, "nvfp4", keep=1),
    _norm_quant(3, 64, "none", add=1, keep=1),
    _norm_quant(7, 200, "fp8_token", add=1, keep=1),
    _norm_quant(1, 8200, "fp8_token"),
    _norm_quant(3, 208, "fp8_halves", add=1),
    _norm_quant(3, 128, "fp8", add=1, keep=1, dtype=DType.BF16),
    _norm_quant(3, 128, "nvfp4", add=1, dtype=DType.BF16),
)


def _rms_norm_inputs(rows: int, width: int, dtype: DType = DType.F32, scale: float = 1.0) -> Inputs:
    def make(rng: np.random.Generator) -> tuple[Array, ...]:
        x = rng.standard_normal((rows, width)) * scale
        x[rows // 2] = 0.0  # a row of zeros divides by sqrt(eps), not by zero
        weight = 1.0 + 0.1 * rng.standard_normal(width)
        return x.astype(dtype.numpy), weight.astype(np.float32)

    return make


RMS_NORM = (
    Case("one row", {"eps": 1e-6}, _rms_norm_inputs(1, 64)),
    Case("odd width", {"eps": 1e-6}, _rms_norm_inputs(3, 37)),
    Case("many rows", {"eps": 1e-6}, _rms_norm_inputs(65, 256), bench=True),
    Case("tiny values", {"eps": 1e-6}, _rms_norm_inputs(3, 64, scale=1e-5)),
    Case("huge values", {"eps": 1e-5}, _rms_norm_inputs(3, 64, scale=1e8)),
    Case("bf16", {"eps": 1e-6}, _rms_norm_inputs(5, 128, DType.BF16), rtol=1e-2),
)


def _act_quant(
    act: str,
    rows: int,
    k: int,
    quant: str,
    n: int = 1,
    keep: int = 0,
    bench: bool = False,
    dtype: DType = DType.F32,
) -> Case:
    attrs: Attrs = {
        "act": act,
        "heads": 2,
        "head_dim": k // 2,
        "keep": keep,
        "quant": quant,
        "n": n,
    }

    def make(rng: np.random.Generator) -> tuple[Array, ...]:
        operands: tuple[Array, ...] = (
            random_arrays.normal(rng, rows, 2 * k, scale=2.0, dtype=dtype),
        )
        if act == "sigmoid_gate":
            operands = sigmoid_gate.arrays(rng, rows, 2, k // 2, dtype)
        scales = static_scales(rng, n)
        return (*operands, scales) if quantised.takes_scales(attrs) else operands

    label = f"{act} {rows}x{k} {quant} n{n} keep{keep} {dtype}"
    return Case(label, attrs, make, rtol=rtol_of(dtype), bench=bench)


ACT_QUANT = (
    _act_quant("silu_mul", 1, 64, "fp8"),
    _act_quant("silu_mul", 7, 38, "fp8", n=2, keep=1),
    _act_quant("silu_mul", 3, 200, "fp8_block"),
    _act_quant("silu_mul", 7, 48, "nvfp4", keep=1, bench=True),
    _act_quant("sigmoid_gate", 1, 64, "fp8", bench=True),
    _act_quant("sigmoid_gate", 7, 200, "fp8_block", keep=1),
    _act_quant("sigmoid_gate", 3, 48, "nvfp4", n=2),
    _act_quant("silu_mul", 3, 17408, "fp8_token"),
    _act_quant("sigmoid_gate", 7, 200, "fp8_token", keep=1),
    _act_quant("silu_mul", 136, 2624, "fp8_halves"),  # more rows than multiprocessors
    _act_quant("silu_mul", 3, 272, "fp8_halves"),
    _act_quant("silu_mul", 3, 64, "fp8", keep=1, dtype=DType.BF16),
    _act_quant("sigmoid_gate", 3, 64, "nvfp4", dtype=DType.BF16),
)


def _nvfp4_widen_inputs(rows: int, width: int) -> Inputs:
    def make(rng: np.random.Generator) -> tuple[Array, ...]:
        x = awkward(rng, rows, width).astype(np.float32)
        return numpy_codecs.nvfp4_quantise(x, np.float32(1e-3))

    return make


def _nvfp4_widen(label: str, rows: int, width: int, dtype: DType = DType.BF16) -> Case:
    return Case(
        label, {"dtype": dtype.value}, _nvfp4_widen_inputs(rows, width), 0.0, 0.0, bench=rows == 65
    )


NVFP4_WIDEN = (
    _nvfp4_widen("one row", 1, 64),
    _nvfp4_widen("f32, odd number of blocks", 7, 48, DType.F32),
    _nvfp4_widen("odd number of blocks", 7, 48),
    _nvfp4_widen("many rows", 65, 256),
)


def _quantisers_inputs(
    rows: int, width: int, dtype: DType = DType.F32, scaled: bool = True
) -> Inputs:
    def make(rng: np.random.Generator) -> tuple[Array, ...]:
        x = awkward(rng, rows, width, dtype)
        return (x, np.asarray(rng.uniform(0.01, 1), np.float32)) if scaled else (x,)

    return make


def _blocks(rows: int, width: int, dtype: DType = DType.F32) -> Inputs:
    def make(rng: np.random.Generator) -> tuple[Array, ...]:
        x = awkward(rng, rows, width, dtype)
        x[0, width // 2 :] = 0  # a block of zeros in a row that is not
        return (x,)

    return make


def _scaled(rows: int, width: int, dtype: DType = DType.F32, scale: float = 1e-3) -> Inputs:
    def make(rng: np.random.Generator) -> tuple[Array, ...]:
        return awkward(rng, rows, width, dtype), np.asarray(scale, np.float32)

    return make


NAN_ROW = random_arrays.ignore_rows(5)
_TOKEN: Attrs = {"by_token": 1}
_HALVES: Attrs = {"by_token": 1, "halves": 1}

FP8 = (
    Case("one row", {}, _quantisers_inputs(1, 64)),
    Case("awkward values, odd width", {}, _quantisers_inputs(7, 37), ignore=NAN_ROW),
    Case("many rows", {}, _quantisers_inputs(65, 256), ignore=NAN_ROW, bench=True),
    Case("bf16", {}, _quantisers_inputs(6, 64, DType.BF16), ignore=NAN_ROW),
    Case("by token", _TOKEN, _quantisers_inputs(1, 64, scaled=False)),
    Case("by token, odd width", _TOKEN, _quantisers_inputs(7, 37, scaled=False), ignore=NAN_ROW),
    Case("halves", _HALVES, _quantisers_inputs(7, 48, scaled=False), ignore=NAN_ROW),
    Case("halves, bf16", _HALVES, _quantisers_inputs(6, 272, DType.BF16, False), ignore=NAN_ROW),
    Case(
        "by token, wide bf16",
        _TOKEN,
        _quantisers_inputs(6, 17408, DType.BF16, False),
        ignore=NAN_ROW,
    ),
)
FP8_BLOCK = (
    Case("one row", {}, _blocks(1, 256)),
    Case("narrow last block", {}, _blocks(7, 200), ignore=NAN_ROW),
    Case("narrower than a block", {}, _blocks(3, 48)),
    Case("many rows", {}, _blocks(65, 256), ignore=NAN_ROW, bench=True),
    Case("bf16", {}, _blocks(6, 384, DType.BF16), ignore=NAN_ROW),
)
NVFP4 = (
    Case("one row", {}, _scaled(1, 64)),
    Case("odd number of blocks", {}, _scaled(7, 48), ignore=NAN_ROW),
    Case("exact ties", {}, _scaled(7, 176, scale=1.0), ignore=NAN_ROW),
    Case("scales that round to zero", {}, _scaled(3, 32, scale=1e5)),
    Case("many rows", {}, _scaled(65, 256), ignore=NAN_ROW, bench=True),
    Case("bf16", {}, _scaled(6, 64, DType.BF16), ignore=NAN_ROW),
)


def _sigmoid_gate(
    rows: int, heads: int, dim: int, dtype: DType = DType.F32, bench: bool = False
) -> Case:
    def make(rng: np.random.Generator) -> tuple[Array, ...]:
        return arrays(rng, rows, heads, dim, dtype)

    attrs: Attrs = {"heads": heads, "head_dim": dim}
    return Case(f"{rows} rows {heads}x{dim} {dtype}", attrs, make, rtol=rtol_of(dtype), bench=bench)


SIGMOID_GATE = (
    _sigmoid_gate(1, 2, 32),
    _sigmoid_gate(3, 3, 20),
    _sigmoid_gate(65, 4, 64, bench=True),
    _sigmoid_gate(3, 2, 32, DType.BF16),
)


def _silu_mul(rows: int, half: int, dtype: DType = DType.F32, bench: bool = False) -> Case:
    def make(rng: np.random.Generator) -> tuple[Array, ...]:
        x = random_arrays.normal(rng, rows, 2 * half, scale=4.0, dtype=dtype)
        x[0, :4] = (-100.0, 100.0, -0.0, 1e-30)
        return (x,)

    return Case(f"{rows}x{half} {dtype}", {}, make, rtol=rtol_of(dtype), bench=bench)


SILU_MUL = (
    _silu_mul(1, 64),
    _silu_mul(3, 37),
    _silu_mul(65, 128, bench=True),
    _silu_mul(3, 64, DType.BF16),
)


CASES = {
    "norm_quant": NORM_QUANT,
    "rms_norm": RMS_NORM,
    "act_quant": ACT_QUANT,
    "nvfp4_widen": NVFP4_WIDEN,
    "fp8_quant": FP8,
    "fp8_block_quant": FP8_BLOCK,
    "nvfp4_quant": NVFP4,
    "sigmoid_gate": SIGMOID_GATE,
    "silu_mul": SILU_MUL,
}
