"""A grammar as it is written down, in the Lark form that llguidance reads.

Knows that form's words and escapes. Knows no request and no tool; `matcher` compiles the text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from llguidance import regex_to_lark
from llguidance.gbnf_to_lark import any_to_lark

from spark_engine.errors import RequestError

# Between JSON's parts, once at each place: models indent, and must not write blanks for ever.
BLANK = r"[ \t]|\n[ \t]{0,24}"
_OPTIONS = "x-guidance"  # llguidance's own key in a schema


@dataclass(frozen=True)
class Style:
    """How JSON is written and how closely its schema is followed.

    Attributes:
        blank: regex of the white space between parts; "" for none.
        lenient: keywords that no grammar holds are left out, instead of refused.
    """

    blank: str = BLANK
    lenient: bool = False

    def options(self) -> dict[str, Any]:
        """For llguidance."""
        how: dict[str, Any] = {"whitespace_pattern": self.blank} if self.blank else {}
        how["whitespace_flexible"] = bool(self.blank)
        return {**how, "lenient": self.lenient, "coerce_one_of": self.lenient}


@dataclass(frozen=True)
class Piece:
    """A schema in a grammar, and where in the request it stands."""

    place: str
    schema: Any
    style: Style

    @property
    def field(self) -> str:
        """The field of the body."""
        return re.split(r"[.\[]", self.place)[0]


class Lark:
    """Collects rules. Expressions are texts; those that a method returns name what it added."""

    def __init__(self) -> None:
        self.pieces: list[Piece] = []
        self._names: dict[tuple[str, str], str] = {}  # by kind and expression
        self._others: list[dict[str, str]] = []

    def rule(self, expression: str) -> str:
        """A new rule."""
        return self._add("r", expression)

    def terminal(self, expression: str) -> str:
        """A new lexeme: strings, regexes and other lexemes, read as one."""
        return self._add("T", expression)

    def json(self, schema: Any, style: Style, place: str) -> str:
        """Values of a JSON schema that stands at `place` in the request."""
        self.pieces.append(Piece(place, schema, style))
        return self.rule(json_of(schema, style))

    def grammar(self, text: str) -> str:
        """A whole grammar of somebody else's, with its own `start`."""
        name = f"g{len(self._others)}"
        self._others.append({"name": name, "lark_grammar": text})
        return f"@{name}"

    def text(self, start: str) -> str:
        """What `Grammars` compiles: an answer is `start`."""
        rows = (f"{name}: {expression}" for (_, expression), name in self._names.items())
        lark = "\n".join([f"start: {start}", *rows, ""])
        if not self._others:
            return lark
        return json.dumps({"grammars": [{"name": "start", "lark_grammar": lark}, *self._others]})

    def _add(self, kind: str, expression: str) -> str:
        return self._names.setdefault((kind, expression), f"{kind}{len(self._names)}")


def json_of(schema: Any, style: Style) -> str:
    """The expression of a JSON schema."""
    plain = {} if schema is True else schema
    if isinstance(plain, Mapping):
        own = {key: value for key, value in plain.items() if key != _OPTIONS}
        plain = {**own, _OPTIONS: style.options()}
    return f"%json {json.dumps(plain)}"


def quoted(text: str) -> str:
    """The expression of a text. Raises RequestError where it is not Unicode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"{text!r} is not valid Unicode: {error}") from None
    return json.dumps(text)


def one_of(expressions: Iterable[str]) -> str:
    """Any of them."""
    return f"({' | '.join(expressions)})"


def regex(text: str) -> str:
    """The expression of a regex that a whole text must match. `\\d` is 0 to 9."""
    return f"/{regex_to_lark(text, 'd')}/"


def ebnf(text: str) -> str:
    """A Lark grammar from one in GBNF's or in Lark's form. Raises RequestError."""
    try:
        made = str(any_to_lark(text))
    except Exception as error:  # the library raises what it trips over
        raise RequestError(f"it is neither EBNF nor Lark: {error}") from None
    return made


def token(number: int) -> str:
    """The expression of one token id."""
    return f"<[{number}]>"


def in_regex(text: str) -> str:
    """A text as a regex between slashes."""
    return "".join(map(in_class, text))


def in_class(letter: str) -> str:
    """A character of a regex, escaped for a class or outside one."""
    return letter if letter.isalnum() or letter in "_=<> " else f"\\{letter}"
