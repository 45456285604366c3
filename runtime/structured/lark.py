"""Writes a grammar in llguidance's Lark format.

Knows the format's syntax and escapes. Knows no request and no tool; `matcher` compiles the text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

from llguidance import regex_to_lark
from llguidance.gbnf_to_lark import any_to_lark

from spark_engine.errors import RequestError
from spark_engine.runtime.structured.schemas import SchemaBundle, states

# Between JSON's parts, once at each place: models indent, and must not write blanks without end.
BLANK = r"[ \t]|\n[ \t]{0,24}"
MOST_TEXT = 256 << 10  # characters of a grammar
MULTIPLES = 20_000  # sum over all `multipleOf` of a grammar: each costs this many states
_OPTIONS = "x-guidance"  # llguidance's own key in a schema


@dataclass(frozen=True)
class Style:
    """Whitespace and strictness of a JSON value."""

    blank: str = BLANK  # regex of the white space between parts; "" for none
    lenient: bool = False  # keywords that a grammar cannot express are removed, instead of refused

    def options(self) -> dict[str, Any]:
        how: dict[str, Any] = {"whitespace_pattern": self.blank} if self.blank else {}
        how["whitespace_flexible"] = bool(self.blank)
        return {**how, "lenient": self.lenient, "coerce_one_of": self.lenient}


@dataclass(frozen=True)
class GrammarPiece:
    """A schema or another form in a grammar, and its place in the request.

    Attributes:
        write: its expression, from the schema or a replacement; raises RequestError if it has none.
        places: by name, the places of the definitions in the schema's `$defs`.
    """

    place: str
    make: Callable[[], Any]  # creates the schema on demand, as it may be long
    style: Style
    write: Callable[[Lark, Any], str]
    anything: Any = True  # the least restrictive replacement of the schema
    places: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def schema(self) -> Any:
        return self.make()

    @property
    def param(self) -> str:
        return param_of(self.place)

    def real(self, place: str) -> str:
        """A place in `schema`, as a place in the request."""
        shared = f"{self.place}.$defs."
        name, *rest = re.split(r"(?=[.\[])", place.removeprefix(shared), maxsplit=1)
        if not place.startswith(shared) or name not in self.places:
            return place
        return "".join([self.places[name], *rest])


class TooLong(RequestError):
    """A grammar's text has more than MOST_TEXT characters."""

    def __init__(self) -> None:
        super().__init__(f"it makes a grammar of more than {MOST_TEXT} characters: make it shorter")


class Lark:
    """Collects rules. Methods add rules and return grammar expressions as text.

    Attributes:
        pieces: the pieces that `piece` has written.
        failed: the error of a piece that could not be written; the text is then invalid.
    """

    def __init__(self, instead: Callable[[GrammarPiece], Any] | None = None) -> None:
        """`instead`: the schema that replaces each piece's own."""
        self.pieces: list[GrammarPiece] = []
        self.failed: RequestError | None = None
        self._instead = instead or (lambda piece: piece.schema)
        self._names: dict[tuple[str, str], str] = {}  # by kind and expression
        self._written: dict[Hashable, str] = {}
        self._others: list[dict[str, str]] = []
        self._size = self._states = 0  # characters of the text; states of all `multipleOf`

    def rule(self, expression: str) -> str:
        return self._add("r", expression)

    def terminal(self, expression: str) -> str:
        """Adds a lexeme and returns its name: strings, regexes and other lexemes,
        matched as one."""
        return self._add("T", expression)

    def piece(self, piece: GrammarPiece) -> str:
        """The piece's expression. Raises TooLong; stores any other error in `failed`."""
        self.pieces.append(piece)
        try:
            return piece.write(self, self._instead(piece))
        except TooLong:
            raise
        except RequestError as error:
            self.failed = self.failed or error
            return '""'

    def schema(self, schema: Any, style: Style, place: str, anything: Any = True) -> str:
        """The expression of a JSON schema at `place` in the request."""
        bundle = SchemaBundle(schema, place)
        write = partial(Lark.json, style=style)
        make = partial(bundle.whole, schema)
        return self.piece(GrammarPiece(place, make, style, write, anything, bundle.places))

    def json(self, schema: Any, style: Style) -> str:
        """The expression of a JSON schema. Raises RequestError if its `multipleOf` are
        too costly."""
        self._states += states(schema)
        if self._states > MULTIPLES:
            words = f"its values of multipleOf are {self._states} together"
            raise RequestError(f"{words}; at most {MULTIPLES} are supported")
        text = json_of(schema, style)
        if ("r", text) in self._names:
            self.count(text)
        return self.rule(text)

    def once(self, key: Hashable, write: Callable[[], str]) -> str:
        if key not in self._written:
            self._written[key] = write()
        return self._written[key]

    def grammar(self, text: str) -> str:
        """A complete foreign grammar, with its own `start`."""
        name = f"g{len(self._others)}"
        self.count(text)
        self._others.append({"name": name, "lark_grammar": text})
        return f"@{name}"

    def text(self, start: str) -> str:
        """The text for `Grammars`; an answer matches `start`. Raises TooLong, and `failed`."""
        if self.failed is not None:
            raise self.failed
        self.count(start)
        rows = (f"{name}: {expression}" for (_, expression), name in self._names.items())
        lark = "\n".join([f"start: {start}", *rows, ""])
        if not self._others:
            return lark
        return json.dumps({"grammars": [{"name": "start", "lark_grammar": lark}, *self._others]})

    def _add(self, kind: str, expression: str) -> str:
        if (kind, expression) not in self._names:
            self.count(expression)
            self._names[kind, expression] = f"{kind}{len(self._names)}"
        return self._names[kind, expression]

    def count(self, text: str) -> None:
        """Adds to the text's length, or to the cost of discarded work. Raises TooLong."""
        self._size += len(text) + 8
        if self._size > MOST_TEXT:
            raise TooLong


def param_of(place: str) -> str:
    """The body's field that contains a place."""
    return re.split(r"[.\[]", place)[0]


def json_of(schema: Any, style: Style) -> str:
    plain = {} if schema is True else schema
    if isinstance(plain, Mapping):
        own = {key: value for key, value in plain.items() if key != _OPTIONS}
        plain = {**own, _OPTIONS: style.options()}
    return f"%json {json.dumps(plain)}"


def quoted(text: str) -> str:
    """The expression of a text. Raises RequestError if it is not valid Unicode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"{text!r} is not valid Unicode: {error}") from None
    return json.dumps(text)


def one_of(expressions: Iterable[str]) -> str:
    return f"({' | '.join(expressions)})"


def regex(text: str) -> str:
    r"""The expression of a regex that must match a whole text. `\d` is 0 to 9."""
    return f"/{regex_to_lark(text, 'd')}/"


def ebnf(text: str) -> str:
    """A Lark grammar from a GBNF or Lark one. Raises RequestError."""
    try:
        made = str(any_to_lark(text))
    except Exception as error:  # the library raises various exceptions
        raise RequestError(f"it is neither EBNF nor Lark: {error}") from None
    return made


def token(number: int) -> str:
    return f"<[{number}]>"


def in_regex(text: str) -> str:
    """A text as a regex between slashes."""
    return "".join(map(in_class, text))


def in_class(letter: str) -> str:
    """A regex character, escaped for a class or outside one."""
    return letter if letter.isalnum() or letter in "_=<> " else f"\\{letter}"
