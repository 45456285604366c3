"""Sampling where ranks share the vocabulary, on the host: each rank a thread with its own library.

The same source without other ranks is the truth: tokens, log-probabilities, top ids, bit for bit.
"""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from spark_engine.kernel import H200, Plan
from spark_engine.op import Attrs
from spark_engine.plugins.ops.sampling import sample
from spark_engine.tensors import Array, DType, TensorSpec
from tests.plugins import emulated
from tests.plugins.cases.sampling.sample import Launch, broken, ties
from tests.plugins.emulated import Buffer

pytestmark = pytest.mark.skipif(emulated.COMPILER is None, reason="needs g++")
(TACTIC,) = sample.OP.cuda.tactics
FEW_SMS = replace(H200, card=replace(H200.card, sms=3))  # each block computes several rows
Arrays = Sequence[Array]
RUN_EVERY = "SPARK_EVERY_FORMAT"  # in the environment: `make ranks`


class Ranks:
    """What the ranks of an engine have: regions, which stay from launch to launch."""

    def __init__(self, cache: Path, ranks: int) -> None:
        self._libraries, self.ranks = emulated.RankLibraries(cache), ranks
        self._regions: list[Buffer] = []

    def run(self, attrs: Attrs, operands: Sequence[Arrays]) -> list[list[Array]]:
        """The results of each rank, which is launched when it likes."""
        specs = tuple(TensorSpec("x", DType.of(a.dtype), a.shape) for a in operands[0])
        assert TACTIC.refuse(attrs, specs, FEW_SMS) is None
        plan = TACTIC.plan(attrs, specs, FEW_SMS)
        if not self._regions:
            zeros = np.zeros(plan.symmetric, np.uint8)
            self._regions = [Buffer(plan.symmetric, zeros) for _ in range(self.ranks)]
        assert plan.symmetric <= len(self._regions[0].bytes)
        outs = sample.OP.infer(attrs, specs)
        for launch in plan.launches:
            for rank in range(self.ranks):
                self._libraries.of(launch, TACTIC, rank)
        with ThreadPoolExecutor(self.ranks) as pool:
            work = (pool.submit(self._one, plan, r, operands[r], outs) for r in range(self.ranks))
            return [w.result() for w in list(work)]

    def _one(
        self, plan: Plan, rank: int, arrays: Arrays, outs: Sequence[TensorSpec]
    ) -> list[Array]:
        table = np.array([r.bytes.ctypes.data for r in self._regions], np.uint64)
        made = [Buffer(s.nbytes) for s in outs]
        if len(outs) == 6:  # a state, updated in place
            made[5].bytes[:] = arrays[12].view(np.uint8)
        places = {
            "input": [Buffer(a.nbytes, np.ascontiguousarray(a)) for a in arrays],
            "output": made,
            "scratch": [Buffer(s.nbytes) for s in plan.scratch],
        }
        at = {**emulated.addresses(places), "peers": [table.ctypes.data]}
        for launch in plan.launches:
            own = self._libraries.of(launch, TACTIC, rank)
            emulated.call(own, launch, at, False, rank, 1 + rank)
        for buffer in (b for some in places.values() for b in some):
            buffer.check()
        return [
            b.bytes.view(s.dtype.numpy).reshape(s.dims) for s, b in zip(outs, made, strict=True)
        ]


def shares(arrays: Arrays, ranks: int) -> list[Arrays]:
    size = arrays[0].shape[1] // ranks
    cuts = [np.ascontiguousarray(x) for x in np.split(arrays[0], ranks, axis=1)]
    return [(x, *arrays[1:], np.array([i * size], np.int32)) for i, x in enumerate(cuts)]


def same(launch: Launch, arrays: Arrays, ranks: Ranks, one: Ranks) -> None:
    """Holds what several ranks make of a launch against what one does."""
    live = launch.live.reshape(-1) if launch.tile else ~launch.idle
    (want,) = one.run(launch.attrs, [arrays])
    found = ranks.run({**launch.attrs, "ranks": ranks.ranks}, shares(arrays, ranks.ranks))
    for mine in found:
        for at, (a, b) in enumerate(zip(mine, want, strict=True)):
            rows = slice(None) if at == 5 else live
            np.testing.assert_array_equal(a[rows].view(np.int32), b[rows].view(np.int32))


SIZE = {"width": 4 * 428, "vocab": 1709}  # borders are within cells
QUICK = (
    Launch(1.7, 0.9, 0.01, 1.3, 0.7, 0.2, 30, bias=True, mask=0.4, slots=(3, 1), **SIZE),  # type: ignore[arg-type]
    Launch(1.5, slots=(-1, 2), **SIZE),  # type: ignore[arg-type]
)
EVERY = (
    Launch(0.0, **SIZE),  # type: ignore[arg-type]
    Launch(1.5, **SIZE),  # type: ignore[arg-type]
    Launch(1.0, 0.9, **SIZE),  # type: ignore[arg-type]
    Launch(2.0, top_k=7, edit=ties, **SIZE),  # type: ignore[arg-type]
    Launch(0.0, mask=0.01, slots=(-1, 3, -1), **SIZE),  # type: ignore[arg-type]
    Launch(1.0, slots=(-1, -1), **SIZE),  # type: ignore[arg-type]
    Launch(1.2, 0.8, 0.02, edit=broken, **SIZE),  # type: ignore[arg-type]
    Launch(1.2, 0.8, 0.02, 1.3, tile=3, bias=True, slots=(2, 1, -1), **SIZE),  # type: ignore[arg-type]
)


@pytest.mark.parametrize(
    ("launches", "ranks"), [(QUICK, 2), (EVERY, 2), (EVERY, 4)], ids=["quick", "2", "4"]
)
def test_ranks_sample_what_one_rank_samples(
    launches: Sequence[Launch], ranks: int, cache: Path
) -> None:
    if launches is EVERY and RUN_EVERY not in os.environ:
        pytest.skip("make ranks runs it")
    several, one = Ranks(cache, ranks), Ranks(cache, 1)
    for i, launch in enumerate(launches):
        same(launch, launch.inputs(np.random.default_rng(i)), several, one)
