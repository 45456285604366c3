"""One GPU: memory, cubins, launches and graphs, over the CUDA driver.

Knows the driver's API and no engine. Everything here raises ExecutorError with the driver's name
for what went wrong and what to do about it, or CapacityError when device memory is used up.
Importing it needs no driver; making a `Gpu` does.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from cuda.bindings import driver
from numpy.typing import NDArray

from spark_engine.cuda_driver import MAX_SHARED, queueing, value, values
from spark_engine.kernel import Launch, Shape
from spark_engine.tensors import Array

_ARCHITECTURES = {(9, 0): "sm_90a", (12, 1): "sm_121a"}
Module = Any  # a CUmodule
Function = Any  # a CUfunction
Graph = Any  # a CUgraphExec
Event = Any  # a CUevent


def architecture() -> str | None:
    """The target name of the first GPU; None without a driver, a GPU or a name for it."""
    try:
        value(driver.cuInit(0))
        device = value(driver.cuDeviceGet(0))
        return _ARCHITECTURES.get(_capability(device))
    except Exception:  # a missing libcuda raises RuntimeError, a missing GPU ExecutorError
        return None


class Gpu:
    """The first GPU's primary context and one stream, made current in this thread.

    Another thread calls `use` before anything else.
    """

    def __init__(self) -> None:
        value(driver.cuInit(0))
        self._device = value(driver.cuDeviceGet(0))
        self._context = value(driver.cuDevicePrimaryCtxRetain(self._device))
        value(driver.cuCtxSetCurrent(self._context))
        flags = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
        self.stream = value(driver.cuStreamCreate(flags.value))
        self._modules: list[Any] = []

    def use(self) -> None:
        """Makes the GPU current in the calling thread."""
        value(driver.cuCtxSetCurrent(self._context))

    @property
    def free_bytes(self) -> int:
        """Device memory that is not taken."""
        value(driver.cuCtxSetCurrent(self._context))
        error, free, _ = driver.cuMemGetInfo()
        value((error,))
        return int(free)

    @property
    def capability(self) -> tuple[int, int]:
        """Major and minor compute capability."""
        return _capability(self._device)

    @property
    def multiprocessors(self) -> int:
        """Streaming multiprocessors that a launch may use."""
        name = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
        return int(value(driver.cuDeviceGetAttribute(name, self._device)))

    def allocate(self, nbytes: int) -> int:
        """Address of fresh device memory, on a 256-byte boundary."""
        return int(value(driver.cuMemAlloc(max(nbytes, 1))))

    def free(self, address: int) -> None:
        """Gives `allocate`d memory back."""
        value(driver.cuMemFree(address))

    def pinned(self, nbytes: int) -> NDArray[np.uint8]:
        """Page-locked host memory, for copies that overlap; kept until `unpin` or the end."""
        address = int(value(driver.cuMemHostAlloc(max(nbytes, 1), 0)))
        raw = (ctypes.c_uint8 * nbytes).from_address(address)
        return np.ctypeslib.as_array(raw)

    def unpin(self, memory: NDArray[np.uint8]) -> None:
        """Gives `pinned` memory back."""
        value(driver.cuMemFreeHost(memory.ctypes.data))

    def upload(self, address: int, array: Array) -> None:
        """Queues a copy to the device; `array` is C-contiguous and stays untouched until then."""
        value(driver.cuMemcpyHtoDAsync(address, array.ctypes.data, array.nbytes, self.stream))

    def download(self, array: Array, address: int) -> None:
        """Queues a copy from the device into a C-contiguous array."""
        value(driver.cuMemcpyDtoHAsync(array.ctypes.data, address, array.nbytes, self.stream))

    def fill(self, address: int, byte: int, nbytes: int) -> None:
        """Queues setting every byte."""
        value(driver.cuMemsetD8Async(address, byte, nbytes, self.stream))

    def wait(self) -> None:
        """Blocks until everything queued is done."""
        value(driver.cuStreamSynchronize(self.stream))

    def load(self, cubin: bytes, symbols: Sequence[str], shared: int = 0) -> dict[str, Function]:
        """The entries of a cubin, each allowed `shared` bytes of dynamic shared memory."""
        module = self.module(cubin)
        found = {symbol: self.function(module, symbol) for symbol in symbols}
        for function in found.values():
            self.allow_shared(function, shared)
        return found

    def module(self, cubin: bytes) -> Module:
        """A loaded cubin; unloaded by `close`."""
        module = value(driver.cuModuleLoadData(cubin))
        self._modules.append(module)
        return module

    def function(self, module: Module, symbol: str) -> Function:
        """An entry of a loaded cubin."""
        return value(driver.cuModuleGetFunction(module, symbol.encode()))

    def allow_shared(self, function: Function, nbytes: int) -> None:
        """Lets launches ask for so much dynamic shared memory; 48 KiB less static needs nothing."""
        if nbytes:
            value(driver.cuFuncSetAttribute(function, MAX_SHARED, nbytes))

    def launch(self, function: Function, launch: Launch, args: Sequence[int | float]) -> None:
        """Queues a kernel; `args` are addresses and numbers in the order of `launch.args`."""
        self.prepare(function, launch.shape, args)()

    def prepare(
        self, function: Function, shape: Shape, args: Sequence[int | float]
    ) -> Callable[[], None]:
        """What queues this kernel whenever it is called, for launches that are repeated."""
        return queueing(self.stream, function, shape, args)

    def begin_capture(self) -> None:
        """From here on the stream records instead of running."""
        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        value(driver.cuStreamBeginCapture(self.stream, mode))

    def end_capture(self) -> Graph:
        """What was recorded, ready to replay."""
        return self._instantiate(value(driver.cuStreamEndCapture(self.stream)))

    def end_counted_capture(self) -> tuple[Graph, int]:
        """What was recorded, and how many launches in it may start before the one before ends."""
        graph = value(driver.cuStreamEndCapture(self.stream))
        edges = _overlapping_edges(graph)
        return self._instantiate(graph), edges

    def _instantiate(self, graph: Any) -> Graph:
        executable = value(driver.cuGraphInstantiate(graph, 0))
        value(driver.cuGraphDestroy(graph))
        return executable

    def replay(self, graph: Graph) -> None:
        """Queues a graph."""
        value(driver.cuGraphLaunch(graph, self.stream))

    def destroy_graph(self, graph: Graph) -> None:
        """Gives a graph back."""
        value(driver.cuGraphExecDestroy(graph))

    def event(self, timed: bool = False) -> Event:
        """A fresh event."""
        flag = driver.CUevent_flags
        kind = flag.CU_EVENT_DEFAULT if timed else flag.CU_EVENT_DISABLE_TIMING
        return value(driver.cuEventCreate(kind.value))

    def record(self, event: Event) -> None:
        """Queues the event."""
        value(driver.cuEventRecord(event, self.stream))

    def wait_for(self, event: Event) -> None:
        """Blocks until the event has happened."""
        value(driver.cuEventSynchronize(event))

    def milliseconds(self, first: Event, last: Event) -> float:
        """Time between two timed events that have happened."""
        return float(value(driver.cuEventElapsedTime(first, last)))

    def close(self) -> None:
        """Unloads cubins and lets the context go. May be called twice."""
        modules, self._modules = self._modules, []
        for module in modules:
            value(driver.cuModuleUnload(module))
        if self._context is not None:
            value(driver.cuStreamDestroy(self.stream))
            value(driver.cuDevicePrimaryCtxRelease(self._device))
            self._context = None


def _capability(device: Any) -> tuple[int, int]:
    names = driver.CUdevice_attribute
    major = value(
        driver.cuDeviceGetAttribute(names.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device)
    )
    minor = value(
        driver.cuDeviceGetAttribute(names.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device)
    )
    return int(major), int(minor)


def _overlapping_edges(graph: Any) -> int:
    """Edges of a recorded graph that are programmatic."""
    count = int(values(driver.cuGraphGetEdges(graph, 0))[3])
    kinds = [e.type for e in values(driver.cuGraphGetEdges(graph, count))[2]] if count else []
    wanted = driver.CUgraphDependencyType.CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC
    return sum(kind == wanted.value for kind in kinds)
