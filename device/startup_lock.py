"""Programs that share one memory measure and allocate their parts of it one after another.

If host and GPU share the memory (a DGX Spark), two engines that start at once would both see all of
it free, both plan to use it, and hang the machine. So a program holds a lock while it measures the
free memory and allocates its part; the next program measures afterwards and is refused with correct
figures. The lock is on the file of NVIDIA's driver library that this process has loaded: that file
is the same in every container (the container toolkit mounts the host's), for every user and process
namespace, and the kernel releases the lock with the process, so it is never stale. If the file is
not the host's, programs elsewhere do not see the lock, and a warning says so: an image's own
library for forward compatibility (in a folder `compat`), or one that an update has replaced.
Knows Linux's files; knows neither engines nor CUDA.
"""

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from spark_engine.errors import CapacityError

MAPS, LIBRARY = Path("/proc/self/maps"), "libcuda.so"
COMPAT = "compat"  # the folder of an image's own driver library (CUDA's forward compatibility)
DELETED = " (deleted)"  # Linux's suffix for a file that was replaced
LIMIT = 900.0  # seconds: loading weights that fill such a memory from a slow disk takes less
AGAIN = 0.2  # seconds between two attempts
REPORT_S = 60.0  # seconds between two messages: a silent program seems to hang


def silent(words: str) -> None:
    """Discards a message."""


@contextmanager
def startup_lock(
    shared: bool, say: Callable[[str], None], limit: float = LIMIT, maps: Path | None = None
) -> Iterator[None]:
    """Holds the start-up lock; does nothing if the GPU's memory is not `shared` with the host.

    Reports by `say` that it waits. Raises CapacityError after `limit` seconds without the lock.
    `maps`: the files that this process has loaded, as Linux lists them.
    """
    library = _library(maps or MAPS) if shared else None
    if library is None:
        yield
        return
    if why := _apart(library):
        say(f"warning: {why}: start one engine at a time")
    try:
        file = os.open(library, os.O_RDONLY)
    except OSError as error:
        if not why:
            failed = f"{library} cannot be locked ({error.strerror})"
            say(f"warning: {failed}: start one engine at a time")
        yield
        return
    try:
        _wait(file, library, say, limit)
        yield
    finally:
        os.close(file)


def _wait(file: int, library: str, say: Callable[[str], None], limit: float) -> None:
    start, reports = time.monotonic(), 0
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pass
        except OSError as error:  # a file system without locks
            why = error.strerror
            say(f"warning: {library} cannot be locked ({why}): start one engine at a time")
            return
        else:
            if reports:
                say(f"continued after {time.monotonic() - start:.0f} s")
            return
        waited = time.monotonic() - start
        if waited >= reports * REPORT_S:
            say("another engine is allocating its part of this machine's memory: waiting for it")
            reports += 1
        if waited > limit:
            raise CapacityError(
                f"another program has been allocating memory for {limit:.0f} s, and how much it "
                f"will leave is not known: wait until it is done, or stop it (`lslocks` and `fuser "
                f"{library}` say which holds the lock), then start again"
            )
        time.sleep(AGAIN)


def _apart(library: str) -> str:
    """Why other programs lock another file than this one; empty if they lock the same."""
    if library.endswith(DELETED):
        old = library.removesuffix(DELETED)
        return f"an update of the driver has replaced {old}, so other engines do not see this one"
    if COMPAT in Path(library).parts:
        return (
            f"{library} is this container's own driver library (CUDA's forward compatibility), so "
            "engines outside it do not see this one"
        )
    return ""


def _library(maps: Path) -> str | None:
    """The path of the driver's library that is loaded here; None without one."""
    try:
        lines = maps.read_text().splitlines()
    except OSError:
        return None
    paths = ("/" + rest for _, slash, rest in (line.partition("/") for line in lines) if slash)
    return next((path for path in paths if _is_driver(path.rpartition("/")[2])), None)


def _is_driver(name: str) -> bool:
    return name.removesuffix(DELETED) == LIBRARY or name.startswith(f"{LIBRARY}.")
