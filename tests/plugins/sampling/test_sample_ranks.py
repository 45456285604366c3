"""Ranks that share the vocabulary choose what one rank with all logits chooses, on the CPU."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from spark_engine.plugins.ops.sampling import sample, sample_join, sample_part
from spark_engine.tensors import Array
from tests.plugins.cases.sampling.sample import Launch, ties
from tests.plugins.run_op import named, run

TOKENS, TOP_IDS, OK = 0, 2, 4
WIDE = {"width": 1024, "vocab": 1020}
LAUNCHES = {
    "greedy": Launch(0.0, **WIDE),  # type: ignore[arg-type]
    "greedy, ties": Launch(0.0, edit=ties, **WIDE),  # type: ignore[arg-type]
    "top_k": Launch(1.5, top_k=20, **WIDE),  # type: ignore[arg-type]
    "top_k, ties": Launch(2.0, top_k=7, edit=ties, **WIDE),  # type: ignore[arg-type]
    "top_k 64, nearly flat": Launch(8.0, top_k=64, spread=1e-3, **WIDE),  # type: ignore[arg-type]
    "top_k 65": Launch(8.0, top_k=65, spread=1e-3, **WIDE),  # type: ignore[arg-type]
    "all ids": Launch(3.0, **WIDE),  # type: ignore[arg-type]
    "top_p": Launch(1.0, 0.9, **WIDE),  # type: ignore[arg-type]
    "min_p": Launch(1.0, min_p=0.1, **WIDE),  # type: ignore[arg-type]
    "everything": Launch(1.7, 0.9, 0.01, 1.3, 0.7, 0.2, 30, bias=True, mask=0.4, **WIDE),  # type: ignore[arg-type]
    "masks of few ids": Launch(1.0, top_k=20, mask=0.004, **WIDE),  # type: ignore[arg-type]
    "4 tokens a row": Launch(1.7, 0.9, 0.01, 1.3, 0.7, 0.2, 30, bias=True, tile=4, **WIDE),  # type: ignore[arg-type]
}


def whole(launch: Launch, arrays: Sequence[Array]) -> list[Array]:
    return run(sample.OP, launch.attrs, named(sample.OP, arrays, launch.attrs))


def shared(launch: Launch, arrays: Sequence[Array], ranks: int) -> tuple[list[Array], Array]:
    """What each of several makes of it, and the rows that they wanted whole."""
    attrs = {**launch.attrs, "ranks": ranks}
    size = launch.width // ranks
    parts = []
    for rank, cut in enumerate(np.split(arrays[0], ranks, axis=1)):
        own = (np.ascontiguousarray(cut), *arrays[1:], np.asarray([rank * size], np.int32))
        parts.append(run(sample_part.OP, attrs, named(sample_part.OP, own, attrs)))
    wanted = parts[0][1]
    assert all((part[1] == wanted).all() for part in parts)
    rest = np.where(wanted[:, None] != 0, arrays[0], np.nan)
    joined = (np.concatenate([part[0] for part in parts], axis=1), wanted, rest, *arrays[1:])
    operands: Mapping[str, Array] = named(sample_join.OP, joined, attrs)
    return run(sample_join.OP, attrs, operands), wanted


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("label", LAUNCHES)
def test_the_tokens_are_those_of_one_rank(label: str, ranks: int) -> None:
    launch = LAUNCHES[label]
    live = launch.live.reshape(-1) if launch.tile else ~launch.idle
    rest = np.random.default_rng(7)
    for seed in range(1 if ranks == 2 else 2):
        arrays = list(launch.inputs(np.random.default_rng(seed)))
        arrays[3][:, 1:3] = rest.integers(-99, 99, arrays[3][:, 1:3].shape)
        one, (several, wanted) = whole(launch, arrays), shared(launch, arrays, ranks)
        for at in (TOKENS, TOP_IDS, OK):
            np.testing.assert_array_equal(several[at][live], one[at][live])
        for at in (1, 3):
            np.testing.assert_allclose(several[at][live], one[at][live], rtol=1e-5, atol=2e-6)
        if not launch.tile:
            np.testing.assert_array_equal(several[5][:-1], one[5][:-1])
        bounded = launch.temperature == 0 or 0 < launch.top_k <= sample_part.FEW
        assert wanted[live].any() != bounded


def test_a_logit_of_one_rank_that_is_not_finite_stops_the_row() -> None:
    launch = LAUNCHES["top_k"]
    for value in (np.nan, np.inf, -np.inf):
        arrays = list(launch.inputs(np.random.default_rng(1)))
        arrays[0][2, 900] = value
        one, (several, _) = whole(launch, arrays), shared(launch, arrays, 4)
        assert one[OK][2] == several[OK][2] == several[TOKENS][2] == 0 and one[OK][0] == 1
        np.testing.assert_allclose(several[1][2], one[1][2], rtol=1e-5)


def test_rows_of_both_kinds_share_a_launch() -> None:
    """A greedy row, one of few candidates and one of all ids, side by side."""
    launch = dataclasses.replace(LAUNCHES["all ids"], slots=(0, 1, 2, -1))
    arrays = list(launch.inputs(np.random.default_rng(2)))
    arrays[2][1, 0], arrays[3][2, 0], arrays[-2][:] = 0, 12, 1
    one, (several, wanted) = whole(launch, arrays), shared(launch, arrays, 2)
    assert wanted.tolist() == [1, 0, 0, 0]
    np.testing.assert_array_equal(several[TOKENS][:3], one[TOKENS][:3])
