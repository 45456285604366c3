"""Which place in a JSON schema keeps it from being compiled to a grammar.

A compiler says what is wrong and not where. Here it is asked again about parts: the place is the
deepest part that is wrong by itself, and in it the keyword without which it would not be. Knows how
schemas nest; knows no keyword's meaning.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from typing import Any

from spark_engine.errors import RequestError

DEEPEST = 64  # of mappings and lists in a schema; the compiler's own limit is near 128
MOST_TEXT = 128 << 10  # characters of a schema's JSON
MULTIPLES = 20_000  # all `multipleOf` of a schema together: each takes so many states
TRIALS, TRIALS_S = 400, 0.5  # parts that are compiled to find a place, and the time for it
_MAPS = ("$defs", "definitions", "properties", "patternProperties", "dependentSchemas")
_LISTS = ("prefixItems", "anyOf", "oneOf", "allOf", "items")
_ONE = (
    *("items", "additionalItems", "additionalProperties", "unevaluatedProperties"),
    *("unevaluatedItems", "contains", "propertyNames", "not", "if", "then", "else"),
)
_SHARED = ("$defs", "definitions", "$schema")
_PLAIN = re.compile(r"[A-Za-z_$][\w$-]*")


def check_size(schema: Any, place: str) -> None:
    """Raises RequestError for what is no schema, is nested too deeply, too long or too costly."""
    if not isinstance(schema, Mapping | bool):
        words = f"{place} is {_short(schema)}; it must be a JSON schema, an object"
        raise RequestError(words, _param(place))
    rows, states = [(schema, 1)], 0
    while rows:
        value, depth = rows.pop()
        if depth > DEEPEST:
            words = f"{place} nests {depth} deep; at most {DEEPEST} are supported"
            raise RequestError(words, _param(place))
        if isinstance(value, Mapping):
            rows += [(v, depth + 1) for v in value.values()]
            states += _states(value.get("multipleOf"))
        elif isinstance(value, list):
            rows += [(v, depth + 1) for v in value]
    if states > MULTIPLES:
        words = f"{place}: its values of multipleOf are {states} together; at most {MULTIPLES}"
        raise RequestError(f"{words} are supported", _param(place))
    size = len(json.dumps(schema))
    if size > MOST_TEXT:
        words = f"{place} has {size} characters; at most {MOST_TEXT} are supported"
        raise RequestError(words, _param(place))


def _states(multiple: Any) -> int:
    """What a `multipleOf` costs: its digits as an integer."""
    if not isinstance(multiple, int | float) or isinstance(multiple, bool):
        return 0
    digits = Decimal(repr(multiple)).normalize().as_tuple().digits
    return int("".join(map(str, digits[:9])))


def locate(schema: Any, place: str, error_of: Callable[[Any], str]) -> tuple[str, str]:
    """(place, what is wrong there) of a schema for which `error_of` has words; those are "" for a
    schema that becomes a grammar."""
    return _Search(schema, error_of).down(schema, place, error_of(schema))


def join(place: str, key: str | int) -> str:
    """The place of a part: `a.b[0]["c d"]`."""
    if isinstance(key, int):
        return f"{place}[{key}]"
    return f"{place}.{key}" if _PLAIN.fullmatch(key) else f"{place}[{json.dumps(key)}]"


class _Search:
    """Tries parts of one schema, for a while."""

    def __init__(self, root: Any, error_of: Callable[[Any], str]) -> None:
        self._error_of = error_of
        self._left = TRIALS
        self._until = time.monotonic() + TRIALS_S
        # what references in a part may point to
        plain = root if isinstance(root, Mapping) else {}
        self._shared = {key: plain[key] for key in _SHARED if key in plain}

    def down(self, schema: Any, place: str, error: str) -> tuple[str, str]:
        """The place below this one, which is wrong."""
        wrong = []
        for at, part in _parts(schema, place):
            found = self._error(part)
            if found == error:  # what the whole says of itself is this part's
                return self.down(part, at, found)
            if found:
                wrong.append((at, part, found))
        if wrong:
            at, part, found = wrong[0]
            return self.down(part, at, found)
        kept = {key: self._without(schema, key) for key in schema} if _is_map(schema) else {}
        named = [key for key, error in kept.items() if error == "" and key not in self._shared]
        # without its type a schema allows so much that nothing else is wrong
        named = [key for key in named if key != "type"] or named
        return (join(place, named[0]) if named else place), error

    def _without(self, schema: Mapping[str, Any], key: str) -> str | None:
        return self._error({k: v for k, v in schema.items() if k != key})

    def _error(self, part: Any) -> str | None:
        """None where there is no more time to say."""
        if not self._left or time.monotonic() > self._until:
            return None
        self._left -= 1
        return self._error_of({**self._shared, **part} if _is_map(part) else part)


def _is_map(schema: Any) -> bool:
    return isinstance(schema, Mapping)


def _parts(schema: Any, place: str) -> Iterator[tuple[str, Any]]:
    """(place, schema) of the schemas right below."""
    if not isinstance(schema, Mapping):
        return
    for name in _MAPS:
        rows = schema.get(name)
        for key, part in rows.items() if isinstance(rows, Mapping) else ():
            yield join(join(place, name), key), part
    for name in _LISTS:
        rows = schema.get(name)
        for i, part in enumerate(rows if isinstance(rows, list) else ()):
            yield join(join(place, name), i), part
    for name in _ONE:
        if isinstance(schema.get(name), Mapping):
            yield join(place, name), schema[name]


def _param(place: str) -> str:
    return re.split(r"[.\[]", place)[0]


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
