"""How every command of ours ends: its exit code, and one line on standard error.

Knows errors, signals and the environment; knows no option. Exit codes: 0 done, 1 a bug of ours, 2
something the user can fix, 3 `spark-check` found a divergence, 75 memory or machines are short,
which may pass (`EX_TEMPFAIL`), 130 Ctrl-C, 143 SIGTERM.
"""

import errno
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from spark_engine.errors import CapacityError, OptionError, UserError

OK, BUG, USER, DIVERGED, SHORT, INTERRUPTED, TERMINATED = 0, 1, 2, 3, 75, 130, 143
DEBUG = "SPARK_DEBUG"  # in the environment: tracebacks are shown
_FULL = "free some space, or choose a folder on another disk"
_CLOSED = "choose a folder that you may read and write"
_REMEDIES = {
    errno.ENOSPC: _FULL,
    errno.EDQUOT: _FULL,
    errno.EACCES: _CLOSED,
    errno.EPERM: _CLOSED,
    errno.EROFS: _CLOSED,
}


class Terminated(BaseException):
    """SIGTERM came. Like KeyboardInterrupt it unwinds, so that nothing half-made stays."""


@contextmanager
def command(name: str) -> Iterator[None]:
    """Runs the work of the command `name`; whatever ends it becomes an exit code and one line.

    What the user can fix exits with 2, and so do errors of the system such as a full disk; where
    memory is short, which the next try may find free, it is 75. Any other exception is our bug.
    """
    try:
        with _sigterm_raises():
            yield
    except CapacityError as error:
        _leave(name, str(error), SHORT)
    except UserError as error:
        _leave(name, str(error), USER)
    except BrokenPipeError:  # the reader of the output has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(OK)
    except OSError as error:
        _leave(name, system_words(error), USER)
    except MemoryError as error:
        _leave(name, f"memory ran out ({error}): stop other programs, or ask for less", SHORT)
    except KeyboardInterrupt:
        _leave(name, "interrupted", INTERRUPTED)
    except Terminated:
        _leave(name, "ended by SIGTERM", TERMINATED)
    except Exception as error:
        more = "" if os.environ.get(DEBUG) else f" and what {DEBUG}=1 in the environment shows"
        words = f"{type(error).__name__}: {error}. This is our bug: please report it"
        _leave(name, f"{words} with the command{more}", BUG)


def system_words(error: OSError) -> str:
    """What the system refused: path, reason and, where we know one, the remedy."""
    where = f"{error.filename}: " if error.filename else ""
    remedy = _REMEDIES.get(error.errno or 0)
    return where + (error.strerror or str(error)) + (f"; {remedy}" if remedy else "")


def check_writable(option: str, path: Path) -> None:
    """Raises OptionError where the file cannot be written: before the work, and not at its end."""
    there = path.exists()
    try:
        path.open("a").close()
    except OSError as error:
        plain = OSError(error.errno, error.strerror)
        raise OptionError(f"{option} {path}: {system_words(plain)}") from None
    if not there:
        path.unlink(missing_ok=True)  # another process of ours may look as well


def _leave(name: str, words: str, code: int) -> None:
    if os.environ.get(DEBUG):
        traceback.print_exc()
    print(f"{name}: {words}", file=sys.stderr, flush=True)
    sys.exit(code)


@contextmanager
def _sigterm_raises() -> Iterator[None]:
    def stop(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one must not cut the cleaning
        raise Terminated

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
