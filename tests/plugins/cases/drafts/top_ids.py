"""The seeded cases of top_ids."""

import numpy as np

from spark_engine.op import Attrs, Case
from spark_engine.tensors import Array


def _case(
    label: str, wide: int, vocab: int, tile: int = 4, top: int = 16, short: int = 0, nan: float = 0
) -> Case:
    counts = (tile, 0, tile, tile, tile)

    def make(rng: np.random.Generator) -> tuple[Array, ...]:
        logits = np.round(3 * rng.standard_normal((len(counts), tile, wide))).astype(np.float32)
        logits[rng.random(logits.shape) < nan] = np.nan
        logits[1], logits[:, 0] = np.nan, np.nan
        logits[-1] = 7.0 if nan == 0 else np.nan
        shortlist = [np.sort(rng.permutation(short)[:wide]).astype(np.int32)] if short else []
        return (logits.reshape(-1, wide), *shortlist, np.asarray(counts, np.int32))

    attrs: Attrs = {"tile": tile, "top": top, "vocab": vocab, "shortlist": int(short > 0)}
    return Case(label, attrs, make)


CASES = (
    _case("small", 64, 64),
    _case("rows beyond the vocabulary", 256, 200, tile=8),
    _case("shortlist", 64, 900, short=1000),
    _case("few are left", 64, 12, nan=0.3),
    _case("pairs", 32, 32, tile=2, top=4),
    _case("several parts a token", 20_000, 19_900, tile=3),
)
