"""An answer of only some ids: the engine's constraint, and that its grammar accepts just these."""

import numpy as np
import pytest

from spark_engine.runtime.engine.constraint import ConstraintSpec
from spark_engine.runtime.server.api.fields import BadField
from spark_engine.runtime.server.prompts.allowed_token_ids import only_these_ids
from spark_engine.runtime.structured.matcher import MOST_TEXT, Grammars
from tests.runtime.server.api.api_client import tokenizer

EOS, VOCAB = 1, 512


@pytest.mark.parametrize(
    "ids", [[5], [300, 5, 7, 8, 9], [0, 2, 3], [401, 402, 5], [6, 8, 10], [5, EOS]]
)
def test_a_grammar_allows_just_these(ids: list[int]) -> None:
    spec = only_these_ids(ids, len(tokenizer()), (EOS,), 3, None)
    matcher = Grammars(tokenizer, VOCAB, (EOS,))(spec.grammar)
    for token in (ids[0], ids[0], ids[0]):
        row = np.zeros(VOCAB // 32, np.uint32)
        assert matcher.fill(row)
        assert {i for i in range(VOCAB) if row[i // 32] >> (i % 32) & 1} == set(ids)
        matcher.advance(token)
    assert not matcher.done, "the engine counts"


def test_what_binds_already_stays() -> None:
    spec = only_these_ids([3], 9, (1,), 7, ConstraintSpec(forced=(4, 5)))
    assert spec == ConstraintSpec(forced=(4, 5), grammar="start: id{8}\nid: <[3]>")


def test_what_cannot_be_followed_is_refused() -> None:
    with pytest.raises(BadField, match="allowed_token_ids is empty"):
        only_these_ids([], 9, (1,), 7, None)
    for wild in (-1, 9):
        with pytest.raises(BadField, match=f"holds {wild}; ids go from 0 to 8"):
            only_these_ids([3, wild], 9, (1,), 7, None)
    with pytest.raises(BadField, match="give one of them"):
        only_these_ids([3], 9, (1,), 7, ConstraintSpec(grammar="start: /a/"))
    with pytest.raises(BadField, match="too many apart"):
        only_these_ids(range(0, MOST_TEXT, 2), MOST_TEXT, (1,), 7, None)
    assert only_these_ids(range(MOST_TEXT), MOST_TEXT, (1,), 7, None)
