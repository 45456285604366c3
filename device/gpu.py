"""One GPU: memory, cubins, launches and graphs, over the CUDA driver.

Knows the driver's API and no engine. Everything here raises ExecutorError with the driver's error
name and a remedy, or CapacityError if device memory is exhausted. Importing this module needs no
driver; creating a `Gpu` does.
"""

import ctypes
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
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
    pack,
    queueing,
    resident_blocks,
    static_shared,
    value,
)
from spark_engine.device.rehearsal import SharedMemoryScale, requested_rehearsal
from spark_engine.device.sm_partition import partition, whole
from spark_engine.errors import ExecutorError
from spark_engine.kernel import Launch, Shape, Target, rehearsal, target_of
from spark_engine.tensors import Array

OURS = 7 / 8  # part of a memory shared with the host that a plan may use
Module = Any  # a CUmodule
Function = Any  # a CUfunction
Graph = Any  # a CUgraphExec
Event = Any  # a CUevent
Stream = Any  # a CUstream


def present() -> Target | None:
    """The first GPU; None without a driver, a GPU or an architecture for it.

    In a rehearsal it is the partition that represents another GPU (`kernel.rehearsal`). Raises
    OptionError if this GPU cannot represent it.
    """
    rehearsed, found = requested_rehearsal(), _present()
    return rehearsal(rehearsed, found) if rehearsed and found else found


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
    """The target name of the first GPU; None without one."""
    found = present()
    return found.name if found else None


def count() -> int:
    """The number of GPUs that this process may use; 0 without a driver."""
    try:
        value(driver.cuInit(0))
        return int(value(driver.cuDeviceGetCount()))
    except Exception:  # a missing libcuda raises RuntimeError, a missing GPU ExecutorError
        return 0


def capability() -> tuple[int, int] | None:
    """The compute capability of the first GPU, known target or not; None without a GPU."""
    try:
        return _capability(_first())
    except Exception:  # a missing libcuda raises RuntimeError, a missing GPU ExecutorError
        return None


def shared_bytes() -> int | None:
    """Bytes of memory that the first GPU shares with the host; None if it shares none."""
    try:
        device = _first()
        shares = attribute(device, "INTEGRATED")
        return int(value(driver.cuDeviceTotalMem(device))) if shares else None
    except Exception:  # a missing libcuda raises RuntimeError, a missing GPU ExecutorError
        return None


def name_and_driver() -> tuple[str, str]:
    """The first GPU's name and its driver's CUDA version. Raises ExecutorError without a GPU."""
    return _name(_first()), str(value(driver.cuDriverGetVersion()))


