"""The router of many tokens by wgmma on the host, thread by thread, whenever copies arrive.

The last cluster has tokens for one of its blocks only; x and the weights are followed by NaN,
and rows are all zeros (ties), NaN, or pairs of equal logits.
"""

from pathlib import Path

import numpy as np
import pytest

from spark_engine.kernel import GB10, H200
from spark_engine.op import Attrs
from spark_engine.plugins.ops.moe.moe_router import OP
from spark_engine.tensors import Array, DType
from tests.plugins import cuda_node, emulated

pytestmark = pytest.mark.skipif(emulated.COMPILER is None, reason="needs g++")
TACTIC = next(t for t in OP.cuda.tactics if t.name == "wgmma")
TOKENS, TOP_K = 150, 5
SIZES = [(256, 72, True), (40, 328, True), (64, 128, False), (16, 64, True)]  # experts, H, a gate


def drawn(experts: int, hidden: int, gated: bool) -> tuple[Array, ...]:
    """Rows 1, 2 and 3 are ties, NaN, and pairs of ties."""
    rng = np.random.default_rng(7)
    x = rng.standard_normal((TOKENS, hidden)).astype(np.float32)
    w = rng.standard_normal((experts, hidden)).astype(np.float32) * 2 * hidden**-0.5
    x[1], x[2], x[3] = 0, np.nan, 0
    x[3, 0], w[:, 0] = 1, np.arange(experts) // 2 % 64
    gate = rng.standard_normal((1, hidden)).astype(np.float32)
    return tuple(a.astype(DType.BF16.numpy) for a in ((x, w, gate) if gated else (x, w)))


def run(arrays: tuple[Array, ...], cache: Path, late: bool) -> list[Array]:
    return emulated.results(OP, "wgmma", {"top_k": TOP_K}, arrays, H200, cache, late)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("late", [False, True], ids=["at_once", "late"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_it_chooses_as_the_reference_does(
    sizes: tuple[int, int, bool], late: bool, cache: Path
) -> None:
    arrays = drawn(*sizes)
    ids, weights = OP.reference({"top_k": TOP_K}, arrays)
    got_ids, got = run(arrays, cache, late)
    np.testing.assert_array_equal(got_ids, ids)
    finite = np.arange(TOKENS) != 2
    np.testing.assert_allclose(got[finite], weights[finite], 1e-4, 1e-6)


def test_a_tokens_bits_do_not_depend_on_its_company(cache: Path) -> None:
    x, *rest = drawn(*SIZES[1])
    order = np.random.default_rng(8).permutation(TOKENS)
    whole, mixed = run((x, *rest), cache, True), run((x[order], *rest), cache, True)
    for a, b in zip(whole, mixed, strict=True):
        assert a[order].tobytes() == b.tobytes()


def test_targets_without_wgmma_are_refused() -> None:
    attrs: Attrs = {"top_k": TOP_K}
    specs = cuda_node.specs_of(OP, attrs, drawn(*SIZES[0]))
    assert "no wgmma" in (TACTIC.refuse(attrs, specs, GB10) or "")
