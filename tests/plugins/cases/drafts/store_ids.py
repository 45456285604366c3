"""The seeded cases of store_ids."""

import numpy as np

from spark_engine.op import Attrs, Case
from spark_engine.tensors import Array
from tests.plugins.cases.drafts import rounds
from tests.plugins.cases.drafts.rounds import WILD, Round, without_scratch


def _case(given: Round, starts: tuple[int, ...], page: int = 16) -> Case:
    def make(rng: np.random.Generator) -> tuple[Array, ...]:
        at = np.asarray(starts, np.int32)
        pages, table = rounds.paged(rng, page, max(a + given.tile for a in starts))
        at[np.asarray(given.slots) < 0] = WILD
        ids = given.tokens(lambda n: rng.integers(0, 14, n))  # from 12 on they are images'
        return (ids, pages, table, *given.rows_of(at))

    attrs: Attrs = {"tile": given.tile, "vocab": 12}
    label = f"{rounds.label(given)} from {starts[0]}, pages of {page}"
    return Case(label, attrs, make, ignore=without_scratch(0))


PREFILL = Round(64, (3, 3, -1, 1, 5), (64, 9, 0, 1, 63))

STARTS = (14, 3, 0, 62, 15, 33)  # rows cross pages

CASES = (
    _case(PREFILL, (64, 128, 0, 7, 0)),
    *(_case(given, STARTS[: given.rows]) for given in rounds.ALL),
    _case(rounds.ROUNDS[0], STARTS, 64),
)
