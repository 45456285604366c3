"""The seeded cases of mark_tokens."""

import numpy as np

from spark_engine.op import Case, Inputs
from spark_engine.tensors import Array
from tests.plugins.cases.rounds import without_scratch


def _inputs(
    slots: tuple[int, ...], starts: tuple[int, ...], counts: tuple[int, ...], tile: int
) -> Inputs:
    vocab, units = 12, 6  # few ids, so that they repeat

    def make(rng: np.random.Generator) -> tuple[Array, ...]:
        token_counts = rng.integers(0, 9, (units + 1, vocab))
        lens = np.asarray([0, 1, 5, 70, 100, 1000, -7])
        token_counts[-1] = -(1 << 31) + 5
        for slot, start in zip(slots, starts, strict=True):
            if slot >= 0 and start == 0:
                token_counts[slot] = 1 << 30  # stale: whatever the slot held before
        tokens = np.full((len(slots), tile), 1 << 30)
        for row, n in enumerate(counts):
            tokens[row, :n] = rng.integers(-1 if tile == 1 else 0, vocab, n)
            if tile == 64:
                tokens[row, 3:n:9] = vocab + rng.integers(0, 99, len(tokens[row, 3:n:9]))
        last = rng.integers(0, vocab, units + 1)
        last[-1] = 1 << 29
        columns = (token_counts, tokens.reshape(-1), last, slots, starts, counts, lens)
        return tuple(np.asarray(c, np.int32) for c in columns)

    return make


def _case(
    label: str, tile: int, slots: tuple[int, ...], starts: tuple[int, ...], counts: tuple[int, ...]
) -> Case:
    return Case(
        label, {"tile": tile}, _inputs(slots, starts, counts, tile), ignore=without_scratch(0)
    )


CASES = (
    _case("decode", 1, (3, -1, 0, 2, 5), (69, 99, 7, 5, 0), (1, 0, 1, 1, 1)),
    _case("decode alone", 1, (4,), (100,), (1,)),
    _case("all inert", 1, (-1, -1), (0, 1 << 30), (0, 0)),
    _case("round", 4, (3, -1, 0, 2, 5), (69, 0, 7, 5, 0), (1, 0, 1, 0, 1)),
    _case("round of two", 2, (1, 4), (0, 100), (1, 1)),
    _case("longest round", 8, (4, -1, 2), (99, 0, 5), (1, 0, 1)),
    _case("prefill", 64, (3, 3, -1, 1, 5), (0, 64, 0, 0, 131), (64, 9, 0, 20, 64)),
    _case("several tiles", 64, (2, 5, 5, 5, -1), (0, 31, 95, 159, 0), (1, 64, 64, 3, 0)),
    _case("prompt and generated", 64, (3, 3, 4), (10, 74, 90), (64, 64, 30)),
)
