"""What the schemas of tools say of their parameters' types, and values made from text by them.

In calls that are written as XML a string has no quotes, so that `null` or `[1]` may be a string or
not. The schema decides:

- A parameter that may only be a string is the text as it was written; so is one of which the schema
  says nothing, and a text that equals a string of an `enum` or a `const`.
- Where strings are allowed beside other types, the text is the first of null, boolean, number,
  object and array which is allowed and as which it can be read, else a string. Nothing may be lost
  by that: `12` is a number, but `012`, `1.50` and a number beyond 2**53 are strings.
- Where no string is allowed the text is read as JSON, raw newlines in its strings, a comma before a
  closing bracket and Python's `True`, `False` and `None` included. What cannot be read is a string:
  the tool's own check then tells the model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, ClassVar, TypeAlias

_SURROGATE = re.compile("[\ud800-\udfff]")
_CHAIN = 32  # references, one to the next
_VISITS = 50_000  # schemas and values of enums, for all the tools of a request
_NAMES = (
    *((bool, "boolean"), (str, "string"), (int, "integer"), (float, "number")),
    *((type(None), "null"), (Mapping, "object"), (list, "array")),
)
_WORDS = {"true": True, "True": True, "false": False, "False": False}
_NUMBER = re.compile(r"-?[\d.eE+-]*")  # the beginning of one
_EXACT = 2**53  # integers up to it are the same in every client
_COMMA = re.compile(r'("(?:[^"\\]|\\.)*")|,(?=\s*[\]}])', re.DOTALL)


@dataclass(frozen=True)
class Parameter:
    """What a schema says of one parameter. `types`: JSON types it may have, empty where nothing is
    said; `words`: the strings of its enum or const."""

    types: frozenset[str] = frozenset()
    words: frozenset[str] = frozenset()
    SHORT: ClassVar[int] = 32  # characters of a null, a boolean or a number among strings

    def is_text(self, begun: str) -> bool:
        """Whether a value that begins so is a string, whatever follows. Only the first SHORT
        characters count, and an opening bracket, which leaves it open for good."""
        if not self.types or self.types == {"string"}:
            return True
        if "string" not in self.types:
            return False
        start = begun[: self.SHORT + 1].strip()
        if start[:1] == "[" or start[:1] == "{":
            return ("array" if start[0] == "[" else "object") not in self.types
        if len(begun) > self.SHORT:
            return True
        others = ["null"] if "null" in self.types else []
        others += _WORDS if "boolean" in self.types else ()
        if any(word.startswith(start) for word in others):
            return False
        number = not self.types.isdisjoint(("integer", "number"))
        return bool(start) and not (number and _NUMBER.fullmatch(start))

    def may_be_text(self, begun: str) -> bool:
        """Whether a value that was cut off here is taken for a string."""
        return "string" in self.types and begun.lstrip()[:1] not in ("[", "{")

    def value(self, text: str) -> Any:
        """The value that the text of a parameter stands for."""
        if text in self.words or self.is_text(text):
            return text
        if "string" in self.types:
            return self._among_strings(text)
        try:
            value = read_json(text)
            value = self._nested(value) if isinstance(value, str) else value
        except (ValueError, RecursionError):
            value = {"true": True, "false": False, "none": None}.get(text.strip().lower(), text)
        whole = isinstance(value, float) and value.is_integer() and abs(value) <= _EXACT
        return int(value) if whole and self.types == {"integer"} else value

    def _among_strings(self, text: str) -> Any:
        plain = text.strip()
        if "boolean" in self.types and plain in _WORDS:
            return _WORDS[plain]
        try:
            value = read_json(text)
        except (ValueError, RecursionError):
            return text
        kind = _type(value)
        if kind in ("integer", "number"):
            allowed = "number" in self.types or kind in self.types
            same = abs(value) <= _EXACT and json.dumps(value) == plain
            return value if allowed and same else text
        return value if kind in self.types and kind != "string" else text

    def _nested(self, text: str) -> Any:
        """What was written as JSON in a JSON string, where no string is allowed."""
        try:
            value = read_json(text)
        except (ValueError, RecursionError):
            return text
        return value if _type(value) in self.types else text


Types: TypeAlias = Mapping[str, Mapping[str, Parameter]]  # of each function's parameters


def read_json(text: str) -> Any:
    """JSON as models write it: with raw newlines in strings, and commas before closing brackets.
    Raises ValueError for other text and for what `to_json` refuses, RecursionError."""
    try:
        value = json.loads(text, strict=False)
    except ValueError:
        value = json.loads(_COMMA.sub(lambda hit: hit[1] or "", text), strict=False)
    to_json(value)
    return value


def to_json(value: Any) -> str:
    """JSON that every client reads, and that UTF-8 can hold: half a surrogate pair, which JSON may
    spell, is escaped again. Raises ValueError for a number that JSON has no word for."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return text if text.isascii() or not _SURROGATE.search(text) else json.dumps(value)


