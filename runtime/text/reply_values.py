"""Where a parameter's value ends in a call that is written as XML, while it streams.

A value is any text, and may hold the form's own words; knows no JSON and no tokens.
"""

from __future__ import annotations

import re

from spark_engine.runtime.text.reply_formats import (
    END_FUNCTION,
    END_PARAMETER,
    FUNCTION,
    PARAMETER,
)
from spark_engine.runtime.text.stops import partial_match

_SPACE = re.compile(r"\s*")
_LOOK = 64  # characters; every mark is shorter


def possible_end(text: str, end: str, start: int) -> int:
    """The first `</parameter>` from `start` on that ends the value, or may yet; -1: there is none.

    Those before it are followed by something else, and need not be looked at again.
    """
    at = text.find(END_PARAMETER, start)
    while at >= 0:
        rest, behind = _rest(text, at), _behind(end)
        if rest.startswith(behind) or any(mark.startswith(rest) for mark in behind):
            break
        at = text.find(END_PARAMETER, at + 1)
    return at


def value_end(text: str, end: str, call_end: int, last: bool, at: int) -> tuple[int, int] | None:
    """(place, length of the mark) of the value's end in `text`; None while it is not certain.

    `</parameter>` ends it where another parameter, or the function's or the call's `end` follows,
    so that a value may hold the words; `at` is its `possible_end`. A line that begins with
    `<parameter=`, or the call's end at `call_end` (-1: not there), ends one that was left open.
    `last`: no more text comes.
    """
    if at >= 0:
        rest = _rest(text, at)
        if rest.startswith(_behind(end)) or (last and not rest):
            return _open_end(text, call_end, at) or (at, len(END_PARAMETER))
        if not last:
            return _open_end(text, call_end, at)
    return _open_end(text, call_end, len(text))


def sure_of_value(text: str, end: str) -> int:
    """How much of `text` is sure to be part of the value, when its end is not there yet."""
    marks = (END_PARAMETER, "\n" + PARAMETER, END_FUNCTION, end)
    hits = [hit for mark in marks if (hit := text.find(mark)) >= 0]
    cut = min([*hits, len(text) - partial_match(text, marks)])
    return cut - (cut > 0 and text[cut - 1] == "\n")


def _behind(end: str) -> tuple[str, ...]:
    return (PARAMETER, END_FUNCTION, end, FUNCTION)


def _rest(text: str, at: int) -> str:
    """What follows `</parameter>` at this place but for white space, as far as it matters."""
    space = _SPACE.match(text, at + len(END_PARAMETER))
    assert space is not None
    return text[space.end() : space.end() + _LOOK]


def _open_end(text: str, call_end: int, before: int) -> tuple[int, int] | None:
    """The end of a value whose mark was left out, if there is one before this place."""
    ends = [text.find("\n" + PARAMETER) + 1]
    if call_end >= 0:
        at = text.rfind(END_FUNCTION, 0, call_end)
        whole = at >= 0 and text[at:call_end].strip() == END_FUNCTION
        ends.append(at if whole else call_end)
    found = [at for at in ends if 0 < at < before]
    return (min(found), 0) if found else None
