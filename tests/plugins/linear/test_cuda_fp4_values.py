"""W4A4 linears by values in bf16, as GPUs without FP4 instructions run them: bits and error.

On a GPU each tactic of both ops is held to float64, and prints its error (`pytest -m gpu -s`).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from spark_engine.kernel import H200
from spark_engine.op import Attrs
from spark_engine.plugins.formats import numpy_codecs
from spark_engine.plugins.registry import REGISTRY
from spark_engine.tensors import Array, DType
from tests.plugins import emulated

if TYPE_CHECKING:
    from tests.plugins.cuda_node import Bench

A4, WIDEN, LINEAR = (REGISTRY[n] for n in ("nvfp4_linear_a4", "nvfp4_widen", "nvfp4_linear"))
BF16: Attrs = {"dtype": "bf16"}
SHAPES = ((3, 2048, 5120), (40, 1040, 17408), (300, 2048, 5120))  # of the 27B, fewer rows of w


def operands(m: int, n: int, k: int) -> tuple[Array, ...]:
    """Rows 1 and 2 are zeros and NaN; block scales of w reach from the least to the largest."""
    rng = np.random.default_rng(m + n + k)
    x, w = (rng.standard_normal((rows, k), dtype=np.float32) for rows in (m, n))
    x[1], x[2] = 0, np.nan
    codes, scales, _ = numpy_codecs.nvfp4_weight(w * np.exp(4 * rng.standard_normal((n, 1))))
    quantised = numpy_codecs.nvfp4_quantise(x, np.float32(0.002))
    return (*quantised, codes, scales, rng.uniform(0.5, 2, n).astype(np.float32))


def test_the_bits_are_those_of_the_op_that_it_replaces() -> None:
    """References sum in float64; so no product may have been rounded."""
    xq, x_scale, *stored = operands(5, 48, 320)
    (want,) = A4.reference({"dtype": "f32"}, (xq, x_scale, *stored))
    (x,) = WIDEN.reference(BF16, (xq, x_scale))
    (got,) = LINEAR.reference({"dtype": "f32"}, (x, *stored))
    np.testing.assert_array_equal(got, want)


def test_every_code_and_scale_is_exact_on_a_kernel(cache: Path) -> None:
    if emulated.COMPILER is None:
        pytest.skip("needs g++")
    scales = np.arange(127, dtype=np.uint8)  # 127 is NaN
    codes = np.asarray([[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]] * 127, np.uint8)
    arrays = codes, scales[:, None].view(DType.F8E4M3.numpy)
    (got,) = emulated.results(WIDEN, "", BF16, arrays, H200, cache)
    values = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    values += [-v for v in values]
    np.testing.assert_array_equal(got.astype(np.float32), arrays[1].astype(np.float32) * values)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_error_is_that_of_rounding_y(bench: Bench, shape: tuple[int, int, int]) -> None:
    """2^-9 at most for a bf16 result, a third of it in the mean of squares."""
    arrays = operands(*shape)
    (x,) = bench.results(WIDEN, arrays[:2]).values()
    wanted = WIDEN.reference(BF16, arrays[:2])[0]  # f32: numpy's bf16 has no NaN that equals NaN
    np.testing.assert_array_equal(x.astype(np.float32), wanted.astype(np.float32))
    (want,) = A4.reference({"dtype": "f32"}, arrays)
    kept = np.arange(shape[0]) != 2
    for op, given in ((LINEAR, (x, *arrays[2:])), (A4, arrays)):
        for tactic, y in bench.results(op, given).items():
            assert np.isnan(y[2].astype(np.float32)).all()
            off = y[kept].astype(np.float64) - want[kept]
            error = np.linalg.norm(off) / np.linalg.norm(want[kept])
            print(f"{op.name}, {tactic}, {shape}: {error:.2e}")
            assert 0 < error < 2.5e-3, (op.name, tactic)
