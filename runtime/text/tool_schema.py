"""What the schemas of tools say of their parameters' types, and values made from text by them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

Types: TypeAlias = Mapping[str, Mapping[str, frozenset[str]]]  # of each function's parameters


def value_of(text: str, types: frozenset[str]) -> Any:
    """Strings stand raw, everything else as JSON. What does not parse stays a string."""
    try:
        value = json.loads(text)
    except ValueError:
        value = {"true": True, "false": False, "none": None}.get(text.strip().lower(), text)
    # "12" is a string where a string is asked for, and null where null is allowed
    return text if "string" in types and value is not None and not isinstance(value, str) else value


def parameter_types(tools: Sequence[Mapping[str, Any]]) -> Types:
    """{function: {parameter: JSON types it may have}}. A schema that is none says nothing."""
    found = {}
    for tool in tools:
        function = _mapping(tool.get("function"))
        rows = _mapping(_mapping(function.get("parameters")).get("properties"))
        found[str(function.get("name"))] = {key: _types(row) for key, row in rows.items()}
    return found


def _types(schema: Any) -> frozenset[str]:
    """The JSON types that a schema names, itself or in its alternatives."""
    schema = _mapping(schema)
    kind = schema.get("type")
    own = frozenset(
        k for k in ([kind] if isinstance(kind, str) else _list(kind)) if isinstance(k, str)
    )
    parts = [*_list(schema.get("anyOf")), *_list(schema.get("oneOf"))]
    return own.union(*(_types(part) for part in parts))


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
