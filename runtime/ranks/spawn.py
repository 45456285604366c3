"""Starts the processes of a tensor-parallel engine's other ranks, and connects them with rank 0.

On one host rank 0 spawns them with inherited sockets and shared memory (`RankSpec`); on several
hosts they connect over TCP (`rendezvous.py`). Rank 0 gets a `RankGroup`; each other rank's process
gets its `RankChannels`. Knows no message content.
"""

import hashlib
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import msgspec

from spark_engine.engine_file import MANIFEST, read_manifest
from spark_engine.errors import CapacityError, EngineError, OptionError
from spark_engine.hints import extra
from spark_engine.manifest import NATIVE, Manifest
from spark_engine.runtime.executors.communicator import Communicator
from spark_engine.runtime.ranks.channel import PacketRing, ring_bytes
from spark_engine.runtime.ranks.communicator import LinkCommunicator
from spark_engine.runtime.ranks.group import RankGroup
from spark_engine.runtime.ranks.links import CPU_LIMIT_S, LIMIT_S
from spark_engine.runtime.ranks.messages import Begin, LoadOptions
from spark_engine.runtime.ranks.rendezvous import accept_ranks, join_ranks

MODULE = "spark_engine.runtime.cli.rank_process"


class RankSpec(msgspec.Struct, frozen=True):
    """Parameters of a rank's process.

    On rank 0's host: inherited descriptors of its socket to rank 0, of its sockets to all ranks (by
    rank), and of the ring. On another host: the addresses of all, and a pipe on which it reports to
    its parent that it runs.
    """

    engine: str
    rank: int
    ranks: int
    control: int = -1
    links: dict[int, int] = {}
    ring: int = -1
    hosts: tuple[str, ...] = ()
    parent: int = 0  # pid of the parent process
    beat: int = -1


@dataclass(frozen=True)
class RankChannels:
    """A rank's connections: commands from rank 0, collectives, and the ring for large packets."""

    control: socket.socket
    comm: Communicator
    ring: PacketRing | None = None


def gather_ranks(
    engine: Path,
    manifest: Manifest,
    hosts: Sequence[str] = (),
    say: Callable[[str], None] = lambda text: None,
) -> RankGroup:
    """Rank 0's group: it starts the other ranks on this host, or waits for ranks on the other
    `hosts`.

    Raises CapacityError if this host has fewer GPUs than ranks; OptionError unless there is one
    host per rank, and for ranks that read each other's memory; EngineError if the ranks need NCCL
    and it is missing; ExecutorError if a rank does not connect.
    """
    check_hosts(hosts, manifest)
    if hosts:
        say(f"waiting on {hosts[0]} for ranks on {', '.join(hosts[1:])}")
        return accept_ranks(hosts, limit_of(manifest))
    check_gpus(manifest)
    return start_ranks(engine, manifest.ranks, limit_of(manifest))


def limit_of(manifest: Manifest) -> float:
    return LIMIT_S if manifest.executor == NATIVE else CPU_LIMIT_S


def check_hosts(hosts: Sequence[str], manifest: Manifest) -> None:
    """Raises OptionError unless there are no hosts, or one per rank of an engine that supports
    several; EngineError if a package for that is missing."""
    ranks = manifest.ranks
    if hosts and len(hosts) != ranks:
        raise OptionError(
            f"--hosts names {len(hosts)}, and the engine was built for {ranks} ranks, one on each "
            f"host: name {ranks}, or build with --tp {len(hosts)}"
        )
    if hosts and manifest.executor == NATIVE and not manifest.across_hosts:
        raise OptionError(
            "--hosts: the ranks of this engine read each other's memory, which works on one host "
            f"only: leave --hosts out, or build it with --tp {ranks} --across-hosts"
        )
    check_nccl(manifest)


def check_nccl(manifest: Manifest) -> None:
    """Raises EngineError if the ranks need NCCL and its package is missing."""
    if manifest.across_hosts and find_spec("nccl") is None:
        raise EngineError(
            f"engine {manifest.name} connects its ranks through NCCL, and its package is not "
            f"installed: {extra('nccl')}"
        )


