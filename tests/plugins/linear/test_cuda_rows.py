"""Linears of 64 rows and more where there is no wgmma, and NVFP4 activations: tiles, keys, the GPU.

An H200 runs them as `REHEARSED`: GB10's tactics and limits compiled for Hopper.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from spark_engine.kernel import GB10, H200, Plan, Target, rehearsal
from spark_engine.op import Attrs, Op
from spark_engine.plugins.formats import numpy_codecs
from spark_engine.plugins.kernels import gemm
from spark_engine.plugins.kernels.gemm.stream_k import stream_k_gemm as sg
from spark_engine.plugins.kernels.gemm.stream_k import stream_k_schedule as order
from spark_engine.plugins.registry import REGISTRY
from spark_engine.tensors import Array, DType, TensorSpec
from tests.plugins import packed_node
from tests.plugins.linear import test_cuda_linear

if TYPE_CHECKING:
    from tests.plugins.cuda_node import Bench

A4 = "nvfp4_linear_a4"
BF16: Attrs = {"dtype": "bf16"}
REHEARSED = rehearsal(GB10, H200)
OPS = {n: REGISTRY[n] for n in ("linear", "fp8_linear", "nvfp4_linear", A4, "int4_linear")}
FORMS = {
    form.symbol: form
    for form in (
        gemm.linear_bf16_kernels.FORM,
        gemm.linear_fp8_kernels.FORM,
        gemm.linear_nvfp4_kernels.FORM,
        gemm.linear_nvfp4_kernels.INT4,
        gemm.linear_nvfp4_a4_kernels.FORM,
    )
}
LAYERS = ((34816, 5120), (5120, 17408), (16384, 5120), (5120, 6144), (12288, 2048), (64, 2048))
DECODE, MORE = (1, 8, 16, 32, 64, 128), (256, 512, 4096)


def made(op: str, m: int, n: int, k: int, target: Target) -> Plan:
    """Stream-K's plan; k counts bytes where activations are NVFP4."""
    problem = sg.Problem(m, n, k // 2 if op == A4 else k)
    node = packed_node.linear_node(OPS[op], m, n, k, target)
    return sg.plan(node, sg.choose(problem, FORMS[op], target), problem, FORMS[op])


def banded(op: str, m: int, n: int, k: int, target: Target) -> Plan | None:
    problem = sg.Problem(m, n, k // 2 if op == A4 else k)
    return sg.plan_large(packed_node.linear_node(OPS[op], m, n, k, target), problem, FORMS[op])


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_tiles_fit_where_wgmma_is_not(op: str, layer: tuple[int, int]) -> None:
    for target in (GB10, REHEARSED):
        for m in DECODE + MORE:
            (launch,) = made(op, m, *layer, target).launches
            macros = {name: int(value) for name, value in launch.defines}
            assert launch.shared + 1024 <= target.shared_bytes and macros["STAGES"] >= 2
            assert macros["WGMMA"] == 0 and launch.block[0] <= 384
            # Eight warps, two a scheduler: one decodes while the other multiplies.
            assert launch.block[0] == 384 or macros["BLOCK_N"] == 64


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_a_row_has_one_reduction_in_every_decode_bucket(op: str, layer: tuple[int, int]) -> None:
    """On GB10 the cut of k does not depend on m up to 128 rows; beyond, whole tiles have a key."""
    keys = {order.reduction_key(made(op, m, *layer, GB10)) for m in DECODE}
    assert len(keys) == 1 and None not in keys
    for m in MORE:
        plan = banded(op, m, *layer, GB10)
        assert plan is None or plan.launches[0].grid[0] == GB10.sms


def test_a_prefill_goes_through_its_tiles_in_bands() -> None:
    """The tiles of one round: their activations, the band's and the weights fit L2 together."""
    for op in OPS:
        plan = banded(op, 4096, 34816, 5120, GB10)
        assert plan is not None
        (launch,) = plan.launches
        macros = {name: int(value) for name, value in launch.defines}
        assert macros["BLOCK_M"] == 128 and macros["WARPS_M"] == 2 and not launch.resident
        row = 5120 * {A4: 0.5625, "fp8_linear": 1}.get(op, 2)
        assert macros["BAND"] * 128 * row <= 12e6, "half of a GB10's L2"
        assert banded(op, 128, 34816, 5120, GB10) is None


def test_on_hopper_the_large_tiles_are_as_they_were() -> None:
    plan = banded("nvfp4_linear", 4096, 34816, 5120, H200)
    assert plan is not None
    macros = dict(plan.launches[0].defines)
    assert macros["WGMMA"] == "1" and macros["BLOCK_M"] == "256" and "WARPS_M" not in macros
    assert dict(made(A4, 128, 34816, 5120, H200).launches[0].defines)["WGMMA"] == "0"


# ---- NVFP4 activations -------------------------------------------------------------------------


def specs(m: int, n: int, k: int) -> tuple[TensorSpec, ...]:
    """Those of nvfp4_linear_a4, packed."""
    u8, f8 = DType.U8, DType.F8E4M3
    given = (
        TensorSpec("xq", u8, (m, k // 2)),
        TensorSpec("x_scale", f8, (m, k // 16)),
        TensorSpec("w", u8, (n, k // 2)),
        TensorSpec("w_scale", f8, (n, k // 16)),
        TensorSpec("alpha", DType.F32, (n,)),
    )
    return packed_node.packed_specs(OPS[A4], BF16, given)


def cheapest(given: tuple[TensorSpec, ...], target: Target) -> str:
    able = [t for t in OPS[A4].cuda.tactics if t.refuse(BF16, given, target) is None]
    return min(able, key=lambda t: t.cost(BF16, given, target)).name


def test_few_rows_have_their_kernel_and_many_do_not() -> None:
    assert cheapest(specs(1, 5120, 6144), GB10) == "m16 tiles"
    for m in (64, 128, 512):
        assert cheapest(specs(m, 5120, 6144), GB10) != "m16 tiles"
    assert cheapest(specs(8192, 34816, 5120), GB10) == "whole tiles"


def test_k_that_is_no_whole_slabs_is_left_to_m16_tiles() -> None:
    given = specs(128, 144, 624)
    m16, stream, whole = OPS[A4].cuda.tactics
    assert m16.refuse(BF16, given, GB10) is None
    for tactic in (stream, whole):
        assert "k is 624; scales are copied for 256" in (tactic.refuse(BF16, given, GB10) or "")
    ragged = specs(128, 130, 256)
    assert all("130x256" in (t.refuse(BF16, ragged, GB10) or "") for t in (m16, stream, whole))


def test_scales_count_among_the_bytes() -> None:
    form = FORMS[A4]
    tile = sg.choose(sg.Problem(128, 5120, 3072), form, GB10)
    assert tile.stage_bytes(form) == 128 * (128 + 16) + 8 * (2048 + 256)
    moved = sg.bytes_moved(sg.Problem(128, 5120, 3072), form, "bf16")
    assert moved == (5120 + 128) * (3072 + 384) + 128 * 5120 * 2


# ---- compilation -------------------------------------------------------------------------------


@pytest.mark.kernels
@pytest.mark.parametrize("target", [GB10, REHEARSED], ids=lambda t: t.name)
@pytest.mark.parametrize("op", OPS)
def test_128_rows_compile_without_spills(op: str, target: Target, cache: Path) -> None:
    pytest.importorskip("cuda.bindings", reason="needs the extra `cuda`")
    from spark_engine.builder.native import nvrtc

    for m in (128, 4096) if op == A4 and target is GB10 else (128,):
        plan = banded(op, m, 34816, 5120, target) or made(op, m, 34816, 5120, target)
        (launch,) = plan.launches
        job = nvrtc.Job(FORMS[op].source, launch.defines, (op,))
        usage = nvrtc.compile(job, target, cache).usage[op]
        assert usage.spills == 0 and usage.stack == 0, (m, usage)


# ---- on a GPU ----------------------------------------------------------------------------------


def operands(op: str, m: int, n: int, k: int) -> tuple[Array, ...]:
    if op != A4:
        return test_cuda_linear.operands(op, m, n, k)
    rng = np.random.default_rng(m + n + k)
    x, w = (rng.standard_normal((rows, k), dtype=np.float32) for rows in (m, n))
    alpha = rng.uniform(0.5, 2, n).astype(np.float32)
    return (
        *numpy_codecs.nvfp4_quantise(x, np.float32(0.002)),
        *numpy_codecs.nvfp4_weight(w)[:2],
        alpha,
    )


def run(bench: Bench, op: Op, arrays: tuple[Array, ...]) -> dict[str, Array]:
    """The result of each tactic by its name, as a target without wgmma runs it."""
    target = REHEARSED if bench.target.wgmma else bench.target
    return type(bench)(bench.gpu, target, bench._cache).results(op, arrays)


SHAPES = (
    (7, 1040, 5120),
    (65, 128, 256),  # one column group of the second half of the tokens
    (97, 272, 1024),
    (128, 5120, 512),
    (200, 640, 2048),
    (512, 1040, 1024),
    (1100, 1296, 512),  # bands, the last of them short
)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("op", "shape"), [(A4, (130, 272, 2064)), *itertools.product(OPS, SHAPES)], ids=str
)
def test_equals_the_reference(bench: Bench, op: str, shape: tuple[int, int, int]) -> None:
    arrays = operands(op, *shape)
    (want,) = OPS[op].reference({"dtype": "f32"}, arrays)
    found = run(bench, OPS[op], arrays)
    assert ({"m16 tiles"} if shape[2] % 256 else {"stream-k", "whole tiles"}) & set(found)
    for tactic, bits in found.items():
        got = bits.astype(np.float64)
        assert np.isfinite(got).all(), tactic
        assert np.linalg.norm(got - want) <= 2**-8 * np.linalg.norm(want), tactic


@pytest.mark.gpu
@pytest.mark.parametrize("op", OPS)
def test_a_row_does_not_depend_on_its_bucket(bench: Bench, op: str) -> None:
    """Up to 128 rows for every tactic, beyond for whole tiles, which have a key there too."""
    arrays = operands(op, 512, 1040, 2048)
    many = 2 if op == A4 else 1  # operands with a row a token
    found = run(bench, OPS[op], arrays)
    full = found.get("whole tiles", found["stream-k"])  # refused where stream-K cuts no tile
    most = run(bench, OPS[op], (*(a[:128] for a in arrays[:many]), *arrays[many:]))
    for m in (1, 8, 16, 32, 64, 96, 128, 256):
        for tactic, part in run(
            bench, OPS[op], (*(a[:m] for a in arrays[:many]), *arrays[many:])
        ).items():
            if tactic == "whole tiles":
                assert part.tobytes() == full[:m].tobytes(), m
            elif tactic in most and m <= 128:
                assert part.tobytes() == most[tactic][:m].tobytes(), (tactic, m)


@pytest.mark.gpu
@pytest.mark.parametrize("op", ["linear", "nvfp4_linear"])
def test_tokens_shared_by_two_warps_give_the_bits_of_one(
    bench: Bench, op: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays, chosen = operands(op, 128, 640, 2048), sg.choose
    results = [run(bench, OPS[op], arrays)["stream-k"].tobytes() for _ in range(5)]

    def choose(p: sg.Problem, form: sg.StreamKForm, t: Target, exact: bool) -> sg.StreamKConfig:
        return sg.fill(replace(chosen(p, form, t), warp_tiles=1, warps_m=1), p, form, t)

    monkeypatch.setattr(sg, "choose", choose)
    results += [run(bench, OPS[op], arrays)["stream-k"].tobytes() for _ in range(5)]
    assert len(set(results)) == 1
