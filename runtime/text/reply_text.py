"""Splits the text of a streamed answer into marks and the text between them.

A mark that the tokenizer has as a token counts only where that token was generated, so that an
answer may quote it. Every character is examined once. How the stream is divided affects only how
the text between two marks is divided. Knows no states and no calls.
"""

import enum
import re
from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

from spark_engine.runtime.text.reply_formats import (
    END_FUNCTION,
    END_PARAMETER,
    FUNCTION,
    PARAMETER,
    STRAY,
    CallFormat,
    ReasoningFormat,
)

_NAME = r"[^<>\n]{0,256}"
_NAMED = rf"(?P<named>function|parameter)=(?P<name>{_NAME})(?:[>\n]|(?=<))"
# Misspellings of `</parameter>` by models: `</parameter/>`, `</parameter1>`, `</Parameter >`, …
_NEAR = r"(?i: ?/ ?parameter[^<>\n]{0,16}(?:>|(?=[<\n]))|parameter ?/?>)"
_UNFINISHED = re.compile(rf"<(?:(?:function|parameter)={_NAME}|(?i: ?/ ?parameter[^<>\n]{{0,16}}))")
_NEARLY = ("</parameter", "<parameter/>")
_LONGEST = 300  # characters; every mark is shorter


class Mark(enum.Enum):
    TEXT = enum.auto()
    THINK = enum.auto()
    END_THINK = enum.auto()
    CALL = enum.auto()
    END_CALL = enum.auto()
    FUNCTION = enum.auto()
    END_FUNCTION = enum.auto()
    PARAMETER = enum.auto()
    END_PARAMETER = enum.auto()
    NEAR_END = enum.auto()  # a misspelled `</parameter>`
    STRAY = enum.auto()  # another end mark that models write after a function


class Lexeme(NamedTuple):
    """A mark, or text between two, or a part of such text. `at`: its position in the answer;
    `name`: of a function or a parameter, and included in its mark."""

    kind: Mark
    text: str
    at: int
    name: str = ""

    @property
    def is_blank(self) -> bool:
        """True if the text is white space, which separates two marks."""
        return self.kind is Mark.TEXT and self.text.isspace()


class Lexer:
    """The lexemes of one answer. `tokens`: marks that the tokenizer has as tokens."""

    def __init__(
        self,
        thoughts: ReasoningFormat | None,
        calls: CallFormat | None,
        tokens: Collection[str] = (),
    ) -> None:
        self.at = 0  # position in the answer up to which lexemes exist
        self._text = ""  # the text from there on
        self._tokens, self._places = frozenset(tokens), set[int]()  # and the positions of marks
        self._kinds: dict[str, Mark] = {}
        if thoughts is not None:
            self._kinds |= {thoughts.start: Mark.THINK, thoughts.end: Mark.END_THINK}
        if calls is not None:
            self._kinds |= {calls.start: Mark.CALL, calls.end: Mark.END_CALL}
        self._xml = calls is not None and calls.xml
        if self._xml:
            self._kinds |= dict.fromkeys(STRAY, Mark.STRAY)
            self._kinds |= {END_FUNCTION: Mark.END_FUNCTION, END_PARAMETER: Mark.END_PARAMETER}
        rows = [re.escape(mark[1:]) for mark in self._kinds]
        rows += [_NAMED, _NEAR] if self._xml else []
        self._pattern = re.compile(f"<(?:{'|'.join(rows)})") if rows else None

    def push(self, text: str, places: Iterable[int]) -> None:
        """Adds text. `places`: positions in the whole answer of tokens that are marks, which may be
        ahead of the text."""
        self._places.update(places)
        self._text += text

    def lexemes(self, last: bool) -> Iterator[Lexeme]:
        """The certain lexemes; with `last`, at the end of the text, all of them."""
        text, begin = self._text, self.at
        done = start = 0
        while self._pattern is not None and (hit := self._pattern.search(text, start)):
            mark, place = hit.group(), hit.start()
            start = hit.end()
            if mark in self._tokens and begin + place not in self._places:
                continue
            if place > done:
                yield Lexeme(Mark.TEXT, text[done:place], begin + done)
            yield self._lexeme(hit, begin + place)
            done = start
        end = len(text) if last else self._certain(text, done)
        if end > done:
            yield Lexeme(Mark.TEXT, text[done:end], begin + done)
        self._text = text[end:]
        self.at += end

    def _lexeme(self, hit: re.Match[str], at: int) -> Lexeme:
        mark = hit.group()
        if (kind := self._kinds.get(mark)) is not None:
            return Lexeme(kind, mark, at)
        if not (named := hit["named"]):
            return Lexeme(Mark.NEAR_END, mark, at)
        kind = Mark.FUNCTION if named in FUNCTION else Mark.PARAMETER
        return Lexeme(kind, mark, at, hit["name"].strip())

    def _certain(self, text: str, done: int) -> int:
        """End of the certain text from `done` on: before an incomplete mark. No mark has a second
        `<`."""
        place = text.rfind("<", done)
        if place < 0 or not self._may_become_mark(text[place:], self.at + place):
            return len(text)
        return place

    def _may_become_mark(self, text: str, at: int) -> bool:
        if len(text) > _LONGEST:
            return False
        for mark in self._kinds:
            if mark.startswith(text) and (mark not in self._tokens or at in self._places):
                return True
        if not self._xml:
            return False
        if any(mark.startswith(text) for mark in (FUNCTION, PARAMETER)):
            return True
        plain = text.lower().replace(" ", "")
        nearly = len(text) <= len(plain) + 2 and any(mark.startswith(plain) for mark in _NEARLY)
        return nearly or _UNFINISHED.fullmatch(text) is not None
