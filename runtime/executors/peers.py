"""The regions that ranks read of each other, set up over whatever the ranks speak through.

Knows who gathers and the device's regions; knows no launch.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from spark_engine.device_resources import DeviceResources
from spark_engine.peer_memory import PeerMemory
from spark_engine.tensors import Array


class Ranked(Protocol):
    """What an owner needs of a communicator."""

    @property
    def rank(self) -> int:
        """This one."""
        ...

    def all_gather(self, array: Array) -> Array:
        """[ranks, *shape]."""
        ...

    def barrier(self) -> None:
        """Returns when all ranks have come."""
        ...


def meet(resources: DeviceResources, nbytes: int, comm: Ranked) -> PeerMemory:
    """This rank's region and the others'; all are there, and zero, when it returns."""

    def gather(handle: bytes) -> list[bytes]:
        return [row.tobytes() for row in comm.all_gather(np.frombuffer(handle, np.uint8))]

    peers = PeerMemory(resources, nbytes, comm.rank, gather)
    comm.barrier()
    return peers
