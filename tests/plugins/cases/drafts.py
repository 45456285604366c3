"""The seeded cases of the ops of drafts."""

import numpy as np

from spark_engine.op import Attrs, Case, Inputs, rtol_of
from spark_engine.plugins.common.random_arrays import normal
from spark_engine.plugins.ops.drafts.block_conv import SIDES, TAPS
from spark_engine.tensors import Array, DType
from tests.plugins.cases import rounds
from tests.plugins.cases.rounds import UNITS, WILD, Round, without_scratch


def _accept_drafts(given: Round, hold: int) -> Case:
    """A case in which up to `hold` drafts of each row are accepted, and all after the first
    mismatch match again."""
    vocab = 12

    def make(rng: np.random.Generator) -> tuple[Array, ...]:
        ids = given.tokens(lambda n: rng.integers(0, 4, n))  # few, so that they repeat
        sampled = np.full((given.rows, given.tile), WILD, np.int32)
        tokens = ids.reshape(sampled.shape)
        for row, n in enumerate(given.counts):
            sampled[row, : max(n, 1) - 1] = tokens[row, 1:n]
            sampled[row, n - 1 : n] = 11
            if hold < n - 1:
                sampled[row, hold] = (sampled[row, hold] + 1) % 4
        token_counts = rng.integers(0, 9, (UNITS + 1, vocab))
        last, standing = (rng.integers(0, 99, UNITS + 1) for _ in range(2))
        starts = rng.integers(0, 5000, given.rows)
        starts[np.asarray(given.slots) < 0] = WILD
        states = [np.asarray(x, np.int32) for x in (token_counts, last, standing)]
        return (sampled.reshape(-1), ids, *states, *given.rows_of(starts))

    return Case(
        f"{rounds.label(given)}, {hold} hold", {"tile": given.tile}, make, ignore=without_scratch(2)
    )


ACCEPT_DRAFTS = (
    *(_accept_drafts(rounds.ALONE, hold) for hold in range(4)),
    *(_accept_drafts(given, hold) for given in rounds.ROUNDS for hold in (0, 1, 7)),
    _accept_drafts(rounds.INERT, 1),
)


