"""What both halves of the `trt` executor ask of TensorRT-RTX itself: its version, and its words.

Knows the library's version and loggers; imports nothing of it, but is given its module.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

from spark_engine.hints import extra

LEAST, BELOW = (1, 7), (2,)  # as the extra `trt` asks for
_SHORT = ("memory", "bad_alloc")  # in the words of what TensorRT could not allocate
MOST = 600  # characters of its words that are passed on


def missing(error: Exception) -> str:
    """What to say where the library cannot be imported."""
    return f"needs TensorRT-RTX ({error}): {extra('trt')}"


def wrong_version(trt: ModuleType) -> str:
    """What to say of a version that this is not written for; empty of others."""
    numbers = tuple(int(n) for n in trt.__version__.split(".") if n.isdigit())
    if LEAST <= numbers < BELOW:
        return ""
    wanted = f"{'.'.join(map(str, LEAST))} or later and below {BELOW[0]}"
    return f"needs TensorRT-RTX {wanted}, and {trt.__version__} is here: {extra('trt')}"


def logger(trt: ModuleType, errors: list[str]) -> Any:
    """A logger that keeps errors in `errors` and passes nothing on; it must live as long as what it
    is given to."""

    class Log(trt.ILogger):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, words: str) -> None:
            if severity in (trt.ILogger.Severity.ERROR, trt.ILogger.Severity.INTERNAL_ERROR):
                errors.append(words)

    return Log()


def says(errors: Sequence[str]) -> str:
    """The words that were kept, for the end of a message."""
    return f"; TensorRT says: {'; '.join(errors)[:MOST]}" if errors else ""


def out_of_memory(errors: Sequence[str]) -> bool:
    """Whether they speak of memory that was not to be had."""
    return any(word in said.lower() for said in errors for word in _SHORT)
