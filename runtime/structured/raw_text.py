"""Raw text up to a mark, as lexemes with fast masks.

Knows the marks of replies. After a `<` that may start a mark, nearly every token may follow.
llguidance computes such a mask quickly only if a slice of the vocabulary equals, letter by letter,
the rest of a lexeme. A text is therefore a sequence of short lexemes. The text after a partial mark
and a letter that no mark has is a separate lexeme, which is a slice.
"""

from collections.abc import Sequence

from spark_engine.runtime.structured.lark import Lark, in_class, in_regex
from spark_engine.runtime.text.reply_formats import (
    END_FUNCTION,
    END_PARAMETER,
    FUNCTION,
    PARAMETER,
    marks,
)

_REST = "[^<]*"
_OF_VALUES = (END_PARAMETER, PARAMETER, END_FUNCTION)
_LETTERS = tuple(  # sets of letters, each a subset of the next: of the marks of values, and of all
    "".join(sorted({letter for mark in row for letter in mark} - {"<"}))
    for row in (_OF_VALUES, (*_OF_VALUES, FUNCTION, *marks()))
)


def _other(letters: str) -> str:
    """A regex: a letter outside this set, then text up to the next `<`."""
    return f"[^<{''.join(map(in_class, letters))}]{_REST}"


SLICES = tuple(_other(letters) for letters in reversed(_LETTERS))  # smallest first


ANY = "[^<]+"
NO_BRACKET = r"([^<\[{\s][^<]*|\n)"  # text that JSON would not read as an array or an object


def without(lark: Lark, barred: Sequence[str], start: str = ANY) -> str:
    """The expression of texts without these marks. Each mark has one `<`, at its start, and none is
    a prefix of another.

    A text may end within a mark. `start` matches the text before the first `<`, if there is any.
    """
    return lark.once((without, start, *barred), lambda: _without(lark, barred, start))


def _without(lark: Lark, barred: Sequence[str], start: str) -> str:
    own = {letter for mark in barred for letter in mark[1:]}
    letters = next((row for row in _LETTERS if own <= set(row)), "".join(sorted(own)))
    prefixes = sorted({mark[1:i] for mark in barred for i in range(1, len(mark))})
    others, known = [], []
    for part in prefixes:
        others.append(in_regex(part) + _other(letters))
        after = {mark[len(part) + 1] for mark in barred if mark[1:].startswith(part)}
        if rest := "".join(map(in_class, sorted(set(letters) - after))):
            known.append(f"{in_regex(part)}[{rest}]{_REST}")
    ends = "|".join(map(in_regex, filter(None, prefixes)))
    pieces = (*("|".join(rows) for rows in (others, known) if rows), ends + "|")
    behind = " | ".join(lark.terminal(f"/<({piece})/") for piece in pieces)
    first = lark.terminal(f"/{start}/")
    return lark.rule(f"{first}? ({behind})*")
