"""The multiprocessors (SMs) that a process uses: all of them, or a partition for a rehearsal.

A partition is a green context: work queued on its stream, and graphs recorded there, run on its
multiprocessors only. Memory, cubins and events belong to the whole GPU. Knows the driver; knows no
kernel.
"""

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from spark_engine.device import cuda_driver
from spark_engine.device.cuda_driver import attribute, value, values
from spark_engine.errors import ExecutorError


@dataclass(frozen=True)
class SmPartition:
    """The multiprocessors that a process uses."""

    context: Any  # current in every thread that uses the GPU
    stream: Any  # all work is queued on it
    multiprocessors: int  # how many run the launches
    kind: str  # "whole" or "green context"


def whole(device: Any, context: Any, undo: ExitStack) -> SmPartition:
    """All multiprocessors, in the current context; `undo` destroys the stream."""
    flag = cuda_driver.driver.CUstream_flags.CU_STREAM_NON_BLOCKING.value
    stream = value(cuda_driver.driver.cuStreamCreate(flag))
    undo.callback(lambda: value(cuda_driver.driver.cuStreamDestroy(stream)))
    return SmPartition(context, stream, attribute(device, "MULTIPROCESSOR_COUNT"), "whole")


def partition(device: Any, count: int, undo: ExitStack) -> SmPartition:
    """`count` multiprocessors; makes the context of the partition current. `undo` releases
    everything. Raises ExecutorError if the GPU has fewer, or the driver makes no such partition."""
    there = attribute(device, "MULTIPROCESSOR_COUNT")
    if count > there:
        raise ExecutorError(
            f"a partition of {count} multiprocessors is requested, and this GPU has {there}: unset "
            "SPARK_REHEARSE, or take a larger GPU"
        )
    kind = cuda_driver.driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
    all_ = value(cuda_driver.driver.cuDeviceGetDevResource(device, kind))
    groups = values(cuda_driver.driver.cuDevSmResourceSplitByCount(1, all_, 0, count))[0]
    found = int(groups[0].sm.smCount)
    if found != count:  # some drivers split in groups of eight
        raise ExecutorError(
            f"the driver splits off {found} multiprocessors, not {count}: unset SPARK_REHEARSE, or "
            "install another driver"
        )
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
