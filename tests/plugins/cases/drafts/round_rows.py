"""The seeded cases of round_rows."""

import numpy as np

from spark_engine.op import Case
from spark_engine.tensors import Array
from tests.plugins.cases.drafts import rounds
from tests.plugins.cases.drafts.rounds import UNITS, WILD, Round


def _case(given: Round) -> Case:
    def make(rng: np.random.Generator) -> tuple[Array, ...]:
        last, standing = (rng.integers(0, 99, UNITS + 1) for _ in range(2))
        drafts = rng.integers(0, 99, (UNITS + 1, max(given.tile, 2)))  # one more than is used
        tokens = given.tokens(lambda n: rng.integers(0, 99, n) * rng.integers(0, 2, n) - 1)
        for slot in set(range(UNITS + 1)) - set(given.slots):
            last[slot], standing[slot], drafts[slot] = -WILD, -WILD, -WILD
        drafts[:, given.tile - 1 :] = -WILD
        starts = rng.integers(-1, 2, given.rows) * 77  # 0 and 77 of the host, else the state's
        starts[np.asarray(given.slots) < 0] = WILD
        states = [np.asarray(x, np.int32) for x in (last, drafts, standing)]
        return (tokens, *states, *given.rows_of(starts))

    return Case(rounds.label(given), {"tile": given.tile}, make)


CASES = tuple(_case(r) for r in rounds.ALL)
