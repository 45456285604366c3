"""`bad_words`: texts that an answer must not contain, as rows of token ids not to sample.

As in vLLM a text is excluded as its own tokens, alone and after a space, in the whole answer,
including thoughts.
"""

from collections.abc import Sequence

import msgspec

from spark_engine.runtime.engine.constraint import ConstraintSpec
from spark_engine.runtime.server.api.fields import BadField, short
from spark_engine.runtime.text.tokenizer import Tokenizer

FIELD = "bad_words"
MOST_WORDS, MOST_CHARACTERS = 1024, 16 << 10


def bar(
    words: Sequence[str], tokenizer: Tokenizer, bound: ConstraintSpec | None
) -> ConstraintSpec | None:
    """Adds to a constraint: an answer without these texts.

    Raises BadField for a blank text, and for too many.
    """
    size = sum(map(len, words))
    if len(words) > MOST_WORDS or size > MOST_CHARACTERS:
        most = f"at most {MOST_WORDS} texts of {MOST_CHARACTERS} characters together"
        raise BadField(f"{FIELD} holds {len(words)} texts of {size} characters; {most}", FIELD)
    rows: dict[tuple[int, ...], None] = {}
    for word in words:
        plain = word.lstrip()
        if not plain:
            raise BadField(f"{FIELD} holds {short(word)}; each must hold more than blanks", FIELD)
        rows |= {tuple(tokenizer.encode(text)): None for text in (plain, f" {plain}")}
    if not rows:
        return bound
    return msgspec.structs.replace(bound or ConstraintSpec(), barred=tuple(rows))
