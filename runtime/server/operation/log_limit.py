"""The log's rate limit: one line a second of a kind, so that no client can make it grow.

Knows logging only.
"""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator

ACCESS = "spark.access"  # the logger with a line for every request, an option
EVERY_S = 1.0
MOST_KINDS = 1000  # remembered; above it, all are dropped and may log again


class OnePerKind(logging.Filter):
    """Lets one record of a kind pass every `EVERY_S` seconds, with the number of those between.

    A kind is one logger, level and format, whatever the arguments. For a text formatted elsewhere
    (asyncio's contain addresses) its first line is the format. The access log is not limited.
    `clock` is in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._seen: dict[tuple[str, int, str], tuple[float, int]] = {}  # when, how many since

    def filter(self, record: logging.LogRecord) -> bool:
        if record.name == ACCESS:
            return True
        kind = (record.name, record.levelno, str(record.msg).partition("\n")[0])
        now = self._clock()
        last, missed = self._seen.get(kind, (-EVERY_S, 0))
        if now - last < EVERY_S:
            self._seen[kind] = (last, missed + 1)
            return False
        if len(self._seen) >= MOST_KINDS:
            self._seen.clear()
        self._seen[kind] = (now, 0)
        if missed:
            record.msg, record.args = f"{record.getMessage()} ({missed} more like this)", ()
        return True


@contextlib.contextmanager
def limited_log() -> Iterator[None]:
    """Adds the filter to all current handlers of the root logger, and removes it at the end."""
    quiet = [(handler, OnePerKind()) for handler in logging.getLogger().handlers]
    for handler, found in quiet:
        handler.addFilter(found)
    try:
        yield
    finally:
        for handler, found in quiet:
            handler.removeFilter(found)
