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

from spark_engine.errors import CapacityError, ExecutorError
from spark_engine.kernel import Launch, Pointer
from spark_engine.tensors import Array

_TYPES = {"i32": ctypes.c_int32, "i64": ctypes.c_int64, "f32": ctypes.c_float}
_MAX_SHARED = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_CLUSTER = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
_OVERLAP = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
_LOST = tuple(
    f"CUDA_ERROR_{what}"
    for what in ("ILLEGAL_ADDRESS", "MISALIGNED_ADDRESS", "ILLEGAL_INSTRUCTION", "INVALID_PC")
    + ("INVALID_ADDRESS_SPACE", "HARDWARE_STACK_ERROR", "LAUNCH_FAILED", "LAUNCH_TIMEOUT")
    + ("ASSERT", "ECC_UNCORRECTABLE", "CONTEXT_IS_DESTROYED", "DEVICE_UNAVAILABLE")
)
_FOREIGN = ("CUDA_ERROR_NO_BINARY_FOR_GPU", "CUDA_ERROR_INVALID_IMAGE", "CUDA_ERROR_NOT_FOUND")
_ARCHITECTURES = {(9, 0): "sm_90a", (12, 1): "sm_121a"}
Module = Any  # a CUmodule
Function = Any  # a CUfunction
Graph = Any  # a CUgraphExec
Event = Any  # a CUevent


def architecture() -> str | None:
    """The target name of the first GPU; None without a driver, a GPU or a name for it."""
    try:
        _do(driver.cuInit(0))
        device = _do(driver.cuDeviceGet(0))
        return _ARCHITECTURES.get(_capability(device))
    except Exception:  # a missing libcuda raises RuntimeError, a missing GPU ExecutorError
        return None


class Gpu:
    """The first GPU's primary context and one stream, made current in this thread.

    Another thread calls `use` before anything else.
    """

    def __init__(self) -> None:
        _do(driver.cuInit(0))
        self._device = _do(driver.cuDeviceGet(0))
        self._context = _do(driver.cuDevicePrimaryCtxRetain(self._device))
        _do(driver.cuCtxSetCurrent(self._context))
        flags = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
        self.stream = _do(driver.cuStreamCreate(flags.value))
        self._modules: list[Any] = []

    def use(self) -> None:
        """Makes the GPU current in the calling thread."""
        _do(driver.cuCtxSetCurrent(self._context))

    @property
    def free_bytes(self) -> int:
        """Device memory that is not taken."""
        _do(driver.cuCtxSetCurrent(self._context))
        error, free, _ = driver.cuMemGetInfo()
        _do((error,))
        return int(free)

    @property
    def capability(self) -> tuple[int, int]:
        """Major and minor compute capability."""
        return _capability(self._device)

    @property
    def multiprocessors(self) -> int:
        """Streaming multiprocessors that a launch may use."""
        name = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
        return int(_do(driver.cuDeviceGetAttribute(name, self._device)))

    def allocate(self, nbytes: int) -> int:
        """Address of fresh device memory, on a 256-byte boundary."""
        return int(_do(driver.cuMemAlloc(max(nbytes, 1))))

    def free(self, address: int) -> None:
        """Gives `allocate`d memory back."""
        _do(driver.cuMemFree(address))

    def pinned(self, nbytes: int) -> NDArray[np.uint8]:
        """Page-locked host memory, for copies that overlap; kept until `unpin` or the end."""
        address = int(_do(driver.cuMemHostAlloc(max(nbytes, 1), 0)))
        raw = (ctypes.c_uint8 * nbytes).from_address(address)
        return np.ctypeslib.as_array(raw)

    def unpin(self, memory: NDArray[np.uint8]) -> None:
        """Gives `pinned` memory back."""
        _do(driver.cuMemFreeHost(memory.ctypes.data))

    def upload(self, address: int, array: Array) -> None:
        """Queues a copy to the device; `array` is C-contiguous and stays untouched until then."""
        _do(driver.cuMemcpyHtoDAsync(address, array.ctypes.data, array.nbytes, self.stream))

    def download(self, array: Array, address: int) -> None:
        """Queues a copy from the device into a C-contiguous array."""
        _do(driver.cuMemcpyDtoHAsync(array.ctypes.data, address, array.nbytes, self.stream))

    def fill(self, address: int, byte: int, nbytes: int) -> None:
        """Queues setting every byte."""
        _do(driver.cuMemsetD8Async(address, byte, nbytes, self.stream))

    def wait(self) -> None:
        """Blocks until everything queued is done."""
        _do(driver.cuStreamSynchronize(self.stream))

    def load(self, cubin: bytes, symbols: Sequence[str], shared: int = 0) -> dict[str, Function]:
        """The entries of a cubin, each allowed `shared` bytes of dynamic shared memory."""
        module = self.module(cubin)
        found = {symbol: self.function(module, symbol) for symbol in symbols}
        for function in found.values():
            self.allow_shared(function, shared)
        return found

    def module(self, cubin: bytes) -> Module:
        """A loaded cubin; unloaded by `close`."""
        module = _do(driver.cuModuleLoadData(cubin))
        self._modules.append(module)
        return module

    def function(self, module: Module, symbol: str) -> Function:
        """An entry of a loaded cubin."""
        return _do(driver.cuModuleGetFunction(module, symbol.encode()))

    def allow_shared(self, function: Function, nbytes: int) -> None:
        """Lets launches ask for so much dynamic shared memory; 48 KiB less static needs nothing."""
        if nbytes:
            _do(driver.cuFuncSetAttribute(function, _MAX_SHARED, nbytes))

    def launch(self, function: Function, launch: Launch, args: Sequence[int | float]) -> None:
        """Queues a kernel; `args` are addresses and numbers in the order of `launch.args`."""
        self.prepare(function, launch, args)()

    def prepare(
        self, function: Function, launch: Launch, args: Sequence[int | float]
    ) -> Callable[[], None]:
        """What queues this kernel whenever it is called, for launches that are repeated."""
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = launch.grid
        config.blockDimX, config.blockDimY, config.blockDimZ = launch.block
        config.sharedMemBytes = launch.shared
        config.hStream = self.stream
        attributes = _attributes(launch)
        config.numAttrs, config.attrs = len(attributes), attributes
        types = tuple(
            ctypes.c_void_p if isinstance(a, Pointer) else _TYPES[a.kind] for a in launch.args
        )
        values = tuple(args), types

        def launch_now() -> None:
            _do(driver.cuLaunchKernelEx(config, function, values, 0))

        return launch_now

    def begin_capture(self) -> None:
        """From here on the stream records instead of running."""
        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        _do(driver.cuStreamBeginCapture(self.stream, mode))

    def end_capture(self) -> Graph:
        """What was recorded, ready to replay."""
        return self._instantiate(_do(driver.cuStreamEndCapture(self.stream)))

    def end_counted_capture(self) -> tuple[Graph, int]:
        """What was recorded, and how many launches in it may start before the one before ends."""
        graph = _do(driver.cuStreamEndCapture(self.stream))
        edges = _overlapping_edges(graph)
        return self._instantiate(graph), edges

    def _instantiate(self, graph: Any) -> Graph:
        executable = _do(driver.cuGraphInstantiate(graph, 0))
        _do(driver.cuGraphDestroy(graph))
        return executable

    def replay(self, graph: Graph) -> None:
        """Queues a graph."""
        _do(driver.cuGraphLaunch(graph, self.stream))

    def destroy_graph(self, graph: Graph) -> None:
        """Gives a graph back."""
        _do(driver.cuGraphExecDestroy(graph))

    def event(self, timed: bool = False) -> Event:
        """A fresh event."""
        flag = driver.CUevent_flags
        kind = flag.CU_EVENT_DEFAULT if timed else flag.CU_EVENT_DISABLE_TIMING
        return _do(driver.cuEventCreate(kind.value))

    def record(self, event: Event) -> None:
        """Queues the event."""
        _do(driver.cuEventRecord(event, self.stream))

    def wait_for(self, event: Event) -> None:
        """Blocks until the event has happened."""
        _do(driver.cuEventSynchronize(event))

    def milliseconds(self, first: Event, last: Event) -> float:
        """Time between two timed events that have happened."""
        return float(_do(driver.cuEventElapsedTime(first, last)))

    def close(self) -> None:
        """Unloads cubins and lets the context go. May be called twice."""
        modules, self._modules = self._modules, []
        for module in modules:
            _do(driver.cuModuleUnload(module))
        if self._context is not None:
            _do(driver.cuStreamDestroy(self.stream))
            _do(driver.cuDevicePrimaryCtxRelease(self._device))
            self._context = None


