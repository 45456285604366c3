"""A round of drafts: in literals, and rounds of a sequence against its tokens one by one."""

from collections.abc import Sequence

import numpy as np
import pytest

from spark_engine.errors import GraphError
from spark_engine.op import Attrs, Op
from spark_engine.plugins.ops.drafts import (
    accept_drafts,
    draft_token,
    match_drafts,
    mtp_input,
    round_rows,
    shift_ids,
    store_ids,
)
from spark_engine.plugins.ops.norm import rms_norm
from spark_engine.plugins.ops.rowwise import embed
from spark_engine.plugins.ops.sampling import mark_tokens
from spark_engine.tensors import Array, DType, TensorSpec
from tests.plugins.run_op import named, run

BOTH = pytest.mark.parametrize("how", ["reference", "body"])


def ints(values: object) -> Array:
    return np.asarray(values, np.int32)


def go(how: str, op: Op, attrs: Attrs, *arrays: Array) -> list[Array]:
    """The op's results, by its reference or its body."""
    if how == "reference":
        return [a.copy() for a in op.reference(attrs, arrays)]
    return run(op, attrs, named(op, arrays, attrs))


# ---- where a round begins ----------------------------------------------------------------------


@BOTH
def test_a_round_takes_from_the_states_what_the_host_left_out(how: str) -> None:
    """Rows: all from the states; host's; the host's second draft; unused; without tokens."""
    ids, starts, certain = go(
        how,
        round_rows.OP,
        {"tile": 3},
        ints([-1, -1, -1, 7, 8, 9, -1, -1, 5, 4, 4, 4, -1, -1, -1]),
        ints([10, 11, 12, 13, -9]),
        ints([[20, 30, 40], [21, 31, 41], [22, 32, 42], [23, 33, 43], [-9, -9, -9]]),
        ints([100, 101, 102, 103, -9]),
        ints([2, 0, 1, -1, 3]),
        ints([-1, 55, 0, 66, -1]),
        ints([3, 2, 3, 0, 0]),
    )
    assert ids.reshape(5, 3).tolist() == [[12, 22, 32], [7, 8, 0], [11, 21, 5], [0] * 3, [0] * 3]
    assert starts.tolist() == [102, 55, 0, 0, 103]
    assert certain.tolist() == [1, 1, 1, 0, 0]


@BOTH
def test_an_id_0_of_the_host_is_an_id(how: str) -> None:
    made = go(how, round_rows.OP, {"tile": 2}, ints([0, 0]), ints([3, 3]), ints([[4], [4]]),
              ints([8, 8]), ints([0]), ints([0]), ints([2]))  # fmt: skip
    assert made[0].tolist() == [0, 0] and made[1].tolist() == [0]


def test_more_drafts_than_a_slot_holds_are_refused() -> None:
    def infer(tile: int) -> None:
        shapes = ((2 * tile,), (5,), (5, 3), (5,), (2,), (2,), (2,))
        specs = tuple(TensorSpec(f"s{i}", DType.I32, s) for i, s in enumerate(shapes))
        round_rows.OP.infer({"tile": tile}, specs)

    infer(4)
    with pytest.raises(GraphError, match="tile is 5; 3 drafts serve a tile of 4"):
        infer(5)


# ---- what of it holds ----------------------------------------------------------------------------

# ids of a row (its certain token first), what was sampled behind each, tokens there -> accepted
ACCEPTED = {
    "all": ([1, 2, 3, 4], [2, 3, 4, 9], 4, 4),
    "none": ([1, 2, 3, 4], [5, 3, 4, 9], 4, 1),
    "the first, and nothing behind one that fails": ([1, 2, 3, 4], [2, 5, 4, 9], 4, 2),
    "up to what is there": ([1, 2, 3, 4], [2, 3, 4, 9], 3, 3),
    "without drafts": ([1, 2, 3, 4], [2, 3, 4, 9], 1, 1),
    "the certain token is not compared": ([9, 2, 3, 4], [2, 3, 4, 9], 2, 2),
    "without tokens": ([1, 2, 3, 4], [2, 3, 4, 9], 0, 0),
    "the same id again and again": ([7, 7, 7, 7], [7, 7, 7, 7], 4, 4),
}


