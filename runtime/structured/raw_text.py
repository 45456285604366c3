"""Text that stands raw up to a mark, in lexemes whose masks are quick.

Knows the marks of replies. Behind a `<` that may begin a mark nearly every token may follow, and
the library sees that at once only where a slice of the vocabulary is, letter by letter, what a
lexeme still asks for. So a text is a row of short lexemes, and what goes on behind a begun mark
with a letter that no mark has is a lexeme of its own: it is a slice.
"""

from __future__ import annotations

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
_LETTERS = tuple(  # sets of letters, each within the next: of the marks of values, and of all
    "".join(sorted({letter for mark in row for letter in mark} - {"<"}))
    for row in (_OF_VALUES, (*_OF_VALUES, FUNCTION, *marks()))
)


def _other(letters: str) -> str:
    """A letter that is none of these, and text up to the next `<`."""
    return f"[^<{''.join(map(in_class, letters))}]{_REST}"


SLICES = tuple(_other(letters) for letters in reversed(_LETTERS))  # the narrowest first


ANY = "[^<]+"
NO_BRACKET = r"([^<\[{\s][^<]*|\n)"  # what cannot be read as JSON's array or object


def without(lark: Lark, barred: Sequence[str], start: str = ANY) -> str:
    """The expression of texts that hold none of these marks, each of which has one `<`, at its
    start, and none of which begins another.

    A text may end within a mark. What is before the first `<` is of `start`, or is not there.
    """
    return lark.once((without, start, *barred), lambda: _without(lark, barred, start))


def _without(lark: Lark, barred: Sequence[str], start: str) -> str:
    own = {letter for mark in barred for letter in mark[1:]}
    letters = next((row for row in _LETTERS if own <= set(row)), "".join(sorted(own)))
    begun = sorted({mark[1:i] for mark in barred for i in range(1, len(mark))})
    others, known = [], []
    for part in begun:
        others.append(in_regex(part) + _other(letters))
        after = {mark[len(part) + 1] for mark in barred if mark[1:].startswith(part)}
        if rest := "".join(map(in_class, sorted(set(letters) - after))):
            known.append(f"{in_regex(part)}[{rest}]{_REST}")
    ends = "|".join(map(in_regex, filter(None, begun)))
    pieces = (*("|".join(rows) for rows in (others, known) if rows), ends + "|")
    behind = " | ".join(lark.terminal(f"/<({piece})/") for piece in pieces)
    first = lark.terminal(f"/{start}/")
    return lark.rule(f"{first}? ({behind})*")
