"""One bench at a time on a machine, since two would disturb each other.

Knows a file that is locked while its process runs.
"""

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from spark_engine.errors import OptionError


@contextmanager
def alone(path: Path, wait: bool, say: Callable[[str], None]) -> Iterator[None]:
    """Holds the lock `path`. Raises OptionError when another bench has it, or waits for that."""
    file = _open(path)
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(file, 20).decode() or "?"
            words = f"another spark-bench runs on this machine (process {holder}, {path})"
            if not wait:
                raise OptionError(f"{words}: give --wait to run after it") from None
            say(f"waiting: {words}")
            fcntl.flock(file, fcntl.LOCK_EX)
        with suppress(OSError):  # another user's file, which only that user may write
            os.ftruncate(file, 0)
            os.pwrite(file, str(os.getpid()).encode(), 0)
        yield
    finally:
        os.close(file)


def _open(path: Path) -> int:
    """Locking does not write: the file may be another user's, in a shared folder."""
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    except PermissionError:
        return os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
