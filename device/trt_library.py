"""TensorRT-RTX for both halves of the `trt` executor: its version and its error messages.

Knows the library's version and loggers, and no engine.
"""

from collections.abc import Sequence
from types import ModuleType
from typing import Any

from spark_engine.errors import UserError
from spark_engine.hints import extra

LEAST, BELOW = (1, 7), (2,)  # versions, as in the extra `trt`
_SHORT = ("memory", "bad_alloc")  # words in messages about failed allocations
MOST = 600  # characters of its messages that are passed on


def library(needed_by: str, refusal: type[UserError]) -> ModuleType:
    """The library. Raises `refusal` where it is not installed, or of another version."""
    try:
        import tensorrt_rtx
    except (ImportError, OSError) as error:  # the latter where its libraries cannot be loaded
        raise refusal(f"{needed_by} needs TensorRT-RTX ({error}): {extra('trt')}") from error
    found: ModuleType = tensorrt_rtx
    numbers = tuple(int(n) for n in found.__version__.split(".") if n.isdigit())
    if not LEAST <= numbers < BELOW:
        wanted = f"{'.'.join(map(str, LEAST))} or later and below {BELOW[0]}"
        words = f"{wanted}, and {found.__version__} is here: {extra('trt')}"
        raise refusal(f"{needed_by} needs TensorRT-RTX {words}")
    return found


def logger(trt: ModuleType, errors: list[str]) -> Any:
    """A logger that stores errors in `errors` and prints nothing; it must outlive its users."""

    class Log(trt.ILogger):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, words: str) -> None:
            if severity in (trt.ILogger.Severity.ERROR, trt.ILogger.Severity.INTERNAL_ERROR):
                errors.append(words)

    return Log()


def says(errors: Sequence[str]) -> str:
    """The stored messages, for the end of an error."""
    return f"; TensorRT says: {'; '.join(errors)[:MOST]}" if errors else ""


def out_of_memory(errors: Sequence[str]) -> bool:
    """True if they report a failed allocation."""
    return any(word in error.lower() for error in errors for word in _SHORT)
