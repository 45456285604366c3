"""What ranks make together, on one GPU with a stream for each: the same launches as on several."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("cuda.bindings", reason="needs the extra `cuda`")

from benchmarks.rank_cards import RankCards  # noqa: E402
from spark_engine import device  # noqa: E402
from spark_engine.plugins.ranks import all_reduce, gather_logits  # noqa: E402
from spark_engine.plugins.ranks.collectives_cuda import symmetric_bytes  # noqa: E402

pytestmark = pytest.mark.gpu
MOST = 300 * 5120 * 2  # bytes of the largest part


@pytest.fixture(params=[2, 3])
def cards(request: pytest.FixtureRequest, cache: Path) -> Iterator[RankCards]:
    target = device.present()
    if target is None:
        pytest.skip("needs a GPU of a target")
    yield RankCards([0] * request.param, target, cache, symmetric_bytes(MOST))


def test_sums_are_those_of_the_reference_bit_for_bit(cards: RankCards) -> None:
    """Of one row and of many, in any order: launches of other sizes use the same memory."""
    rng = np.random.default_rng(1)
    for rows in (1, 300, 3, 1, 64, 300, 2, 128, 1) * 3:
        parts = [
            rng.standard_normal((rows, 5120)).astype(ml_dtypes.bfloat16) for _ in cards.streams
        ]
        want = all_reduce.summed(tuple(parts))
        for found in cards.together(all_reduce.OP, {"ranks": cards.ranks}, parts):
            assert found.tobytes() == want.tobytes(), rows


def test_a_rows_sum_does_not_depend_on_the_batch(cards: RankCards) -> None:
    rng = np.random.default_rng(2)
    parts = [rng.standard_normal((64, 2048)).astype(ml_dtypes.bfloat16) for _ in cards.streams]
    many = cards.together(all_reduce.OP, {"ranks": cards.ranks}, parts)[0]
    alone = cards.together(all_reduce.OP, {"ranks": cards.ranks}, [p[7:8] for p in parts])[0]
    assert many[7:8].tobytes() == alone.tobytes()


def test_logits_lie_side_by_side(cards: RankCards) -> None:
    rng = np.random.default_rng(3)
    for rows, columns in ((1, 512), (5, 68), (2, 4096), (1, 4)):
        parts = [rng.standard_normal((rows, columns)).astype(np.float32) for _ in cards.streams]
        want = gather_logits.gathered(tuple(parts))
        for found in cards.together(gather_logits.OP, {"ranks": cards.ranks}, parts):
            assert found.tobytes() == want.tobytes(), (rows, columns)
