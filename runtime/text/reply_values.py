"""Where a parameter's value ends in a call that is written as XML, while it streams.

A value is any text, and may hold the form's own words; knows no JSON and no tokens.
"""

from __future__ import annotations

from spark_engine.runtime.text.reply_formats import (
    END_FUNCTION,
    END_PARAMETER,
    FUNCTION,
    PARAMETER,
)
from spark_engine.runtime.text.stops import partial_match


def value_end(text: str, end: str, call_end: int, last: bool) -> tuple[int, int] | None:
    """(place, length of the mark) of the value's end in `text`; None while it is not certain.

    `</parameter>` ends it where another parameter, or the function's or the call's `end` follows,
    so that a value may hold the words. A line that begins with `<parameter=`, or the call's end at
    `call_end` (-1: not there), ends one that was left open. `last`: no more text comes.
    """
    behind = (PARAMETER, END_FUNCTION, end, FUNCTION)
    at = -1
    while (at := text.find(END_PARAMETER, at + 1)) >= 0:
        rest = text[at + len(END_PARAMETER) :].lstrip()
        if rest.startswith(behind) or (last and not rest):
            return _open_end(text, call_end, at) or (at, len(END_PARAMETER))
        if not last and any(mark.startswith(rest) for mark in behind):
            return _open_end(text, call_end, at)
    return _open_end(text, call_end, len(text))


def sure_of_value(text: str, end: str) -> int:
    """How much of `text` is sure to be part of the value, when its end is not there yet."""
    marks = (END_PARAMETER, "\n" + PARAMETER, END_FUNCTION, end)
    hits = [hit for mark in marks if (hit := text.find(mark)) >= 0]
    cut = min([*hits, len(text) - partial_match(text, marks)])
    return cut - (cut > 0 and text[cut - 1] == "\n")


def _open_end(text: str, call_end: int, before: int) -> tuple[int, int] | None:
    """The end of a value whose mark was left out, if there is one before this place."""
    ends = [text.find("\n" + PARAMETER) + 1]
    if call_end >= 0:
        at = text.rfind(END_FUNCTION, 0, call_end)
        whole = at >= 0 and text[at:call_end].strip() == END_FUNCTION
        ends.append(at if whole else call_end)
    found = [at for at in ends if 0 < at < before]
    return (min(found), 0) if found else None
