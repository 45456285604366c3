"""The seeded cases of act_quant."""

import numpy as np

from spark_engine.op import Attrs, Case, rtol_of
from spark_engine.plugins.common import random_arrays
from spark_engine.plugins.formats import quantised
from spark_engine.plugins.ops.rowwise import sigmoid_gate
from spark_engine.tensors import Array, DType
from tests.plugins.cases.scales import static_scales


def _case(
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


CASES = (
    _case("silu_mul", 1, 64, "fp8"),
    _case("silu_mul", 7, 38, "fp8", n=2, keep=1),
    _case("silu_mul", 3, 200, "fp8_block"),
    _case("silu_mul", 7, 48, "nvfp4", keep=1, bench=True),
    _case("sigmoid_gate", 1, 64, "fp8", bench=True),
    _case("sigmoid_gate", 7, 200, "fp8_block", keep=1),
    _case("sigmoid_gate", 3, 48, "nvfp4", n=2),
    _case("silu_mul", 3, 17408, "fp8_token"),
    _case("sigmoid_gate", 7, 200, "fp8_token", keep=1),
    _case("silu_mul", 3, 272, "fp8_halves"),
    _case("silu_mul", 3, 64, "fp8", keep=1, dtype=DType.BF16),
    _case("sigmoid_gate", 3, 64, "nvfp4", dtype=DType.BF16),
)
