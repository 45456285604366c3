"""Objects in calls: the arguments of a function, or whole calls, while they stream.

An end that comes inside a JSON string is text: a string may speak of the form. Only where the
string is never closed, or a new call follows the end, did the object end there. Knows JSON and
marks; knows no schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from typing import Any

from spark_engine.runtime.text.reply_text import Lexeme, Mark
from spark_engine.runtime.text.tool_schema import read_json, to_json

_ENDS = (Mark.END_FUNCTION, Mark.END_CALL)
_OUTSIDE, _INSIDE = re.compile('"'), re.compile(r'["\\]')


class OpenObject:
    """Collects an object up to the first of its `ends`. With `plain` strings hide no end: for an
    answer of which no more comes, so that it is not read again and again."""

    def __init__(self, ends: Collection[Mark], plain: bool) -> None:
        self._ends, self._plain = ends, plain
        self._lexemes: list[Lexeme] = []
        self._inside = self._escaped = False  # of a string
        self._first: int | None = None  # end inside a string, by its place among the lexemes
        self._latest: int | None = None  # the same, with nothing but ends behind it
        self._opened = False  # the mark of a call came behind it

    def take(self, lexeme: Lexeme) -> tuple[str, Sequence[Lexeme]] | None:
        """None, or, when it has ended, its text and what follows, the end included."""
        here = len(self._lexemes)
        self._lexemes.append(lexeme)
        if lexeme.kind in self._ends and (self._plain or not self._inside):
            return self._cut(here)
        if self._inside and not lexeme.is_blank and self._begins_call(lexeme, here):
            return self._cut(self._latest)
        self._scan(lexeme.text)
        return None

    def end(self, cut: bool) -> tuple[str, Sequence[Lexeme]]:
        """The same when no more comes; `cut`: the answer was cut off, maybe inside a string."""
        return self._cut(self._first if self._inside and not cut else None)

    def _begins_call(self, lexeme: Lexeme, here: int) -> bool:
        """Whether a new call begins, inside a string and directly behind an end."""
        kind = lexeme.kind
        if kind in self._ends and kind in _ENDS:
            self._first = here if self._first is None else self._first
            self._latest = here if self._latest is None or self._opened else self._latest
            self._opened = False
            return False
        begun = self._opened and lexeme.text.lstrip().startswith("{")
        if self._latest is not None and (begun or kind is Mark.FUNCTION):
            return True
        self._opened = kind is Mark.CALL and self._latest is not None
        self._latest = self._latest if self._opened else None
        return False

    def _cut(self, place: int | None) -> tuple[str, Sequence[Lexeme]]:
        inner, rest = self._lexemes, list[Lexeme]()
        if place is not None:
            inner, rest = self._lexemes[:place], self._lexemes[place:]
        return "".join(lexeme.text for lexeme in inner), rest

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
    """(name, arguments as JSON) of objects one behind the other; None where one is no call."""
    try:
        made = _objects(text.strip())
        calls = [_call(one) for one in made]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return calls


def object_in(text: str) -> str | None:
    """An object as JSON; None where the text is none."""
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
    """Raises what the object's form makes it raise."""
    name, given = made["name"], made.get("arguments", made.get("parameters", {}))
    given = read_json(given) if isinstance(given, str) else given
    if not isinstance(name, str) or not isinstance(given, dict):
        raise ValueError(name)
    name.encode()
    return name, to_json(given)
