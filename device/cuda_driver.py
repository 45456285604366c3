"""The CUDA driver's binding as builder and runtime use it: checked calls, launches, free memory.

Knows the launch attributes and the remedies of driver errors; knows neither engines nor timing.
Importing this module needs the extra `cuda`, not a driver.
"""

import ctypes
import math
import struct
from collections.abc import Callable, Sequence
from itertools import accumulate, chain, pairwise
from typing import Any

import numpy as np
from cuda.bindings import driver as driver  # gpu.py calls it too

from spark_engine.device.host_memory import available_memory, free_memory
from spark_engine.errors import CapacityError, ExecutorError
from spark_engine.kernel import Shape

GIB, _MOST = 1 << 30, (1 << 64) - 1
MAX_SHARED = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_CLUSTER = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
_OVERLAP = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
_TYPES = {
    "address": ctypes.c_void_p,
    "i32": ctypes.c_int32,
    "i64": ctypes.c_int64,
    "f32": ctypes.c_float,
}
_LOST = tuple(
    f"CUDA_ERROR_{what}"
    for what in ("ILLEGAL_ADDRESS", "MISALIGNED_ADDRESS", "ILLEGAL_INSTRUCTION", "INVALID_PC")
    + ("INVALID_ADDRESS_SPACE", "HARDWARE_STACK_ERROR", "LAUNCH_FAILED", "LAUNCH_TIMEOUT")
    + ("ASSERT", "ECC_UNCORRECTABLE", "CONTEXT_IS_DESTROYED", "DEVICE_UNAVAILABLE")
)
_FOREIGN = ("CUDA_ERROR_NO_BINARY_FOR_GPU", "CUDA_ERROR_INVALID_IMAGE", "CUDA_ERROR_NOT_FOUND")


def queueing(
    stream: Any,
    function: Any,
    shape: Shape,
    args: Sequence[int | float] | memoryview,
    configs: dict[Shape, Any] | None = None,
) -> Callable[[], None]:
    """A function that queues the kernel on the stream on every call.

    `args` are addresses and numbers in the order of `shape.kinds`, or what `pack` made, which costs
    a launch a third of the host's time. `configs`: those made before for this stream, which the
    caller keeps, since a bucket has few distinct shapes.
    """
    known = None if configs is None else configs.get(shape)
    if known is None:
        known = _config(stream, shape), tuple(_TYPES[kind] for kind in shape.kinds)
        if configs is not None:
            configs[shape] = known
    config, types = known
    given = args if isinstance(args, memoryview) else (tuple(args), types)

    def queue() -> None:
        value(driver.cuLaunchKernelEx(config, function, given, 0))

    return queue


def pack(
    values: Sequence[int | float], kinds: Sequence[str], uses: Sequence[Sequence[int]]
) -> list[memoryview]:
    """For each of `uses`, the indices of a launch's arguments, the addresses of these `values`.

    A value is in memory once, in 8 bytes, however many launches use it. The views keep the memory.
    """
    slots = [
        int.from_bytes(struct.pack("<f", value), "little") if kind == "f32" else int(value) & _MOST
        for value, kind in zip(values, kinds, strict=True)
    ]
    memory = np.array([*slots, *chain.from_iterable(uses)], np.uint64)
    memory[len(slots) :] = memory[len(slots) :] * 8 + memory.ctypes.data
    ends = accumulate(map(len, uses), initial=len(slots))
    return [memory.data[start:end] for start, end in pairwise(ends)]


def hold_context() -> Callable[[], None]:
    """Creates the first GPU's primary context, which a `Gpu` then finds; returns what releases it.
    Raises ExecutorError without a GPU."""
    value(driver.cuInit(0))
    device = value(driver.cuDeviceGet(0))
    value(driver.cuDevicePrimaryCtxRetain(device))
    return lambda: value(driver.cuDevicePrimaryCtxRelease(device))


def copy_all(stream: Any, copies: Sequence[tuple[int, int, int]]) -> None:
    """Queues copies within the device, (to, from, bytes), as one call: a snapshot has hundreds.

    No copy may read what another one writes.
    """
    if not copies:
        return
    to = [driver.CUdeviceptr(copy[0]) for copy in copies]
    source = [driver.CUdeviceptr(copy[1]) for copy in copies]
    sizes = [copy[2] for copy in copies]
    how = driver.CUmemcpyAttributes()
    how.srcAccessOrder = driver.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
    value(driver.cuMemcpyBatchAsync(to, source, sizes, len(sizes), [how], [0], 1, stream))


