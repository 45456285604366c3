"""`bad_words`: which rows of tokens, and that none of them comes."""

import pytest

from spark_engine.runtime.engine.constraint import ConstraintSpec
from spark_engine.runtime.server.api.fields import BadField
from spark_engine.runtime.server.prompts.bad_words import MOST_WORDS, bar
from tests.runtime.structured.grammar_walks import tokenizer


def test_texts_are_barred_in_their_tokens_alone_and_behind_a_blank() -> None:
    tokens, first = tokenizer(), ConstraintSpec(grammar="g")
    bound = bar(["  the girl", "the girl", "7"], tokens, first)
    assert bound is not None and bound.grammar == "g"
    texts = {tokens.decode(row) for row in bound.barred}
    assert texts == {"the girl", " the girl", "7", " 7"}
    assert len(set(bound.barred)) == len(bound.barred) == 4
    assert max(map(len, bound.barred)) > 1
    assert bar([], tokens, first) is first and bar([], tokens, None) is None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["a", " \n"], "more than blanks"),
        ([""], "more than blanks"),
        (["a"] * (MOST_WORDS + 1), f"holds {MOST_WORDS + 1} texts of {MOST_WORDS + 1} characters"),
        (["a" * 20_000], "1 texts of 20000 characters; at most"),
    ],
)
def test_what_cannot_be_barred_is_refused(words: list[str], said: str) -> None:
    with pytest.raises(BadField, match=said):
        bar(words, tokenizer(), None)
