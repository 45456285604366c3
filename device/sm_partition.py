"""The multiprocessors (SMs) that a process uses: all of them, or a partition for a rehearsal.

A partition is a green context: work queued on its stream, and graphs recorded there, run on its
multiprocessors only. If the driver refuses to create one, blocks occupy the other multiprocessors
while the device is open. Memory, cubins and events belong to the whole GPU. Knows the driver; knows
no kernel of an op.
"""

import ctypes
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np

from spark_engine.device import cuda_driver
from spark_engine.device.cuda_driver import MAX_SHARED, attribute, queueing, value, values
from spark_engine.errors import ExecutorError
from spark_engine.kernel import Shape

ARRIVAL = 10.0  # seconds until the occupying blocks must run
# One block takes all shared memory of its multiprocessor, so that no other block fits on it.
OCCUPY = b"""
.version 7.8
.target sm_80
.address_size 64
.visible .entry occupy(.param .u64 arrived, .param .u64 leave)
{
  .reg .pred %p;
  .reg .b32 %r<3>;
  .reg .b64 %rd<4>;
  ld.param.u64 %rd1, [arrived];
  ld.param.u64 %rd2, [leave];
  mov.u32 %r1, %ctaid.x;
  mul.wide.u32 %rd3, %r1, 4;
  add.s64 %rd1, %rd1, %rd3;
  mov.u32 %r2, 1;
  st.volatile.u32 [%rd1], %r2;
again:
  nanosleep.u32 2000;
  ld.volatile.u32 %r2, [%rd2];
  setp.eq.u32 %p, %r2, 0;
  @%p bra again;
  ret;
}
\0"""


@dataclass(frozen=True)
class SmPartition:
    """The multiprocessors that a process uses.

    Attributes:
        context: current in every thread that uses the GPU.
        stream: all work is queued on it.
        multiprocessors: how many run the launches.
        kind: "whole", "green context" or "occupied".
        alone: context manager around calls that wait for all work of the device.
    """

    context: Any
    stream: Any
    multiprocessors: int
    kind: str
    alone: Callable[[], AbstractContextManager[None]] = nullcontext


def whole(device: Any, context: Any, undo: ExitStack) -> SmPartition:
    """All multiprocessors, in the current context; `undo` destroys the stream."""
    stream = _stream(undo)
    return SmPartition(context, stream, attribute(device, "MULTIPROCESSOR_COUNT"), "whole")


def partition(device: Any, context: Any, count: int, occupy: bool, undo: ExitStack) -> SmPartition:
    """`count` multiprocessors; makes the context of the partition current.

    Creates a green context. With `occupy`, or if the driver creates none, blocks occupy the other
    multiprocessors. `undo` releases everything. Raises ExecutorError if the GPU has fewer.
    """
    there = attribute(device, "MULTIPROCESSOR_COUNT")
    if count > there:
        raise ExecutorError(
            f"a partition of {count} multiprocessors is requested, and this GPU has {there}: unset "
            "SPARK_REHEARSE, or take a larger GPU"
        )
    if not occupy:
        try:
            with ExitStack() as own:
                made = _green(device, count, own)
                undo.push(own.pop_all())
            return made
        except (ExecutorError, AttributeError):  # refused, or the driver does not know the call
            value(cuda_driver.driver.cuCtxSetCurrent(context))
    return _occupied(device, context, count, there, undo)


def _stream(undo: ExitStack) -> Any:
    flag = cuda_driver.driver.CUstream_flags.CU_STREAM_NON_BLOCKING.value
    stream = value(cuda_driver.driver.cuStreamCreate(flag))
    undo.callback(lambda: value(cuda_driver.driver.cuStreamDestroy(stream)))
    return stream


def _green(device: Any, count: int, undo: ExitStack) -> SmPartition:
    kind = cuda_driver.driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
    all_ = value(cuda_driver.driver.cuDeviceGetDevResource(device, kind))
    groups = values(cuda_driver.driver.cuDevSmResourceSplitByCount(1, all_, 0, count))[0]
    found = int(groups[0].sm.smCount)
    if found != count:  # some drivers split in groups of eight
        raise ExecutorError(f"the driver splits off {found} multiprocessors, not {count}")
    description = value(cuda_driver.driver.cuDevResourceGenerateDesc([groups[0]], 1))
    flags = cuda_driver.driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM.value
    green = value(cuda_driver.driver.cuGreenCtxCreate(description, device, flags))
    undo.callback(lambda: value(cuda_driver.driver.cuGreenCtxDestroy(green)))
    context = value(cuda_driver.driver.cuCtxFromGreenCtx(green))
    value(cuda_driver.driver.cuCtxSetCurrent(context))
    flag = cuda_driver.driver.CUstream_flags.CU_STREAM_NON_BLOCKING.value
    stream = value(cuda_driver.driver.cuGreenCtxStreamCreate(green, flag, 0))
    undo.callback(lambda: value(cuda_driver.driver.cuStreamDestroy(stream)))
    return SmPartition(context, stream, count, "green context")


def _occupied(device: Any, context: Any, count: int, there: int, undo: ExitStack) -> SmPartition:
    stream = _stream(undo)
    blocks = _Blocks(device, there - count, stream, undo)
    blocks.begin()
    undo.callback(blocks.end)
    return SmPartition(context, stream, count, "occupied", blocks.away)


class _Blocks:
    """`count` blocks, each of which occupies one multiprocessor until `end`."""

    def __init__(self, device: Any, count: int, other: Any, undo: ExitStack) -> None:
        self._other, self._stream = other, _stream(undo)
        module = value(cuda_driver.driver.cuModuleLoadData(OCCUPY))
        undo.callback(lambda: value(cuda_driver.driver.cuModuleUnload(module)))
        kernel = value(cuda_driver.driver.cuModuleGetFunction(module, b"occupy"))
        shared = attribute(device, "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN")
        value(cuda_driver.driver.cuFuncSetAttribute(kernel, MAX_SHARED, shared))
        nbytes = 4 * (count + 1)
        address = int(value(cuda_driver.driver.cuMemHostAlloc(nbytes, 0)))
        undo.callback(lambda: value(cuda_driver.driver.cuMemFreeHost(address)))
        words = (ctypes.c_uint32 * (count + 1)).from_address(address)
        self._words = np.ctypeslib.as_array(words)  # one word per block, then the word "leave"
        shape = Shape((count, 1, 1), (32, 1, 1), ("address", "address"), shared)
        self._queue = queueing(self._stream, kernel, shape, (address, address + 4 * count))

    def begin(self) -> None:
        """Launches the blocks; returns when all of them run."""
        self._words[:] = 0
        self._queue()
        late = time.monotonic() + ARRIVAL
        while not self._words[:-1].all():
            if time.monotonic() > late:
                running = int(self._words[:-1].sum())
                self.end()
                raise ExecutorError(
                    f"{running} of {len(self._words) - 1} multiprocessors could be occupied: end "
                    "other programs on the GPU"
                )
            time.sleep(1e-4)

    def end(self) -> None:
        """Ends the blocks, and waits until they have ended."""
        self._words[-1] = 1
        value(cuda_driver.driver.cuStreamSynchronize(self._stream))

    @contextmanager
    def away(self) -> Iterator[None]:
        """Ends the blocks and starts them again afterwards; waits for the other stream first."""
        value(cuda_driver.driver.cuStreamSynchronize(self._other))
        self.end()
        try:
            yield
        finally:
            self.begin()
