"""What the schemas of tools say of their parameters' types, and values made from text by them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any, TypeAlias

Types: TypeAlias = Mapping[str, Mapping[str, frozenset[str]]]  # of each function's parameters
_SURROGATE = re.compile("[\ud800-\udfff]")
_CHAIN = 32  # references, one to the next
_NAMES = (
    *((bool, "boolean"), (str, "string"), (int, "integer"), (float, "number")),
    *((type(None), "null"), (Mapping, "object"), (list, "array")),
)


def value_of(text: str, types: frozenset[str]) -> Any:
    """Strings stand raw, everything else as JSON. What does not parse stays a string."""
    try:
        value = json.loads(text)
        to_json(value)
    except (ValueError, RecursionError):
        value = {"true": True, "false": False, "none": None}.get(text.strip().lower(), text)
    # "12" is a string where a string is asked for, and null where null is allowed
    return text if "string" in types and value is not None and not isinstance(value, str) else value


def to_json(value: Any) -> str:
    """JSON that every client reads, and that UTF-8 can hold: half a surrogate pair, which JSON may
    spell, is escaped again. Raises ValueError for a number that JSON has no word for."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return text if text.isascii() or not _SURROGATE.search(text) else json.dumps(value)


def parameter_types(tools: Sequence[Mapping[str, Any]]) -> Types:
    """{function: {parameter: JSON types it may have}}. A schema that is none says nothing."""
    found = {}
    for tool in tools:
        function = _mapping(tool.get("function"))
        root = _mapping(function.get("parameters"))
        rows = _mapping(resolve(root, root).get("properties"))
        types = {key: types_of(row, root) for key, row in rows.items()}
        found[str(function.get("name"))] = types
    return found


def types_of(schema: Any, root: Mapping[str, Any]) -> frozenset[str]:
    """The JSON types that a schema allows by its type, values and alternatives; empty where it says
    nothing. References go from `root`."""
    return _types(schema, root, set())


def _types(schema: Any, root: Mapping[str, Any], seen: set[int]) -> frozenset[str]:
    schema = resolve(schema, root)
    if id(schema) in seen:  # a schema may refer to itself, or many times to the same
        return frozenset()
    seen.add(id(schema))
    kind = schema.get("type")
    names = [kind] if isinstance(kind, str) else _list(kind)
    values = [schema["const"]] if "const" in schema else _list(schema.get("enum"))
    said = [frozenset(k for k in names if isinstance(k, str)), frozenset(map(_type, values))]
    for name in ("anyOf", "oneOf"):
        parts = [_types(part, root, seen) for part in _list(schema.get(name))]
        said.append(frozenset().union(*parts))
    said += [_types(part, root, seen) for part in _list(schema.get("allOf"))]
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


def _type(value: Any) -> str:
    return next((name for kind, name in _NAMES if isinstance(value, kind)), "null")


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
