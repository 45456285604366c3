"""What `token_counts` holds, in literals: 2 · (times generated) + (1 if in the prompt)."""

from collections.abc import Sequence

import numpy as np
import pytest

from spark_engine.plugins.ops.sampling import mark_tokens
from spark_engine.tensors import Array
from tests.plugins.run_op import named, run

VOCAB, PAD = 6, 5


def marked(
    how: str,
    tile: int,
    token_counts: dict[int, list[int]],
    rows: Sequence[tuple[int, int, list[int]]],
    prompts: list[int],
    last: Sequence[int] = (0, 0, 0),
) -> Array:
    """`token_counts` [2,VOCAB] after rows of (slot, start, tokens); stale rows hold 77."""
    state = np.full((3, VOCAB), 77)
    for slot, row in token_counts.items():
        state[slot] = row
    ids = np.full((len(rows), tile), PAD)
    for i, (_, _, tokens) in enumerate(rows):
        ids[i, : len(tokens)] = tokens
    slots, starts = [r[0] for r in rows], [r[1] for r in rows]
    counts = [len(r[2]) for r in rows]
    columns = (state, ids.reshape(-1), last, slots, starts, counts, [*prompts, 0])
    arrays = tuple(np.asarray(c, np.int32) for c in columns)
    if how == "reference":
        return mark_tokens.OP.reference({"tile": tile}, arrays)[0][:2]
    return run(mark_tokens.OP, {"tile": tile}, named(mark_tokens.OP, arrays))[0][:2]


BOTH = pytest.mark.parametrize("how", ["reference", "body"])


@BOTH
def test_a_prompt_is_marked_once_and_clears_what_was_there(how: str) -> None:
    got = marked(how, 64, {}, [(1, 0, [2, 0, 2])], prompts=[9, 3])
    assert got.tolist() == [[77] * 6, [1, 0, 1, 0, 0, 0]]


@BOTH
def test_generated_tokens_are_counted_next_to_the_prompts_mark(how: str) -> None:
    got = marked(how, 1, {0: [1, 0, 0, 4, 0, 0], 1: [0] * 6}, [(0, 7, [0])], prompts=[7, 9])
    assert got[0].tolist() == [3, 0, 0, 4, 0, 0]
    got = marked(how, 1, {0: [3, 0, 0, 4, 0, 0], 1: [0] * 6}, [(0, 8, [3])], prompts=[7, 9])
    assert got[0].tolist() == [3, 0, 0, 6, 0, 0]


@BOTH
def test_the_prompt_ends_before_the_position_of_its_length(how: str) -> None:
    """Positions 5 and 6 belong to a prompt of 7, positions 7 and 8 do not."""
    got = marked(how, 64, {0: [0] * 6, 1: [0] * 6}, [(0, 5, [1, 2, 3, 3])], prompts=[7, 9])
    assert got[0].tolist() == [0, 1, 1, 4, 0, 0]


@BOTH
def test_a_prompt_token_adds_no_count_to_one_generated(how: str) -> None:
    """A sequence that is prefilled again marks what it had generated as such."""
    got = marked(how, 64, {}, [(0, 0, [4, 4, 4, 1, 4])], prompts=[2, 9])
    assert got[0].tolist() == [0, 2, 0, 0, 5, 0]


@BOTH
def test_a_decode_row_may_take_the_token_sampled_last(how: str) -> None:
    rows = [(1, 4, [-1]), (0, 9, [2])]
    state = {0: [0] * 6, 1: [0] * 6}
    got = marked(how, 1, state, rows, prompts=[4, 4], last=(1, 3, 0))
    assert got.tolist() == [[0, 0, 2, 0, 0, 0], [0, 0, 0, 2, 0, 0]]


@BOTH
def test_tiles_of_one_sequence_add_up(how: str) -> None:
    rows = [(1, 0, [0] * 64), (1, 64, [0, 1]), (-1, 0, [])]
    got = marked(how, 64, {0: [0] * 6}, rows, prompts=[9, 63])
    assert got.tolist() == [[0] * 6, [1 + 2 * 2, 2, 0, 0, 0, 0]]
