"""Memory that this process freed returns to the system: glibc keeps it otherwise.

glibc frees the end of its heap alone: a few small objects there keep all that was freed before
them, as after large bodies and grammars (`make abuse` shows what is kept). Knows glibc and /proc;
with another libc nothing happens.
"""

import contextlib
import ctypes
import os
import threading
from collections.abc import Iterator
from pathlib import Path

LARGE_BUFFER = 1 << 20  # bytes of what is mapped by itself, and so returned when it is freed
FREED = 16 << 20  # bytes that are free in the heap, and may be in memory, for it to be trimmed
EVERY_S = 2.0
_M_MMAP_THRESHOLD = -3  # of malloc.h


def return_large_buffers() -> None:
    """From here on, for the whole process. By default glibc learns from large buffers that were
    freed to keep the next ones, up to 32 MiB each; a threshold that is set stays."""
    with contextlib.suppress(AttributeError, OSError):  # another libc
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, LARGE_BUFFER)


@contextlib.contextmanager
def trimmed_heap() -> Iterator[None]:
    """Within it, a thread trims the heap whenever `FREED` bytes could be returned."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2"):  # glibc before 2.33, or another libc
        yield
        return
    libc.mallinfo2.restype = _Mallinfo
    ended = threading.Event()
    thread = threading.Thread(target=_trim, args=(libc, ended), name="heap", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


class _Mallinfo(ctypes.Structure):
    """`struct mallinfo2`: sums over all arenas. `fordblks` is the free part."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks"),
            *("uordblks", "fordblks", "keepcost"),
        )
    )


def _trim(libc: ctypes.CDLL, ended: threading.Event) -> None:
    """What was trimmed stays free in glibc's account. So memory can be returned where more became
    free, or where the process grew: free memory that is used and freed again between two looks."""
    least_free, least_resident = 0, resident()
    while not ended.wait(EVERY_S):
        free, now = int(libc.mallinfo2().fordblks), resident()
        if free > FREED and (free > least_free + FREED or now > least_resident + FREED):
            libc.malloc_trim(0)  # without Python's lock
            least_free, least_resident = free, resident()
        least_free, least_resident = min(least_free, free), min(least_resident, now)


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
