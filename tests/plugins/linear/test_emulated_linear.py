"""Linear layers of FP8 blocks, and of NVFP4 with FP8 activations, on the host, thread by thread,
whenever copies arrive."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from spark_engine.kernel import GB10, H200, Target
from spark_engine.op import Attrs
from spark_engine.plugins.kernels.gemm.stream_k import stream_k_gemm
from tests.plugins import cuda_node, emulated
from tests.plugins.linear import test_cuda_linear

pytestmark = pytest.mark.skipif(emulated.COMPILER is None, reason="needs g++")
A8 = "nvfp4_linear_a8"
BROKEN = 2  # the token that is NaN
# Tactic, dtype, rows, N, K: edges of m16 tiles, of blocks of 128, of k-slabs; tiles cut in two and
# in three (stream-K), whole, and large ones in bands.
CASES = (
    ("skinny", "bf16", 7, 173, 80),
    ("skinny", "bf16", 16, 304, 1040),
    ("stream-k", "bf16", 5, 173, 208),
    ("stream-k", "bf16", 33, 400, 656),
    ("stream-k", "bf16", 129, 272, 256),
    ("stream-k", "f32", 90, 400, 400),
    ("whole tiles", "bf16", 40, 656, 656),
    ("whole tiles", "bf16", 300, 528, 272),
    ("whole tiles", "bf16", 300, 528, 1024),
)
# Every scale byte, and every code with it; ragged rows, tiles cut in two and three, whole, banded.
A8_CASES = (
    ("stream-k", "bf16", 5, 173, 256),
    ("stream-k", "bf16", 33, 656, 640),
    ("stream-k", "bf16", 129, 272, 512),
    ("whole tiles", "bf16", 40, 656, 384),
    ("whole tiles", "bf16", 300, 528, 256),
)


@pytest.mark.parametrize("late", [False, True], ids=["at_once", "late"])
@pytest.mark.parametrize("card", [GB10, H200], ids=lambda t: t.name)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_fp8_blocks_equal_the_reference(
    monkeypatch: pytest.MonkeyPatch,
    case: tuple[str, str, int, int, int],
    card: Target,
    late: bool,
    cache: Path,
) -> None:
    """At 8 k-slabs the large tiles' warpgroups multiply in turn, as they do at 65."""
    monkeypatch.setattr(stream_k_gemm, "FEW_SLABS", 4)
    run("fp8_block_linear", case, card, late, cache)


@pytest.mark.parametrize("card", [GB10, H200], ids=lambda t: t.name)
@pytest.mark.parametrize("case", A8_CASES, ids=str)
def test_nvfp4_with_fp8_activations_equals_the_reference(
    case: tuple[str, str, int, int, int], card: Target, cache: Path
) -> None:
    run(A8, case, card, True, cache)


def run(
    name: str, case: tuple[str, str, int, int, int], card: Target, late: bool, cache: Path
) -> None:
    tactic, dtype, *size = case
    op = test_cuda_linear.OPS[name]
    target = replace(card, card=replace(card.card, sms=3))
    attrs: Attrs = {"dtype": dtype}
    arrays = test_cuda_linear.operands(name, *size)
    arrays[0].view(np.uint8)[BROKEN] = 0x7F
    packed = cuda_node.packed_specs(op, attrs, cuda_node.specs_of(op, attrs, arrays))
    if next(t for t in op.cuda.tactics if t.name == tactic).refuse(attrs, packed, target):
        pytest.skip("no tile is cut in any case")
    (y,) = emulated.results(op, tactic, attrs, arrays, target, cache, late)
    got, want = y.astype(np.float64), op.reference(attrs, arrays)[0].astype(np.float64)
    assert np.isnan(got[BROKEN]).all()
    got, want = np.delete(got, BROKEN, 0), np.delete(want, BROKEN, 0)
    for axis, most in ((1, 1e-3), (0, 5e-3)):  # of a token, and of a row of the weight
        error = np.linalg.norm(got - want, axis=axis) / np.linalg.norm(want, axis=axis)
        assert error.max() < most, (axis, error.max())
