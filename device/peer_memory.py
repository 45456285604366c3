"""Device memory that the processes of several GPUs share: each rank's own region, and the others'.

Knows the driver's handles; knows neither engines nor how a handle reaches another process. All
regions have one size, so that an offset is valid in each of them.
"""

import ctypes
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

import numpy as np

from spark_engine.device.cuda_driver import driver, value
from spark_engine.device.resources import DeviceResources
from spark_engine.errors import EngineError, ExecutorError

GRANULE = 2 << 20  # bytes: a handle names a whole allocation, so a region is one
HANDLE_BYTES = 64
# A rank's handle -> the handles of all ranks, in rank order.
Gather: TypeAlias = Callable[[bytes], Sequence[bytes]]
Barrier: TypeAlias = Callable[[], None]  # returns when no rank has another's region open


class PeerMemory:
    """This rank's region, zeroed, and the addresses of all ranks' regions in this process.

    `table` is the device address of u64[ranks]: the regions in rank order. `gather` is called once,
    by all ranks; `barrier` after this rank has closed the others' regions, before it frees its own:
    to free a region while another process has it open is undefined behaviour. Raises EngineError if
    a GPU cannot read another's memory.
    """

    def __init__(
        self, resources: DeviceResources, nbytes: int, rank: int, gather: Gather, barrier: Barrier
    ) -> None:
        gpu = resources.gpu
        gpu.use()
        self.own = resources.zeros(-(-max(nbytes, 1) // GRANULE) * GRANULE)
        resources.finally_(barrier)
        gpu.wait()  # zeros are written before another rank may read them
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
