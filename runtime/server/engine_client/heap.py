"""Memory that this process freed returns to the system: glibc keeps it otherwise.

glibc frees the end of its heap alone. After a body of 31 MiB a server kept 108 MiB behind a few
small objects, and an engine process kept 35 MiB of grammars that it had dropped. Knows glibc;
with another libc nothing happens.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Iterator

LARGE_BUFFER = 1 << 20  # bytes of what is mapped by itself, and so returned when it is freed
FREED = 32 << 20  # bytes that became free since the heap was trimmed last, for another time
EVERY_S = 2.0
_M_MMAP_THRESHOLD = -3  # of malloc.h


def return_large_buffers() -> None:
    """From here on, for the whole process. By default glibc learns from large buffers that were
    freed to keep the next ones, up to 32 MiB each; a threshold that is set stays."""
    with contextlib.suppress(AttributeError, OSError):  # another libc
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, LARGE_BUFFER)


@contextlib.contextmanager
def trimmed_heap() -> Iterator[None]:
    """Within it, a thread trims the heap whenever `FREED` bytes of it became free."""
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
    """Free bytes that were trimmed stay free in glibc's account, so growth counts."""
    least = 0
    while not ended.wait(EVERY_S):
        free = int(libc.mallinfo2().fordblks)
        if free > least + FREED:
            libc.malloc_trim(0)  # without Python's lock
            least = free
        least = min(least, free)