@BOTH
@pytest.mark.parametrize("case", ACCEPTED)
def test_drafts_hold_while_they_are_what_was_sampled(case: str, how: str) -> None:
    ids, sampled, count, want = ACCEPTED[case]
    before = np.arange(10) % 4
    token_counts = np.stack([before, before + 4, before * 0])
    accepted, draft_starts, counts, last, positions = go(
        how,
        accept_drafts.OP,
        {"tile": 4},
        ints([8] * 4 + sampled),
        ints([8] * 4 + ids),
        ints(token_counts),
        ints([50, 51, 0]),
        ints([60, 61, 0]),
        ints([-1, 1]),
        ints([3, 100]),
        ints([0, count]),
    )
    assert accepted.tolist() == [0, want]
    assert draft_starts.tolist() == [0, 100 + want - 1 if want else 0]
    held = np.bincount(ids[1:want], minlength=10) if want else 0
    assert counts[:2].tolist() == [before.tolist(), (before + 4 + 2 * np.asarray(held)).tolist()]
    assert last[:2].tolist() == [50, sampled[want - 1] if want else 51]
    assert positions[:2].tolist() == [60, 100 + want if want else 61]


@BOTH
@pytest.mark.parametrize("most", [1, 3, 7])
def test_rounds_give_the_tokens_of_one_by_one(how: str, most: int) -> None:
    """Rounds of any size with drafts of any quality: the tokens, the counts, the position."""
    rng, vocab, length, prompt = np.random.default_rng(most), 11, 40, 2
    truth = rng.integers(0, vocab, length + most + 2)  # the model's token at each position
    states = {
        "token_counts": ints([[1] * vocab, [0] * vocab]),
        "last_tokens": ints([truth[prompt], 0]),
        "positions": ints([prompt, 0]),
        "drafts": ints([[0] * most] * 2),
    }
    lens, slots, from_state = ints([prompt, 0]), ints([0]), ints([-1])
    heard, sizes = [int(truth[prompt])], set()
    while len(heard) < length - prompt:
        here, tile = int(states["positions"][0]), int(rng.integers(1, most + 2))
        good = rng.integers(0, 4, most) > 0
        states["drafts"][0] = np.where(good, truth[here + 1 :][:most], rng.integers(0, vocab, most))
        counts, attrs = ints([rng.integers(1, tile + 1)]), {"tile": tile}
        ids, starts, certain = go(
            how, round_rows.OP, attrs, ints([-1] * tile), states["last_tokens"],
            states["drafts"], states["positions"], slots, from_state, counts,
        )  # fmt: skip
        (states["token_counts"],) = go(
            how, mark_tokens.OP, attrs, states["token_counts"], ids, states["last_tokens"],
            slots, starts, certain, lens,
        )  # fmt: skip
        # Behind a token that is not the model's, the model says something else.
        right = np.cumprod(ids == truth[here : here + tile]).astype(bool)
        sampled = np.where(right, truth[here + 1 : here + tile + 1], vocab - 1 - ids)
        accepted, draft_starts, *moved = go(
            how, accept_drafts.OP, attrs, ints(sampled), ids, states["token_counts"],
            states["last_tokens"], states["positions"], slots, starts, counts,
        )  # fmt: skip
        states |= dict(zip(("token_counts", "last_tokens", "positions"), moved, strict=True))
        n = int(accepted[0])
        assert draft_starts[0] == here + n - 1 and states["positions"][0] == here + n
        heard += sampled[:n].tolist()
        sizes.add(n)
    assert heard == truth[prompt : prompt + len(heard)].tolist() and len(sizes) > min(most, 2)
    said = np.bincount(heard[:-1], minlength=vocab)  # the last one is counted when it is read
    assert states["token_counts"][0].tolist() == (1 + 2 * said).tolist()


# ---- drafting ------------------------------------------------------------------------------------


def drafted(
    how: str, logits: Sequence[Sequence[float]], vocab: int, shortlist: Sequence[int] = ()
) -> list[int]:
    """The token of each row; its slot is the row's number."""
    n = len(logits)
    arrays = [np.asarray(logits, np.float32), *([ints(shortlist)] if shortlist else [])]
    attrs: Attrs = {"index": 1, "shortlist": int(bool(shortlist)), "vocab": vocab}
    rows = (ints(range(n)), ints(range(70, 70 + n)), ints([1] * n))
    tokens, ends, drafts = go(how, draft_token.OP, attrs, *arrays, ints([[5] * 3] * (n + 1)), *rows)
    assert ends.tolist() == list(range(71, 71 + n))
    assert drafts[:n].tolist() == [[5, int(t), 5] for t in tokens]
    return [int(t) for t in tokens]


