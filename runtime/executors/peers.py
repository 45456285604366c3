"""The regions that ranks read of each other, set up over whatever the ranks speak through.

Knows who gathers and the device's regions; knows no launch.
"""

from __future__ import annotations

import contextlib
from typing import Protocol

import numpy as np

from spark_engine.device_resources import DeviceResources
from spark_engine.errors import ExecutorError
from spark_engine.peer_memory import PeerMemory
from spark_engine.tensors import Array

PART_S = 3.0  # that a rank which closes waits for the others to close what is its own


class Ranked(Protocol):
    """What an owner needs of a communicator."""

    limit_s: float  # seconds that a call waits for the others

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
    """This rank's region and the others'; all are there, and zero, when it returns.

    When it is given back, a rank that has ended, or does not come within PART_S, is not waited for.
    """

    def gather(handle: bytes) -> list[bytes]:
        return [row.tobytes() for row in comm.all_gather(np.frombuffer(handle, np.uint8))]

    def part() -> None:
        comm.limit_s = min(comm.limit_s, PART_S)
        with contextlib.suppress(ExecutorError):
            comm.barrier()

    peers = PeerMemory(resources, nbytes, comm.rank, gather, part)
    comm.barrier()
    return peers
