"""The seeded cases of draft_path."""

import numpy as np

from spark_engine.op import Case
from spark_engine.plugins.common.random_arrays import normal
from spark_engine.tensors import Array, DType
from tests.plugins.cases.drafts import rounds
from tests.plugins.cases.drafts.rounds import UNITS, WILD, Round, without_scratch


def _case(given: Round, r: int, top: int, dtype: DType = DType.F32, held: int = 0) -> Case:
    vocab = 40

    def make(rng: np.random.Generator) -> tuple[Array, ...]:
        tokens = given.rows * given.tile
        ids = np.stack([rng.permutation(vocab)[:top] for _ in range(tokens)]).astype(np.int32)
        values = np.asarray(-np.sort(-rng.standard_normal((tokens, top))), np.float32)
        values[:, top - 1] = -np.inf
        query = normal(rng, tokens, r, dtype=dtype)
        books = [normal(rng, vocab, r, dtype=dtype) for _ in range(2)]
        last = np.asarray(rng.integers(0, vocab, UNITS + 1), np.int32)
        drafts = np.full((UNITS + 1, held or max(given.tile - 1, 1)), -WILD, np.int32)
        slots, _, counts = given.rows_of(np.zeros(given.rows))
        for row, slot in enumerate(given.slots):
            if slot < 0 or given.counts[row] == 0:
                values.reshape(given.rows, -1)[row] = np.nan
                query.reshape(given.rows, -1)[row] = np.nan
                last[slot] = WILD
        return ids, values, query, *books, last, drafts, slots, counts

    label = f"{rounds.label(given)}, {top} of rank {r}, {dtype}"
    return Case(label, {"tile": given.tile}, make, ignore=without_scratch(0))


_BLOCKS = Round(8, (3, -1, 0, 6, 5), (8, 0, 8, 8, 0))

CASES = (
    _case(rounds.ALONE, 32, 16),
    _case(_BLOCKS, 64, 16),
    _case(_BLOCKS, 256, 16, DType.BF16),
    _case(Round(2, (1, 4, -1), (2, 2, 0)), 8, 5, held=7),
    _case(rounds.INERT, 16, 4),
)