# ---- drafting from the text ----------------------------------------------------------------------

LONG = [*range(20, 36)]
# the text, fewest ids of a match -> ids that match, the first three drafts
MATCHES = {
    "what followed": ([1, 2, 3, 4, 5, 6, 9, 1, 2, 3], 3, 3, [4, 5, 6]),
    "too short": ([1, 2, 3, 4, 5, 6, 9, 1, 2, 3], 4, 0, [0, 0, 0]),
    "the longest, not the latest": ([7, 1, 2, 3, 5, 1, 2, 4, 7, 1, 2], 1, 3, [3, 5, 1]),
    "the latest of equal ones": ([1, 2, 3, 8, 1, 2, 5, 9, 1, 2], 2, 2, [5, 9, 1]),
    "the last token itself is no match": ([1, 2, 3, 4], 1, 0, [0, 0, 0]),
    "the end continues with what repeats": ([5, 1, 2, 1, 2], 2, 2, [1, 2, 1]),
    "one id again": ([4, 4], 1, 1, [4, 4, 4]),
    "from the first token on": ([3, 1, 6, 3, 1], 2, 2, [6, 3, 1]),
    "no more than there are": ([3, 1, 6, 3, 1], 3, 0, [0, 0, 0]),
    "no image matches": ([-1, -1, 2, 8, -1, -1, 2], 2, 0, [0, 0, 0]),
    "an image is no draft": ([1, 2, -1, 3, 1, 2], 2, 2, [0, 3, 1]),
    "a text of one token": ([1], 1, 0, [0, 0, 0]),
    "no longer than is compared": ([0, *LONG, 2, 9, *LONG, 3, 0, *LONG], 6, 16, [3, 0, 20]),
}


@BOTH
@pytest.mark.parametrize("case", MATCHES)
def test_what_followed_the_end_of_the_text_before_is_drafted(case: str, how: str) -> None:
    """The text but its last token is stored in rounds of up to three, among rejected ones."""
    text, least, matched, drafts = MATCHES[case]
    pages, table = np.full((20, 1, 4, 1), 77, np.int32), ints([[-1] * 17, [*range(18, 1, -1)]])
    slots, vocab, at = ints([1]), 40, 0
    while at < len(text) - 1:
        ids = [vocab if t < 0 else t for t in [*text[at : at + 3], 38, 38][:3]]
        count = min(3, len(text) - 1 - at)
        rows = slots, ints([at]), ints([count])
        (pages,) = go(
            how, store_ids.OP, {"tile": 3, "vocab": vocab}, ints(ids), pages, table, *rows
        )
        at += count
    if at:
        rows = slots, ints([at - 1]), ints([1])
        got, state = go(how, match_drafts.OP, {"least": least, "held": 0}, pages, table,
                        ints([0, text[-1]]), ints([[9] * 3] * 2), *rows)  # fmt: skip
        assert got.tolist() == [matched] and state[1].tolist() == drafts