def resident_blocks(stream: Any, multiprocessors: int, function: Any, shape: Shape) -> int:
    """Blocks of such a launch that the stream's multiprocessors run at once when they are idle."""
    if shape.cluster != (1, 1, 1):
        clusters = value(driver.cuOccupancyMaxActiveClusters(function, _config(stream, shape)))
        return int(clusters) * math.prod(shape.cluster)
    threads = math.prod(shape.block)
    of_one = driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(function, threads, shape.shared)
    return int(value(of_one)) * multiprocessors


def static_shared(function: Any) -> int:
    """Bytes of static shared memory of the kernel."""
    name = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES
    return int(value(driver.cuFuncGetAttribute(name, function)))


def free_bytes(device: Any) -> int:
    """Bytes that may be allocated on the device, which is current.

    If host and device share one memory, the driver counts the page cache as used, although Linux
    frees it on demand: then Linux's figure is returned.
    """
    shared = available_memory() if attribute(device, "INTEGRATED") else None
    return driver_free_bytes() if shared is None else shared


def driver_free_bytes() -> int:
    """Bytes of the current device's memory that the driver reports as free."""
    return int(values(driver.cuMemGetInfo())[0])


def attribute(device: Any, name: str) -> int:
    """A device's attribute, by its name without the driver's prefix."""
    number = getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
    return int(value(driver.cuDeviceGetAttribute(number, device)))


def _config(stream: Any, shape: Shape) -> Any:
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = shape.grid
    config.blockDimX, config.blockDimY, config.blockDimZ = shape.block
    config.sharedMemBytes, config.hStream = shape.shared, stream
    attributes = _attributes(shape)
    config.numAttrs, config.attrs = len(attributes), attributes
    return config


def _attributes(shape: Shape) -> list[Any]:
    found = []
    if shape.cluster != (1, 1, 1):
        attribute = driver.CUlaunchAttribute()
        attribute.id = _CLUSTER
        dim = attribute.value.clusterDim
        dim.x, dim.y, dim.z = shape.cluster
        found.append(attribute)
    if shape.pdl:
        attribute = driver.CUlaunchAttribute()
        attribute.id = _OVERLAP
        attribute.value.programmaticStreamSerializationAllowed = 1
        found.append(attribute)
    return found


def value(result: tuple[Any, ...], asked: int | None = None) -> Any:
    """The value that a driver call returned; `asked`: bytes that the call allocates.

    Raises ExecutorError or CapacityError with the name of the driver's error.
    """
    found = values(result, asked)
    return found[0] if found else None


def values(result: tuple[Any, ...], asked: int | None = None) -> tuple[Any, ...]:
    """All values that a driver call returned."""
    if result[0] != driver.CUresult.CUDA_SUCCESS:
        raise _failure(result[0].name, result[0].value, asked)
    return result[1:]


def _failure(name: str, value: int, asked: int | None) -> Exception:
    says = f"the CUDA driver says {name} ({value})"
    if name == "CUDA_ERROR_OUT_OF_MEMORY":
        return _out_of_memory(says if asked is None else f"{says} to {asked / GIB:.2f} GiB")
    if name in _LOST:
        return ExecutorError(
            f"{says}: a kernel failed, and the CUDA context is lost; start the engine "
            "again; if it comes back, `compute-sanitizer` names the kernel"
        )
    if name in _FOREIGN:
        return ExecutorError(f"{says}: rebuild the engine for this GPU with spark-build")
    return ExecutorError(
        f"{says}; start the engine again, and see `nvidia-smi` for the GPU's state"
    )


def _out_of_memory(says: str) -> CapacityError:
    """The error of a failed allocation; the page cache may use memory that counts as available."""
    less = "rebuild with a smaller --max-context, --max-seqs or --kv-tokens"
    if not _integrated():
        return CapacityError(f"{says}: stop other programs on the GPU, or {less}")
    known = (("available", available_memory()), ("free", free_memory()))
    figures = " and ".join(f"{n / GIB:.2f} are {word}" for word, n in known if n is not None)
    where = f", where of the host's memory, which is the GPU's, {figures}" if figures else ""
    return CapacityError(
        f"{says}{where}: empty the page cache (`sync; echo 3 | sudo tee /proc/sys/vm/drop_caches`),"
        f" then start again; if it comes back, stop other programs, or {less}"
    )


def _integrated() -> bool:
    """True if the current device shares the host's memory; False if that is not known."""
    try:
        return bool(attribute(value(driver.cuCtxGetDevice()), "INTEGRATED"))
    except Exception:  # a missing libcuda raises RuntimeError, no context ExecutorError
        return False