class Gpu:
    """The first GPU's primary context, current in this thread, and one stream.

    Another thread calls `use` first. In a rehearsal (`SPARK_REHEARSE`) it is a partition of the
    GPU's multiprocessors; `kind` is "whole" or "green context". In a rehearsal `smem_scale` scales
    the shared memory of blocks by the ratio of the multiprocessors' sizes.
    """

    def __init__(self) -> None:
        self._device = _first()
        self._modules: list[Module] = []
        self._configs: dict[Shape, Any] = {}
        with ExitStack() as undo:
            before = value(driver.cuCtxGetCurrent())
            context = value(driver.cuDevicePrimaryCtxRetain(self._device))
            undo.callback(lambda: value(driver.cuDevicePrimaryCtxRelease(self._device)))
            value(driver.cuCtxSetCurrent(context))
            rehearsed = requested_rehearsal()
            if rehearsed is None:
                mine = whole(self._device, context, undo)
            else:  # after a green context ends, the thread's current context is destroyed
                undo.callback(lambda: value(driver.cuCtxSetCurrent(before)))
                mine = partition(self._device, rehearsed.sms, undo)
            self._context, self.stream = mine.context, mine.stream
            self.multiprocessors, self.kind = mine.multiprocessors, mine.kind
            self.smem_scale = _smem_scale(self._device, rehearsed) if rehearsed else None
            undo.callback(self._unload_all)
            self._undo = undo.pop_all()

    def use(self) -> None:
        """Makes the GPU current in the calling thread."""
        value(driver.cuCtxSetCurrent(self._context))

    @property
    def free_bytes(self) -> int:
        """Bytes that may be allocated on the device (see `cuda_driver.free_bytes`)."""
        self.use()
        return free_bytes(self._device)

    @property
    def driver_free_bytes(self) -> int:
        """Bytes that the driver reports as free; it counts the page cache as used."""
        self.use()
        return driver_free_bytes()

    @property
    def total_bytes(self) -> int:
        """Bytes of device memory."""
        return int(value(driver.cuDeviceTotalMem(self._device)))

    @property
    def integrated(self) -> bool:
        """True if the GPU and the host share one memory."""
        return bool(attribute(self._device, "INTEGRATED"))

    @property
    def shared_by_mps(self) -> bool:
        """True if other processes run in this context at the same time (NVIDIA MPS)."""
        try:
            return bool(attribute(self._device, "MPS_ENABLED"))
        except ExecutorError:  # the driver does not know the attribute
            return False

    @property
    def most_mhz(self) -> float | None:
        """The highest clock of the multiprocessors; None if the driver reports none."""
        try:
            return attribute(self._device, "CLOCK_RATE") / 1000 or None
        except ExecutorError:
            return None

    @property
    def l2_bytes(self) -> int:
        """Bytes of the L2 cache."""
        return attribute(self._device, "L2_CACHE_SIZE")

    def allocate(self, nbytes: int) -> int:
        """Allocates device memory; returns its address, on a 256-byte boundary."""
        return int(value(driver.cuMemAlloc(max(nbytes, 1)), nbytes))

    def free(self, address: int) -> None:
        """Frees memory of `allocate`."""
        value(driver.cuMemFree(address))

    def pinned(self, nbytes: int) -> NDArray[np.uint8]:
        """Allocates page-locked host memory, for copies that overlap; valid until `unpin`."""
        address = int(value(driver.cuMemHostAlloc(max(nbytes, 1), 0), nbytes))
        raw = (ctypes.c_uint8 * nbytes).from_address(address)
        return np.ctypeslib.as_array(raw)

    def unpin(self, memory: NDArray[np.uint8]) -> None:
        """Frees memory of `pinned`."""
        value(driver.cuMemFreeHost(memory.ctypes.data))

    @property
    def registers(self) -> bool:
        """True if it page-locks memory that it did not allocate."""
        return bool(attribute(self._device, "HOST_REGISTER_SUPPORTED"))

    def register(self, memory: Array) -> None:
        """Page-locks memory that other processes may share; valid until `unregister`."""
        value(driver.cuMemHostRegister(memory.ctypes.data, memory.nbytes, 0), memory.nbytes)

    def unregister(self, memory: Array) -> None:
        """Ends `register`."""
        value(driver.cuMemHostUnregister(memory.ctypes.data))

    def upload(self, address: int, array: Array, stream: Stream | None = None) -> None:
        """Queues a copy to the device; `array` is C-contiguous and must not change before."""
        on = self.stream if stream is None else stream
        value(driver.cuMemcpyHtoDAsync(address, array.ctypes.data, array.nbytes, on))

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
        """Queues setting `nbytes` bytes to `byte`."""
        value(driver.cuMemsetD8Async(address, byte, nbytes, self.stream))

    def wait(self) -> None:
        """Blocks until all queued work is done."""
        value(driver.cuStreamSynchronize(self.stream))

    def load(self, cubin: bytes, symbols: Sequence[str], shared: int = 0) -> dict[str, Function]:
        """The functions of a cubin, each allowed `shared` bytes of dynamic shared memory."""
        module = self.module(cubin)
        found = {symbol: self.function(module, symbol) for symbol in symbols}
        for function in found.values():
            self.allow_shared(function, shared)
        return found

    def module(self, cubin: bytes) -> Module:
        """Loads a cubin; `unload` or `close` unloads it."""
        self._modules.append(value(driver.cuModuleLoadData(cubin)))
        return self._modules[-1]

    def unload(self, module: Module) -> None:
        """Unloads a cubin."""
        self._modules.remove(module)
        value(driver.cuModuleUnload(module))

    def _unload_all(self) -> None:
        with ExitStack() as undo:  # all of them, even if one fails
            for module in list(self._modules):
                undo.callback(self.unload, module)

    def function(self, module: Module, symbol: str) -> Function:
        """A function of a loaded cubin."""
        return value(driver.cuModuleGetFunction(module, symbol.encode()))

    def load_function(self, function: Function) -> None:
        """Loads its code now, which the driver otherwise does at the first launch."""
        value(driver.cuFuncLoad(function))

    def allow_shared(self, function: Function, nbytes: int) -> None:
        """Allows launches this much dynamic shared memory; up to 48 KiB in all need no call."""
        if self.smem_scale is not None:
            nbytes = self.smem_scale.most - static_shared(function)
        if nbytes:
            value(driver.cuFuncSetAttribute(function, MAX_SHARED, nbytes))

    def resident_blocks(self, function: Function, shape: Shape) -> int:
        """Blocks of such a launch that run at the same time on an idle GPU."""
        own = self._crowded(function, shape)
        return resident_blocks(self.stream, self.multiprocessors, function, own)

    def launch(self, function: Function, launch: Launch, args: Sequence[int | float]) -> None:
        """Queues a kernel; `args` are addresses and numbers in the order of `launch.args`."""
        self.prepare(function, launch.shape, args)()

    pack = staticmethod(pack)  # the arguments of many launches, which `prepare` takes

    def prepare(
        self, function: Function, shape: Shape, args: Sequence[int | float] | memoryview
    ) -> Callable[[], None]:
        """A function that queues this kernel on every call, for repeated launches."""
        shape = self._crowded(function, shape)
        return queueing(self.stream, function, shape, args, self._configs)

    def _crowded(self, function: Function, shape: Shape) -> Shape:
        """The launch with the rehearsed GPU's number of blocks per multiprocessor."""
        if self.smem_scale is None:
            return shape
        shared = self.smem_scale.dynamic(shape.shared, static_shared(function))
        self.allow_shared(function, shared)
        return shape._replace(shared=shared)

    def begin_capture(self) -> None:
        """Starts recording: the stream records work instead of running it."""
        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        value(driver.cuStreamBeginCapture(self.stream, mode))

    def end_capture(self) -> Graph:
        """Ends recording; returns the graph, ready to replay."""
        return self._instantiate(value(driver.cuStreamEndCapture(self.stream)))

    def drop_capture(self) -> None:
        """Ends a recording that failed, and discards it."""
        with suppress(ExecutorError):
            value(driver.cuGraphDestroy(value(driver.cuStreamEndCapture(self.stream))))

    def _instantiate(self, graph: Any) -> Graph:
        try:
            return value(driver.cuGraphInstantiate(graph, 0))
        finally:
            value(driver.cuGraphDestroy(graph))

    def replay(self, graph: Graph) -> None:
        """Queues a graph once."""
        value(driver.cuGraphLaunch(graph, self.stream))

    def destroy_graph(self, graph: Graph) -> None:
        value(driver.cuGraphExecDestroy(graph))

    def event(self, timed: bool = False) -> Event:
        flag = driver.CUevent_flags
        kind = flag.CU_EVENT_DEFAULT if timed else flag.CU_EVENT_DISABLE_TIMING
        return value(driver.cuEventCreate(kind.value))

    def destroy_event(self, event: Event) -> None:
        value(driver.cuEventDestroy(event))

    def record(self, event: Event, stream: Stream | None = None) -> None:
        """Queues the event."""
        value(driver.cuEventRecord(event, self.stream if stream is None else stream))

    def mark(self, event: Event) -> None:
        """Records the event as a part of the graph that is captured: every replay reaches it."""
        flag = driver.CUevent_record_flags.CU_EVENT_RECORD_EXTERNAL.value
        value(driver.cuEventRecordWithFlags(event, self.stream, flag))

    def new_stream(self) -> Stream:
        """Creates a stream that waits for no other; `upload` and `record` take it."""
        flag = driver.CUstream_flags.CU_STREAM_NON_BLOCKING.value
        return value(driver.cuStreamCreate(flag))

    def destroy_stream(self, stream: Stream) -> None:
        value(driver.cuStreamDestroy(stream))

    def wait_for(self, event: Event) -> None:
        """Blocks until the event is recorded on the GPU."""
        value(driver.cuEventSynchronize(event))

    def milliseconds(self, first: Event, last: Event) -> float:
        """Milliseconds between two timed events that have happened."""
        return float(value(driver.cuEventElapsedTime(first, last)))

    def close(self) -> None:
        """Unloads cubins and releases the context. May be called twice."""
        self._undo.close()


def _smem_scale(device: Any, of: Target) -> SharedMemoryScale:
    """The scale with which a multiprocessor holds as many blocks as one of `of`."""
    here = attribute(device, "MAX_SHARED_MEMORY_PER_MULTIPROCESSOR")
    most = attribute(device, "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN")
    return SharedMemoryScale(of.architecture.sm_shared_bytes, here, most)


def _first() -> Any:
    """The driver's handle of the first GPU."""
    value(driver.cuInit(0))
    return value(driver.cuDeviceGet(0))


def _name(device: Any) -> str:
    found: bytes = value(driver.cuDeviceGetName(128, device))
    return found.split(b"\0")[0].decode()


def _capability(device: Any) -> tuple[int, int]:
    major, minor = (attribute(device, f"COMPUTE_CAPABILITY_{part}") for part in ("MAJOR", "MINOR"))
    return major, minor
