"""Prefill attention on the host, thread by thread: pairs of warps, for targets without wgmma."""

from pathlib import Path

import numpy as np
import pytest

from spark_engine.kernel import GB10
from spark_engine.plugins.ops.attention.paged_attention import OP
from spark_engine.tensors import Array, DType
from tests.plugins import cuda_node, emulated
from tests.plugins.cases.attention.paged_attention import Launch

pytestmark = pytest.mark.skipif(emulated.COMPILER is None, reason="needs g++")
STORED = pytest.mark.parametrize("kv", [DType.F8E4M3, DType.BF16], ids=str)
LATE = pytest.mark.parametrize("late", [False, True], ids=["at once", "late"])
# slot, first position, tokens: from amid a tile of keys, from the beginning, of no sequence, from
# where a tile begins, behind others.
ROWS = ((1, 61, 64), (0, 0, 40), (-1, 9, 0), (2, 64, 1), (3, 200, 33))


def given(kv: DType, rows: tuple[tuple[int, int, int], ...]) -> Launch:
    slots, starts, counts = zip(*rows, strict=True)
    return Launch(64, slots, starts, counts, 4, 2, 256, 32, kv=kv, dtype=DType.BF16)


def drawn(launch: Launch, size: float = 1.0) -> tuple[Array, ...]:
    """Operands; the larger the queries, the farther a score may rise above those before."""
    qkv, q_norm, *rest = launch.inputs(np.random.default_rng(3))
    return (qkv, (q_norm * size).astype(np.float32), *rest)


def run(launch: Launch, arrays: tuple[Array, ...], cache: Path, late: bool) -> list[Array]:
    return emulated.results(OP, "tiles_pair", launch.attrs, arrays, GB10, cache, late)


@STORED
@LATE
def test_what_the_reference_says(kv: DType, late: bool, cache: Path) -> None:
    launch = given(kv, ROWS)
    arrays = drawn(launch)
    got, want = run(launch, arrays, cache, late), OP.reference(launch.attrs, arrays)
    for outputs in (got, want):
        launch.ignore(tuple(outputs))
    assert cuda_node.compare("o", got[0], want[0], OP.tolerance(launch.attrs), False) == ""


@STORED
def test_sums_shrink_where_a_score_rises_far(kv: DType, cache: Path) -> None:
    """Queries of 16 bits are coarse for such scores: as a whole the result is near."""
    launch = given(kv, ROWS)
    arrays = drawn(launch, {DType.F8E4M3: 12.0, DType.BF16: 4.0}[kv])
    got, want = run(launch, arrays, cache, late=True)[0], OP.reference(launch.attrs, arrays)[0]
    live = np.arange(64) < np.asarray(launch.counts)[:, None]
    near, exact = (x.reshape(len(launch.slots), 64, -1)[live].astype(float) for x in (got, want))
    assert np.linalg.norm(near - exact) < 5e-3 * np.linalg.norm(exact)


@STORED
def test_a_prompt_cut_at_an_odd_place_has_the_same_bits(kv: DType, cache: Path) -> None:
    whole = given(kv, ((0, 0, 64), (0, 64, 64), (0, 128, 8)))
    first, second = given(kv, ((0, 0, 37),)), given(kv, ((0, 37, 64), (0, 101, 35)))
    arrays = drawn(whole, 6.0)
    want, *_ = run(whole, arrays, cache, late=True)
    pages, got = arrays[6:8], []
    for part, begin, tokens in ((first, 0, 37), (second, 37, 99)):
        qkv = np.full((64 * len(part.slots), arrays[0].shape[1]), np.nan, arrays[0].dtype)
        qkv[:tokens] = arrays[0][begin : begin + tokens]
        steps = [np.asarray(x, np.int32) for x in (part.slots, part.starts, part.counts)]
        turns = np.zeros((64 * len(part.slots), 3), np.int32)
        turns[:tokens] = arrays[4].reshape(-1, 3)[begin : begin + tokens]
        constants = (*arrays[1:4], turns.reshape(len(part.slots), -1), arrays[5])
        operands = (qkv, *constants, *pages, arrays[8], *steps)
        o, *pages = run(part, operands, cache, late=True)
        got.append(o[:tokens])
    joined = np.concatenate(got)
    assert joined.tobytes() == want[: len(joined)].tobytes()
