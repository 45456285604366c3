"""The seeded cases of accept_drafts."""

import numpy as np

from spark_engine.op import Case
from spark_engine.tensors import Array
from tests.plugins.cases.drafts import rounds
from tests.plugins.cases.drafts.rounds import UNITS, WILD, Round, without_scratch


def _case(given: Round, hold: int) -> Case:
    """A case in which up to `hold` drafts of each row are accepted, and all after the first
    mismatch match again."""
    vocab = 12

    def make(rng: np.random.Generator) -> tuple[Array, ...]:
        ids = given.tokens(lambda n: rng.integers(0, 4, n))  # few, so that they repeat
        sampled = np.full((given.rows, given.tile), WILD, np.int32)
        tokens = ids.reshape(sampled.shape)
        for row, n in enumerate(given.counts):
            sampled[row, : max(n, 1) - 1] = tokens[row, 1:n]
            sampled[row, n - 1 : n] = 11
            if hold < n - 1:
                sampled[row, hold] = (sampled[row, hold] + 1) % 4
        token_counts = rng.integers(0, 9, (UNITS + 1, vocab))
        last, standing = (rng.integers(0, 99, UNITS + 1) for _ in range(2))
        starts = rng.integers(0, 5000, given.rows)
        starts[np.asarray(given.slots) < 0] = WILD
        states = [np.asarray(x, np.int32) for x in (token_counts, last, standing)]
        return (sampled.reshape(-1), ids, *states, *given.rows_of(starts))

    return Case(
        f"{rounds.label(given)}, {hold} hold", {"tile": given.tile}, make, ignore=without_scratch(2)
    )


CASES = (
    *(_case(rounds.ALONE, hold) for hold in range(4)),
    *(_case(given, hold) for given in rounds.ROUNDS for hold in (0, 1, 7)),
    _case(rounds.INERT, 1),
)
