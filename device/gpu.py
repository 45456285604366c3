"""One GPU: memory, cubins, launches and graphs, over the CUDA driver.

Knows the driver's API and no engine. Everything here raises ExecutorError with the driver's name
for what went wrong and what to do about it, or CapacityError when device memory is used up.
Importing it needs no driver; making a `Gpu` does.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spark_engine.device.cuda_driver import (
    MAX_SHARED,
    attribute,
    copy_all,
    driver,
    driver_free_bytes,
    free_bytes,
    queueing,
    resident_blocks,
    static_shared,
    value,
    values,
)
from spark_engine.device.occupancy import SharedMemoryScale
from spark_engine.device.rehearsal import requested_rehearsal
from spark_engine.device.sm_partition import part, whole
from spark_engine.errors import ExecutorError
from spark_engine.kernel import Launch, Shape, Target, rehearsal, target_of
from spark_engine.tensors import Array

OURS = 7 / 8  # of memory that the GPU shares with the host
Module = Any  # a CUmodule
Function = Any  # a CUfunction
Graph = Any  # a CUgraphExec
Event = Any  # a CUevent


def present() -> Target | None:
    """The first GPU; None without a driver, a GPU or an architecture for it.

    In a rehearsal it is the part of it that stands for another (`kernel.rehearsal`). Raises
    OptionError for one that this GPU does not give.
    """
    rehearsed, found = requested_rehearsal(), _present()
    return rehearsal(rehearsed.target, found) if rehearsed and found else found


def _present() -> Target | None:
    try:
        device = _first()
        memory = int(value(driver.cuDeviceTotalMem(device)))
        if attribute(device, "INTEGRATED"):
            memory = int(OURS * memory)
        sms = attribute(device, "MULTIPROCESSOR_COUNT")
        return target_of(_capability(device), _name(device), sms, memory)
    except Exception:  # a missing libcuda raises RuntimeError, a missing GPU ExecutorError
        return None


def architecture() -> str | None:
    """The target name of the first GPU; None where there is none."""
    found = present()
    return found.name if found else None


def count() -> int:
    """GPUs that this process may use; 0 where there is none, or no driver."""
    try:
        value(driver.cuInit(0))
        return int(value(driver.cuDeviceGetCount()))
    except Exception:  # a missing libcuda raises RuntimeError, a missing GPU ExecutorError
        return 0


def capability() -> tuple[int, int] | None:
    """The first GPU's compute capability, whatever it is; None where there is none."""
    try:
        return _capability(_first())
    except Exception:  # a missing libcuda raises RuntimeError, a missing GPU ExecutorError
        return None


def shared_bytes() -> int | None:
    """Memory that the first GPU shares with the host; None where it has its own, or is none."""
    try:
        device = _first()
        shares = attribute(device, "INTEGRATED")
        return int(value(driver.cuDeviceTotalMem(device))) if shares else None
    except Exception:  # a missing libcuda raises RuntimeError, a missing GPU ExecutorError
        return None


def name_and_driver() -> tuple[str, str]:
    """The first GPU's name, and the CUDA version of its driver. Raises ExecutorError without."""
    return _name(_first()), str(value(driver.cuDriverGetVersion()))


