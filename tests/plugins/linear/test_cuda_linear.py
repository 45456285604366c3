"""The streaming linear kernels: packs, tiles, compilation at the served shapes, and the GPU.

Knows `linear` and the linears of fp8, fp8_block, nvfp4 and int4; the ops' cases run in
`test_cuda_ops`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np
import pytest

from spark_engine.errors import GraphError
from spark_engine.kernel import H200, TARGETS, Target
from spark_engine.plugins.formats import expert_layout as et
from spark_engine.plugins.formats import int4, numpy_codecs, weight_packing
from spark_engine.plugins.formats import linear_layout as wt
from spark_engine.plugins.formats.registry import FORMATS
from spark_engine.plugins.kernels.gemm import (
    linear_bf16_kernels,
    linear_fp8_block_kernels,
    linear_fp8_kernels,
    linear_nvfp4_kernels,
    skinny_gemm,
)
from spark_engine.plugins.kernels.gemm.stream_k import stream_k_gemm as sg
from spark_engine.plugins.registry import REGISTRY
from spark_engine.tensors import Array, DType, TensorSpec
from tests.plugins.linear import unpacking
from tests.plugins.packed_node import linear_node

if TYPE_CHECKING:
    from tests.plugins.cuda_node import Bench

BF16 = np.dtype(ml_dtypes.bfloat16)
FORMS = {
    "linear": linear_bf16_kernels.FORM,
    "fp8_linear": linear_fp8_kernels.FORM,
    "fp8_block_linear": linear_fp8_block_kernels.FORM,
    "nvfp4_linear": linear_nvfp4_kernels.FORM,
    "nvfp4_linear_a8": linear_nvfp4_kernels.A8,
    "int4_linear": linear_nvfp4_kernels.INT4,
}
OPS = {name: REGISTRY[name] for name in FORMS}
# The layers of the 27B and of the 35B, of NVIDIA's and of Qwen's checkpoints: op, N, K.
LAYERS = (
    ("fp8_linear", 16384, 5120),
    ("fp8_linear", 5120, 6144),
    ("fp8_linear", 14336, 5120),
    ("linear", 96, 5120),
    ("fp8_block_linear", 16384, 5120),
    ("fp8_block_linear", 34816, 5120),
    ("fp8_block_linear", 5120, 17408),
    ("fp8_block_linear", 2048, 4096),
    ("nvfp4_linear", 34816, 5120),
    ("nvfp4_linear", 5120, 17408),
    ("nvfp4_linear", 248320, 5120),
    ("fp8_linear", 12288, 2048),
    ("fp8_linear", 2048, 4096),
    ("fp8_linear", 9216, 2048),
    ("linear", 64, 2048),
    ("nvfp4_linear", 248320, 2048),
    ("nvfp4_linear_a8", 34816, 5120),
    ("nvfp4_linear_a8", 5120, 17408),
    ("int4_linear", 16384, 5120),
    ("int4_linear", 34816, 5120),
    ("int4_linear", 5120, 17408),
    ("int4_linear", 12288, 3072),  # the 122B's
)


def skinny(op: str) -> bool:
    """Whether few rows have the skinny kernel."""
    return any(t.name == "skinny" for t in OPS[op].cuda.tactics)


BUCKETS = (1, 8, 16, 32, 64, 128, 256)


# ---- packs -------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [8, 16, 96, 250, 256, 1040])
@pytest.mark.parametrize("k", [16, 80, 256, 640])
def test_packs_are_undone_exactly(n: int, k: int) -> None:
    raw = np.random.default_rng(n + k).integers(0, 256, (n, k), dtype=np.uint8)
    np.testing.assert_array_equal(unpacking.unpack_bytes(wt.pack_bytes(raw), k)[:n], raw)
    np.testing.assert_array_equal(unpacking.unpack_fp4(wt.pack_fp4(raw), k)[:n], raw)
    scales = np.minimum(raw & 0x7F, 0x7E)  # 0x7f is NaN
    np.testing.assert_array_equal(unpacking.unpack_scales(wt.pack_scales(scales), k)[:n], scales)


@pytest.mark.parametrize("n", [1, 8, 16, 17, 250])
@pytest.mark.parametrize("op", OPS)
def test_ragged_rows_keep_their_number_in_the_shape(op: str, n: int) -> None:
    arrays = operands(op, 3, n, 96 if op == "int4_linear" else 80)
    given = dict(zip(OPS[op].names({}, len(arrays)), arrays, strict=True))
    for name, pack in OPS[op].cuda.packs.items():
        spec = TensorSpec(name, DType.of(given[name].dtype), given[name].shape)
        packed = pack.apply({}, given[name])
        assert packed.shape == pack.infer({}, spec).dims and len(packed) == n
        elements = weight_packing.padded(n, wt.M16) * given[name].size // n
        assert packed.nbytes >= elements * packed.itemsize


def test_a_lane_finds_its_fragment() -> None:
    """Element (row g + 8r, k 16h + 2t + i) of a bf16 tile is in register 2h + r of lane 4g + t."""
    rows = np.arange(16 * 64, dtype=np.uint16).reshape(16, 64)
    packed = wt.pack_bytes(rows.view(np.uint8)).view(np.uint16).reshape(4, 8, 4, 2, 2, 2)
    for step, g, t, h, r, i in np.ndindex(packed.shape):
        k = 16 * step + 8 * h + 2 * t + i
        assert packed[step, g, t, h, r, i] == rows[g + 8 * r, k]


def test_codes_decode_by_rotations_and_masks() -> None:
    """As the kernel does it: each pair of a word becomes bf16 · 2^-126."""
    codes = np.random.default_rng(0).integers(0, 256, (16, 32), dtype=np.uint8)
    want = numpy_codecs.e2m1_decode(numpy_codecs.unpack(codes)).reshape(2, 8, 2, 2, 2, 4, 2)
    words = wt.pack_fp4(codes).view(np.uint32).reshape(8, 4, 2, 2)  # g, t, p, r
    for j, i, got in unpacking.rotated(words):
        # want: r, g, p, odd step, half of k, t, i
        expect = want[:, :, :, j // 2, j % 2, :, i].transpose(1, 3, 2, 0)
        np.testing.assert_array_equal(got, expect)


def test_int4_decodes_as_the_kernel_does_it() -> None:
    """Each pair of a word, less the zero point and times the scale of its 32 columns, is w."""
    rng = np.random.default_rng(4)
    codes = rng.integers(0, 256, (16, 32), dtype=np.uint8)
    scale = (rng.uniform(2**-15, 1, (16, 2)) * rng.choice([-1, 1], (16, 2))).astype(BF16)
    zero = rng.integers(0, 16, (16, 2))
    # Scale and zero, as a row's word has them: r, g -> two groups.
    pairs = int4.paired(scale.astype(np.float32), zero.astype(np.float32))
    pairs[:, 0::2] = scale
    halves = weight_packing.int4_halves(pairs)
    words = wt.pack_int4_scales(halves).view(np.uint32).reshape(8, 2)  # g, r
    found = np.stack([words & 0xFFFF, words >> 16], -1).astype(np.uint32)  # g, r, group
    factor = ((found & 0x87FF | 0x7000) << 16).astype(np.uint32).view(np.float32) * 2.0**-112
    np.testing.assert_array_equal(factor, scale.reshape(2, 8, 2).swapaxes(0, 1))
    points = (found >> 11 & 15).astype(np.float64)
    np.testing.assert_array_equal(points, zero.reshape(2, 8, 2).swapaxes(0, 1))
    want = numpy_codecs.unpack(codes).astype(np.float64) - zero.repeat(32, 1)
    want = want.reshape(2, 8, 2, 2, 2, 4, 2)  # r, g, p, odd step, half of k, t, i
    packed = wt.pack_fp4(codes, weight_packing.INT4_WORDS).view(np.uint32).reshape(8, 4, 2, 2)
    for j in range(4):
        turned = packed << np.uint32(8) | packed >> np.uint32(24) if j >= 2 else packed
        for i in range(2):
            half = turned >> np.uint32(16 * i) & np.uint32(0xFFFF)
            bits = half & 0x8070 | 8 if j % 2 else half & 15
            value = (bits << np.uint32(16)).view(np.float32).astype(np.float64) * 2.0**133
            value = (value + 120) / 16 if j % 2 else value
            got = value - points.transpose(0, 2, 1)[:, None]  # g, t, p, r
            expect = want[:, :, :, j // 2, j % 2, :, i].transpose(1, 3, 2, 0)
            np.testing.assert_array_equal(got, expect)


@pytest.mark.parametrize(("scale", "zero"), [(1.5, 8), (np.nan, 8), (0.5, 16), (0.5, 7.5)])
def test_int4_scales_that_have_no_packed_form_are_refused(scale: float, zero: float) -> None:
    with pytest.raises(GraphError, match="make them by `paired`"):
        weight_packing.int4_halves(np.array([[scale, zero]], np.float32))


def test_scales_decode_by_one_addition() -> None:
    """A stored byte with 224 added to its exponent is the scale · 2^119 in bf16."""
    scales = np.arange(1, 0x7F, dtype=np.uint8)
    stored = weight_packing.WIDE[scales].astype(np.uint32)
    got = ((stored << 4 | 0x7000) << 16).astype(np.uint32).view(np.float32).astype(np.float64)
    want = scales.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    np.testing.assert_array_equal(got * 2.0**-119, want)


@pytest.mark.parametrize("scale", [0x7F, 0x81, 0xFF])
def test_scales_that_have_no_packed_form_are_refused(scale: int) -> None:
    for pack in (wt.pack_scales, et.pack_scales):
        scales = np.full((64, 4), 0x7E, np.uint8)
        pack(scales)
        scales[63, 3] = scale
        with pytest.raises(GraphError, match="negative or NaN"):
            pack(scales)


# ---- tiles -------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", TARGETS.values(), ids=lambda t: t.name)
@pytest.mark.parametrize("layer", LAYERS, ids=lambda a: "-".join(map(str, a)))
def test_tiles_fit(layer: tuple[str, int, int], target: Target) -> None:
    op, n, k = layer
    for m in BUCKETS:
        problem, form = sg.Problem(m, n, k), FORMS[op]
        tile = sg.choose(problem, form, target)
        launch = sg.plan(linear_node(OPS[op], m, n, k, target), tile, problem, form).launches[0]
        assert launch.shared + 1024 <= target.shared_bytes
        assert tile.stages >= (3 if tile.wgmma else 2)
        assert launch.grid[0] <= target.sms


@pytest.mark.parametrize("layer", LAYERS, ids=lambda a: "-".join(map(str, a)))
def test_the_cut_does_not_depend_on_the_batch(layer: tuple[str, int, int]) -> None:
    op, n, k = layer
    cuts = set()
    for m in BUCKETS[:-1]:
        problem, form = sg.Problem(m, n, k), FORMS[op]
        tile = sg.choose(problem, form, H200)
        launch = sg.plan(linear_node(OPS[op], m, n, k, H200), tile, problem, form).launches[0]
        cuts.add((tile.block_n, dict(launch.defines)["CUT"], launch.grid))
    assert len(cuts) == 1


@pytest.mark.parametrize("target", TARGETS.values(), ids=lambda t: t.name)
@pytest.mark.parametrize("layer", [a for a in LAYERS if skinny(a[0])], ids=str)
def test_skinny_gemms_fit_and_sum_in_one_order(layer: tuple[str, int, int], target: Target) -> None:
    op, n, k = layer
    form, orders, taken = FORMS[op], set(), 0
    for m in (1, 8, 9, 16):
        problem = sg.Problem(m, n, k)
        if skinny_gemm.refuse(problem, form, target) is not None:
            continue
        share = skinny_gemm.choose(problem, form, target)
        node = linear_node(OPS[op], m, n, k, target)
        (launch,) = skinny_gemm.plan(node, share, problem, form).launches
        assert launch.shared + share.static_bytes(problem) <= target.shared_bytes
        blocks = launch.grid[1]
        assert (blocks - 1) * share.each < -(-n // wt.M16) <= blocks * share.each
        assert blocks * share.splits <= target.sms
        assert share.held * share.wn >= share.each and share.stages >= 2
        orders.add((share.splits, share.wk))
        taken += 1
    assert len(orders) <= 1
    assert taken == 4 or not target.large_shared or n * form.weight_bits > 200_000
    assert skinny_gemm.refuse(sg.Problem(17, n, k), form, target) is not None


@pytest.mark.parametrize("layer", [a for a in LAYERS if a[0] == "nvfp4_linear"], ids=str)
def test_pieces_of_decoded_weights_are_nearly_equal(layer: tuple[str, int, int]) -> None:
    op, n, k = layer
    form, problem = FORMS[op], sg.Problem(128, n, k)
    tile = sg.choose(problem, form, H200)
    cut = sg.cut_of(tile.block_n, problem, form, H200)
    cuts = -(-n // tile.block_n) * (k // form.slab) // cut
    assert cut % tile.stage_slabs == 0
    assert -(-cuts // H200.sms) * H200.sms <= 1.03 * cuts


@pytest.mark.parametrize("layer", LAYERS, ids=lambda a: "-".join(map(str, a)))
def test_large_tiles_fit_and_are_for_many_rows(layer: tuple[str, int, int]) -> None:
    op, n, k = layer
    for m in (128, 1024, 8192):
        problem, form = sg.Problem(m, n, k), FORMS[op]
        plan = sg.plan_large(linear_node(OPS[op], m, n, k, H200), problem, form)
        if plan is None:
            assert m == 128 or n < 6000
            continue
        (launch,) = plan.launches
        macros = {name: int(value) for name, value in launch.defines}
        assert m > 128 and launch.grid[0] == H200.sms and not launch.resident
        assert launch.shared + 1024 <= H200.shared_bytes and macros["STAGES"] >= 3
        # A round's tiles fetch no less with half the band, nor with twice.
        weights, rows = macros["BLOCK_N"] * form.weight_bits, macros["BLOCK_M"] * form.x_bytes * 8

        def fetched(band: int, weights: int = weights, rows: int = rows) -> float:
            return band * rows + H200.sms / band * weights

        band = macros["BAND"]
        assert fetched(band) <= min(fetched(band // 2), fetched(2 * band))


def test_int4_costs_what_nvfp4_costs() -> None:
    """It has as many bytes in the same schedule, and no times yet."""
    for m, n, k in ((1, 34816, 5120), (128, 5120, 17408), (2048, 16384, 5120)):
        costs = []
        for name in ("int4_linear", "nvfp4_linear"):
            node = linear_node(OPS[name], m, n, k, H200)
            tactics = OPS[name].cuda.tactics
            specs = tuple(node.specs)
            taken = [t for t in tactics if t.refuse(node.attrs, specs, H200) is None]
            costs.append([t.cost(node.attrs, specs, H200) for t in taken])
        assert costs[0] == costs[1] and costs[0]


# ---- compilation -------------------------------------------------------------------------------


@pytest.mark.kernels
@pytest.mark.parametrize("target", TARGETS.values(), ids=lambda t: t.name)
@pytest.mark.parametrize("op", FORMS)
def test_served_shapes_compile(op: str, target: Target, cache: Path) -> None:
    pytest.importorskip("cuda.bindings", reason="needs the extra `cuda`")
    from spark_engine.builder.native import nvrtc

    form, jobs = FORMS[op], {}
    for name, n, k in LAYERS:
        for m in BUCKETS if name == op else ():
            problem = sg.Problem(m, n, k)
            tile = sg.choose(problem, form, target)
            node = linear_node(OPS[op], m, n, k, target)
            (launch,) = sg.plan(node, tile, problem, form).launches
            jobs[nvrtc.Job(form.source, launch.defines, (op,))] = m
            if skinny(op) and skinny_gemm.refuse(problem, form, target) is None:
                share = skinny_gemm.choose(problem, form, target)
                (launch,) = skinny_gemm.plan(node, share, problem, form).launches
                jobs[nvrtc.Job(form.source, launch.defines, (launch.symbol,))] = m
        many = sg.plan_large(linear_node(OPS[op], 8192, n, k, target), sg.Problem(8192, n, k), form)
        if name == op and many is not None:
            jobs[nvrtc.Job(form.source, many.launches[0].defines, (op,))] = 8192
    for job, m in jobs.items():
        (usage,) = nvrtc.compile(job, target, cache).usage.values()
        # Without wgmma, large tiles of scaled k-slabs keep the stride between tiles in memory.
        spared = 8 if (op, m) == ("fp8_block_linear", 8192) and not target.wgmma else 0
        assert usage.spills <= spared, (m, job.defines, usage)


# ---- on a GPU ----------------------------------------------------------------------------------


def operands(op: str, m: int, n: int, k: int) -> tuple[Array, ...]:
    rng = np.random.default_rng(m + n + k)
    x = rng.standard_normal((m, k), dtype=np.float32)
    if op == "fp8_linear":
        w = numpy_codecs.e4m3(rng.standard_normal((n, k), dtype=np.float32) * 100)
        w_scale = rng.uniform(0.0005, 0.001, n).astype(np.float32)
        return numpy_codecs.e4m3(x * 100), w, np.asarray(0.007, np.float32), w_scale
    if op == "fp8_block_linear":
        w = rng.standard_normal((n, k), dtype=np.float32)
        return *numpy_codecs.fp8_block_quantise(x), *numpy_codecs.fp8_block_weight(w)
    if op == "linear":
        return x.astype(BF16), rng.standard_normal((n, k), dtype=np.float32).astype(BF16)
    codes = rng.integers(0, 256, (n, k // 2), dtype=np.uint8)
    if op == "int4_linear":
        scale = rng.uniform(2**-9, 1, (n, k // 32)).astype(np.float16) * rng.choice([-1, 1])
        zeros = rng.integers(0, 16, (n, k // 32)).astype(np.float32)
        pairs = int4.paired(scale.astype(np.float32), zeros)
        return x.astype(BF16), codes, pairs, rng.uniform(0.5, 2, n).astype(np.float32)
    scales = rng.integers(0, 0x7F, (n, k // 16), dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)
    if op == "nvfp4_linear_a8":
        scales[n // 2 :].view(np.uint8)[:] &= 15  # e4m3 at an eighth of them is subnormal
        x *= np.exp2(rng.integers(-9, 9, (m, 1))).astype(np.float32)
        quantised = FORMATS["nvfp4_a8"].inputs.quantise(x, np.float32(1))
        return *quantised, codes, scales, rng.uniform(0.5, 2, n).astype(np.float32)
    return x.astype(BF16), codes, scales, rng.uniform(0.5, 2, n).astype(np.float32)


def truth(op: str, arrays: tuple[Array, ...], rows: np.ndarray) -> Array:
    """The reference over some of the weight's rows; blocks of 128 rows share their scales."""
    if op == "fp8_block_linear":
        xq, x_scale, w, w_scale = arrays
        blocks = np.unique(rows // 128)
        whole = (blocks[:, None] * 128 + np.arange(128)).ravel()
        whole = whole[whole < len(w)]
        given = (xq, x_scale, w[whole], w_scale[blocks])
        (want,) = OPS[op].reference({"dtype": "f32"}, given)
        return want[:, np.searchsorted(whole, rows)]
    given = tuple(a[rows] if i >= own(op) and a.ndim else a for i, a in enumerate(arrays))
    (want,) = OPS[op].reference({"dtype": "f32"}, given)
    return want


def tokens(op: str, arrays: tuple[Array, ...], m: int) -> tuple[Array, ...]:
    """The operands of the first `m` tokens."""
    return *(a[:m] for a in arrays[: own(op)]), *arrays[own(op) :]


def own(op: str) -> int:
    return 2 if op in ("fp8_block_linear", "nvfp4_linear_a8") else 1


SHAPES = (
    ("linear", 5, 176, 192),
    ("linear", 200, 320, 1088),
    ("linear", 9, 8, 256),
    ("linear", 130, 277, 256),
    ("fp8_linear", 7, 176, 80),
    ("fp8_linear", 7, 173, 80),
    ("fp8_linear", 33, 1040, 1024),
    ("fp8_linear", 129, 272, 256),
    ("fp8_block_linear", 7, 173, 80),
    ("fp8_block_linear", 33, 1040, 1040),
    ("fp8_block_linear", 129, 272, 256),
    ("fp8_block_linear", 16, 2120, 1040),
    ("nvfp4_linear", 1, 64, 128),
    ("nvfp4_linear", 1, 8, 128),
    ("nvfp4_linear", 40, 301, 128),
    ("nvfp4_linear", 7, 176, 80),
    ("nvfp4_linear", 17, 96, 5120),
    ("nvfp4_linear", 100, 4096, 512),
    ("nvfp4_linear", 200, 320, 1088),
    ("nvfp4_linear", 9, 4112, 2064),
    ("nvfp4_linear", 16, 34816, 1040),
    ("nvfp4_linear", 3, 5120, 17392),
    ("fp8_linear", 16, 2120, 1040),
    ("linear", 11, 9216, 336),
    ("linear", 1100, 4112, 336),  # large tiles, from here on
    ("fp8_linear", 2200, 2120, 400),
    ("fp8_linear", 2200, 2117, 256),
    ("fp8_block_linear", 2200, 2120, 400),
    ("fp8_block_linear", 2200, 2117, 256),
    ("fp8_block_linear", 2200, 2120, 1520),  # three rounds of scales a tile
    ("nvfp4_linear", 1100, 4112, 272),
    ("nvfp4_linear", 1100, 4105, 128),
    ("nvfp4_linear", 128, 64, 5120),  # wgmma over few rows of weights
    ("nvfp4_linear_a8", 40, 301, 128),
    ("nvfp4_linear_a8", 17, 96, 5120),
    ("nvfp4_linear_a8", 200, 320, 1152),
    ("nvfp4_linear_a8", 1100, 4105, 384),
    ("nvfp4_linear_a8", 2200, 4112, 256),
    ("int4_linear", 1, 64, 128),
    ("int4_linear", 40, 301, 96),
    ("int4_linear", 7, 176, 160),
    ("int4_linear", 17, 96, 5120),
    ("int4_linear", 200, 320, 1088),
    ("int4_linear", 3, 5120, 17376),
    ("int4_linear", 1100, 4105, 128),
    ("int4_linear", 128, 64, 5120),
)
SERVED = tuple((op, m, n, k) for op, n, k in LAYERS for m in (1, 128) if n * k < 3e8)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES + SERVED, ids=lambda a: "-".join(map(str, a)))
def test_equals_the_reference(bench: Bench, shape: tuple[str, int, int, int]) -> None:
    bench.gpu.wait()  # skipped where there is none: tests above plan these shapes
    op, m, n, k = shape
    arrays = operands(op, m, n, k)
    rows = np.unique(np.r_[np.arange(0, n, max(1, n // 97)), n - 1])
    want = truth(op, arrays, rows)
    for tactic, bits in bench.results(OPS[op], arrays).items():
        got = bits.astype(np.float64)
        assert np.isfinite(got).all(), tactic
        # 2^-8: one bf16 rounding, should a single output outweigh the others.
        assert np.linalg.norm(got[:, rows] - want) <= 2**-8 * np.linalg.norm(want), tactic


@pytest.mark.gpu
@pytest.mark.parametrize("n", [96, 2048])
@pytest.mark.parametrize("op", FORMS)
def test_a_row_does_not_depend_on_its_bucket(bench: Bench, op: str, n: int) -> None:
    arrays = operands(op, 128, n, 2048)
    full: dict[str, Array] = {}
    for m in (8, 16, 128):  # of each tactic the most rows that it takes
        full |= bench.results(OPS[op], tokens(op, arrays, m))
    for m in (1, 8, 9, 16, 32, 64):
        for tactic, part in bench.results(OPS[op], tokens(op, arrays, m)).items():
            rows = min(m, len(full[tactic]))
            assert part[:rows].tobytes() == full[tactic][:rows].tobytes(), (tactic, m)


@pytest.mark.gpu
def test_wgmma_and_mma_give_the_same_bits(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the check that no activation is read before it is there: 30 runs each."""
    chosen = sg.choose
    arrays = operands("nvfp4_linear", 32, 4096, 512)
    results = []
    for wgmma in (True, False):

        def choose(
            p: sg.Problem, form: sg.StreamKForm, t: Target, _: bool, wgmma: bool = wgmma
        ) -> sg.StreamKConfig:
            return sg.fill(replace(chosen(p, form, t), wgmma=wgmma and t.wgmma), p, form, t)

        monkeypatch.setattr(sg, "choose", choose)
        results += [
            bench.results(OPS["nvfp4_linear"], arrays)["stream-k"].tobytes() for _ in range(15)
        ]
    assert len(set(results)) == 1
