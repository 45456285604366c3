"""What ranks make together, on one GPU with a stream for each: the same launches as on several."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("cuda.bindings", reason="needs the extra `cuda`")
from spark_engine.device.gpu import present
from spark_engine.op import Attrs
from spark_engine.plugins.kernels.ranks.collectives_kernels import symmetric_bytes
from spark_engine.plugins.ops.ranks import all_reduce, gather_logits, reduce_norm_quant
from spark_engine.tensors import Array, DType, TensorSpec
from tests.plugins.ranks.rank_cards import RankCards, specs_of

SUMS = tuple(t for t in all_reduce.OP.cuda.tactics if not t.name.startswith("nccl"))

pytestmark = pytest.mark.gpu
MOST = 300 * 5120 * 2  # bytes of the largest part


@pytest.fixture(params=[2, 3])
def cards(request: pytest.FixtureRequest, cache: Path) -> Iterator[RankCards]:
    target = present()
    if target is None:
        pytest.skip("needs a GPU of a target")
    made = RankCards([0] * request.param, target, cache, symmetric_bytes(MOST))
    yield made
    made.close()


def parts_of(cards: RankCards, rng: np.random.Generator, rows: int, columns: int) -> list[Array]:
    drawn = (rng.standard_normal((rows, columns), np.float32) for _ in cards.streams)
    return [part.astype(ml_dtypes.bfloat16) for part in drawn]


def test_sums_are_those_of_the_reference_bit_for_bit(cards: RankCards) -> None:
    """Of one row and of many, in any order and by any tactic: all launches use the same memory."""
    rng = np.random.default_rng(1)
    attrs: Attrs = {"ranks": cards.ranks}
    seen = set()
    for rows in (1, 300, 3, 1, 64, 300, 2, 128, 1) * 2:
        parts = parts_of(cards, rng, rows, 5120)
        want, spec = all_reduce.summed(tuple(parts)), TensorSpec("x", DType.BF16, (rows, 5120))
        for tactic in SUMS:
            if tactic.refuse(attrs, (spec,), cards.target):
                continue
            seen.add(tactic.name)
            for (found,) in cards.run(all_reduce.OP, attrs, tactic, [(p,) for p in parts]):
                assert found.tobytes() == want.tobytes(), (tactic.name, rows)
    assert len(seen) == (2 if cards.ranks == 2 else 3)


QUANTS = [("none", 1), ("fp8", 1), ("fp8", 4), ("fp8_block", 1), ("nvfp4", 2), ("fp8_token", 1)]


@pytest.mark.parametrize(("quant", "n"), QUANTS)
@pytest.mark.parametrize("columns", [2048, 5120])
def test_the_norm_in_the_launch_has_the_bits_of_the_norm_apart(
    cards: RankCards, columns: int, quant: str, n: int
) -> None:
    """Also where blocks have several rows: a part of the multiprocessors, so that the launches of
    all ranks fit one GPU together."""
    rng = np.random.default_rng(4)
    cards.target = replace(cards.target, card=replace(cards.target.card, sms=24))
    attrs: Attrs = {"ranks": cards.ranks, "eps": 1e-6, "keep": 1, "quant": quant, "n": n}
    op = reduce_norm_quant.OP
    for rows in (1, 24, 3, 100, 1):
        weight = rng.uniform(0.5, 2, columns).astype(np.float32)
        residual = rng.standard_normal((rows, columns), np.float32).astype(ml_dtypes.bfloat16)
        scales = [rng.uniform(0.004, 0.01, n).astype(np.float32)] * (quant in ("fp8", "nvfp4"))
        parts = parts_of(cards, rng, rows, columns)
        operands = [(part, weight, residual, *scales) for part in parts]
        total = (all_reduce.summed(tuple(parts)), weight, residual, *scales)
        want = op.reference({**attrs, "ranks": 1}, total)
        (first,) = (t for t in op.cuda.tactics if t.name == "one_shot_apart")
        apart = cards.run(op, attrs, first, operands)[0]
        assert apart[1].tobytes() == want[1].tobytes()
        y, near = apart[0].astype(np.float64), want[0].astype(np.float64)
        assert np.linalg.norm(y - near) < 1e-2 * np.linalg.norm(near)
        for tactic in op.cuda.tactics:
            specs = specs_of(op, attrs, operands[0])
            if tactic.refuse(attrs, specs, cards.target):
                continue
            for results in cards.run(op, attrs, tactic, operands):
                for a, b in zip(apart, results, strict=True):
                    assert a.tobytes() == b.tobytes(), (tactic.name, rows)


def test_launches_follow_one_another_without_the_host(cards: RankCards) -> None:
    """Thousands of every tactic and size in one queue a rank: none reads what another left."""
    rng = np.random.default_rng(5)
    cards.target = replace(cards.target, card=replace(cards.target.card, sms=24))
    attrs: Attrs = {"ranks": cards.ranks, "eps": 1e-6, "keep": 1, "quant": "none", "n": 1}
    op, nodes = reduce_norm_quant.OP, []
    with ExitStack() as held:
        for rows in (1, 40, 2, 1, 24, 5, 100):
            weight = rng.uniform(0.5, 2, 2048).astype(np.float32)
            residual = rng.standard_normal((rows, 2048), np.float32).astype(ml_dtypes.bfloat16)
            parts = parts_of(cards, rng, rows, 2048)
            operands = [(part, weight, residual) for part in parts]
            specs = specs_of(op, attrs, operands[0])
            (first,) = (t for t in op.cuda.tactics if t.name == "one_shot_apart")
            want = cards.run(op, attrs, first, operands)[0]
            sizes = [spec.nbytes for spec in op.infer(attrs, specs)]
            for tactic in op.cuda.tactics:
                if tactic.refuse(attrs, specs, cards.target):
                    continue
                plan = tactic.plan(attrs, specs, cards.target)
                made = held.enter_context(cards.placed(tactic, plan, operands, sizes))
                nodes.append((tactic.name, rows, want, *made))
        for _ in range(100):
            for at in rng.permutation(len(nodes)):
                for rank in rng.permutation(cards.ranks):
                    cards.use(int(rank))
                    for launch in nodes[at][4][rank]:
                        launch()
        for name, rows, want, places, _ in nodes:
            for rank, made in enumerate(places):
                for address, array in zip(made["output"], want, strict=True):
                    spec = TensorSpec("y", DType.BF16, array.shape)
                    found = cards.get(rank, address, spec)
                    assert found.tobytes() == array.tobytes(), (name, rows, rank)


def test_a_rows_sum_does_not_depend_on_the_batch(cards: RankCards) -> None:
    rng = np.random.default_rng(2)
    parts = [rng.standard_normal((64, 2048)).astype(ml_dtypes.bfloat16) for _ in cards.streams]
    many = cards.together(all_reduce.OP, {"ranks": cards.ranks}, parts)[0]
    alone = cards.together(all_reduce.OP, {"ranks": cards.ranks}, [p[7:8] for p in parts])[0]
    assert many[7:8].tobytes() == alone.tobytes()


def test_logits_are_adjacent(cards: RankCards) -> None:
    rng = np.random.default_rng(3)
    for rows, columns in ((1, 512), (5, 68), (2, 4096), (1, 4)):
        parts = [rng.standard_normal((rows, columns)).astype(np.float32) for _ in cards.streams]
        want = gather_logits.gathered(tuple(parts))
        for found in cards.together(gather_logits.OP, {"ranks": cards.ranks}, parts):
            assert found.tobytes() == want.tobytes(), (rows, columns)