def _capability(device: Any) -> tuple[int, int]:
    names = driver.CUdevice_attribute
    major = _do(
        driver.cuDeviceGetAttribute(names.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device)
    )
    minor = _do(
        driver.cuDeviceGetAttribute(names.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device)
    )
    return int(major), int(minor)


def _overlapping_edges(graph: Any) -> int:
    """Edges of a recorded graph that are programmatic."""
    count = int(_values(driver.cuGraphGetEdges(graph, 0))[3])
    kinds = [e.type for e in _values(driver.cuGraphGetEdges(graph, count))[2]] if count else []
    wanted = driver.CUgraphDependencyType.CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC
    return sum(kind == wanted.value for kind in kinds)


def _attributes(launch: Launch) -> list[Any]:
    found = []
    if launch.cluster != (1, 1, 1):
        attribute = driver.CUlaunchAttribute()
        attribute.id = _CLUSTER
        dim = attribute.value.clusterDim
        dim.x, dim.y, dim.z = launch.cluster
        found.append(attribute)
    if launch.overlaps:
        attribute = driver.CUlaunchAttribute()
        attribute.id = _OVERLAP
        attribute.value.programmaticStreamSerializationAllowed = 1
        found.append(attribute)
    return found


def _do(result: tuple[Any, ...]) -> Any:
    """The driver call's value. Raises ExecutorError or CapacityError naming the error."""
    values = _values(result)
    return values[0] if values else None


def _values(result: tuple[Any, ...]) -> tuple[Any, ...]:
    """All that the driver call returned."""
    if result[0] != driver.CUresult.CUDA_SUCCESS:
        raise _failure(result[0].name, result[0].value)
    return result[1:]


def _failure(name: str, value: int) -> Exception:
    says = f"the CUDA driver says {name} ({value})"
    if name == "CUDA_ERROR_OUT_OF_MEMORY":
        return CapacityError(
            f"{says}: stop other programs on the GPU, or rebuild with a smaller --max-context, "
            "--max-seqs or --kv-tokens"
        )
    if name in _LOST:
        return ExecutorError(
            f"{says}: a kernel went wrong, and all that was on the GPU is lost; start the engine "
            "again; if it comes back, `compute-sanitizer` names the kernel"
        )
    if name in _FOREIGN:
        return ExecutorError(f"{says}: rebuild the engine for this GPU with spark-build")
    return ExecutorError(
        f"{says}; start the engine again, and see `nvidia-smi` for the GPU's state"
    )