@BOTH
def test_a_match_that_is_not_long_needs_the_heads_word(how: str) -> None:
    """Its first draft; else the head's drafts stay, and those that it did not make are 0."""
    pages, table = np.full((10, 1, 8, 1), 77, np.int32), ints([[*range(9)], [-1] * 9])

    def drafted(text: list[int], head: list[int], held: int) -> tuple[int, list[int]]:
        at = np.arange(len(text) - 1)
        pages[at // 8, 0, at % 8, 0] = text[:-1]
        last, rows = ints([text[-1], 0]), (ints([0]), ints([len(text) - 3]), ints([2]))
        attrs: Attrs = {"least": 2, "held": held}
        matched, state = go(
            how, match_drafts.OP, attrs, pages, table, last, ints([head] * 2), *rows
        )
        return int(matched[0]), [int(t) for t in state[0]]

    short, long = [1, 2, 3, 4, 1, 2], [*LONG, 3, 4, *LONG]
    assert drafted(short, [3, 9, 9], 2) == (2, [3, 4, 1])
    assert drafted(short, [9, 3, 9], 2) == (0, [9, 3, 0])
    assert drafted(short, [9, 9, 9], 0) == (2, [3, 4, 1])
    assert drafted(long, [9, 9, 9], 3) == (16, [3, 4, 20])
    assert drafted(long[1:], [9, 9, 9], 3) == (0, [9, 9, 9])


NAN, INF = float("nan"), float("inf")


@BOTH
def test_the_draft_is_the_lowest_of_the_largest(how: str) -> None:
    rows = [[1, 3, 3, 2], [-0.0, 0.0, 0.0, -1], [0.0, -0.0, 0, 0], [-INF, -INF, -1e38, -INF]]
    assert drafted(how, rows, 4) == [1, 0, 0, 2]


@BOTH
def test_what_may_not_be_drafted_is_not(how: str) -> None:
    rows = [[1, NAN, 3, 9], [NAN, -INF, -INF, 9], [NAN, NAN, NAN, 9], [NAN, 2, INF, INF]]
    assert drafted(how, rows, 3) == [2, 1, 0, 2]


@BOTH
def test_a_shortlist_names_the_ids(how: str) -> None:
    """In any order; −1 and what is not below the vocabulary are never drafted."""
    rows = [[1, 7, 7, 0, 9, 9], [9, 1, 1, 1, 9, 9], [NAN, NAN, NAN, NAN, 9, 9]]
    assert drafted(how, rows, 40, [30, 8, 5, 39, -1, 40]) == [5, 30, 0]


@BOTH
def test_a_row_without_a_token_drafts_nothing(how: str) -> None:
    attrs: Attrs = {"index": 0, "shortlist": 0, "vocab": 4}
    logits, held = np.full((2, 4), np.nan, np.float32), ints([[5], [5]])
    rows = (ints([-1, 0]), ints([9, 9]), ints([0, 0]))
    tokens, ends, drafts = go(how, draft_token.OP, attrs, logits, held, *rows)
    assert tokens.tolist() == ends.tolist() == [0, 0] and drafts[0].tolist() == [5]


def test_a_draft_that_no_slot_holds_is_refused() -> None:
    shapes = ((2, 8), (5, 3), (2,), (2,), (2,))
    dtypes = (DType.F32, *[DType.I32] * 4)
    specs = tuple(TensorSpec("s", d, s) for d, s in zip(dtypes, shapes, strict=True))
    draft_token.OP.infer({"index": 2, "shortlist": 0, "vocab": 8}, specs)
    with pytest.raises(GraphError, match="index is 3; a slot has 3 drafts"):
        draft_token.OP.infer({"index": 3, "shortlist": 0, "vocab": 8}, specs)


# ---- what the draft head reads -------------------------------------------------------------------


@BOTH
def test_ids_move_one_to_the_left(how: str) -> None:
    (ids,) = go(
        how,
        shift_ids.OP,
        {"tile": 3},
        ints([1, 2, 3, 4, 5, 9, 6, 9, 9, 9, 9, 9]),
        ints([50, -1, 0, 50]),
        ints([70, 71, 72, 73]),
        ints([3, 2, 1, 0]),
    )
    assert ids.reshape(4, 3).tolist() == [[2, 3, 50], [5, 71, 0], [0, 0, 0], [0, 0, 0]]


@BOTH
@pytest.mark.parametrize("dtype", [DType.F32, DType.BF16])
def test_the_input_is_embed_and_two_norms_bit_for_bit(how: str, dtype: DType) -> None:
    rng, h = np.random.default_rng(4), 48
    weight, hidden = (rng.standard_normal((n, h)).astype(dtype.numpy) for n in (20, 5))
    norms = [rng.standard_normal(h).astype(np.float32) for _ in range(2)]
    ids, eps = ints([3, 0, 19, 20, -1]), {"eps": 1e-6}
    (got,) = go(how, mtp_input.OP, {**eps, "dtype": dtype.value}, ids, hidden, weight, *norms)
    legal = ints([3, 0, 19, 0, 0])
    (x,) = go(how, embed.OP, {"tile": 1, "dtype": dtype.value}, legal, legal, legal * 0, weight)
    left, right = (
        go(how, rms_norm.OP, eps, a, w)[0] for a, w in zip((x, hidden), norms, strict=True)
    )
    assert got.tobytes() == np.concatenate([left, right], axis=1).tobytes()
