"""A fake driver of a DGX Spark: one memory for host and GPU, little of it `free`, and a GPU with
the clock and the bandwidth that a test chooses."""

import ctypes
from typing import Any

import numpy as np

from tests.fake_driver import FakeDriver

GIB = 1 << 30
TOTAL = int(119.6 * GIB)
MEMINFO = """MemTotal: {total} kB
MemFree: 1000000 kB
MemAvailable: {available} kB
SwapTotal: 16000000 kB
SwapFree: {swap_free} kB
"""


def meminfo(available: int, swap_free: int = 16_000_000) -> str:
    """/proc/meminfo with so many bytes available, and so many KiB of swap unused."""
    return MEMINFO.format(total=TOTAL >> 10, available=available >> 10, swap_free=swap_free)


class FakeSpark(FakeDriver):
    """`mhz` of the multiprocessors under load, `bandwidth` in bytes a second; `free` is what
    cuMemGetInfo reports, which counts the page cache as taken."""

    def __init__(self, mhz: float = 2281, bandwidth: float = 240e9, free: int = GIB) -> None:
        super().__init__(
            free, MULTIPROCESSOR_COUNT=48, INTEGRATED=1, MPS_ENABLED=0, CLOCK_RATE=3_003_000,
            COMPUTE_CAPABILITY_MAJOR=12, COMPUTE_CAPABILITY_MINOR=1,
        )  # fmt: skip
        self.product, self.total = "NVIDIA GB10", TOTAL
        self.mhz, self.bandwidth, self.copied = mhz, bandwidth, 0
        self._pinned: list[Any] = []

    def _answer(self, name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
        if name == "cuMemHostAlloc":
            self._pinned.append(ctypes.create_string_buffer(args[0]))
            return (ctypes.addressof(self._pinned[-1]),)
        if name == "cuDriverGetVersion":
            return (13_000,)
        if name == "cuMemcpyDtoDAsync":
            self.copied += args[2]
        if name == "cuEventElapsedTime":  # everything that was copied since it was asked last
            copied, self.copied = self.copied, 0
            return (2000 * copied / self.bandwidth,)
        if name == "cuMemcpyDtoHAsync":
            clocks = np.array([self.mhz * 10_000, 10_000_000], np.uint64)  # 10 ms
            ctypes.memmove(args[0], clocks.ctypes.data, args[2])
        if name in ("cuMemFreeHost", "cuMemsetD8Async", "cuLaunchKernelEx"):
            return ()
        return super()._answer(name, args)
