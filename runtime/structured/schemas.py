"""JSON schemas as trees: their parts' places, restricting keywords, and self-contained parts.

Knows the kinds of keywords. Knows no grammar and no request.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from typing import Any

from spark_engine.runtime.text.schema_root import Root

MAPS = ("$defs", "definitions", "properties", "patternProperties", "dependentSchemas")
LISTS = ("prefixItems", "anyOf", "oneOf", "allOf", "items")
ONE = (
    *("items", "additionalItems", "additionalProperties", "unevaluatedProperties"),
    *("unevaluatedItems", "contains", "propertyNames", "not", "if", "then", "else"),
)
TYPES = frozenset(("string", "integer", "number", "boolean", "null", "array", "object"))
SHARED = ("$defs", "definitions")
# Formats that a grammar supports. Any other name is an annotation, as JSON Schema defines `format`.
FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
)
_NOTES = frozenset(
    (
        *("title", "description", "default", "examples", "example", "deprecated", "readOnly"),
        *("writeOnly", "$comment", "$id", "id", "$anchor"),
    )
)
_DRAFTS = "json-schema.org/draft"
_OF_TYPE = {  # keywords that restrict values of one type only
    **dict.fromkeys(("format", "pattern", "minLength", "maxLength"), "string"),
    **dict.fromkeys(("uniqueItems", "contains", "minContains", "maxContains"), "array"),
    **dict.fromkeys(("unevaluatedItems", "additionalItems", "minItems", "maxItems"), "array"),
    **dict.fromkeys(("propertyNames", "dependentRequired", "dependentSchemas"), "object"),
    **dict.fromkeys(("unevaluatedProperties", "minProperties", "maxProperties"), "object"),
}
_FREE: Mapping[str, tuple[Any, ...]] = {  # values with which a keyword restricts nothing
    "uniqueItems": (False,),
    **dict.fromkeys(("minItems", "minLength", "minProperties"), (0,)),
    "propertyNames": (True, {}, {"type": "string"}),
    **dict.fromkeys(("dependentRequired", "dependentSchemas", "patternProperties"), ({},)),
    "not": (False,),
    **dict.fromkeys(("unevaluatedProperties", "unevaluatedItems"), (True, {})),
}
_APPLIED = {"$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "if", "dependentSchemas"}
_SHAPE = frozenset(("type", "properties", "required", "items", "prefixItems", "enum", "const"))
_SHAPE |= {"additionalProperties", "anyOf", "$ref", "$defs"}
_MANY = 10**9
_NAME = re.compile(r"#/(?:\$defs|definitions)/([A-Za-z0-9_.-]+)")
_PLAIN = re.compile(r"[A-Za-z_$][\w$-]*")
Keys = Callable[[Mapping[str, Any]], Mapping[str, Any]]


def join(place: str, key: str | int) -> str:
    """The place of a part: `a.b[0]["c d"]`."""
    if isinstance(key, int):
        return f"{place}[{key}]"
    return f"{place}.{key}" if _PLAIN.fullmatch(key) else f"{place}[{json.dumps(key)}]"


def parts(schema: Any) -> Iterator[tuple[str, str | int | None, Any]]:
    """(keyword, key or index in it, schema) of the direct subschemas."""
    if not isinstance(schema, Mapping):
        return
    for name in MAPS:
        rows = schema.get(name)
        for key, part in rows.items() if isinstance(rows, Mapping) else ():
            yield name, key, part
    for name in LISTS:
        rows = schema.get(name)
        for i, part in enumerate(rows if isinstance(rows, list) else ()):
            yield name, i, part
    for name in ONE:
        if isinstance(schema.get(name), Mapping):
            yield name, None, schema[name]


def rebuilt(schema: Any, keys: Keys) -> Any:
    """A copy; `keys` maps each schema's keywords, for subschemas before their parents."""
    if not isinstance(schema, dict):
        return schema
    made = {}
    for key, value in schema.items():
        if isinstance(value, list):
            if key in LISTS:
                value = [rebuilt(part, keys) for part in value]
        elif isinstance(value, dict):
            if key in MAPS:
                value = {name: rebuilt(part, keys) for name, part in value.items()}
            elif key in ONE:
                value = rebuilt(value, keys)
        made[key] = value
    return keys(made)


def binding(schema: Mapping[str, Any]) -> dict[str, Any]:
    kind = schema.get("type")
    kinds = kind if isinstance(kind, list) else [kind]
    types = {one for one in kinds if isinstance(one, str)}
    made = {key: value for key, value in schema.items() if _binds(key, value, schema, types)}
    if made.get("unevaluatedProperties") is False and not made.keys() & _APPLIED:
        made.setdefault("additionalProperties", False)  # the same without other applicators
        del made["unevaluatedProperties"]
    return made


