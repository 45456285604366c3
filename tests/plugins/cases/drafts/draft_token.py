"""The seeded cases of draft_token."""

import numpy as np

from spark_engine.op import Case
from spark_engine.tensors import Array
from tests.plugins.cases.drafts.rounds import UNITS, WILD, without_scratch


def _broken(rng: np.random.Generator, logits: Array) -> None:
    logits[0, ::3] = np.nan
    logits[2] = np.nan
    logits[3] = -np.inf
    logits[3, :5] = np.nan
    logits[4, 7] = np.inf


def _ties(rng: np.random.Generator, logits: Array) -> None:
    logits[...] = np.round(logits)
    logits[0] = 0.0
    logits[0, 1::2] = -0.0  # equal to 0


def _case(
    label: str,
    wide: int,
    vocab: int,
    short: bool = False,
    index: int = 1,
    edit: object = None,
    slots: tuple[int, ...] = (3, -1, 0, 6, 5, 1),
    counts: tuple[int, ...] = (1, 0, 1, 1, 1, 0),
    bench: bool = False,
    pairs: int = 0,
) -> Case:
    def make(rng: np.random.Generator) -> tuple[Array, ...]:
        logits = rng.standard_normal((len(slots), wide)).astype(np.float32)
        logits[:, -1] = 9.0  # of an id that is not below the vocabulary
        if callable(edit):
            edit(rng, logits)
        if pairs:
            shown = np.zeros((len(slots), pairs, 4), np.float32)
            shown[..., 0] = np.round(logits[:, :pairs])
            shown[..., 1] = np.sort(rng.integers(-1, vocab + 9, (len(slots), pairs)))
            logits = shown.reshape(len(slots), -1)
        logits[np.asarray(counts) == 0] = np.nan
        ids = rng.permutation(vocab + 9)[:wide]
        ids[-1], ids[0] = vocab, -1
        drafts = rng.integers(0, 99, (UNITS + 1, 3))
        starts = rng.integers(0, 5000, len(slots))
        starts[np.asarray(counts) == 0] = WILD
        ints = [np.asarray(x, np.int32) for x in (drafts, slots, starts, counts)]
        return (logits, *([ids.astype(np.int32)] if short else []), *ints)

    attrs = {"index": index, "shortlist": int(short), "vocab": vocab, "pairs": pairs}
    return Case(label, attrs, make, ignore=without_scratch(2), bench=bench)


CASES = (
    _case("plain", 300, 299),
    _case("alone", 256, 255, index=0, slots=(2,), counts=(1,)),
    _case("not finite", 300, 290, edit=_broken),
    _case("ties", 300, 299, index=2, edit=_ties),
    _case("shortlist", 128, 500, short=True),
    _case("shortlist, ties", 128, 500, short=True, edit=_ties),
    _case("shortlist, not finite", 128, 500, short=True, edit=_broken),
    _case("pairs of four ranks", 64, 500, pairs=4),
    _case("pairs of two ranks", 64, 60, pairs=2, edit=_broken),
    _case("all inert", 64, 63, slots=(-1, -1), counts=(0, 0)),
    _case("several blocks a row", 20_000, 19_000, bench=True),
    _case("many rows", 5_000, 4_990, slots=(*range(7), *[-1] * 200), counts=(1,) * 7 + (0,) * 200),
)
