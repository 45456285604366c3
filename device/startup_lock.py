"""That programs of ours which share one memory take their parts of it one after another.

Where host and GPU share the memory (a DGX Spark), two engines that start at once would both see all
of it free, both plan it, and hang the machine. So whoever measures what is free and then takes it
holds a lock meanwhile; the next one measures when that is over, and is refused with true figures.
The lock is on the file of NVIDIA's driver library that this process has loaded: it is the same file
in every container (the container toolkit binds the host's in), for every user and process
namespace, and the kernel lets go of it with the process, so that nothing stale is ever left. Where
that file is not the host's, programs elsewhere do not see the lock, which is said: an image's own
library for forward compatibility (in a folder `compat`), or one that an update has replaced.
Knows Linux's files; knows neither engines nor CUDA.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from spark_engine.errors import CapacityError

MAPS, LIBRARY = Path("/proc/self/maps"), "libcuda.so"
COMPAT = "compat"  # the folder of an image's own driver library (CUDA's forward compatibility)
DELETED = " (deleted)"  # as Linux marks a file that was replaced
LIMIT = 900.0  # seconds: longer than weights that fill such a memory take from a slow disk
AGAIN = 0.2  # seconds between two looks
SAID = 60.0  # and between two times that it says so: who says nothing for long seems to hang


def silent(words: str) -> None:
    """For who says nothing."""


@contextmanager
def startup_lock(
    shared: bool, say: Callable[[str], None], limit: float = LIMIT, maps: Path | None = None
) -> Iterator[None]:
    """Inside, no other program of ours measures and takes memory; nothing happens where it is not
    `shared` with the host. Waits, which it says. Raises CapacityError where its turn does not come
    within `limit` seconds. `maps`: the files that this process has loaded, as Linux lists them."""
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
    start, told = time.monotonic(), 0
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
            if told:
                say(f"went on after {time.monotonic() - start:.0f} s")
            return
        waited = time.monotonic() - start
        if waited >= told * SAID:
            say("another engine is taking its part of this machine's memory: waiting for it")
            told += 1
        if waited > limit:
            raise CapacityError(
                f"another program has been taking memory for {limit:.0f} s, and how much it will "
                f"leave is not known: wait until it is done, or stop it (`lslocks` and `fuser "
                f"{library}` say which holds the lock), then start again"
            )
        time.sleep(AGAIN)


def _apart(library: str) -> str:
    """Why other programs lock another file than this one; empty where they lock the same."""
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
    """The path of the driver's library as it is loaded here; None where none is."""
    try:
        lines = maps.read_text().splitlines()
    except OSError:
        return None
    paths = ("/" + rest for _, slash, rest in (line.partition("/") for line in lines) if slash)
    return next((path for path in paths if _is_driver(path.rpartition("/")[2])), None)


def _is_driver(name: str) -> bool:
    return name.removesuffix(DELETED) == LIBRARY or name.startswith(f"{LIBRARY}.")
