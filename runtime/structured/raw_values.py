"""Parameters of calls in the XML format: strings are raw text, all other values are JSON.

Follows the reply parser's reading of a value (`tool_schema`), so that the parsed arguments satisfy
the schema. Knows no function and no call.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from spark_engine.errors import RequestError
from spark_engine.runtime.structured.lark import (
    GrammarPiece,
    Lark,
    Style,
    in_regex,
    one_of,
    param_of,
    quoted,
    regex,
)
from spark_engine.runtime.structured.raw_text import ANY, NO_BRACKET, without
from spark_engine.runtime.structured.schemas import TYPES, SchemaBundle, join
from spark_engine.runtime.text.reply_formats import END_PARAMETER, FUNCTION, PARAMETER
from spark_engine.runtime.text.schema_root import ALTERNATIVES, Root

_END = f"\n{END_PARAMETER}"
_ANY = "(?s:.*)"
MOST_ALTERNATIVES = 256  # of one parameter: schemas, not enum values
_BOUNDS = {"pattern", "minLength", "maxLength", "format"}
_REFUSED = {"not", "if", "then", "else", "$dynamicRef", "$recursiveRef"}  # of strings
# without February 29, which only leap years have
_SHORT = r"02-(0[1-9]|1\d|2[0-8])|(04|06|09|11)-(0[1-9]|[12]\d|30)"
_DAY = rf"[12]\d{{3}}-({_SHORT}|(01|03|05|07|08|10|12)-(0[1-9]|[12]\d|3[01]))"
_TIME = r"([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d{1,9})?(Z|[+-]([01]\d|2[0-3]):[0-5]\d)"
_CLOCK = r"T(\d+H(\d+M(\d+S)?)?|\d+M(\d+S)?|\d+S)"
_HEX = "[0-9a-fA-F]"
_QUAD = f"{_HEX}{{1,4}}"
_GAPS = "|".join(f"({_QUAD}:){{1,{7 - n}}}(:{_QUAD}){{1,{n}}}" for n in range(1, 7))
FORMATS = {  # of raw strings; JSON strings use the compiler's
    "date": _DAY,
    "time": _TIME,
    "date-time": f"{_DAY}T{_TIME}",
    "uuid": f"{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}",
    "email": r"[A-Za-z0-9_+-]+(\.[A-Za-z0-9_+-]+)*@([A-Za-z0-9-]+\.)+[A-Za-z]{2,}",
    "ipv4": r"((25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)\.){3}(25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)",
    "ipv6": f"({_QUAD}:){{7}}{_QUAD}|({_QUAD}:){{1,7}}:|{_GAPS}|:((:{_QUAD}){{1,7}}|:)",
    "duration": rf"P(\d+W|(\d+Y(\d+M(\d+D)?)?|\d+M(\d+D)?|\d+D)({_CLOCK})?|{_CLOCK})",
    "hostname": r"[A-Za-z0-9]+(-[A-Za-z0-9]+)*(\.[A-Za-z0-9]+(-[A-Za-z0-9]+)*)*",
    "uri": r"[A-Za-z][A-Za-z0-9+.-]*:[A-Za-z0-9_.~!$&'()*+,;=:@%/?#-]+",
}


@dataclass(frozen=True)
class Ends:
    """Ends of a raw value for the reply parser: `marks`, and a parameter that begins after it, with
    one of `names`."""

    marks: tuple[str, ...]
    names: tuple[str, ...]

    @property
    def barred(self) -> tuple[str, ...]:
        """Marks that free text must not contain; `<parameter=` with any name, as names would be
        long lexemes."""
        return (*self.marks, PARAMETER)

    def fits(self, text: str) -> bool:
        """True if the parser reads the text as one value."""
        started = [part.lstrip() for part in text.split(PARAMETER)[1:]]
        return not (
            any(mark in text for mark in self.marks)
            or any(part.startswith(self.names) for part in started)
            or (started and FUNCTION in text)  # a complete call within the call
        )


@dataclass(frozen=True)
class Values:
    """Parameters of one function; `bundle` holds its schema."""

    lark: Lark
    bundle: SchemaBundle
    style: Style
    ends: Ends
    known: dict[tuple[str, bool], str] = field(default_factory=dict)

    def value(self, schema: Any, place: str) -> str:
        """The expression of one value with its end mark."""
        types = self.bundle.root.types(schema)
        raw = not types or "string" in types
        text = json.dumps(self.bundle.copy(schema)[0])
        if (text, raw) not in self.known:  # many are equal, and their definitions may be long
            self.known[text, raw] = self.lark.piece(self._piece(schema, place, types, raw))
        return self.known[text, raw]

    def anything(self) -> str:
        """Any string with its end mark."""
        return f"{without(self.lark, self.ends.barred)} {quoted(END_PARAMETER)}"

    def _piece(self, schema: Any, place: str, types: frozenset[str], raw: bool) -> GrammarPiece:
        def as_json(lark: Lark, given: Any) -> str:
            return f"{lark.json(given, self.style)} {quoted(_END)}"

        def as_text(lark: Lark, given: Any) -> str:
            lark.count(json.dumps(given))
            return _Text(lark, given, self, place).expression()

        make = partial(self.bundle.whole, schema)
        known = sorted(types & TYPES)
        anything = {"type": known} if known and not raw else True
        write = as_text if raw else as_json
        return GrammarPiece(place, make, self.style, write, anything, self.bundle.places)


class _Text:
    """One value that may be a string, and is therefore raw text."""

    def __init__(self, lark: Lark, schema: Any, values: Values, place: str) -> None:
        self._lark, self._schema, self._place = lark, schema, place
        self._ends, self._style = values.ends, values.style
        self._lenient = values.style.lenient
        self._places, self._root = values.bundle.places, Root(schema)
        self._seen: set[int] = set()

    def expression(self) -> str:
        """The expression of the value with its end mark. Raises RequestError naming the place."""
        others = (self._root.types(self._schema) & TYPES) - {"string"}
        found = list(self._strings(self._schema, self._place))
        if free := self._anything() in found:
            # other strings would be lexemes that compete with free text
            found = [self._anything()]
        if free and others & {"array", "object"}:  # the parser reads brackets as these
            found = [self._anything(NO_BRACKET)]
            others &= {"array", "object"}
        elif free:
            others = frozenset()
        if others:
            found.append(self._json(others))
        if not found:
            raise _error(self._place, "allows no value that can be written")
        return one_of(dict.fromkeys(found))

    def _anything(self, start: str = ANY) -> str:
        return f"{without(self._lark, self._ends.barred, start)} {quoted(END_PARAMETER)}"

    def _json(self, types: frozenset[str]) -> str:
        """The expression of the schema's values of these types."""
        own = {key: value for key, value in self._schema.items() if key != "$defs"}
        shared = {key: value for key, value in self._schema.items() if key == "$defs"}
        schema = {"allOf": [own, {"type": sorted(types)}], **shared}
        return f"{self._lark.json(schema, self._style)} {quoted(_END)}"

    def _strings(self, schema: Any, place: str) -> Iterator[str]:
        """An expression for each kind of string that a schema allows; visits each schema once."""
        left = [(schema, place)]
        while left:
            schema, place = left.pop(0)
            if schema is False:
                continue
            plain = self._root.resolve(schema)
            if id(plain) in self._seen:
                continue
            self._seen.add(id(plain))
            if len(self._seen) > MOST_ALTERNATIVES:
                raise _error(place, f"is one of more than {MOST_ALTERNATIVES} alternatives")
            place = self._place_of(schema, place)
            kinds = self._root.types(plain)
            if not kinds or "string" in kinds:
                yield from self._own(plain, place, left)

    def _own(
        self, plain: Mapping[str, Any], place: str, left: list[tuple[Any, str]]
    ) -> Iterator[str]:
        """The schema's own strings; appends its alternatives to `left`."""
        self._refuse_others(plain, place)
        parts = [(name, plain[name]) for name in ALTERNATIVES if isinstance(plain.get(name), list)]
        if "const" in plain or isinstance(plain.get("enum"), list):
            yield from self._values(plain, place)
        elif parts and not plain.keys() & _BOUNDS:
            name, rows = parts[0]
            if (len(parts) > 1 or (name == "allOf" and len(rows) > 1)) and not self._lenient:
                words = "a string's alternatives cannot be combined with others here"
                raise _error(join(place, name), words)
            left += [(row, join(join(place, name), i)) for i, row in enumerate(rows)]
        else:
            yield self._bound(plain, place)

    def _values(self, plain: Mapping[str, Any], place: str) -> Iterator[str]:
        named = "const" in plain
        rows = [plain["const"]] if named else plain["enum"]
        words = [(i, value) for i, value in enumerate(rows) if isinstance(value, str)]
        fitting = [value for _, value in words if self._ends.fits(value)]
        yield from (quoted(value + _END) for value in fitting)
        if len(fitting) == len(words):
            return
        if not self._lenient:
            i = next(i for i, value in words if not self._ends.fits(value))
            where = join(place, "const") if named else join(join(place, "enum"), i)
            says = f"holds a mark of this model's calls, such as {END_PARAMETER}: leave it out"
            raise _error(where, says)
        if not fitting:
            yield self._anything()

    def _place_of(self, schema: Any, place: str) -> str:
        where = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(where, str):
            return place
        if self._root.target(where) is None and not self._lenient:
            raise _error(join(place, "$ref"), f"is {where!r}, which does not exist")
        return self._places.get(where.removeprefix("#/$defs/"), place)

    def _refuse_others(self, schema: Mapping[str, Any], place: str) -> None:
        """Raises RequestError for unknown keywords that might restrict a string."""
        for key in () if self._lenient else sorted(_REFUSED & schema.keys()):
            words = "is not supported for a parameter that is a string"
            raise _error(join(place, key), words)

    def _bound(self, schema: Mapping[str, Any], place: str) -> str:
        """A string with length bounds, or any string."""
        regexes = []
        low, high = (_count(schema, key, place) for key in ("minLength", "maxLength"))
        if low or high is not None:
            regexes.append(f"(?s:.{{{low or 0},{'' if high is None else high}}})")
        if isinstance(pattern := schema.get("pattern"), str):
            regexes.append(self._search(pattern, join(place, "pattern")))
        if (form := schema.get("format")) in FORMATS:
            regexes.append(FORMATS[form])
        if not regexes:
            return self._anything()
        ends = "|".join(map(in_regex, self._ends.barred))
        free = f"~{regex(f'{_ANY}({ends}){_ANY}')}"
        both = " & ".join([*map(regex, regexes), free])
        return self._lark.terminal(f"({both}) {quoted(_END)}")

    def _search(self, pattern: str, place: str) -> str:
        """A regex of whole strings from one that matches anywhere in them."""
        begins, ends = pattern.startswith("^"), re.search(r"(?<!\\)(\\\\)*\$$", pattern) is not None
        inner = pattern[begins : len(pattern) - ends]
        if (begins or ends) and _has_bar(inner):
            if self._lenient:
                return _ANY
            words = "^ and $ must enclose alternatives in parentheses: ^(a|b)$"
            raise _error(place, f"is {pattern!r}; {words}")
        return f"{'' if begins else _ANY}({inner}){'' if ends else _ANY}"


def _has_bar(text: str) -> bool:
    """True if a regex has alternatives outside parentheses."""
    depth, inside, at = 0, False, 0
    while at < len(text):
        letter = text[at]
        if letter == "\\":
            at += 1
        elif inside:
            inside = letter != "]"
        elif letter in "([":
            depth, inside = depth + (letter == "("), letter == "["
        elif letter == ")":
            depth -= 1
        elif letter == "|" and not depth:
            return True
        at += 1
    return False


def _count(schema: Mapping[str, Any], key: str, place: str) -> int | None:
    value = schema.get(key)
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 0):
        return value
    raise _error(join(place, key), f"is {value!r}; it must be a number of characters")


def _error(place: str, words: str) -> RequestError:
    return RequestError(f"{place} {words}", param_of(place))
