"""A CUDA driver that counts what it hands out, in the place of cuda.bindings' module.

It answers what a device is asked about itself, makes handles, and takes them back; it runs nothing.
"""

import itertools
from collections import Counter
from typing import Any

from cuda.bindings import driver as real

OK = real.CUresult.CUDA_SUCCESS
# What a call makes -> what takes it back.
PAIRS = {
    "cuDevicePrimaryCtxRetain": "cuDevicePrimaryCtxRelease",
    "cuStreamCreate": "cuStreamDestroy",
    "cuModuleLoadData": "cuModuleUnload",
    "cuEventCreate": "cuEventDestroy",
    "cuGraphInstantiate": "cuGraphExecDestroy",
    "cuStreamEndCapture": "cuGraphDestroy",
    "cuMemAlloc": "cuMemFree",
}
ENDS = {end: start for start, end in PAIRS.items()}


class FakeDriver:
    """`attributes` by name without the prefix; `free` bytes; `fails` names calls that fail;
    `error`: how."""

    def __init__(self, free: int = 1 << 30, fails: tuple[str, ...] = (), **attributes: int) -> None:
        self.attributes = {"MULTIPROCESSOR_COUNT": 132, "INTEGRATED": 0, **attributes}
        self.free, self.fails = free, fails
        self.product, self.total = "NVIDIA H200", 140 << 30
        self.gpus, self.error = 1, "UNKNOWN"
        self.held: Counter[str] = Counter()
        self.asked: list[tuple[Any, ...]] = []
        self._next = itertools.count(1)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            return getattr(real, name)
        return lambda *args: self._call(name, args)

    def _call(self, name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
        self.asked.append((name, *args))
        if name in self.fails:
            return (getattr(real.CUresult, f"CUDA_ERROR_{self.error}"),)
        if name in PAIRS:
            self.held[name] += 1
            return OK, next(self._next)
        if name in ENDS:
            self.held[ENDS[name]] -= 1
        return OK, *self._answer(name, args)

    def _answer(self, name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
        if name == "cuMemGetInfo":
            return self.free, 2 * self.free
        if name == "cuDeviceGetCount":
            return (self.gpus,)
        if name == "cuDeviceTotalMem":
            return (self.total,)
        if name == "cuDeviceGetName":
            return (self.product.encode() + b"\0\0",)
        if name == "cuDeviceGetAttribute":
            return (self.attributes[args[0].name.removeprefix("CU_DEVICE_ATTRIBUTE_")],)
        return (next(self._next),)
