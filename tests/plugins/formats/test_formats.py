"""The number formats against their definitions, value by value."""

import numpy as np
import pytest

from spark_engine.plugins.formats import numpy_codecs


def nearest_even_code(x: float) -> int:
    """By definition: the nearest magnitude; of two equally near, the even code."""
    gaps = [abs(abs(x) - float(m)) for m in numpy_codecs.E2M1_MAGNITUDES]
    near = [i for i, gap in enumerate(gaps) if gap == min(gaps)]
    return min(near, key=lambda i: i % 2) + (8 if x < 0 else 0)


def test_e2m1_rounds_to_nearest_even_code_and_saturates() -> None:
    x = np.concatenate([np.arange(-8, 8, 1 / 64), [1e9, -1e9, 1e-30, -1e-30]]).astype(np.float32)
    want = [nearest_even_code(float(v)) for v in x]
    assert numpy_codecs.e2m1_encode(x).tolist() == want


def test_e4m3_saturates_and_keeps_nan() -> None:
    x = np.array([1e9, -1e9, 448, 449, 2**-9, 2**-10, 3 * 2**-11, np.nan], np.float32)
    got = numpy_codecs.e4m3(x).astype(np.float32)
    np.testing.assert_array_equal(got[:-1], [448, -448, 448, 448, 2**-9, 0, 2**-9])
    assert np.isnan(got[-1])


def test_nvfp4_weight_decodes_within_half_a_step() -> None:
    rng = np.random.default_rng(1)
    w = rng.standard_normal((8, 64)).astype(np.float32) * np.exp(rng.standard_normal((8, 1)))
    w[3] = 0
    packed, scale, scale2 = numpy_codecs.nvfp4_weight(w.astype(np.float32))
    assert scale2 == pytest.approx(np.abs(w).max() / 2688, rel=1e-6)
    np.testing.assert_array_equal(scale[3].astype(np.float32), 1)
    amax = np.abs(w).reshape(8, -1, 16).max(-1).repeat(16, -1)
    # half the widest step (1 of 6), and the block scale's own rounding (1/16)
    assert (
        np.abs(numpy_codecs.nvfp4_decode(packed, scale) * scale2 - w) <= amax * (1 / 6 + 1 / 16)
    ).all()


def test_fp8_block_weight_has_one_scale_per_block() -> None:
    w = np.random.default_rng(2).standard_normal((130, 200)).astype(np.float32)
    w[128:, 128:] = 0
    codes, scale = numpy_codecs.fp8_block_weight(w)
    assert scale.shape == (2, 2) and scale[1, 1] == 1
    assert scale[0, 1] == np.abs(w[:128, 128:]).max() / np.float32(448)
    back = codes.astype(np.float32) * numpy_codecs.fp8_block_expand(scale, w.shape)
    np.testing.assert_allclose(back, w, rtol=2**-4, atol=448 * 2**-10 * scale.max())


def test_fp8_weight_of_zeros_has_scale_one() -> None:
    codes, scale = numpy_codecs.fp8_weight(np.zeros((2, 3), np.float32))
    assert scale == 1 and not codes.any()
