"""Sums over ranks, and the norm behind them, on the host: each rank a thread with its own library.

Ranks begin when they like, one may be launches ahead of another, and memory that a launch must not
read is NaN.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from spark_engine.kernel import H200, Plan, Specs, Tactic
from spark_engine.op import Attrs, Op
from spark_engine.plugins.kernels.ranks.collectives_kernels import symmetric_bytes
from spark_engine.plugins.ops.ranks import all_reduce, reduce_norm_quant
from spark_engine.tensors import Array
from tests.plugins import cuda_node, emulated
from tests.plugins.emulated import Buffer

SUMS = tuple(t for t in all_reduce.OP.cuda.tactics if not t.name.startswith("nccl"))

pytestmark = pytest.mark.skipif(emulated.COMPILER is None, reason="needs g++")
RANKS = 3
SMALL = replace(H200, card=replace(H200.card, sms=2))  # a block has several turns, or rows
TACTICS = {t.name: t for t in reduce_norm_quant.OP.cuda.tactics}


class Ranks:
    """Regions of a few ranks, and what runs a plan on all of them at once."""

    def __init__(self, cache: Path, most: int, launches: int = 0) -> None:
        """`launches`: how many there were, none of which used a flag."""
        self._libraries = emulated.RankLibraries(cache)
        self._regions = [Buffer(symmetric_bytes(most), np.zeros(1, np.uint8)) for _ in range(RANKS)]
        for region in self._regions:
            region.bytes[:4] = np.array([launches], np.uint32).view(np.uint8)
        self._table = np.array([r.bytes.ctypes.data for r in self._regions], np.uint64)

    def run(
        self, op: Op, attrs: Attrs, steps: Sequence[tuple[Tactic, Sequence[tuple[Array, ...]]]]
    ) -> list[list[list[Array]]]:
        """By step and rank what the op's results are; `steps` have a tactic and operands by rank.
        Every rank goes from step to step without waiting for the others."""
        made = []
        for tactic, operands in steps:
            specs = cuda_node.specs_of(op, attrs, operands[0])
            assert tactic.refuse(attrs, specs, SMALL) is None
            made.append(
                (tactic.plan(attrs, specs, SMALL), self._places(op, attrs, specs, operands))
            )
        for (plan, _), (tactic, _) in zip(made, steps, strict=True):
            for launch in plan.launches:
                for rank in range(RANKS):
                    self._libraries.of(launch, tactic, rank)

        def work(rank: int) -> None:
            for (plan, places), (tactic, _) in zip(made, steps, strict=True):
                self._one(plan, tactic, places[rank], rank)

        with ThreadPoolExecutor(RANKS) as pool:
            list(pool.map(work, range(RANKS)))
        found = []
        for (plan, places), (_, operands) in zip(made, steps, strict=True):
            assert plan.symmetric <= len(self._regions[0].bytes)
            outs = op.infer(attrs, cuda_node.specs_of(op, attrs, operands[0]))
            found.append(
                [
                    [
                        b.bytes.view(s.dtype.numpy).reshape(s.dims)
                        for s, b in zip(outs, mine["output"], strict=True)
                    ]
                    for mine in places
                ]
            )
            for buffer in (b for mine in places for some in mine.values() for b in some):
                buffer.check()
        for region in self._regions:
            region.check()
        return found

    def _places(
        self, op: Op, attrs: Attrs, specs: Specs, operands: Sequence[tuple[Array, ...]]
    ) -> list[dict[str, list[Buffer]]]:
        scratch = specs[0].nbytes
        return [
            {
                "input": [Buffer(a.nbytes, np.ascontiguousarray(a)) for a in arrays],
                "output": [Buffer(s.nbytes) for s in op.infer(attrs, specs)],
                "scratch": [Buffer(scratch)],
            }
            for arrays in operands
        ]

    def _one(self, plan: Plan, tactic: Tactic, places: dict[str, list[Buffer]], rank: int) -> None:
        at = {**emulated.addresses(places), "peers": [self._table.ctypes.data]}
        for launch in plan.launches:
            own = self._libraries.of(launch, tactic, rank)
            emulated.call(own, launch, at, False, rank, 1 + rank)


def parts(rng: np.random.Generator, rows: int, columns: int) -> list[Array]:
    """Of each rank, one NaN among them."""
    found = [rng.standard_normal((rows, columns)).astype(ml_dtypes.bfloat16) for _ in range(RANKS)]
    found[1][rows - 1, 3] = np.nan
    return found


def same(a: Array, b: Array) -> bool:
    """Bit for bit, where NaNs are all alike."""
    unread = [np.isnan(x.astype(np.float32)) for x in (a, b)]
    return (unread[0] == unread[1]).all() and a[~unread[0]].tobytes() == b[~unread[0]].tobytes()


def test_every_tactic_gives_the_references_bits(cache: Path) -> None:
    """One after the other, of many sizes: launches of other tactics use the same regions."""
    rng = np.random.default_rng(1)
    ranks = Ranks(cache, 7 * 136 * 2)
    steps = []
    for rows in (1, 7, 2):
        for tactic in (*SUMS, SUMS[-1], SUMS[-1]):  # pushed ones behind one another too
            given = parts(rng, rows, 136)
            steps.append((tactic, [(part,) for part in given]))
    found = ranks.run(all_reduce.OP, {"ranks": RANKS}, steps)
    for (tactic, given), results in zip(steps, found, strict=True):
        want = all_reduce.summed(tuple(part for (part,) in given))
        for (y,) in results:
            assert same(y, want), (tactic.name, len(want))


def test_a_flag_that_was_not_used_for_long_is_waited_for(cache: Path) -> None:
    """After hours of pushed sums: as numbers with signs an old flag would be ahead."""
    rng = np.random.default_rng(3)
    for launches in (1 << 31, (1 << 31) + 9, 3 << 30) * 3:
        given = parts(rng, 7, 136)
        ranks = Ranks(cache, 7 * 136 * 2, launches)
        step = (all_reduce.OP.cuda.tactics[0], [(part,) for part in given])
        (results,) = ranks.run(all_reduce.OP, {"ranks": RANKS}, [step])
        for (y,) in results:
            assert same(y, all_reduce.summed(tuple(given)))


def test_the_norm_in_the_launch_has_the_bits_of_the_norm_apart(cache: Path) -> None:
    attrs: Attrs = {"ranks": RANKS, "eps": 1e-6, "keep": 1, "quant": "fp8", "n": 2}
    rng = np.random.default_rng(2)
    ranks = Ranks(cache, 5 * 264 * 2)
    steps = []
    for rows in (1, 5, 2):
        weight = rng.uniform(0.5, 2, 264).astype(np.float32)
        residual = rng.standard_normal((rows, 264)).astype(ml_dtypes.bfloat16)
        scales = np.array([0.004, 0.009], np.float32)
        operands = [(x, weight, residual, scales) for x in parts(rng, rows, 264)]
        steps += [(TACTICS[name], operands) for name in ("one_shot_apart", "one_shot", "push")]
    found = ranks.run(reduce_norm_quant.OP, attrs, steps)
    for first in range(0, len(steps), 3):
        apart = found[first][0]
        total = all_reduce.summed(tuple(x for x, *_ in steps[first][1]))
        want = reduce_norm_quant.norm_quant.reference(
            reduce_norm_quant.norm_quant.added(attrs), (total, *steps[first][1][0][1:])
        )
        assert same(apart[1], want[1])
        np.testing.assert_allclose(
            apart[0].astype(np.float32), want[0].astype(np.float32), rtol=2**-7
        )
        for step in range(first, first + 3):
            for results in found[step]:
                for a, b in zip(apart, results, strict=True):
                    assert a.tobytes() == b.tobytes(), steps[step][0].name