def _block_conv(
    rows: int, tile: int, side: int, h: int, group: int, dtype: DType = DType.F32
) -> Case:
    def make(rng: np.random.Generator) -> tuple[Array, ...]:
        x = normal(rng, rows * tile, h, dtype=dtype)
        deltas = normal(rng, rows * tile, SIDES * TAPS * h // group, scale=0.3, dtype=dtype)
        return x, deltas, normal(rng, SIDES * TAPS, h)

    label = f"{rows} rows of {tile}, side {side}, {h} in groups of {group}, {dtype}"
    attrs: Attrs = {"tile": tile, "side": side}
    return Case(label, attrs, make, rtol=rtol_of(dtype), atol=1e-6)


BLOCK_CONV = (
    _block_conv(1, 8, 0, 64, 16),
    _block_conv(3, 8, 1, 64, 16),
    _block_conv(2, 2, 1, 96, 8),
    _block_conv(4, 5, 0, 256, 16, DType.BF16),
    _block_conv(2, 8, 1, 5120, 16, DType.BF16),
)


def _block_rows(given: Round) -> Case:
    def make(rng: np.random.Generator) -> tuple[Array, ...]:
        last, standing = (rng.integers(0, 99, UNITS + 1) for _ in range(2))
        for slot in set(range(UNITS + 1)) - set(given.slots):
            last[slot], standing[slot] = -WILD, -WILD
        rows = (np.full(given.rows * given.tile, WILD), last, standing, given.slots, given.counts)
        return tuple(np.asarray(x, np.int32) for x in rows)

    return Case(rounds.label(given), {"tile": given.tile, "mask": 300}, make)


BLOCK_ROWS = tuple(_block_rows(r) for r in rounds.ALL)


def _draft_best(
    label: str, wide: int, vocab: int, first: int, rows: int = 6, nan: float = 0.0
) -> Case:
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


DRAFT_BEST = (
    _draft_best("first share", 256, 500, 0),
    _draft_best("ends within", 256, 300, 256, nan=0.3),
    _draft_best("beyond the vocabulary", 64, 64, 64),
    _draft_best("all NaN", 64, 640, 64, nan=1.0),
    _draft_best("several blocks a row", 20_000, 39_000, 20_000),
)


def _draft_path(given: Round, r: int, top: int, dtype: DType = DType.F32, held: int = 0) -> Case:
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

DRAFT_PATH = (
    _draft_path(rounds.ALONE, 32, 16),
    _draft_path(_BLOCKS, 64, 16),
    _draft_path(_BLOCKS, 256, 16, DType.BF16),
    _draft_path(Round(2, (1, 4, -1), (2, 2, 0)), 8, 5, held=7),
    _draft_path(rounds.INERT, 16, 4),
)


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


def _draft_token(
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


DRAFT_TOKEN = (
    _draft_token("plain", 300, 299),
    _draft_token("alone", 256, 255, index=0, slots=(2,), counts=(1,)),
    _draft_token("not finite", 300, 290, edit=_broken),
    _draft_token("ties", 300, 299, index=2, edit=_ties),
    _draft_token("shortlist", 128, 500, short=True),
    _draft_token("shortlist, ties", 128, 500, short=True, edit=_ties),
    _draft_token("shortlist, not finite", 128, 500, short=True, edit=_broken),
    _draft_token("pairs of four ranks", 64, 500, pairs=4),
    _draft_token("pairs of two ranks", 64, 60, pairs=2, edit=_broken),
    _draft_token("all inert", 64, 63, slots=(-1, -1), counts=(0, 0)),
    _draft_token("several blocks a row", 20_000, 19_000, bench=True),
    _draft_token(
        "many rows", 5_000, 4_990, slots=(*range(7), *[-1] * 200), counts=(1,) * 7 + (0,) * 200
    ),
)


SLOTS, STARTS, COUNTS = (3, -1, 0, 6, 5, 1), (61, WILD, 0, 90, 18, 130), (4, 0, 1, 8, 0, 2)


def _match_drafts(
    label: str, ids: int, least: int, held: int, page: int = 16, most: int = 7, far: int = 0
) -> Case:
    """Texts of so few ids that parts of them repeat; two rows end with a copy of a part. `far` more
    ids are before the part of one row."""
    begins = (*STARTS[:3], STARTS[3] + far, *STARTS[4:])

    def make(rng: np.random.Generator) -> tuple[Array, ...]:
        pages, table = rounds.paged(rng, page, 140 + far)
        last = rng.integers(0, ids, UNITS + 1)
        drafts = rng.integers(0, ids, (UNITS + 1, most))
        for row, slot in [(r, s) for r, s in enumerate(SLOTS) if s >= 0]:
            end, same = begins[row] + COUNTS[row], 20 + far * (row == 3)
            text = rng.integers(0, ids, end + 1)
            text[rng.integers(0, end + 1, end // 20)] = -1
            if row in (3, 5):  # of which the head agrees with one
                text[-20:] = text[same : same + 20] = np.abs(text[same : same + 20])
                drafts[slot, 0] = abs(text[same + 20]) + row - 3
            text[-1] = last[slot] = abs(text[-1])
            at = np.arange(end + 1)  # a draft that was rejected may have left any id at `end`
            pages[table[slot, at // page], 0, at % page, 0] = text
        last[-1], drafts[-1], drafts[:, held:] = -WILD, -WILD, -WILD
        rows = [np.asarray(x, np.int32) for x in (SLOTS, begins, COUNTS)]
        return (pages, table, *(np.asarray(x, np.int32) for x in (last, drafts)), *rows)

    return Case(label, {"least": least, "held": held}, make, ignore=without_scratch(1))


MATCH_DRAFTS = (
    _match_drafts("copies", 1000, 6, 0),
    _match_drafts("copies, with the head", 1000, 6, 3),
    _match_drafts("short matches", 5, 2, 0, 64),
    _match_drafts("short matches, with the head", 3, 2, 1, most=3),
    _match_drafts("one id again and again", 1, 6, 7),
    _match_drafts("no match", 1 << 20, 16, 2),
    _match_drafts("more than all threads load at once", 1 << 20, 6, 0, 64, far=70_000),
)


def _inputs(rows: int, h: int, dtype: DType, weight: DType, images: bool) -> Inputs:
    vocab = 30

    def make(rng: np.random.Generator) -> tuple[Array, ...]:
        ids = rng.integers(0, vocab, rows)
        ids[rows // 2] = (-1, vocab, 1 << 30)[rows % 3]  # reads row 0
        hidden = 3.0 * rng.standard_normal((rows, h))
        norms = [1.0 + 0.1 * rng.standard_normal(h) for _ in range(2)]
        table = rng.standard_normal((vocab, h)).astype(weight.numpy)
        kept = rng.standard_normal((6, h))
        kept[-1] = np.nan  # scratch
        if images:
            ids[::3] = vocab + np.arange(len(ids[::3])) % 6  # the sixth reads row 0
        return (
            ids.astype(np.int32),
            hidden.astype(dtype.numpy),
            table,
            *(n.astype(np.float32) for n in norms),
            *([kept.astype(dtype.numpy)] if images else []),
        )

    return make


def _mtp_input(
    rows: int,
    h: int,
    dtype: DType = DType.F32,
    weight: DType = DType.F32,
    bench: bool = False,
    images: bool = False,
) -> Case:
    attrs: Attrs = {"eps": 1e-6, "dtype": dtype.value}
    label = f"{rows} rows of {h}, {dtype} of {weight}{', images' if images else ''}"
    inputs = _inputs(rows, h, dtype, weight, images)
    return Case(label, attrs, inputs, rtol=rtol_of(dtype), bench=bench)


MTP_INPUT = (
    _mtp_input(1, 64),
    _mtp_input(3, 36),
    _mtp_input(5, 128, weight=DType.F16),
    _mtp_input(8, 256, weight=DType.BF16, bench=True),
    _mtp_input(7, 1032, DType.BF16, DType.BF16),
    _mtp_input(65, 128, DType.BF16, DType.BF16),
    _mtp_input(20, 64, images=True),
    _mtp_input(20, 128, DType.BF16, DType.BF16, images=True),
)


def _round_rows(given: Round) -> Case:
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


ROUND_ROWS = tuple(_round_rows(r) for r in rounds.ALL)


def _shift_ids(given: Round) -> Case:
    def make(rng: np.random.Generator) -> tuple[Array, ...]:
        tokens = given.tokens(lambda n: rng.integers(0, 99, n))
        next_ids = rng.integers(0, 99, given.rows)
        next_ids[::2] = -1
        sampled = np.where(next_ids < 0, rng.integers(0, 99, given.rows), WILD)
        rows = [np.asarray(x, np.int32) for x in (next_ids, sampled, given.counts)]
        return (tokens, *rows)

    return Case(rounds.label(given), {"tile": given.tile}, make)


PREFILL = Round(64, (3, 3, -1, 1, 5), (64, 9, 0, 1, 63))
SHIFT_IDS = tuple(_shift_ids(r) for r in (PREFILL, *rounds.ROUNDS))


def _store_ids(given: Round, starts: tuple[int, ...], page: int = 16) -> Case:
    def make(rng: np.random.Generator) -> tuple[Array, ...]:
        at = np.asarray(starts, np.int32)
        pages, table = rounds.paged(rng, page, max(a + given.tile for a in starts))
        at[np.asarray(given.slots) < 0] = WILD
        ids = given.tokens(lambda n: rng.integers(0, 14, n))  # from 12 on they are images'
        return (ids, pages, table, *given.rows_of(at))

    attrs: Attrs = {"tile": given.tile, "vocab": 12}
    label = f"{rounds.label(given)} from {starts[0]}, pages of {page}"
    return Case(label, attrs, make, ignore=without_scratch(0))


CROSSING = (14, 3, 0, 62, 15, 33)  # rows cross pages
STORE_IDS = (
    _store_ids(PREFILL, (64, 128, 0, 7, 0)),
    *(_store_ids(given, CROSSING[: given.rows]) for given in rounds.ALL),
    _store_ids(rounds.ROUNDS[0], CROSSING, 64),
)


def _top_ids(
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


TOP_IDS = (
    _top_ids("small", 64, 64),
    _top_ids("rows beyond the vocabulary", 256, 200, tile=8),
    _top_ids("shortlist", 64, 900, short=1000),
    _top_ids("few are left", 64, 12, nan=0.3),
    _top_ids("pairs", 32, 32, tile=2, top=4),
    _top_ids("several parts a token", 20_000, 19_900, tile=3),
)


CASES = {
    "accept_drafts": ACCEPT_DRAFTS,
    "block_conv": BLOCK_CONV,
    "block_rows": BLOCK_ROWS,
    "draft_best": DRAFT_BEST,
    "draft_path": DRAFT_PATH,
    "draft_token": DRAFT_TOKEN,
    "match_drafts": MATCH_DRAFTS,
    "mtp_input": MTP_INPUT,
    "round_rows": ROUND_ROWS,
    "shift_ids": SHIFT_IDS,
    "store_ids": STORE_IDS,
    "top_ids": TOP_IDS,
}
