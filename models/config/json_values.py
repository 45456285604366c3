"""Where foreign JSON becomes ours: a value of an unforeseen type is the file's fault, and says so.

Readers check what they can name; this catches the rest (a list where an object belongs, a
number where a name does). Knows no key.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from spark_engine.errors import CheckpointError

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
