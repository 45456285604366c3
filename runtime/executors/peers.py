"""Connects the GPUs of ranks, over the communicator that the ranks have: peer memory that they
read of each other on one host, or NCCL's calls between hosts.

Knows who gathers and the device's regions; knows no launch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import Protocol

import numpy as np

from spark_engine.device.peer_memory import PeerMemory
from spark_engine.device.resources import DeviceResources
from spark_engine.errors import ExecutorError
from spark_engine.tensors import Array

PART_S = 3.0  # that a rank which closes waits for the others to close what is its own


class Communicator(Protocol):
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

    def at_abort(self, work: Callable[[], None]) -> None:
        """Does this too where a rank has fallen, in another thread."""
        ...


class CollectiveCalls(Protocol):
    """What ranks make together by calls of a library."""

    def queueing(self, symbol: str, args: Sequence[int | float]) -> Callable[[], None]:
        """What puts the call on the GPU's stream."""
        ...

    def close(self) -> None:
        """Lets the others go."""
        ...


def calls(
    resources: DeviceResources, nbytes: int, comm: Communicator | None
) -> CollectiveCalls | None:
    """NCCL's, of ranks that show each other `nbytes` of memory, where that is none.

    It is closed when no GPU of a rank waits for another.
    """
    if comm is None or nbytes:
        return None
    nccl = import_module("spark_engine.runtime.executors.nccl")  # needs the extra `nccl`
    made: CollectiveCalls = nccl.Nccl(resources.gpu, comm)
    resources.finally_(made.close)
    resources.finally_(partial(_part, comm))
    return made


def connect_peers(
    resources: DeviceResources, nbytes: int, comm: Communicator | None
) -> PeerMemory | None:
    """This rank's region and the others', if they have any; all are there, and zero, when it
    returns.

    When it is given back, a rank that has ended, or does not come within PART_S, is not waited for.
    """
    if comm is None or not nbytes:
        return None

    def gather(handle: bytes) -> list[bytes]:
        return [row.tobytes() for row in comm.all_gather(np.frombuffer(handle, np.uint8))]

    peers = PeerMemory(resources, nbytes, comm.rank, gather, partial(_part, comm))
    comm.barrier()
    return peers


def _part(comm: Communicator) -> None:
    """Returns when all ranks have come so far, or one does not."""
    comm.limit_s = min(comm.limit_s, PART_S)
    with contextlib.suppress(ExecutorError):
        comm.barrier()
