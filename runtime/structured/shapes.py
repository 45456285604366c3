"""The sets of parameters that a function's arguments may have, from its schema's alternatives.

Knows how `anyOf`, `oneOf` and `allOf` combine objects. Knows no grammar.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from spark_engine.errors import RequestError
from spark_engine.runtime.structured.lark import param_of
from spark_engine.runtime.structured.schemas import SchemaBundle, binding, join
from spark_engine.runtime.text.schema_root import ALTERNATIVES, as_list

MOST = 64  # shapes of one function; it visits at most four times as many schemas
_REFUSED = {  # keywords that restrict an object and are not supported here
    *("minProperties", "maxProperties", "patternProperties", "propertyNames", "enum", "const"),
    *("dependentRequired", "dependentSchemas", "dependencies", "unevaluatedProperties"),
    *("not", "if", "then", "else", "$dynamicRef", "$recursiveRef"),
}


@dataclass(frozen=True)
class ParameterShape:
    """One set of parameters."""

    rows: Mapping[str, tuple[Any, str]]  # (schema, place) of each named parameter
    needed: tuple[str, ...]  # required parameters
    open: bool  # other parameters are allowed

    def both(self, other: ParameterShape) -> ParameterShape:
        rows = {**self.rows, **other.rows}
        for key in self.rows.keys() & other.rows.keys():
            (one, place), (two, _) = self.rows[key], other.rows[key]
            rows[key] = (one if one == two else {"allOf": [one, two]}, place)
        needed = dict.fromkeys((*self.needed, *other.needed))
        return ParameterShape(rows, tuple(needed), self.open and other.open)


def shapes(bundle: SchemaBundle, place: str, strict: bool) -> list[ParameterShape]:
    """The shapes of a function's arguments.

    Raises RequestError, which names the place, for malformed or unsupported keywords, if `strict`.
    Otherwise these are ignored, and too many alternatives become one shape.
    """
    try:
        return _Shapes(bundle, strict).of(bundle.root.schema, place, ())
    except _TooManyError:
        if strict:
            words = f"{place} has more than {MOST} combinations of alternatives"
            raise RequestError(words, param_of(place)) from None
    root = bundle.root
    known = {key: (row, join(join(place, "properties"), key)) for key, row in root.rows()}
    needed = [k for k in as_list(root.resolve(root.schema).get("required")) if isinstance(k, str)]
    return [ParameterShape(known, tuple(needed), open=True)]


class _TooManyError(Exception):
    pass


class _Shapes:
    """Collects the shapes of one function; counts the visited schemas."""

    def __init__(self, bundle: SchemaBundle, strict: bool) -> None:
        self._bundle, self._strict = bundle, strict
        self._left = 4 * MOST

    def of(self, schema: Any, place: str, path: tuple[int, ...]) -> list[ParameterShape]:
        """`path`: the ancestors of this schema."""
        self._left -= 1
        plain = self._bundle.root.resolve(schema)
        if self._left < 0:
            raise _TooManyError
        if id(plain) in path:  # a recursive reference adds nothing
            return [ParameterShape({}, (), open=True)]
        place = self._bundle.place_of(schema, place)
        self._refuse_others(plain, place)
        found = [self._own(plain, place)]
        for name in ALTERNATIVES:
            parts = enumerate(as_list(plain.get(name)))
            rows = [
                self.of(part, join(join(place, name), i), (*path, id(plain))) for i, part in parts
            ]
            if name == "oneOf" and self._strict and not _apart(found, rows):
                words = f"{join(place, name)} is not supported where two of it may hold: say anyOf"
                raise RequestError(words, param_of(place))
            if name != "allOf":
                rows = [[shape for row in rows for shape in row]] if rows else []
            for row in rows:
                found = [one.both(two) for one in found for two in row]
                if len(found) > MOST:
                    raise _TooManyError
        return found

    def _own(self, plain: Mapping[str, Any], place: str) -> ParameterShape:
        rows, needed = plain.get("properties", {}), plain.get("required", [])
        if not isinstance(rows, Mapping) or not isinstance(needed, list):
            if self._strict:
                words = f"{place}: properties must be an object and required a list"
                raise RequestError(words, param_of(place))
            rows = rows if isinstance(rows, Mapping) else {}
        at = join(place, "properties")
        known = {key: (row, join(at, key)) for key, row in rows.items()}
        must = tuple(key for key in as_list(needed) if isinstance(key, str))
        return ParameterShape(known, must, plain.get("additionalProperties", True) in (True, {}))

    def _refuse_others(self, plain: Mapping[str, Any], place: str) -> None:
        for key in binding(plain) if self._strict else ():
            if key in _REFUSED:
                words = "is not supported for a function's parameters with strict: true"
                raise RequestError(f"{join(place, key)} {words}", param_of(place))


def _apart(found: Iterable[ParameterShape], rows: list[list[ParameterShape]]) -> bool:
    """True if one required parameter has disjoint values in all alternatives."""
    every = [shape for row in rows for shape in row]
    if len(every) < 2:
        return True
    common = set.intersection(*({*shape.needed} & shape.rows.keys() for shape in every))
    for key in common:
        values = [value for shape in every for value in _values(shape.rows[key][0])]
        texts = {repr(value) for value in values}
        if all(_values(shape.rows[key][0]) for shape in every) and len(texts) == len(values):
            return True
    return False


def _values(schema: Any) -> list[Any]:
    plain = schema if isinstance(schema, Mapping) else {}
    return [plain["const"]] if "const" in plain else as_list(plain.get("enum"))
