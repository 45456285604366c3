"""The seeded cases of draft_best."""

import numpy as np

from spark_engine.op import Case
from spark_engine.tensors import Array


def _case(label: str, wide: int, vocab: int, first: int, rows: int = 6, nan: float = 0.0) -> Case:
    slots = np.arange(rows) % 5 - (np.arange(rows) == 1) * 9

    def make(rng: np.random.Generator) -> tuple[Array, ...]:
        logits = np.round(rng.standard_normal((rows, wide)) * 3).astype(np.float32)
        logits[rng.random(logits.shape) < nan] = np.nan
        counts = (slots >= 0) & (np.arange(rows) != 3)
        logits[~counts] = np.nan
        steps = [np.asarray(x, np.int32) for x in (slots, np.arange(rows), counts)]
        return (logits, *steps, np.array([first], np.int32))

    def ignore(outputs: tuple[Array, ...]) -> None:
        outputs[0][(slots < 0) | (np.arange(rows) == 3)] = 0

    return Case(label, {"vocab": vocab}, make, ignore=ignore)


CASES = (
    _case("first share", 256, 500, 0),
    _case("ends within", 256, 300, 256, nan=0.3),
    _case("beyond the vocabulary", 64, 64, 64),
    _case("all NaN", 64, 640, 64, nan=1.0),
    _case("several blocks a row", 20_000, 39_000, 20_000),
)
