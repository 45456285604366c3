"""The seeded cases of the ops of experts."""

import numpy as np

from spark_engine.op import Attrs, Case, rtol_of
from spark_engine.plugins.common import random_arrays
from spark_engine.plugins.formats import quantised
from spark_engine.plugins.ops.moe import grouped_moe
from spark_engine.tensors import Array, DType
from tests.plugins.cases.scales import static_scales


def _moe_norm_quant(
    kind: str,
    rows: int,
    sizes: tuple[int, int, int, int],
    quant: str = "none",
    n: int = 1,
    keep: int = 0,
    dtype: DType = DType.F32,
) -> Case:
    attrs: Attrs = {"format": kind, "dtype": dtype.value, "eps": 1e-6}
    attrs = {**attrs, "keep": keep, "quant": quant, "n": n}

    def make(rng: np.random.Generator) -> tuple[Array, ...]:
        x, ids, weights, *params = grouped_moe.arrays(rng, kind, rows, sizes)
        residual = random_arrays.normal(rng, rows, sizes[2], scale=3.0)
        if rows > 5:
            x[1], x[5], residual[3] = 0, np.nan, 0
        norm_weight = random_arrays.positive(rng, sizes[2])
        scales = [static_scales(rng, n)]
        narrow = dtype.numpy
        operands = (x.astype(narrow), ids, weights, residual.astype(narrow), norm_weight, *params)
        return (*operands, *scales[: quantised.takes_scales(attrs)])

    label = f"{kind} {rows} rows, {sizes[1]} of {sizes[0]}, {sizes[2]}x{sizes[3]} {quant} n{n}"
    ignore = random_arrays.ignore_rows(5) if rows > 5 else None
    rtol = rtol_of(dtype)
    bench = rows > 5
    return Case(f"{label} keep{keep} {dtype}", attrs, make, rtol, rtol, bench, ignore)


MOE_NORM_QUANT = (
    _moe_norm_quant("dense", 1, (8, 2, 64, 48), keep=1),
    _moe_norm_quant("dense", 7, (4, 1, 48, 19), "fp8", keep=1),
    _moe_norm_quant("nvfp4", 1, (8, 3, 64, 32), "fp8"),
    _moe_norm_quant("nvfp4", 33, (16, 4, 128, 48), "fp8", n=2, keep=1),
    _moe_norm_quant("nvfp4", 7, (4, 4, 64, 32), "nvfp4"),
    _moe_norm_quant("nvfp4_a4", 7, (4, 2, 48, 16), "nvfp4", n=2, keep=1),
    _moe_norm_quant("fp8", 7, (5, 3, 48, 32), "fp8"),
    _moe_norm_quant("fp8_block", 7, (3, 2, 256, 128), "fp8_block", keep=1),
    _moe_norm_quant("fp8_block", 1, (4, 2, 128, 128), "fp8_block"),
    _moe_norm_quant("fp8_channel", 7, (4, 2, 64, 48), "fp8_token", keep=1),
    _moe_norm_quant("nvfp4", 3, (4, 2, 64, 32), "fp8", keep=1, dtype=DType.BF16),
)


def _moe_router(
    m: int,
    experts: int,
    k: int,
    top_k: int,
    gate: bool = False,
    weight: DType = DType.F32,
    dtype: DType = DType.F32,
    bench: bool = False,
) -> Case:
    def make(rng: np.random.Generator) -> tuple[Array, ...]:
        x = random_arrays.normal(rng, m, k, dtype=dtype)
        if m > 5:
            x[1], x[5] = 0, np.nan  # a row of ties, a row of NaN
            x[2] *= np.asarray(60.0, x.dtype)  # logits far apart: exponentials underflow
        w = random_arrays.normal(rng, experts, k, scale=2 * k**-0.5, dtype=weight)
        return (
            (x, w, random_arrays.normal(rng, 1, k, scale=k**-0.5, dtype=weight)) if gate else (x, w)
        )

    ignore = random_arrays.ignore_rows(5) if m > 5 else None
    label = f"{m} rows, {top_k} of {experts}, {k} wide {weight} {dtype}{' gate' if gate else ''}"
    # weights are at most 1 and an error of 1e-6 in a logit moves them by as much
    return Case(label, {"top_k": top_k}, make, 1e-4, 1e-6, bench=bench, ignore=ignore)


def _ties(rng: np.random.Generator) -> tuple[Array, ...]:
    """Small integers: equal logits are exactly equal in every precision."""
    x = rng.integers(-1, 2, (9, 8)).astype(np.float32)
    return x, rng.integers(-1, 2, (12, 8)).astype(np.float32)


MOE_ROUTER = (
    _moe_router(1, 16, 64, 4),
    _moe_router(1, 16, 64, 4, gate=True),
    _moe_router(7, 8, 37, 1),
    _moe_router(7, 6, 48, 6, gate=True),
    _moe_router(65, 64, 256, 8, gate=True, weight=DType.BF16, bench=True),
    _moe_router(3, 8, 64, 3, weight=DType.BF16, dtype=DType.BF16),
    _moe_router(130, 16, 192, 4, gate=True, weight=DType.BF16, dtype=DType.BF16),
    Case("ties go to the lowest index", {"top_k": 5}, _ties),
)


def _shared_gate(
    rows: int, k: int, weight: DType, dtype: DType = DType.F32, bench: bool = False
) -> Case:
    def make(rng: np.random.Generator) -> tuple[Array, ...]:
        three = [random_arrays.normal(rng, rows, k, dtype=dtype) for _ in range(3)]
        return (*three, random_arrays.normal(rng, 1, k, dtype=weight))

    rtol, atol = (1e-5, 1e-5) if dtype is DType.F32 else (1e-2, 1e-2)
    return Case(f"{rows}x{k} {weight} {dtype}", {}, make, rtol=rtol, atol=atol, bench=bench)


SHARED_GATE = (
    _shared_gate(1, 64, DType.F32),
    _shared_gate(3, 37, DType.BF16),
    _shared_gate(65, 256, DType.BF16, bench=True),
    _shared_gate(3, 64, DType.BF16, DType.BF16),
)


CASES = {"moe_norm_quant": MOE_NORM_QUANT, "moe_router": MOE_ROUTER, "shared_gate": SHARED_GATE}
