"""The turns of an engine's ranks at the memory of their hosts, taken in one order by all engines.

A rank that has its turn waits for the others, to plan what all of them have room for. Were each to
take its own as it comes, rank 0 of one engine could hold host A and wait for its rank on B, whose
turn rank 0 of another engine holds, which waits for A: neither would ever go on. So turns are
taken host by host in the order of the hosts' names, each when those before it are held. Whoever
holds a host's turn then waits for turns of later hosts alone; who holds the last waits for none;
so there is no circle. The name is the kernel's own of its start: all containers of a host have the
same, whatever they call themselves, and no two hosts. Knows no engine and no memory.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from spark_engine.device.startup_lock import startup_lock
from spark_engine.runtime.ranks.communicator import Communicator

BOOT = Path("/proc/sys/kernel/random/boot_id")


def take_turns(
    turn: ExitStack,
    shared: bool,
    say: Callable[[str], None],
    comm: Communicator | None,
    boot: Path = BOOT,
) -> None:
    """Enters this rank's `startup_lock` into `turn`; returns when all ranks have theirs. Of several
    on a host, whose GPUs then have a memory of their own in all machines known, the first takes it.
    """
    if comm is None:
        turn.enter_context(startup_lock(shared, say))
        return
    hosts = [row.tobytes() for row in comm.all_gather(np.frombuffer(_host(shared, boot), np.uint8))]
    for host in sorted({*hosts} - {_host(False, boot)}):
        if hosts.index(host) == comm.rank:
            turn.enter_context(startup_lock(True, say))
        comm.barrier()


def _host(shared: bool, boot: Path) -> bytes:
    """32 bytes that name this host; zeros where its memory is not `shared` with the GPU."""
    if not shared:
        return bytes(32)
    try:
        name = boot.read_text()
    except OSError:
        name = platform.node()
    return hashlib.sha256(name.encode()).digest()
