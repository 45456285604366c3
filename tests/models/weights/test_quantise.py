"""Matrices quantised at build, against the definitions value by value."""

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from spark_engine.errors import CheckpointError, GraphError
from spark_engine.models.checkpoint.quant_schemes import Scheme
from spark_engine.models.weights import quantise
from spark_engine.models.weights.quantise import quantised_parts
from spark_engine.models.weights.recipes import Recipe, source
from spark_engine.tensors import Array, DType

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
E4M3 = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)  # 0 … 448
SHAPES = [(1, 16), (16, 128), (128, 256), (130, 272), (257, 144), (3, 130, 48), (2, 5, 16)]


class One:
    def __init__(self, value: Array) -> None:
        self.value = value

    def read(self, name: str) -> Array:
        return self.value


def _parts(value: Array, scheme: Scheme) -> dict[str, Array]:
    recipes = quantised_parts(_source(value), scheme)
    return {name: recipe.evaluate(One(value)) for name, recipe in recipes.items()}


def _source(value: Array) -> Recipe:
    return source("w", DType.of(value.dtype), value.shape)


def _drawn(shape: tuple[int, ...], dtype: DType = DType.BF16) -> Array:
    """Blocks of very different sizes, some of zeros, and a few large values."""
    rng = np.random.default_rng(sum(shape))
    wide = rng.standard_normal(shape) * 10.0 ** rng.integers(-4, 2, (*shape[:-1], 1))
    wide[..., : shape[-1] // 16] = 0
    wide[rng.random(shape) < 0.001] *= 50
    return wide.astype(dtype.numpy)


def _nearest(value: float, grid: NDArray[np.float64]) -> float:
    """Of a symmetric grid: to nearest, ties to the even entry, beyond the end to the end."""
    distance = np.abs(grid - abs(value))
    best = [i for i in range(len(grid)) if distance[i] == distance.min()]
    return float(np.copysign(grid[best[0] if len(best) == 1 else best[best[0] % 2]], value))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [DType.BF16, DType.F16, DType.F32])
def test_fp8_blocks(shape: tuple[int, ...], dtype: DType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantise, "AT_ONCE", 128 * 128)  # several walks of rows
    w = _drawn(shape, dtype)
    made = _parts(w, Scheme.FP8_BLOCK)
    flat = w.astype(np.float32).reshape(-1, *shape[-2:])
    codes, scales = (made[n].reshape(len(flat), *made[n].shape[-2:]) for n in made)
    assert codes.dtype == DType.F8E4M3.numpy and scales.dtype == np.float32
    for one, code, scale in zip(flat, codes.astype(np.float64), scales, strict=True):
        for i in range(0, one.shape[0], 128):
            for j in range(0, one.shape[1], 128):
                block, s = one[i : i + 128, j : j + 128], scale[i // 128, j // 128]
                assert s == (np.abs(block).max() / np.float32(448) or 1)
                got = code[i : i + 128, j : j + 128]
                step = np.maximum(np.abs(got) / 8, 2.0**-9)  # of the binade, at most
                assert (np.abs(got - (block / s).astype(np.float64)) <= step / 2).all()
                for at in [(0, 0), (-1, -1), np.unravel_index(np.abs(block).argmax(), block.shape)]:
                    assert got[at] == _nearest(float(block[at] / s), E4M3)


@pytest.mark.parametrize("shape", SHAPES)
def test_nvfp4(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every scale and code; where a block's scale is rounded down, a value may exceed 6."""
    monkeypatch.setattr(quantise, "AT_ONCE", 128 * 64)
    w = _drawn(shape)
    made = _parts(w, Scheme.NVFP4)
    flat = w.astype(np.float32).reshape(-1, *shape[-2:])
    codes = made["weight"].reshape(len(flat), shape[-2], -1)
    scales = made["weight_scale"].reshape(len(flat), shape[-2], -1).astype(np.float64)
    wholes = made["w_scale2"].reshape(len(flat), shape[-2])
    assert (codes.dtype, wholes.dtype) == (np.uint8, np.float32)
    for one, code, scale, whole in zip(flat, codes, scales, wholes, strict=True):
        want = np.abs(one).max() / np.float32(6 * 448)
        assert (whole == want).all()
        values = np.stack([code & 15, code >> 4], axis=-1).reshape(one.shape)
        signed = np.where(values & 8, -1, 1) * E2M1[values & 7]
        for row in range(len(one)):
            for j in range(0, one.shape[1], 16):
                block, s = one[row, j : j + 16], scale[row, j // 16]
                raw = np.abs(block).max() / (np.float32(6) * want)
                assert s == _nearest(float(np.clip(raw or 1, 2.0**-9, 448)), E4M3)
                exact = (block / (np.float32(s) * want)).astype(np.float64)
                got = signed[row, j : j + 16]
                assert got.tolist() == [_nearest(float(x), E2M1) for x in exact]
                half = np.select([np.abs(exact) <= 2, np.abs(exact) <= 4], [0.25, 0.5], 1.0)
                held = s >= 2.0**-6  # below that scales have fewer digits
                assert not held or (np.abs(got - exact) <= half).all()


@pytest.mark.parametrize("scheme", [Scheme.FP8_BLOCK, Scheme.NVFP4])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_is_refused(scheme: Scheme, bad: float) -> None:
    w = _drawn((4, 32)).astype(np.float32)
    w[3, 5] = bad
    for name, recipe in quantised_parts(_source(w), scheme).items():
        with pytest.raises(CheckpointError, match="w holds a number that is not finite"):
            print(name, recipe.evaluate(One(w)))


def test_a_matrix_of_zeros() -> None:
    w = np.zeros((4, 32), DType.BF16.numpy)
    fp8, fp4 = _parts(w, Scheme.FP8_BLOCK), _parts(w, Scheme.NVFP4)
    assert not fp8["weight"].view(np.uint8).any() and (fp8["weight_scale"] == 1).all()
    assert not fp4["weight"].any() and (fp4["w_scale2"] == 1).all()


def test_what_is_not_made() -> None:
    with pytest.raises(CheckpointError, match="w: 24 columns do not split"):
        quantised_parts(_source(np.zeros((4, 24), np.float32)), Scheme.NVFP4)
    with pytest.raises(GraphError, match="quantised to fp8 at build"):
        quantised_parts(_source(np.zeros((4, 32), np.float32)), Scheme.FP8)
