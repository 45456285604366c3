"""The linear layers of FP8 blocks on the host, thread by thread, whenever copies arrive."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from spark_engine.kernel import GB10, H200, Target
from spark_engine.op import Attrs
from tests.plugins import cuda_node, emulated
from tests.plugins.linear import test_cuda_linear

pytestmark = pytest.mark.skipif(emulated.COMPILER is None, reason="needs g++")
NAME = "fp8_block_linear"
OP = test_cuda_linear.OPS[NAME]
TACTICS = {t.name: t for t in OP.cuda.tactics}
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
)


@pytest.mark.parametrize("late", [False, True], ids=["at_once", "late"])
@pytest.mark.parametrize("card", [GB10, H200], ids=lambda t: t.name)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_fp8_blocks_equal_the_reference(
    case: tuple[str, str, int, int, int], card: Target, late: bool, cache: Path
) -> None:
    tactic, dtype, *size = case
    target = replace(card, card=replace(card.card, sms=3))
    attrs: Attrs = {"dtype": dtype}
    arrays = test_cuda_linear.operands(NAME, *size)
    arrays[0].view(np.uint8)[BROKEN] = 0x7F
    given = cuda_node.specs_of(OP, attrs, arrays)
    packed = cuda_node.packed_specs(OP, attrs, given)
    if TACTICS[tactic].refuse(attrs, packed, target):
        pytest.skip("no tile is cut in any case")
    plan = TACTICS[tactic].plan(attrs, packed, target)
    values = cuda_node.packed_arrays(OP, attrs, arrays)
    outputs = OP.infer(attrs, given)
    (y,) = emulated.run(plan, TACTICS[tactic].source, values, outputs, cache, late)
    got, want = y.astype(np.float64), OP.reference(attrs, arrays)[0].astype(np.float64)
    assert np.isnan(got[BROKEN]).all()
    got, want = np.delete(got, BROKEN, 0), np.delete(want, BROKEN, 0)
    error = np.linalg.norm(got - want, axis=1) / np.linalg.norm(want, axis=1)
    assert error.max() < 1e-3, error.max()
