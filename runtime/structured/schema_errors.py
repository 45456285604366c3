"""Finds the place in a JSON schema that prevents its compilation to a grammar.

The compiler reports an error without its place. This module compiles parts: the place is the
deepest invalid part, and in it the keyword that causes the error. Knows
how schemas nest; knows no keyword's meaning.
"""

import json
import time
from collections.abc import Callable, Mapping
from typing import Any

from spark_engine.errors import RequestError
from spark_engine.runtime.structured.lark import param_of
from spark_engine.runtime.structured.schemas import join, parts
from spark_engine.runtime.text.parts import short

DEEPEST = 64  # of mappings and lists in a schema; the compiler's own limit is near 128
MOST_TEXT = 128 << 10  # characters of a schema's JSON
_DEFS = "$defs"
TRIALS, TRIALS_S = 400, 0.5  # compiled parts per request, and their total time


def check_size(schema: Any, place: str) -> None:
    """Raises RequestError if it is not a schema, or is nested too deeply or too long."""
    if not isinstance(schema, Mapping | bool):
        words = f"{place} is {short(schema)}; it must be a JSON schema, an object"
        raise RequestError(words, param_of(place))
    rows: list[tuple[Any, int]] = [(schema, 1)]
    while rows:
        value, depth = rows.pop()
        if depth > DEEPEST:
            words = f"{place} nests {depth} deep; at most {DEEPEST} are supported"
            raise RequestError(words, param_of(place))
        if isinstance(value, Mapping):
            rows += [(v, depth + 1) for v in value.values()]
        elif isinstance(value, list):
            rows += [(v, depth + 1) for v in value]
    size = len(json.dumps(schema))
    if size > MOST_TEXT:
        words = f"{place} has {size} characters; at most {MOST_TEXT} are supported"
        raise RequestError(words, param_of(place))


class Trials:
    """The remaining trials of one request."""

    def __init__(self) -> None:
        self.count, self._until = 0, time.monotonic() + TRIALS_S

    @property
    def left(self) -> bool:
        return self.count < TRIALS and time.monotonic() < self._until


class Search:
    """Tries parts of one schema.

    The targets of a part's references are replaced by a schema that allows anything, so that an
    error in a definition is found in the definition and not in each reference.
    """

    def __init__(self, schema: Any, error_of: Callable[[Any], str], trials: Trials) -> None:
        self.schema = schema
        self._error_of, self._trials = error_of, trials
        self._known: dict[str, str] = {}  # errors by the part's text
        shared = schema.get(_DEFS) if isinstance(schema, Mapping) else None
        names = shared if isinstance(shared, Mapping) else ()
        self._stubs: dict[str, Any] = {_DEFS: dict.fromkeys(names, True)} if names else {}

    def error(self, part: Any) -> str | None:
        """A part's error; "" for none, None if no trial is left."""
        if not self._trials.left:
            return None
        whole = {**self._stubs, **part} if isinstance(part, Mapping) else part
        text = json.dumps(whole)
        if text not in self._known:
            self._trials.count += 1
            self._known[text] = self._error_of(whole)
        return self._known[text]

    def locate(self, place: str) -> tuple[str, str]:
        """(place, error) of the deepest invalid part."""
        error = self.error(self.schema)
        return self._down(
            self.schema, place, self._error_of(self.schema) if error is None else error
        )

    def _down(self, schema: Any, place: str, error: str) -> tuple[str, str]:
        wrong = []
        for name, key, part in parts(schema):
            at = join(place, name) if key is None else join(join(place, name), key)
            found = self.error(part)
            if found == error:  # the error of the whole is this part's
                return self._down(part, at, found)
            if found:
                wrong.append((at, part, found))
        if wrong:
            at, part, found = wrong[0]
            return self._down(part, at, found)
        keys = schema if isinstance(schema, Mapping) else {}
        fewer = {key: {k: v for k, v in keys.items() if k != key} for key in keys if key != _DEFS}
        kept = {key: self.error(part) for key, part in fewer.items()}
        named = [key for key, found in kept.items() if found == ""]
        # no single one, such as an `if` with its `then`
        named = named or [key for key in kept if self.error({key: keys[key]})]
        # without its type a schema allows so much that no other error remains
        named = [key for key in named if key != "type"] or named
        return (join(place, named[0]) if named else place), error
