"""W4A4 linears by m16 tiles: packs, and no spills at the served shapes.

On the GPU they run in `test_cuda_ops` and `test_cuda_rows`.
"""

from pathlib import Path

import numpy as np
import pytest

from spark_engine.kernel import TARGETS, Target
from spark_engine.plugins.kernels.gemm.m16_gemm import plan, refuse
from spark_engine.plugins.registry import REGISTRY
from spark_engine.tensors import Array
from tests.plugins.packed_node import linear_node

OP = REGISTRY["nvfp4_linear_a4"]


def packed(name: str, array: Array) -> Array:
    result = OP.cuda.packs[name].apply({}, array)
    assert result.dtype == array.dtype
    return result.view(np.uint8)


def test_a_lane_finds_its_fp4_fragment_and_scales() -> None:
    """Lane 4g + t, register 2h + r: row g + 8r, codes 32h + 8t … + 7; scales by (g, r)."""
    rng = np.random.default_rng(0)
    raw = rng.integers(0, 256, (32, 104), dtype=np.uint8)
    wide = np.pad(raw, ((0, 0), (0, 24)))
    found = packed("w", raw).reshape(2, 4, 8, 4, 2, 2, 4)
    for m16, step, g, t, h, r in np.ndindex(*found.shape[:-1]):
        at = 32 * step + 16 * h + 4 * t
        np.testing.assert_array_equal(
            found[m16, step, g, t, h, r], wide[16 * m16 + g + 8 * r, at : at + 4]
        )
    raw = rng.integers(0, 127, (32, 13), dtype=np.uint8)
    wide = np.pad(raw, ((0, 0), (0, 3)))
    found = packed("w_scale", raw).reshape(2, 8, 2, 2, 2, 4)
    for m16, g, p, r, high in np.ndindex(*found.shape[:-1]):
        row, step = 16 * m16 + g + 8 * r, 2 * high + p
        np.testing.assert_array_equal(found[m16, g, p, r, high], wide[row, 4 * step : 4 * step + 4])


def test_few_rows_find_an_m16_tile_in_its_panel() -> None:
    """As A4::weights counts: panels of 16 m16 tiles, in a panel k-slab by k-slab."""
    raw = np.random.default_rng(0).integers(0, 127, (304, 48), dtype=np.uint8)
    flat, tiles, slabs = packed("w_scale", raw).reshape(-1, 8, 2, 2, 2, 4), 19, 3
    for m16, slab in np.ndindex(tiles, slabs):
        panel = m16 // 16 * 16
        at = panel * slabs + slab * min(16, tiles - panel) + m16 - panel
        want = raw[16 * m16 + 5 + 8, 16 * slab + 12 : 16 * slab + 16]
        np.testing.assert_array_equal(flat[at, 5, 1, 1, 1], want)


def test_ragged_weights_are_refused_and_left_alone() -> None:
    assert "130x48" in (refuse(130, 48) or "")
    assert refuse(144, 1232) is None
    raw = np.zeros((130, 48), np.uint8)
    assert packed("w", raw).shape == (130, 48)


@pytest.mark.kernels
@pytest.mark.parametrize("target", TARGETS.values(), ids=lambda t: t.name)
def test_no_tile_spills(target: Target, cache: Path) -> None:
    pytest.importorskip("cuda.bindings", reason="needs the extra `cuda`")
    from spark_engine.builder.native import nvrtc
    from spark_engine.plugins.kernels.gemm.linear_nvfp4_a4_kernels import FEW as form

    for m in form.tiles:
        (launch,) = plan(linear_node(OP, m, 5120, 6144, target), form).launches
        job = nvrtc.Job(OP.cuda.tactics[0].source, launch.defines, (form.symbol,))
        usage = nvrtc.compile(job, target, cache).usage[form.symbol]
        assert usage.spills == 0 and usage.shared <= 48 * 1024, (m, usage)