def check_gpus(manifest: Manifest) -> None:
    """Raises CapacityError if this host has fewer GPUs than the engine has ranks on it."""
    if manifest.executor != NATIVE or manifest.ranks == 1:
        return
    from spark_engine.device.gpu import count  # needs the extra `cuda`

    found = count()
    if found < manifest.ranks:
        need = manifest.memory.total / (1 << 30)
        hosts = "name the hosts of all ranks (--hosts), " if manifest.across_hosts else ""
        fewer = f"rebuild with --tp {found}" if found else "run it where they are"
        raise CapacityError(
            f"engine {manifest.name} was built for {manifest.ranks} GPUs, each of which holds "
            f"{need:.2f} GiB, and this machine shows {found} (--device and "
            f"CUDA_VISIBLE_DEVICES count): {hosts}show more, or {fewer}"
        )


def begin_message(engine: Path, options: LoadOptions) -> Begin:
    """The first message to every rank. Only rank 0 plans for swap copies."""
    own = msgspec.structs.replace(options, swap_bytes=0)
    return Begin(manifest_digest(engine), version("spark-engine"), own)


def start_ranks(engine: Path, ranks: int, limit_s: float = LIMIT_S) -> RankGroup:
    """Rank 0's group; the other ranks are new processes of this host.

    They end with the thread that calls this, or with the group. Raises OSError if no process can be
    started.
    """
    with ExitStack() as ends, ExitStack() as undo:
        ring = os.memfd_create("spark-plans")  # freed with the last process that holds it
        ends.callback(os.close, ring)
        os.ftruncate(ring, ring_bytes(ranks))
        pairs = {
            (i, j): [ends.enter_context(s) for s in socket.socketpair()]
            for i in range(ranks)
            for j in range(i + 1, ranks)
        }
        controls = {rank: socket.socketpair() for rank in range(1, ranks)}
        processes = {}
        for rank in range(1, ranks):
            own = ends.enter_context(controls[rank][1])
            undo.callback(controls[rank][0].close)
            links = {
                j: pairs[min(rank, j), max(rank, j)][rank > j] for j in range(ranks) if j != rank
            }
            numbers = {j: link.fileno() for j, link in links.items()}
            shared = own.fileno(), numbers, ring
            spec = RankSpec(str(engine), rank, ranks, *shared, parent=os.getpid())
            processes[rank] = start_rank(spec)
            undo.callback(processes[rank].kill)
        mine = {j: pairs[0, j][0].dup() for j in range(1, ranks)}
        comm = LinkCommunicator(0, mine, limit_s, here=True)
        connected = {rank: pair[0] for rank, pair in controls.items()}
        group = RankGroup(comm, connected, processes, PacketRing(ring, ranks), limit_s)
        undo.pop_all()
        return group


def start_rank(spec: RankSpec) -> subprocess.Popen[bytes]:
    numbers = (spec.control, *spec.links.values(), spec.ring, spec.beat)
    command = [sys.executable, "-P", "-m", MODULE, msgspec.json.encode(spec).decode()]
    passed = [number for number in numbers if number >= 0]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=passed)


def connect_rank(spec: RankSpec) -> RankChannels:
    """A rank's connections, over inherited descriptors or to all hosts.

    Raises ExecutorError if rank 0's host does not answer.
    """
    if spec.hosts:
        return RankChannels(*join_ranks(spec.hosts, spec.rank))
    peers: Mapping[int, socket.socket] = {
        rank: socket.socket(fileno=number) for rank, number in spec.links.items()
    }
    comm = LinkCommunicator(spec.rank, peers, here=True)
    control = socket.socket(fileno=spec.control)
    return RankChannels(control, comm, PacketRing(spec.ring, spec.ranks))


def manifest_digest(engine: Path) -> str:
    """Digest by which ranks verify that they have the same engine. Raises EngineError if there is
    no manifest."""
    read_manifest(engine)
    return hashlib.sha256((engine / MANIFEST).read_bytes()).hexdigest()
