"""The seeded cases of block_rows."""

import numpy as np

from spark_engine.op import Case
from spark_engine.tensors import Array
from tests.plugins.cases.drafts import rounds
from tests.plugins.cases.drafts.rounds import UNITS, WILD, Round


def _case(given: Round) -> Case:
    def make(rng: np.random.Generator) -> tuple[Array, ...]:
        last, standing = (rng.integers(0, 99, UNITS + 1) for _ in range(2))
        for slot in set(range(UNITS + 1)) - set(given.slots):
            last[slot], standing[slot] = -WILD, -WILD
        rows = (np.full(given.rows * given.tile, WILD), last, standing, given.slots, given.counts)
        return tuple(np.asarray(x, np.int32) for x in rows)

    return Case(rounds.label(given), {"tile": given.tile, "mask": 300}, make)


CASES = tuple(_case(r) for r in rounds.ALL)
