"""Draws follow the distribution that the parameters define."""

from collections.abc import Mapping

import numpy as np
import pytest
from numpy.typing import NDArray

from spark_engine.plugins.ops.sampling import sample
from spark_engine.tensors import Array
from tests.plugins.cases.sampling import sample as sample_cases
from tests.plugins.run_op import named, run

PER_ROW = {"slots", "starts", "counts", "emit", "logits"}
DRAWS = (
    {},
    {"temperature": 0.6, "top_k": 5},
    {"temperature": 2.0, "top_p": 0.7},
    {"temperature": 1.4, "min_p": 0.05, "top_k": 12, "top_p": 0.9},
)


@pytest.mark.parametrize("settings", DRAWS, ids=str)
def test_draws_follow_the_distribution(settings: dict[str, float]) -> None:
    """Pearson's statistic of 8,192 draws, by position and by seed, against the exact weights."""
    rows, vocab = 4096, 30
    launch = sample_cases.Launch(**settings, width=vocab, vocab=vocab, spread=1.2, slots=(0,))  # type: ignore[arg-type]
    operands = named(sample.OP, launch.inputs(np.random.default_rng(3)))
    weights = _exact(operands, launch.top_k)
    counts = np.zeros(vocab)
    for seed in (0, -77):
        operands["sampling_i"][0, 1:3] = seed
        many = {n: np.repeat(a, rows, 0) if n in PER_ROW else a for n, a in operands.items()}
        many["starts"] = np.arange(rows, dtype=np.int32)
        counts += np.bincount(run(sample.OP, launch.attrs, many)[0], minlength=vocab)
    expected = weights * counts.sum()
    assert counts[weights == 0].sum() == 0
    likely = expected > 5
    statistic = np.sum((counts - expected)[likely] ** 2 / expected[likely])
    freedom = likely.sum() - 1
    assert statistic < freedom + 4 * np.sqrt(2 * freedom), (statistic, freedom)


def _exact(operands: Mapping[str, Array], top_k: int) -> NDArray[np.float64]:
    """The probability of every id by the definition, written without the op's own code."""
    heat, top_p, min_p = (float(x) for x in operands["sampling_f"][0, :3])
    logits = operands["logits"][0].astype(np.float64)
    p = np.exp(logits / heat) / np.exp(logits / heat).sum()
    kept = [i for i in np.argsort(-p) if p[i] >= min_p * p.max()][: top_k or None]
    mass = sum(p[i] for i in kept)
    chosen: list[int] = []
    while sum(p[i] for i in chosen) < top_p * mass and len(chosen) < len(kept):
        chosen.append(kept[len(chosen)])
    q = np.zeros_like(p)
    q[chosen] = p[chosen]
    exact: NDArray[np.float64] = q / q.sum()
    return exact
