"""A grammar as it is written down, in the Lark form that llguidance reads.

Knows that form's words and escapes. Knows no request and no tool; `matcher` compiles the text.
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
from spark_engine.runtime.structured.schemas import Bundle, states

# Between JSON's parts, once at each place: models indent, and must not write blanks for ever.
BLANK = r"[ \t]|\n[ \t]{0,24}"
MOST_TEXT = 256 << 10  # characters of a grammar
MULTIPLES = 20_000  # all `multipleOf` of a grammar together: each takes so many states
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
    """A schema in a grammar, or another form, and where in the request it is.

    Attributes:
        make: the schema. It may be long, and is made where it is asked for.
        write: its expression; raises RequestError for what has none. Given the schema, or another
            in its place.
        anything: the schema in its place that binds least.
        places: where the definitions in the schema's `$defs` are, by their names.
    """

    place: str
    make: Callable[[], Any]
    style: Style
    write: Callable[[Lark, Any], str]
    anything: Any = True
    places: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def schema(self) -> Any:
        """What `make` makes."""
        return self.make()

    @property
    def param(self) -> str:
        """The field of the body."""
        return param_of(self.place)

    def real(self, place: str) -> str:
        """A place in `schema` as a place in the request."""
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
    """Collects rules. Expressions are texts; those that a method returns name what it added.

    Attributes:
        pieces: what was written by `piece`.
        failed: what kept a piece from being written; the text is then of no use.
    """

    def __init__(self, instead: Callable[[Piece], Any] | None = None) -> None:
        """`instead`: the schema to write in the place of a piece's own."""
        self.pieces: list[Piece] = []
        self.failed: RequestError | None = None
        self._instead = instead or (lambda piece: piece.schema)
        self._names: dict[tuple[str, str], str] = {}  # by kind and expression
        self._written: dict[Hashable, str] = {}
        self._others: list[dict[str, str]] = []
        self._size = self._states = 0  # characters, and of all `multipleOf`

    def rule(self, expression: str) -> str:
        """A new rule."""
        return self._add("r", expression)

    def terminal(self, expression: str) -> str:
        """A new lexeme: strings, regexes and other lexemes, read as one."""
        return self._add("T", expression)

    def piece(self, piece: Piece) -> str:
        """Its expression. Raises TooLong; what else is wrong with it is `failed`."""
        self.pieces.append(piece)
        try:
            return piece.write(self, self._instead(piece))
        except TooLong:
            raise
        except RequestError as error:
            self.failed = self.failed or error
            return '""'

    def schema(self, schema: Any, style: Style, place: str, anything: Any = True) -> str:
        """Values of a JSON schema that is at `place` in the request."""
        bundle = Bundle(schema, place)
        write = partial(Lark.json, style=style)
        make = partial(bundle.whole, schema)
        return self.piece(Piece(place, make, style, write, anything, bundle.places))

    def json(self, schema: Any, style: Style) -> str:
        """Values of a JSON schema. Raises RequestError where its `multipleOf` are too costly."""
        self._states += states(schema)
        if self._states > MULTIPLES:
            words = f"its values of multipleOf are {self._states} together"
            raise RequestError(f"{words}; at most {MULTIPLES} are supported")
        text = json_of(schema, style)
        if ("r", text) in self._names:
            self.count(text)
        return self.rule(text)

    def once(self, key: Hashable, write: Callable[[], str]) -> str:
        """What `write` wrote for this key before, or writes now."""
        if key not in self._written:
            self._written[key] = write()
        return self._written[key]

    def grammar(self, text: str) -> str:
        """A whole grammar of somebody else's, with its own `start`."""
        name = f"g{len(self._others)}"
        self.count(text)
        self._others.append({"name": name, "lark_grammar": text})
        return f"@{name}"

    def text(self, start: str) -> str:
        """What `Grammars` compiles: an answer is `start`. Raises TooLong, and what is `failed`."""
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
        """Of the grammar's text, or of what adds nothing to it and took as long. Raises TooLong."""
        self._size += len(text) + 8
        if self._size > MOST_TEXT:
            raise TooLong


def param_of(place: str) -> str:
    """The field of the body in which a place is."""
    return re.split(r"[.\[]", place)[0]


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
