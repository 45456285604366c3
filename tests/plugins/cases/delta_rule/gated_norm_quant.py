"""The seeded cases of gated_norm_quant."""

import numpy as np

from spark_engine.op import Attrs, Case, rtol_of
from spark_engine.plugins.formats import quantised
from spark_engine.tensors import Array, DType
from tests.plugins.cases.delta_rule import gated_norm
from tests.plugins.cases.scales import static_scales


def _case(
    rows: int,
    heads: int,
    dim: int,
    quant: str,
    n: int = 1,
    keep: int = 0,
    bench: bool = False,
    dtype: DType = DType.F32,
) -> Case:
    attrs: Attrs = {"eps": 1e-6, "heads": heads, "offset": 9, "keep": keep, "quant": quant, "n": n}

    def make(rng: np.random.Generator) -> tuple[Array, ...]:
        operands = gated_norm.arrays(rng, rows, heads, dim, 9, dtype)
        scales = static_scales(rng, n)
        return (*operands, scales) if quantised.takes_scales(attrs) else operands

    label = f"{rows} rows {heads}x{dim} {quant} n{n} keep{keep} {dtype}"
    return Case(label, attrs, make, rtol=rtol_of(dtype), bench=bench)


CASES = (
    _case(1, 2, 32, "fp8"),
    _case(7, 3, 24, "fp8", n=2, keep=1, bench=True),
    _case(3, 3, 64, "fp8_block"),
    _case(3, 3, 64, "fp8_token"),
    _case(1056, 1, 48, "fp8"),  # several rows a block
    _case(7, 1, 48, "nvfp4", bench=True),
    _case(1, 4, 32, "nvfp4", n=2, keep=1),
    _case(3, 2, 64, "fp8", keep=1, dtype=DType.BF16),
    _case(3, 2, 64, "nvfp4", dtype=DType.BF16),
)
