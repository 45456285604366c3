"""Memory that a process freed returns to the system, also from under what it still holds."""

import ctypes
import multiprocessing
import time
from multiprocessing.connection import Connection

import pytest

from spark_engine.runtime.server.engine_client import heap
from spark_engine.runtime.server.engine_client.heap import resident

SIZE = 64 << 10  # bytes of a block, which glibc does not map by itself
COUNT = 4000  # blocks: 250 MiB
needs_glibc = pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="needs glibc")


def use(wait_s: float) -> tuple[bytes, int]:
    """Takes memory, holds it for a while, and frees it, but for a block at the heap's end: that
    block, and the bytes by which the process grew."""
    before = resident()
    blocks = [bytes([i % 256]) * SIZE for i in range(COUNT)]
    last = bytes(SIZE)
    grew = resident() - before
    time.sleep(wait_s)
    del blocks
    return last, grew


def settled(before: int) -> int:
    """Bytes that are kept, once that is little, or after half a minute."""
    end = time.monotonic() + 30
    while (kept := resident() - before) > 2 * heap.FREED and time.monotonic() < end:
        time.sleep(0.05)
    return kept


def use_twice(every_s: float, hold_s: float, result: Connection) -> None:
    """Sends (bytes by which the process grew, bytes that it kept) of each time."""
    heap.EVERY_S = every_s
    with heap.trimmed_heap():
        before = resident()
        held = []
        for _ in range(2):
            last, grew = use(hold_s)
            held.append(last)
            result.send((grew, settled(before)))


@needs_glibc
@pytest.mark.parametrize(
    ("every_s", "hold_s"), [(0.05, 0.2), (2.0, 0.0)], ids=["seen while held", "between two looks"]
)
def test_what_was_freed_returns_though_something_holds_the_end(
    every_s: float, hold_s: float
) -> None:
    """Twice: the second time glibc's account has free bytes that were trimmed before. In a separate
    process: one that ran other tests has free memory, and does not grow."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=use_twice, args=(every_s, hold_s, theirs)
    )
    process.start()
    theirs.close()
    for _ in range(2):
        grew, kept = ours.recv()
        assert grew > COUNT * SIZE // 2
        assert kept <= 2 * heap.FREED, f"{kept >> 20} MiB kept"
    process.join()
    assert process.exitcode == 0
