"""The seeded rounds of the cases of a round's ops."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from spark_engine.tensors import Array

WILD = 1 << 30  # an illegal id, position or count: ops must not use it

UNITS = 7  # slots of the cases' states, without the scratch row


@dataclass(frozen=True)
class Round:
    """A launch: each row's slot (−1: inert) and its number of live tokens, up to `tile`."""

    tile: int
    slots: tuple[int, ...]
    counts: tuple[int, ...]

    @property
    def rows(self) -> int:
        """Rows of the launch."""
        return len(self.slots)

    def tokens(self, draw: Callable[[int], Array]) -> Array:
        """i32 [tokens]: `draw(n)` for the n live tokens of each row, WILD for the others."""
        ids = np.full((self.rows, self.tile), WILD)
        for row, n in enumerate(self.counts):
            ids[row, :n] = draw(n)
        return np.asarray(ids.reshape(-1), np.int32)

    def rows_of(self, starts: Array) -> tuple[Array, ...]:
        """slots, starts, counts i32 [rows]."""
        return tuple(np.asarray(x, np.int32) for x in (self.slots, starts, self.counts))


ALONE = Round(4, (2,), (4,))

ROUNDS = (  # rows: full, shorter, without drafts, without tokens, inert
    Round(4, (3, -1, 0, 6, 5, 1), (4, 0, 2, 1, 0, 3)),
    Round(2, (1, 4, -1), (2, 1, 0)),
    Round(8, (0, -1, 5), (8, 0, 7)),
    Round(1, (3, -1, 0, 5), (1, 0, 1, 0)),
)

INERT = Round(3, (-1, -1), (0, 0))

ALL = (ALONE, *ROUNDS, INERT)


def paged(rng: np.random.Generator, page: int, tokens: int) -> tuple[Array, Array]:
    """(wild id_pages, a page_table of every slot for so many tokens): pages in random order."""
    own = -(-tokens // page)
    pages = np.full((UNITS * own + 3, 1, page, 1), WILD, np.int32)
    table = np.full((UNITS + 1, own + 1), -1, np.int32)
    table[:-1, :-1] = rng.permutation(UNITS * own + 2)[: UNITS * own].reshape(UNITS, own)
    table[-1] = WILD
    return pages, table


def without_scratch(first: int) -> Callable[[tuple[Array, ...]], None]:
    """An `ignore` for the last unit of the states, which are the results from `first` on."""

    def ignore(outputs: tuple[Array, ...]) -> None:
        for state in outputs[first:]:
            state[-1] = 0

    return ignore


def label(given: Round) -> str:
    """The label of a case with this round."""
    return f"{given.rows} rows of {given.tile}"
