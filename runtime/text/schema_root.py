"""Meaning of the parts of one JSON schema: targets of references, allowed types.

Knows no tool and no grammar.
"""

from collections.abc import Iterator, Mapping
from functools import cached_property, reduce
from types import MappingProxyType
from typing import Any
from urllib.parse import unquote

ALTERNATIVES = ("anyOf", "oneOf", "allOf")
WORDS = 50_000  # values and alternatives of a schema that are searched for strings
_CHAIN = 32  # length of a chain of references
_NOTHING: Mapping[str, Any] = MappingProxyType({})
_NAMES = (
    *((bool, "boolean"), (str, "string"), (int, "integer"), (float, "number")),
    *((type(None), "null"), (Mapping, "object"), (list, "array")),
)


class Root:
    """A schema, against which its parts' references are resolved.

    Visits each part and each reference once over all calls, so the time is bounded by the schema's
    length. Parts are keyed by identity, and must live as long as this object.
    """

    def __init__(self, schema: Any) -> None:
        self.schema = _mapping(schema)
        self._targets: dict[str, Any] = {}
        self._types: dict[int, frozenset[str]] = {}
        self._words = WORDS

    def resolve(self, schema: Any) -> Mapping[str, Any]:
        """The schema, or its reference's target; empty if that does not exist."""
        for _ in range(_CHAIN):
            here = _mapping(schema)
            where = here.get("$ref")
            if not isinstance(where, str):
                return here
            schema = self.target(where)
        return _NOTHING

    def target(self, where: str) -> Any:
        if where not in self._targets:
            self._targets[where] = self._find(where)
        return self._targets[where]

    def types(self, schema: Any) -> frozenset[str]:
        """The JSON types that a schema allows by its type, values, alternatives and OpenAPI 3.0's
        `nullable`; empty if it does not restrict them. A recursive reference adds nothing."""
        first = self.resolve(schema)
        rows = [(first, False)]
        while rows:
            here, known = rows.pop()
            if known:
                self._types[id(here)] = self._types_of(here)
            elif id(here) not in self._types:
                self._types[id(here)] = frozenset()
                rows.append((here, True))
                rows += [(part, False) for name in ALTERNATIVES for part in self._parts(here, name)]
        return _or_null(_mapping(schema), self._types[id(first)])

    def words(self, schema: Any) -> frozenset[str]:
        """The strings of the enums and consts of a schema and its alternatives; none after WORDS
        steps over all calls."""
        found, seen, left = set[str](), set[int](), [schema]
        while left and self._words > 0:
            here = self.resolve(left.pop())
            self._words -= 1
            if id(here) not in seen:
                seen.add(id(here))
                values = [here.get("const"), *as_list(here.get("enum"))]
                found |= {value for value in values if isinstance(value, str)}
                for name in ALTERNATIVES:
                    values += as_list(here.get(name))
                    left += as_list(here.get(name))
                self._words -= len(values)
        return frozenset(found) if self._words > 0 else frozenset()

    def rows(self) -> Iterator[tuple[str, Any]]:
        """(name, schema) of the properties, including those of alternatives."""
        seen, left = set(), [self.resolve(self.schema)]
        while left:
            here = left.pop()
            if id(here) not in seen:
                seen.add(id(here))
                yield from _mapping(here.get("properties")).items()
                left += [part for name in ALTERNATIVES for part in self._parts(here, name)]

    def _parts(self, schema: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
        return [self.resolve(part) for part in as_list(schema.get(name))]

    def _types_of(self, schema: Mapping[str, Any]) -> frozenset[str]:
        kind = schema.get("type")
        names = [kind] if isinstance(kind, str) else as_list(kind)
        values = [schema["const"]] if "const" in schema else as_list(schema.get("enum"))
        sets = [frozenset(k for k in names if isinstance(k, str)), frozenset(map(type_of, values))]
        for name in ALTERNATIVES:
            parts = [self._types[id(part)] for part in self._parts(schema, name)]
            sets += parts if name == "allOf" else [frozenset().union(*parts)]
        sets = [types for types in sets if types]
        common = reduce(frozenset.intersection, sets) if sets else frozenset()
        return _or_null(schema, common or frozenset().union(*sets))

    def _find(self, where: str) -> Any:
        base, _, inner = where.partition("#")
        found = self.schema if base in ("", self.schema.get("$id")) else self._named.get(base)
        if inner and not inner.startswith("/"):
            return self._named.get(f"#{inner}")
        for key in inner.split("/")[1:]:
            key = key.replace("~1", "/").replace("~0", "~")
            if isinstance(found, list):
                at = int(key) if key.isascii() and key.isdecimal() and len(key) < 6 else len(found)
                found = found[at] if at < len(found) else None
            else:
                found = _mapping(found).get(key, _mapping(found).get(unquote(key)))
        return found

    @cached_property
    def _named(self) -> Mapping[str, Any]:
        """Parts with an identifier or an anchor, by it."""
        found: dict[str, Any] = {}
        left: list[Any] = [self.schema]
        while left:
            here = left.pop()
            if isinstance(here, Mapping):
                for key, before in (("$id", ""), ("$anchor", "#")):
                    if isinstance(here.get(key), str):
                        found.setdefault(before + here[key], here)
                left += here.values()
            elif isinstance(here, list):
                left += here
        return found


def _or_null(schema: Mapping[str, Any], types: frozenset[str]) -> frozenset[str]:
    return types | {"null"} if types and schema.get("nullable") is True else types


def type_of(value: Any) -> str:
    return next((name for kind, name in _NAMES if isinstance(value, kind)), "null")


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else _NOTHING


def as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