class _Visits:
    """Which schemas were looked at. One may refer to itself, and many to the same: `left` bounds
    the work on all the tools of a request."""

    def __init__(self, left: int) -> None:
        self.left = left
        self._seen: set[int] = set()

    def begin(self) -> None:
        """Of another parameter."""
        self._seen.clear()

    def is_first(self, schema: Mapping[str, Any]) -> bool:
        """Whether it is to be looked at."""
        self.left -= 1 + len(_list(schema.get("enum")))
        if self.left < 0 or id(schema) in self._seen:
            return False
        self._seen.add(id(schema))
        return True


def parameter_types(tools: Sequence[Mapping[str, Any]]) -> Types:
    """{function: {parameter: what its schema says}}. A schema that is none says nothing, nor do
    those of a request whose schemas are too large together."""
    found, visits = {}, _Visits(_VISITS)
    for tool in tools:
        function = _mapping(tool.get("function"))
        root = _mapping(function.get("parameters"))
        try:
            rows = _parameters(root, visits)
        except RecursionError:
            rows = {}
        found[str(function.get("name"))] = rows
    return found


def _parameters(root: Mapping[str, Any], visits: _Visits) -> dict[str, Parameter]:
    rows: dict[str, Parameter] = {}
    visits.begin()
    for key, schema in list(_properties(root, root, visits)):
        visits.begin()
        types = _types(schema, root, visits)
        visits.begin()
        words = frozenset(_words(schema, root, visits))
        if visits.left < 0:
            types = words = frozenset()
        if (known := rows.get(key)) is not None:  # of another alternative
            both = bool(known.types and types)
            types, words = known.types | types if both else frozenset(), known.words | words
        rows[key] = Parameter(types, words)
    return rows


def _properties(schema: Any, root: Mapping[str, Any], visits: _Visits) -> Iterator[tuple[str, Any]]:
    """The properties of an object, those of its parts and alternatives included."""
    schema = resolve(schema, root)
    if not visits.is_first(schema):
        return
    for key, row in _mapping(schema.get("properties")).items():
        yield str(key), row
    for part in _parts(schema, "allOf", "anyOf", "oneOf"):
        yield from _properties(part, root, visits)


def _words(schema: Any, root: Mapping[str, Any], visits: _Visits) -> Iterator[str]:
    schema = resolve(schema, root)
    if not visits.is_first(schema):
        return
    yield from (v for v in [schema.get("const"), *_list(schema.get("enum"))] if isinstance(v, str))
    for part in _parts(schema, "allOf", "anyOf", "oneOf"):
        yield from _words(part, root, visits)


def types_of(schema: Any, root: Mapping[str, Any]) -> frozenset[str]:
    """The JSON types that a schema allows by its type, values and alternatives; empty where it says
    nothing. References go from `root`."""
    return _types(schema, root, _Visits(_VISITS))


def _types(schema: Any, root: Mapping[str, Any], visits: _Visits) -> frozenset[str]:
    schema = resolve(schema, root)
    if not visits.is_first(schema):
        return frozenset()
    kind = schema.get("type")
    names = [kind] if isinstance(kind, str) else _list(kind)
    values = [schema["const"]] if "const" in schema else _list(schema.get("enum"))
    said = [frozenset(k for k in names if isinstance(k, str)), frozenset(map(_type, values))]
    for name in ("anyOf", "oneOf"):
        parts = [_types(part, root, visits) for part in _parts(schema, name)]
        said.append(frozenset().union(*parts))
    said += [_types(part, root, visits) for part in _parts(schema, "allOf")]
    said = [types for types in said if types]
    common = reduce(frozenset.intersection, said) if said else frozenset()
    return common or frozenset().union(*said)


def resolve(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema, or what it refers to in `root`; empty where that leads nowhere."""
    for _ in range(_CHAIN):
        here = _mapping(schema)
        where = here.get("$ref")
        if not isinstance(where, str):
            return here
        found: Any = root if where.startswith("#") else None
        for key in where[1:].split("/")[1:]:
            key = key.replace("~1", "/").replace("~0", "~")
            found = _mapping(found).get(key)
        schema = found
    return {}


def _parts(schema: Mapping[str, Any], *names: str) -> Iterator[Any]:
    return (part for name in names for part in _list(schema.get(name)))


def _type(value: Any) -> str:
    return next((name for kind, name in _NAMES if isinstance(value, kind)), "null")


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
