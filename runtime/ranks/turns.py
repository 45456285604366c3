"""Turns of an engine's ranks at the memory of their hosts, in one order for all engines.

A rank that holds its host's turn waits for the other ranks, to plan what fits on all hosts. If each
rank took its turn on arrival, two engines could deadlock: rank 0 of one holds host A and waits for
its rank on B, while rank 0 of the other holds B and waits for A. Turns are therefore taken in the
order of the hosts' names, each after the ones before it. A holder then waits only for hosts later
in the order, so there is no cycle. The name is the kernel's boot id: equal in all containers of a
host, different between hosts. Knows no engine and no memory.
"""

import hashlib
import platform
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from spark_engine.device.startup_lock import startup_lock
from spark_engine.runtime.executors.communicator import Communicator

BOOT = Path("/proc/sys/kernel/random/boot_id")


def take_turns(
    turn: ExitStack,
    shared: bool,
    say: Callable[[str], None],
    comm: Communicator | None,
    boot: Path = BOOT,
) -> None:
    """Enters this rank's `startup_lock` into `turn`; returns when all ranks hold theirs. Of several
    ranks on one host the first takes it, since their GPUs then have separate memory on all known
    machines."""
    if comm is None:
        turn.enter_context(startup_lock(shared, say))
        return
    hosts = [row.tobytes() for row in comm.all_gather(np.frombuffer(_host(shared, boot), np.uint8))]
    for host in sorted({*hosts} - {_host(False, boot)}):
        if hosts.index(host) == comm.rank:
            turn.enter_context(startup_lock(True, say))
        comm.barrier()


def _host(shared: bool, boot: Path) -> bytes:
    """32 bytes that identify this host; zeros if its memory is not `shared` with the GPU."""
    if not shared:
        return bytes(32)
    try:
        name = boot.read_text()
    except OSError:
        name = platform.node()
    return hashlib.sha256(name.encode()).digest()
