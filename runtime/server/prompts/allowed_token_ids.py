"""`allowed_token_ids`: an answer of only these ids, as a grammar. It ends by itself only if one of
them is an end id of the model."""

from collections.abc import Iterator, Sequence

import msgspec

from spark_engine.runtime.engine.constraint import ConstraintSpec
from spark_engine.runtime.server.api.fields import BadField, short
from spark_engine.runtime.structured.lark import MOST_TEXT

FIELD = "allowed_token_ids"


def only_these_ids(
    ids: Sequence[int], known: int, ends: Sequence[int], most: int, bound: ConstraintSpec | None
) -> ConstraintSpec:
    """Adds to a constraint: an answer of at most `most` tokens has only `ids`.

    `known` ids have a token, and `ends` are the model's end ids.

    Raises BadField for an id without a token, and where there is another grammar.
    """
    if not ids:
        raise BadField(f"{FIELD} is empty; it must hold an id", FIELD)
    for token in ids:
        if not 0 <= token < known:
            words = f"{FIELD} holds {short(token)}; ids go from 0 to {known - 1}"
            raise BadField(words, FIELD)
    if bound is not None and bound.grammar:
        words = f"{FIELD} and another form of the answer cannot be enforced together"
        raise BadField(f"{words}: give one of them", FIELD)
    spans = ",".join(_spans(sorted(set(ids))))
    # one more than the answer can have: the end of the grammar would end the answer
    times = "*" if set(ends) & set(ids) else f"{{{most + 1}}}"
    text = f"start: id{times}\nid: <[{spans}]>"
    if len(text) > MOST_TEXT:
        raise BadField(f"{FIELD} holds {len(ids)} ids, too many apart; use logit_bias", FIELD)
    return msgspec.structs.replace(bound or ConstraintSpec(), grammar=text)


def _spans(ids: Sequence[int]) -> Iterator[str]:
    """Ids in ascending order as `3` or `5-9`."""
    first = last = ids[0]
    for token in [*ids[1:], None]:
        if token is not None and token == last + 1:
            last = token
            continue
        yield str(first) if first == last else f"{first}-{last}"
        if token is not None:
            first = last = token
