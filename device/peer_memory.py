"""Device memory that the processes of several GPUs share: each rank's own region, and the others'.

Knows the driver's handles; knows no engine and not how a handle gets to another process. Regions
are of one size, so that an offset means the same in all of them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

import numpy as np

from spark_engine.device.cuda_driver import driver, value
from spark_engine.device.resources import DeviceResources
from spark_engine.errors import EngineError, ExecutorError

GRANULE = 2 << 20  # a region of its own: a handle names all of an allocation
HANDLE_BYTES = 64
# A rank's handle -> those of all ranks, in their order.
Gather: TypeAlias = Callable[[bytes], Sequence[bytes]]
Part: TypeAlias = Callable[[], None]  # returns when no rank has another's region open


class PeerMemory:
    """This rank's region, zeroed, and where every rank's lies in this process.

    `table` is the device address of u64[ranks]: the regions in the order of ranks. `gather` is
    called once, by all ranks; `part` when this one has closed the others' regions, before it frees
    its own: a region that is freed while another process has it open is undefined behaviour.
    Raises EngineError where a GPU cannot read another's memory.
    """

    def __init__(
        self, resources: DeviceResources, nbytes: int, rank: int, gather: Gather, part: Part
    ) -> None:
        gpu = resources.gpu
        gpu.use()
        self.own = resources.zeros(-(-max(nbytes, 1) // GRANULE) * GRANULE)
        resources.finally_(part)
        gpu.wait()  # zeros before anybody may read them
        handles = gather(_handle(self.own))
        addresses = []
        for other, handle in enumerate(handles):
            address = self.own if other == rank else _opened(handle, rank, other)
            if other != rank:
                resources.finally_(partial(_close, address))
            addresses.append(address)
        self.addresses = tuple(addresses)
        table = np.array(addresses, np.uint64)
        self.table = resources.memory(table.nbytes)
        gpu.upload(self.table, table)
        gpu.wait()


def _close(address: int) -> None:
    value(driver.cuIpcCloseMemHandle(address))


def _handle(address: int) -> bytes:
    made = value(driver.cuIpcGetMemHandle(address))
    return ctypes.string_at(made.getPtr(), HANDLE_BYTES)


def _opened(handle: bytes, rank: int, other: int) -> int:
    made = driver.CUipcMemHandle()
    ctypes.memmove(made.getPtr(), handle, HANDLE_BYTES)
    flag = driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
    try:
        return int(value(driver.cuIpcOpenMemHandle(made, flag.value)))
    except ExecutorError as error:
        raise EngineError(
            f"the GPU of rank {rank} cannot read that of rank {other} ({error}): ranks on one host "
            "need GPUs with peer access (`nvidia-smi topo -p2p r`), one process for each"
        ) from None
