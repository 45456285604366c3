"""Connects the GPUs of ranks over the ranks' communicator: peer memory on one host, or NCCL calls
between hosts.

Knows collectives and the device's regions; knows no launch.
"""

from __future__ import annotations

import contextlib
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING

import numpy as np

from spark_engine.device.peer_memory import PeerMemory
from spark_engine.device.resources import DeviceResources
from spark_engine.errors import ExecutorError
from spark_engine.runtime.executors.communicator import Communicator

if TYPE_CHECKING:  # needs the extra `nccl`
    from spark_engine.runtime.executors.nccl import Nccl

PART_S = 3.0  # time limit in which a closing rank waits for the others to close their mappings


def calls(resources: DeviceResources, nbytes: int, comm: Communicator | None) -> Nccl | None:
    """NCCL's calls if the ranks share no memory; None if each shares `nbytes`.

    It may be closed only when no rank's GPU waits for another one.
    """
    if comm is None or nbytes:
        return None
    nccl = import_module("spark_engine.runtime.executors.nccl")  # needs the extra `nccl`
    made: Nccl = nccl.Nccl(resources.gpu, comm)
    resources.finally_(made.close)
    resources.finally_(partial(_part, comm))
    return made


def connect_peers(
    resources: DeviceResources, nbytes: int, comm: Communicator | None
) -> PeerMemory | None:
    """This rank's region and the other ranks' regions, if they share memory. When it returns, all
    regions exist and are zero.

    Freeing waits up to PART_S for the other ranks, and not for a rank that has ended.
    """
    if comm is None or not nbytes:
        return None

    def gather(handle: bytes) -> list[bytes]:
        return [row.tobytes() for row in comm.all_gather(np.frombuffer(handle, np.uint8))]

    peers = PeerMemory(resources, nbytes, comm.rank, gather, partial(_part, comm))
    comm.barrier()
    return peers


def _part(comm: Communicator) -> None:
    """Waits until all ranks have called it, or one of them fails to."""
    comm.limit_s = min(comm.limit_s, PART_S)
    with contextlib.suppress(ExecutorError):
        comm.barrier()
