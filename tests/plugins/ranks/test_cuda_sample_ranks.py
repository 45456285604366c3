"""Ranks that share the vocabulary sample what one rank samples: on one GPU, a stream for each."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("cuda.bindings", reason="needs the extra `cuda`")
from spark_engine.builder.native import nvrtc
from spark_engine.device.gpu import present
from spark_engine.kernel import Target
from spark_engine.plugins.ops.sampling import sample
from spark_engine.tensors import Array
from tests.plugins.cases.sampling.sample import Launch, broken, flat, ties
from tests.plugins.ranks.rank_cards import RankCards, specs_of

pytestmark = pytest.mark.gpu
(TACTIC,) = sample.OP.cuda.tactics
SMS = 16  # of a rank: all ranks' blocks are on one GPU, and each computes several rows
REGION = 64 << 20
ROWS = tuple(int(s) for s in np.random.default_rng(0).integers(-1, 8, 37))
SLOTS = (ROWS, (5,), (-1, -1), ROWS[:20])
RANKS = (2, 4)
FULL = {"width": 248_320, "vocab": 248_320}
LAUNCHES = {
    "greedy": Launch(0.0, **FULL),  # type: ignore[arg-type]
    "greedy, ties": Launch(0.0, edit=ties, **FULL),  # type: ignore[arg-type]
    "greedy, flat": Launch(0.0, edit=flat, **FULL),  # type: ignore[arg-type]
    "all ids": Launch(1.3, **FULL),  # type: ignore[arg-type]
    "all ids, flat": Launch(1.0, edit=flat, **FULL),  # type: ignore[arg-type]
    "few": Launch(0.8, 0.95, top_k=20, **FULL),  # type: ignore[arg-type]
    "top_k 64, ties": Launch(2.0, top_k=64, edit=ties, **FULL),  # type: ignore[arg-type]
    "top_k 100": Launch(1.5, top_k=100, **FULL),  # type: ignore[arg-type]
    "top_p": Launch(1.0, 0.9, **FULL),  # type: ignore[arg-type]
    "top_p, hot": Launch(8.0, 0.97, **FULL),  # type: ignore[arg-type]
    "min_p": Launch(1.0, min_p=0.1, **FULL),  # type: ignore[arg-type]
    "everything": Launch(1.7, 0.9, 0.01, 1.3, 0.7, 0.2, 30, bias=True, mask=0.4, **FULL),  # type: ignore[arg-type]
    "all ids, penalties and masks": Launch(
        1.7,
        1.0,
        0.0,
        1.3,
        0.7,
        0.2,
        bias=True,
        mask=0.4,
        **FULL,  # type: ignore[arg-type]
    ),
    "masks of few ids": Launch(1.0, top_k=20, mask=1e-5, **FULL),  # type: ignore[arg-type]
    "not finite": Launch(1.0, 0.9, edit=broken, **FULL),  # type: ignore[arg-type]
    "4 tokens a row": Launch(
        1.7,
        0.9,
        0.01,
        1.3,
        0.7,
        0.2,
        30,
        bias=True,
        mask=0.3,
        tile=4,
        **FULL,  # type: ignore[arg-type]
    ),
    "ids that are not there": Launch(1.0, top_k=20, width=248_320, vocab=248_077),
}


def few_sms() -> Target:
    """The GPU's target with few multiprocessors, or a skipped test."""
    target = present()
    if target is None:
        pytest.skip("needs a GPU of a target")
    return replace(target, card=replace(target.card, sms=SMS))


@pytest.fixture(scope="module")
def compiled(cache: Path) -> Path:
    """The cache with all kernels, made side by side: one takes half a minute."""
    target = few_sms()
    nvrtc.compile_all(jobs(target), target, cache, os.cpu_count() or 1)
    return cache


def jobs(target: Target) -> tuple[nvrtc.Job, ...]:
    """What is compiled for the launches above, of one rank and of several."""
    plans = []
    for launch, slots in product(LAUNCHES.values(), SLOTS):
        launch = slotted(launch, slots)
        rows, tokens = len(launch.slots), max(1, launch.tile)
        small = replace(launch, slots=(5,), width=512, vocab=512, edit=None)
        arrays = small.inputs(np.random.default_rng(0))
        for ranks in (1, *RANKS):
            attrs = {**launch.attrs, **({"ranks": ranks} if ranks > 1 else {})}
            made = (arrays[0][:0], *arrays[1:], *[np.zeros(1, np.int32)] * (ranks > 1))
            first, *rest = specs_of(sample.OP, attrs, made)
            shape = (rows * tokens, launch.width // ranks)
            specs = (replace(first, shape=shape), *rest)
            plans.append((TACTIC.source, TACTIC.plan(attrs, specs, target)))
    return nvrtc.jobs_of(plans)


@pytest.fixture(scope="module", params=RANKS)
def cards(request: pytest.FixtureRequest, compiled: Path) -> Iterator[tuple[RankCards, RankCards]]:
    target = few_sms()
    several = RankCards([0] * request.param, target, compiled, REGION)
    one = RankCards([0], target, compiled, 256)
    yield several, one
    one.close()
    several.close()


def slotted(launch: Launch, slots: Sequence[int]) -> Launch:
    """The launch over rows of these slots; fewer where each has several tokens."""
    return replace(launch, slots=tuple(slots[:9] if launch.tile else slots))


def shares(arrays: Sequence[Array], ranks: int) -> list[tuple[Array, ...]]:
    size = arrays[0].shape[1] // ranks
    cuts = [np.ascontiguousarray(x) for x in np.split(arrays[0], ranks, axis=1)]
    return [(x, *arrays[1:], np.array([i * size], np.int32)) for i, x in enumerate(cuts)]


@pytest.mark.parametrize("label", LAUNCHES)
def test_ranks_sample_what_one_rank_samples(label: str, cards: tuple[RankCards, RankCards]) -> None:
    """Tokens, log-probabilities and top ids, bit for bit; of 37 rows, of one, and of none."""
    several, one = cards
    for seed, slots in enumerate(SLOTS):
        launch = slotted(LAUNCHES[label], slots)
        if launch.edit is broken and len(launch.slots) < 4:
            continue
        arrays = launch.inputs(np.random.default_rng(seed))
        live = launch.live.reshape(-1) if launch.tile else ~launch.idle
        (want,) = one.run(sample.OP, launch.attrs, TACTIC, [arrays])
        attrs = {**launch.attrs, "ranks": several.ranks}
        for mine in several.run(sample.OP, attrs, TACTIC, shares(arrays, several.ranks)):
            for got, expected in zip(mine[:5], want[:5], strict=True):
                a, b = (np.ascontiguousarray(x[live]).view(np.int32) for x in (got, expected))
                np.testing.assert_array_equal(a, b)
            if not launch.tile and len(set(launch.slots)) == len(launch.slots):
                emits = live & (arrays[11] > 0)
                slots_of = np.asarray(launch.slots)[emits]
                np.testing.assert_array_equal(mine[5][slots_of], want[5][slots_of])
