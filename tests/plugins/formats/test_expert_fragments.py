"""Where each element of a packed expert weight is stored: `expert_layout`'s index, spelled out
element by element, and what the bits there decode to."""

import ml_dtypes
import numpy as np
import pytest

from spark_engine.plugins.formats import expert_layout as et
from spark_engine.plugins.formats import expert_packs, numpy_codecs
from tests.plugins.linear import unpacking

ROWS, WIDTH = 128, 128  # two panels of 64 rows, two k-slabs of 64 k


def test_a_lane_finds_its_fp8_fragment() -> None:
    """Lane 4g + t of an m16: of rows g and g + 8 k 16t … 16t + 7, then k 16t + 8 … 16t + 15."""
    raw = np.random.default_rng(0).integers(0, 256, (ROWS, WIDTH), dtype=np.uint8)
    packed = et.pack_fp8(raw).reshape(2, 2, 4, 2, 8, 4, 2, 8)
    for panel, slab, m16, p, g, t, r, i in np.ndindex(packed.shape):
        row, k = 64 * panel + 16 * m16 + 8 * r + g, 64 * slab + 16 * t + 8 * p + i
        assert packed[panel, slab, m16, p, g, t, r, i] == raw[row, k]


def test_a_lane_finds_its_bf16_fragment() -> None:
    """Of each step of 16 k a lane's registers: two k of rows g and g + 8, the next two of both."""
    rows = np.arange(ROWS * WIDTH, dtype=np.uint16).reshape(ROWS, WIDTH)
    packed = et.pack_dense(rows.view(np.uint8)).view(np.uint16).reshape(2, 2, 4, 4, 8, 4, 2, 2, 2)
    for panel, slab, m16, step, g, t, h, r, i in np.ndindex(packed.shape):
        row, k = 64 * panel + 16 * m16 + 8 * r + g, 64 * slab + 16 * t + 4 * step + 2 * h + i
        assert packed[panel, slab, m16, step, g, t, h, r, i] == rows[row, k]


def test_a_lane_finds_and_decodes_its_fp4_codes() -> None:
    """Word 2p + r: row g + 8r, k 16t + 8p … + 7; pair j by its rotation becomes bf16 · 2^-126."""
    codes = np.random.default_rng(1).integers(0, 256, (ROWS, WIDTH // 2), dtype=np.uint8)
    values = numpy_codecs.e2m1_decode(numpy_codecs.unpack(codes)).astype(np.float64)
    words = et.pack_codes(codes).view(np.uint32).reshape(2, 2, 4, 8, 4, 2, 2)
    for j, i, got in unpacking.rotated(words):
        for panel, slab, m16, g, t, p, r in np.ndindex(words.shape):
            row, k = 64 * panel + 16 * m16 + 8 * r + g, 64 * slab + 16 * t + 8 * p + 2 * j + i
            assert got[panel, slab, m16, g, t, p, r] == values[row, k]


def test_a_lane_finds_and_decodes_its_scales() -> None:
    """Of two m16 tiles: rows g, g + 8 of either, block t of a k-slab; the bits as bf16 · 2^119."""
    rng = np.random.default_rng(2)
    scales = rng.integers(0, 0x7F, (ROWS, WIDTH // 16), dtype=np.uint8)
    packed = et.pack_scales(scales).reshape(2, 2, 2, 8, 4, 2, 2)
    wide = ((packed.astype(np.uint32) << 4 | 0x7000) << 16).astype(np.uint32).view(np.float32)
    values = scales.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    for panel, slab, half, g, t, m16, r in np.ndindex(packed.shape):
        row, block = 64 * panel + 32 * half + 16 * m16 + 8 * r + g, 4 * slab + t
        at = (panel, slab, half, g, t, m16, r)
        if values[row, block] == 0:
            assert packed[at] == 0
        else:
            assert float(wide[at]) * 2.0**-119 == values[row, block]


def test_gate_and_up_rows_are_interleaved_by_eights() -> None:
    """40 gate rows (0 …) and 40 up rows (100 …), filled up to 64 of each with zeros."""
    rows = np.concatenate([np.arange(1, 41), np.arange(101, 141)]).astype(np.uint8)[:, None]
    got = et.arranged(rows, up=True)[:, 0]
    assert len(got) == et.rows_of(80, up=True) == 128
    assert got[:24].tolist() == [*range(1, 9), *range(101, 109), *range(9, 17)]
    assert got[64:80].tolist() == [*range(33, 41), *range(133, 141)]
    assert not got[80:].any()
    down = et.arranged(rows, up=False)[:, 0]
    assert down[:80].tolist() == rows[:, 0].tolist() and len(down) == 128 and not down[80:].any()


@pytest.mark.parametrize(
    ("kind", "name", "packed"),
    [("nvfp4", "w13", True), ("nvfp4", "w13_scale", True), ("nvfp4", "w13_scale2", False)],
)
def test_each_expert_is_packed_alone(kind: str, name: str, packed: bool) -> None:
    """w13 of NVFP4 by operand: codes and block scales as `up` rows, global scales as they are."""
    rng = np.random.default_rng(3)
    shapes = {"w13": (2, 128, 64), "w13_scale": (2, 128, 8), "w13_scale2": (2, 128)}
    raw = rng.integers(0, 0x7F, shapes[name], dtype=np.uint8)
    given = {
        "w13": raw,
        "w13_scale": raw.view(ml_dtypes.float8_e4m3fn),
        "w13_scale2": raw.astype(np.float32),
    }[name]
    out = expert_packs.PACKS[name].apply({"format": kind}, given)
    if not packed:
        assert out is given
        return
    pack = et.pack_scales if name == "w13_scale" else et.pack_codes
    for one, rows in zip(out, raw, strict=True):
        whole = np.ascontiguousarray(et.arranged(rows, up=True))
        np.testing.assert_array_equal(one, pack(whole))
