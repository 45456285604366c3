"""What the schemas of tools say of their parameters' types, and values made from text by them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from spark_engine.runtime.text.schema_root import Root

Types: TypeAlias = Mapping[str, Mapping[str, frozenset[str]]]  # of each function's parameters
_SURROGATE = re.compile("[\ud800-\udfff]")


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
    """{function: {parameter: JSON types it may have}}. A schema that is none says nothing.

    A parameter that several alternatives of the schema have may have the types of each.
    """
    found = {}
    for tool in tools:
        function = _mapping(tool.get("function"))
        root = Root(function.get("parameters"))
        types: dict[str, frozenset[str]] = {}
        for key, row in root.rows():
            one = root.types(row)
            other = types.setdefault(key, one)
            types[key] = one | other if one and other else frozenset()
        found[str(function.get("name"))] = types
    return found


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
