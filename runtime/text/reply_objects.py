"""JSON objects in calls: a function's arguments, or whole calls, while they stream.

An end mark inside a JSON string is text, since a string may mention the format. Only if the string
is never closed, or a new call follows the mark, did the object end there. Knows JSON and marks;
knows no schema.
"""

import json
import re
from bisect import bisect_left
from collections.abc import Collection, Sequence
from typing import Any

from spark_engine.runtime.text.reply_text import Lexeme, Mark
from spark_engine.runtime.text.tool_schema import read_json, to_json

_ENDS = (Mark.END_FUNCTION, Mark.END_CALL)
_OUTSIDE, _INSIDE = re.compile('"'), re.compile(r'["\\]')


class OpenObject:
    """Collects an object up to the first of its `ends`."""

    def __init__(self, ends: Collection[Mark]) -> None:
        self._ends = ends
        self._lexemes: list[Lexeme] = []
        self._inside = self._escaped = False  # a string
        # positions in the answer of end marks inside a string; consecutive ones count as one
        self._first: int | None = None
        self._last: int | None = None
        self._behind = False  # no text followed since
        self._opened = False  # only the mark of a call followed since

    def take(self, lexeme: Lexeme) -> tuple[str, Sequence[Lexeme]] | None:
        """None; or, once it has ended, its text and the following lexemes, including the end."""
        self._lexemes.append(lexeme)
        if not self._inside and lexeme.kind in self._ends:
            return self._cut(lexeme.at)
        if self._inside and not lexeme.is_blank and self._begins_call(lexeme):
            return self._cut(self._first)
        self._scan(lexeme.text)
        return None

    def end(self, cut: bool) -> tuple[str, Sequence[Lexeme]]:
        """The same at the end of the answer; `cut`: it may have ended inside a string."""
        return self._cut(self._last if self._inside and not cut else None)

    def _begins_call(self, lexeme: Lexeme) -> bool:
        """True if a new call starts, inside a string that contains an end mark."""
        kind = lexeme.kind
        if kind in self._ends and kind in _ENDS:
            self._last = self._last if self._behind else lexeme.at
            self._first = lexeme.at if self._first is None else self._first
            self._behind, self._opened = True, False
            return False
        opens = self._opened and lexeme.text.lstrip().startswith("{")
        if opens or (kind is Mark.FUNCTION and (self._opened or self._behind)):
            return True
        self._behind = False
        self._opened = kind is Mark.CALL and self._first is not None
        return False

    def _cut(self, place: int | None) -> tuple[str, Sequence[Lexeme]]:
        count = len(self._lexemes)
        if place is not None:
            count = bisect_left(self._lexemes, place, key=lambda lexeme: lexeme.at)
        return "".join(lexeme.text for lexeme in self._lexemes[:count]), self._lexemes[count:]

    def _scan(self, text: str) -> None:
        at = 0
        if self._escaped:
            at, self._escaped = 1, False
        while hit := (_INSIDE if self._inside else _OUTSIDE).search(text, at):
            at = hit.end()
            if hit.group() == '"':
                self._inside = not self._inside
            elif at == len(text):
                self._escaped = True
            else:
                at += 1


def calls_in(text: str) -> list[tuple[str, str]] | None:
    """(name, arguments as JSON) of consecutive objects; None if one is not a call."""
    try:
        made = _objects(text.strip())
        calls = [_call(one) for one in made]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return calls


def object_in(text: str) -> str | None:
    """The object as JSON; None if the text is not one."""
    try:
        made = read_json(text)
    except (ValueError, RecursionError):
        return None
    return to_json(made) if isinstance(made, dict) else None


def _objects(text: str) -> list[Any]:
    found, at, decoder = list[Any](), 0, json.JSONDecoder(strict=False)
    try:
        while at < len(text):
            made, at = decoder.raw_decode(text, at)
            found.append(made)
            while text[at : at + 1].isspace():
                at += 1
    except ValueError:
        return [read_json(text)]
    return found


def _call(made: Any) -> tuple[str, str]:
    """Raises the exceptions of a malformed object."""
    name, given = made["name"], made.get("arguments", made.get("parameters", {}))
    given = read_json(given) if isinstance(given, str) else given
    if not isinstance(name, str) or not isinstance(given, dict):
        raise ValueError(name)
    name.encode()
    return name, to_json(given)
