"""Memory that a process freed returns to the system, also from under what it still holds."""

from __future__ import annotations

import ctypes
import os
import time
from pathlib import Path

import pytest

from spark_engine.runtime.server.engine_client import heap

COUNT, SIZE = 4000, 64 << 10  # 250 MiB in pieces that glibc does not map one by one


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="needs glibc")
def test_what_was_freed_returns_though_something_holds_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Twice: the second time glibc's account has free bytes that were trimmed before."""
    monkeypatch.setattr(heap, "EVERY_S", 0.05)
    with heap.trimmed_heap():
        before = resident()
        for _ in range(2):
            blocks = [bytes([i % 256]) * SIZE for i in range(COUNT)]
            last = bytes(SIZE)  # the heap ends here
            grown = resident()
            time.sleep(0.2)
            del blocks
            end = time.monotonic() + 30
            while (kept := resident() - before) > heap.FREED and time.monotonic() < end:
                time.sleep(0.05)
            assert grown > before + COUNT * SIZE // 2 and last
            assert kept <= heap.FREED, f"{kept >> 20} MiB kept"
