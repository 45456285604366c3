"""The seeded cases of match_drafts."""

import numpy as np

from spark_engine.op import Case
from spark_engine.tensors import Array
from tests.plugins.cases.drafts import rounds
from tests.plugins.cases.drafts.rounds import UNITS, WILD, without_scratch

SLOTS, STARTS, COUNTS = (3, -1, 0, 6, 5, 1), (61, WILD, 0, 90, 18, 130), (4, 0, 1, 8, 0, 2)


def _case(label: str, ids: int, least: int, held: int, page: int = 16, most: int = 7) -> Case:
    """Texts of so few ids that parts of them repeat; two rows end with a copy of a part."""

    def make(rng: np.random.Generator) -> tuple[Array, ...]:
        pages, table = rounds.paged(rng, page, 140)
        last = rng.integers(0, ids, UNITS + 1)
        drafts = rng.integers(0, ids, (UNITS + 1, most))
        for row, slot in enumerate(SLOTS):
            end = STARTS[row] + COUNTS[row]
            if slot < 0:
                continue
            text = rng.integers(0, ids, end + 1)
            text[rng.integers(0, end + 1, end // 20)] = -1
            if row in (3, 5):  # of which the head agrees with one
                text[-20:] = text[20:40] = np.abs(text[20:40])
                drafts[slot, 0] = abs(text[40]) + row - 3
            text[-1] = last[slot] = abs(text[-1])
            at = np.arange(end + 1)  # a draft that was rejected may have left any id at `end`
            pages[table[slot, at // page], 0, at % page, 0] = text
        last[-1], drafts[-1], drafts[:, held:] = -WILD, -WILD, -WILD
        rows = [np.asarray(x, np.int32) for x in (SLOTS, STARTS, COUNTS)]
        return (pages, table, *(np.asarray(x, np.int32) for x in (last, drafts)), *rows)

    return Case(label, {"least": least, "held": held}, make, ignore=without_scratch(1))


CASES = (
    _case("copies", 1000, 6, 0),
    _case("copies, with the head", 1000, 6, 3),
    _case("short matches", 5, 2, 0, 64),
    _case("short matches, with the head", 3, 2, 1, most=3),
    _case("one id again and again", 1, 6, 7),
    _case("no match", 1 << 20, 16, 2),
)
