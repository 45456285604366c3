"""The vision tower's projections on the host, thread by thread, whenever copies arrive."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from spark_engine.kernel import GB10, H200, Target
from spark_engine.op import Attrs
from spark_engine.plugins.registry import REGISTRY
from spark_engine.tensors import DType
from tests.plugins import emulated

pytestmark = pytest.mark.skipif(emulated.COMPILER is None, reason="needs g++")
LINEAR, BF16 = REGISTRY["linear_bias"], DType.BF16.numpy
BROKEN = 2  # the token that is NaN, as padding may be
# Tactic, gelu, residual, rows, N, K: edges of m16 tiles, of k-slabs and of the first tile along m;
# tiles cut in two and in three (stream-K), whole, and large ones in bands.
PROJECTIONS = (
    ("stream-k", "tanh", True, 5, 44, 80),
    ("stream-k", "erf", True, 33, 400, 656),
    ("stream-k", "", True, 129, 272, 256),
    ("whole tiles", "tanh", False, 40, 656, 208),
    ("whole tiles", "", True, 300, 528, 272),
)


@pytest.mark.parametrize("card", [GB10, H200], ids=lambda t: t.name)
@pytest.mark.parametrize("case", PROJECTIONS, ids=str)
def test_projections_equal_the_reference(
    case: tuple[str, str, bool, int, int, int], card: Target, cache: Path
) -> None:
    tactic, gelu, adds, m, n, k = case
    rng = np.random.default_rng(m)
    x, w, residual = (rng.standard_normal(s) for s in ((m, k), (n, k), (m, n)))
    x[BROKEN] = np.nan
    bias = rng.standard_normal(n).astype(np.float32)
    bias[0], bias[-1] = 40, -40  # far outside of where gelu bends
    wide = (x, 2 * k**-0.5 * w, bias, *([residual] if adds else []))
    arrays = tuple(a if a.dtype == np.float32 else a.astype(BF16) for a in wide)
    target = replace(card, card=replace(card.card, sms=3))
    attrs: Attrs = {"gelu": gelu}
    (got,) = emulated.results(LINEAR, tactic, attrs, arrays, target, cache, card is H200)
    (want,) = LINEAR.reference(attrs, arrays)
    a, b = (np.delete(y, BROKEN, 0).astype(np.float64) for y in (got, want))
    assert np.isnan(got[BROKEN].astype(np.float32)).all()
    np.testing.assert_allclose(a, b, rtol=1e-2, atol=1e-3)
    assert np.linalg.norm(a - b) < 2e-4 * np.linalg.norm(b), "other than the last bit, seldom"
