"""Ranks of an engine on several hosts: this host's rank, and waiting for rank 0.

Knows addresses and processes; opens no engine. The same command runs on every host: the first one
serves, and the others start a rank's process for each start of the engine there. That process
reports by a pipe that it runs; one that hangs would never notice that rank 0 has ended.
"""

import fcntl
import os
import select
import signal
import socket
import struct
import subprocess
import time
from collections.abc import Callable, MutableMapping, Sequence
from pathlib import Path
from types import FrameType

from spark_engine.command import USER
from spark_engine.errors import OptionError
from spark_engine.runtime.ranks.rendezvous import address_of
from spark_engine.runtime.ranks.running_clock import TICK_S, RunningClock
from spark_engine.runtime.ranks.spawn import RankSpec, start_rank

PAUSE_S = 1.0  # before a rank is restarted
STILL_S = 40.0  # without Python in a rank's process; a library may hold the GIL this long
NETWORK = "NCCL_SOCKET_IFNAME"
SIOCGIFADDR = 0x8915  # ioctl: an interface's IPv4 address
Say = Callable[[str], None]


def own_rank(hosts: Sequence[str], given: int | None) -> int:
    """This host's index in `hosts`, 0 without hosts.

    Raises OptionError where none of them is this host, or `given` is not an index.
    """
    if not hosts:
        return 0
    if given is not None:
        if given < len(hosts):
            return given
        raise OptionError(f"--rank is {given}; --hosts names ranks 0 to {len(hosts) - 1}")
    mine = (rank for rank, host in enumerate(hosts) if _is_here(address_of(host)[0]))
    rank = next(mine, None)
    if rank is None:
        words = f"none of --hosts {','.join(hosts)} is an address of this host"
        raise OptionError(f"{words}: name it as the others reach it, or give --rank")
    return rank


def _is_here(host: str) -> bool:
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    for family, kind, proto, _, address in found:
        try:
            with socket.socket(family, kind, proto) as own:
                own.bind(address)
        except OSError:
            continue
        return True
    return False


def name_network(environment: MutableMapping[str, str], host: str) -> None:
    """Sets NCCL's interface to that of this host's address in --hosts, unless the user has set it:
    NCCL's default is the first one, which may be in another network than the other hosts."""
    found = _interface(address_of(host)[0])
    if found is not None:
        environment.setdefault(NETWORK, f"={found}")  # "=": the exact name


def _interface(host: str) -> str | None:
    """The name of the interface that has the host's IPv4 address; None where none does."""
    try:
        own = {row[4][0] for row in socket.getaddrinfo(host, 0, socket.AF_INET)}
    except OSError:
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            packed = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(asked.fileno(), SIOCGIFADDR, packed)
            except OSError:  # an interface without an address
                continue
            if socket.inet_ntoa(answer[20:24]) in own:
                return name
    return None


def serve_rank(engine: Path, hosts: Sequence[str], rank: int, say: Say) -> int:
    """Runs this host's rank for each start of rank 0, until a signal; returns the exit code.

    Also ends on another engine at rank 0, or another error that a user must fix.
    """
    stopped: list[int] = []
    process: subprocess.Popen[bytes] | None = None

    def stop(number: int, frame: FrameType | None) -> None:
        stopped.append(number)
        if process is not None:
            process.kill()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    say(f"rank {rank} of {len(hosts)} waits for {hosts[0]}")
    while not stopped:
        beats, beat = os.pipe()
        own = RankSpec(
            str(engine), rank, len(hosts), hosts=tuple(hosts), parent=os.getpid(), beat=beat
        )
        try:
            process = start_rank(own)
        finally:
            os.close(beat)
        if stopped:  # while it was being started
            process.kill()
        if not _ended(beats):
            say(f"rank {rank} made no progress for {STILL_S:g} s and is killed")
            process.kill()
        os.close(beats)
        code = process.wait()
        if stopped:
            break
        if code == USER:
            return USER
        say(f"rank {rank} ended with code {code} and waits again")
        time.sleep(PAUSE_S)
    return 0


def _ended(beats: int) -> bool:
    """Waits until the rank's process has closed its end of the pipe; False if it hangs while this
    one runs."""
    clock, last_beat, pipe = RunningClock(), 0.0, select.poll()
    pipe.register(beats, select.POLLIN)
    while clock.now() - last_beat < STILL_S:
        if pipe.poll(TICK_S * 1000):
            if not os.read(beats, 64):
                return True
            last_beat = clock.now()
    return False