class Gpu:
    """The first GPU's primary context and one stream, made current in this thread.

    Another thread calls `use` before anything else. In a rehearsal (`SPARK_REHEARSE`) it is a part
    of the GPU's multiprocessors. `kind` says which: "whole", "green context" or "occupied"; there
    `smem_scale` gives blocks as much more shared memory as a multiprocessor has more of it.
    """

    def __init__(self) -> None:
        self._device = _first()
        self._modules: list[Module] = []
        with ExitStack() as undo:
            before = value(driver.cuCtxGetCurrent())
            context = value(driver.cuDevicePrimaryCtxRetain(self._device))
            undo.callback(lambda: value(driver.cuDevicePrimaryCtxRelease(self._device)))
            value(driver.cuCtxSetCurrent(context))
            rehearsed = requested_rehearsal()
            if rehearsed is None:
                mine = whole(self._device, context, undo)
            else:  # the end of a green context leaves the thread with one that is destroyed
                undo.callback(lambda: value(driver.cuCtxSetCurrent(before)))
                mine = part(self._device, context, rehearsed.target.sms, rehearsed.occupy, undo)
            self._context, self.stream, self._alone = mine.context, mine.stream, mine.alone
            self.multiprocessors, self.kind = mine.multiprocessors, mine.kind
            self.smem_scale = _smem_scale(self._device, rehearsed.target) if rehearsed else None
            undo.callback(self._unload_all)
            self._undo = undo.pop_all()

    def use(self) -> None:
        """Makes the GPU current in the calling thread."""
        value(driver.cuCtxSetCurrent(self._context))

    @property
    def free_bytes(self) -> int:
        """Memory that may be taken for the device (see `cuda_driver.free_bytes`)."""
        self.use()
        return free_bytes(self._device)

    @property
    def driver_free_bytes(self) -> int:
        """Memory that the driver reports as free; it counts the page cache as taken."""
        self.use()
        return driver_free_bytes()

    @property
    def total_bytes(self) -> int:
        """Memory that there is."""
        return int(value(driver.cuDeviceTotalMem(self._device)))

    @property
    def integrated(self) -> bool:
        """Is its memory the host's as well?"""
        return bool(attribute(self._device, "INTEGRATED"))

    @property
    def shared_by_mps(self) -> bool:
        """Do other processes run in this context at the same time (NVIDIA MPS)?"""
        try:
            return bool(attribute(self._device, "MPS_ENABLED"))
        except ExecutorError:  # a driver that does not know the attribute
            return False

    @property
    def most_mhz(self) -> float | None:
        """The highest clock of its multiprocessors; None where the driver tells none."""
        try:
            return attribute(self._device, "CLOCK_RATE") / 1000 or None
        except ExecutorError:
            return None

    @property
    def l2_bytes(self) -> int:
        """The L2 cache."""
        return attribute(self._device, "L2_CACHE_SIZE")

    def allocate(self, nbytes: int) -> int:
        """Address of fresh device memory, on a 256-byte boundary."""
        with self._alone():
            return int(value(driver.cuMemAlloc(max(nbytes, 1)), nbytes))

    def free(self, address: int) -> None:
        """Gives `allocate`d memory back."""
        with self._alone():
            value(driver.cuMemFree(address))

    def pinned(self, nbytes: int) -> NDArray[np.uint8]:
        """Page-locked host memory, for copies that overlap; kept until `unpin` or the end."""
        with self._alone():
            address = int(value(driver.cuMemHostAlloc(max(nbytes, 1), 0), nbytes))
        raw = (ctypes.c_uint8 * nbytes).from_address(address)
        return np.ctypeslib.as_array(raw)

    def unpin(self, memory: NDArray[np.uint8]) -> None:
        """Gives `pinned` memory back."""
        with self._alone():
            value(driver.cuMemFreeHost(memory.ctypes.data))

    def upload(self, address: int, array: Array) -> None:
        """Queues a copy to the device; `array` is C-contiguous and stays untouched until then."""
        value(driver.cuMemcpyHtoDAsync(address, array.ctypes.data, array.nbytes, self.stream))

    def download(self, array: Array, address: int) -> None:
        """Queues a copy from the device into a C-contiguous array."""
        value(driver.cuMemcpyDtoHAsync(array.ctypes.data, address, array.nbytes, self.stream))

    def copy(self, to: int, source: int, nbytes: int) -> None:
        """Queues a copy within the device."""
        value(driver.cuMemcpyDtoDAsync(to, source, nbytes, self.stream))

    def copy_all(self, copies: Sequence[tuple[int, int, int]]) -> None:
        """Queues copies within the device, (to, from, bytes), in any order among themselves."""
        copy_all(self.stream, copies)

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
        """A loaded cubin; unloaded by `unload`, or by `close`."""
        with self._alone():
            self._modules.append(value(driver.cuModuleLoadData(cubin)))
        return self._modules[-1]

    def unload(self, module: Module) -> None:
        """Gives a loaded cubin back."""
        self._modules.remove(module)
        with self._alone():
            value(driver.cuModuleUnload(module))

    def _unload_all(self) -> None:
        with ExitStack() as undo:  # all of them, even where one fails
            for module in list(self._modules):
                undo.callback(self.unload, module)

    def function(self, module: Module, symbol: str) -> Function:
        """An entry of a loaded cubin."""
        return value(driver.cuModuleGetFunction(module, symbol.encode()))

    def allow_shared(self, function: Function, nbytes: int) -> None:
        """Lets launches ask for so much dynamic shared memory; 48 KiB less static needs nothing."""
        if self.smem_scale is not None:
            nbytes = self.smem_scale.most - static_shared(function)
        if nbytes:
            value(driver.cuFuncSetAttribute(function, MAX_SHARED, nbytes))

    def resident_blocks(self, function: Function, shape: Shape) -> int:
        """Blocks of such a launch that run at once when nothing else does."""
        own = self._crowded(function, shape)
        return resident_blocks(self.stream, self.multiprocessors, function, own)

    def launch(self, function: Function, launch: Launch, args: Sequence[int | float]) -> None:
        """Queues a kernel; `args` are addresses and numbers in the order of `launch.args`."""
        self.prepare(function, launch.shape, args)()

    def prepare(
        self, function: Function, shape: Shape, args: Sequence[int | float]
    ) -> Callable[[], None]:
        """What queues this kernel whenever it is called, for launches that are repeated."""
        return queueing(self.stream, function, self._crowded(function, shape), args)

    def _crowded(self, function: Function, shape: Shape) -> Shape:
        """The launch whose blocks crowd a multiprocessor as those of the rehearsed GPU would."""
        if self.smem_scale is None:
            return shape
        shared = self.smem_scale.dynamic(shape.shared, static_shared(function))
        self.allow_shared(function, shared)
        return replace(shape, shared=shared)

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

    def drop_capture(self) -> None:
        """Ends a recording that went wrong, and forgets it."""
        with suppress(ExecutorError):
            value(driver.cuGraphDestroy(value(driver.cuStreamEndCapture(self.stream))))

    def _instantiate(self, graph: Any) -> Graph:
        try:
            return value(driver.cuGraphInstantiate(graph, 0))
        finally:
            value(driver.cuGraphDestroy(graph))

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

    def destroy_event(self, event: Event) -> None:
        """Gives an event back."""
        value(driver.cuEventDestroy(event))

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
        self._undo.close()


def _smem_scale(device: Any, of: Target) -> SharedMemoryScale:
    """With which the device's multiprocessors hold as many blocks as those of `of`."""
    here = attribute(device, "MAX_SHARED_MEMORY_PER_MULTIPROCESSOR")
    most = attribute(device, "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN")
    return SharedMemoryScale(of.architecture.sm_shared_bytes, here, most)


def _first() -> Any:
    """The first GPU, as the driver knows it."""
    value(driver.cuInit(0))
    return value(driver.cuDeviceGet(0))


def _name(device: Any) -> str:
    found: bytes = value(driver.cuDeviceGetName(128, device))
    return found.split(b"\0")[0].decode()


def _capability(device: Any) -> tuple[int, int]:
    major, minor = (attribute(device, f"COMPUTE_CAPABILITY_{part}") for part in ("MAJOR", "MINOR"))
    return major, minor


def _overlapping_edges(graph: Any) -> int:
    """Edges of a recorded graph that are programmatic."""
    count = int(values(driver.cuGraphGetEdges(graph, 0))[3])
    kinds = [e.type for e in values(driver.cuGraphGetEdges(graph, count))[2]] if count else []
    wanted = driver.CUgraphDependencyType.CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC
    return sum(kind == wanted.value for kind in kinds)
