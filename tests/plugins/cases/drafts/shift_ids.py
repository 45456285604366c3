"""The seeded cases of shift_ids."""

import numpy as np

from spark_engine.op import Case
from spark_engine.tensors import Array
from tests.plugins.cases.drafts import rounds
from tests.plugins.cases.drafts.rounds import WILD, Round


def _case(given: Round) -> Case:
    def make(rng: np.random.Generator) -> tuple[Array, ...]:
        tokens = given.tokens(lambda n: rng.integers(0, 99, n))
        next_ids = rng.integers(0, 99, given.rows)
        next_ids[::2] = -1
        sampled = np.where(next_ids < 0, rng.integers(0, 99, given.rows), WILD)
        rows = [np.asarray(x, np.int32) for x in (next_ids, sampled, given.counts)]
        return (tokens, *rows)

    return Case(rounds.label(given), {"tile": given.tile}, make)


PREFILL = Round(64, (3, 3, -1, 1, 5), (64, 9, 0, 1, 63))

CASES = tuple(_case(r) for r in (PREFILL, *rounds.ROUNDS))