def _binds(key: str, value: Any, schema: Mapping[str, Any], types: set[str]) -> bool:
    if key in _NOTES or (types and key in _OF_TYPE and _OF_TYPE[key] not in types):
        return False
    if key == "format":
        return isinstance(value, str) and value in FORMATS
    if key == "$schema":
        return isinstance(value, str) and _DRAFTS in value
    if key in ("if", "then", "else"):
        return "if" in schema and ("then" in schema or "else" in schema)
    return not any(type(value) is type(free) and value == free for free in _FREE.get(key, ()))


def _with_null(schema: Mapping[str, Any]) -> dict[str, Any]:
    """OpenAPI 3.0's `nullable: true` as JSON Schema writes it."""
    if isinstance(kind := schema.get("type"), str) and not schema.keys() & {"const", "enum"}:
        return {**schema, "type": [kind, "null"]}
    return {"anyOf": [schema, {"type": "null"}]}


def coarse(schema: Any) -> Any:
    """The schema without bounds: its types, values, properties, items and alternatives."""

    def keys(given: Mapping[str, Any]) -> dict[str, Any]:
        left = {"additionalProperties"} if "patternProperties" in given else set()
        return {key: value for key, value in given.items() if key in _SHAPE - left}

    return rebuilt(schema, keys)


def states(schema: Any) -> int:
    found, left = 0, [schema]
    while left:
        here = left.pop()
        if isinstance(here, Mapping):
            found += _states(here.get("multipleOf"))
            left += here.values()
        elif isinstance(here, list):
            left += here
    return found


def _states(multiple: Any) -> int:
    if isinstance(multiple, bool) or not isinstance(multiple, int | float):
        return 0
    if not abs(multiple) < 1e15:
        return _MANY
    digits = Decimal(repr(multiple)).normalize().as_tuple().digits
    return int("".join(map(str, digits[:9])))


class SchemaBundle:
    """Parts of one schema as separate schemas, each with the definitions that it references.

    Keywords without effect are removed. All references become `#/$defs/NAME`.

    Attributes:
        root: the whole schema.
        places: by name, the places of the definitions in the request.
    """

    def __init__(self, schema: Any, place: str) -> None:
        self.root, self.places = Root(schema), dict[str, str]()
        self._place = place
        self._names: dict[int, str] = {}  # by the target's identity
        self._targets: dict[str, Any] = {}
        self._copies: dict[str, tuple[Any, set[str]]] = {}

    def copy(self, schema: Any) -> tuple[Any, set[str]]:
        """A part, and the names of its direct references."""
        names: set[str] = set()

        def keys(given: Mapping[str, Any]) -> dict[str, Any]:
            made = {key: value for key, value in binding(given).items() if key not in SHARED}
            if isinstance(where := made.get("$ref"), str) and (name := self._name(where)):
                names.add(name)
                made["$ref"] = f"#/$defs/{name}"
            return _with_null(made) if made.pop("nullable", False) is True else made

        return rebuilt(schema, keys), names

    def whole(self, schema: Any) -> Any:
        """A part with all definitions that it needs."""
        made, names = self.copy(schema)
        shared: dict[str, Any] = {}
        left = [*names]
        while left:
            name = left.pop()
            if name not in shared:
                if name not in self._copies:
                    self._copies[name] = self.copy(self._targets[name])
                shared[name], more = self._copies[name]
                left += more
        if not shared:
            return made
        own = self._names.get(id(schema))  # a recursive schema
        made = {"$ref": f"#/$defs/{own}"} if own in shared else made
        return {**made, "$defs": shared}

    def place_of(self, schema: Any, place: str) -> str:
        """The place of a reference's target, for a schema at `place`."""
        where = schema.get("$ref") if isinstance(schema, Mapping) else None
        name = self._name(where) if isinstance(where, str) else None
        return place if name is None else self.places[name]

    def _name(self, where: str) -> str | None:
        """The name of a reference's target; None if there is none."""
        found = self.root.target(where)
        if not isinstance(found, Mapping | bool):
            return None
        if (known := self._names.get(id(found))) is not None:
            return known
        match = _NAME.fullmatch(where)
        name, number = match[1] if match else "at-0", 0
        while name in self.places:
            name, number = f"at-{number}", number + 1
        self._names[id(found)], self._targets[name] = name, found
        self.places[name] = self._place_of(where)
        return name

    def _place_of(self, where: str) -> str:
        place = self._place
        for key in where.partition("#")[2].split("/")[1:]:
            key = key.replace("~1", "/").replace("~0", "~")
            place = join(place, int(key) if key.isdecimal() else key)
        return place
