"""Typed reads of foreign JSON: a missing or malformed value is an error that names the file.

`Reader` checks single values; `malformed_json` catches the other faults (a list instead of an
object, a number instead of a name). Knows no key.
"""

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from spark_engine.errors import CheckpointError

Json = Mapping[str, Any]

_FAULTS = (AttributeError, KeyError, IndexError, OverflowError, TypeError, ValueError, re.error)


@contextmanager
def malformed_json(where: str) -> Iterator[None]:
    """Turns the errors of reading malformed JSON values into a CheckpointError naming `where`."""
    try:
        yield
    except _FAULTS as error:
        raise CheckpointError(
            f"{where} is malformed ({type(error).__name__}: {error}); take it from the "
            "checkpoint's source again"
        ) from error


class Reader:
    """Typed access to a JSON mapping; every failure names the file, the key and the value."""

    def __init__(self, row: Json, where: str) -> None:
        self.row, self.where = row, where

    def count(
        self, key: str, default: int | None = None, least: int = 1, most: int = 1 << 24
    ) -> int:
        """An integer of at least `least`, and at most `most`: memory is taken by it."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            self._fail(key, value, f"expected an integer of at least {least} and at most {most}")
        return int(value)

    def optional(self, key: str) -> int | None:
        """An integer of at least 0; None if the key is absent."""
        return None if self.row.get(key) is None else self.count(key, least=0)

    def number(self, key: str, default: float | None = None) -> float:
        """A positive float."""
        value = self._get(key, default)
        sound = isinstance(value, int | float) and not isinstance(value, bool)
        if not sound or not 0 < value < math.inf:  # Python reads NaN and Infinity from JSON
            self._fail(key, value, "expected a positive number")
        return float(value)

    def _get(self, key: str, default: float | None) -> Any:
        value = self.row.get(key)
        value = default if value is None else value
        if value is None:
            self._fail(key, None, "the key is required; take config.json from the model's source")
        return value

    def _fail(self, key: str, value: object, remedy: str) -> None:
        raise CheckpointError(f"{self.where}: {key} is {value!r}: {remedy}")
