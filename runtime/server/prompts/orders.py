"""The messages between the HTTP process and the process that forks workers.

Each message is one packet of MessagePack. Knows no transport.
"""

from collections.abc import Callable

import msgspec

from spark_engine.runtime.server.prompts.contract import Setup

MESSAGE = 64 << 10  # bytes at most
STAYS_MARK, GROWN_MARK = b"\0", b"\1"  # after an answer's header: whether the worker continues


class Fork(msgspec.Struct, tag=True, frozen=True):
    """Fork a worker; its socket is attached to the message. `memory`: bytes of address space in
    addition to the current ones."""

    nice: int
    memory: int


class ForkerReady(msgspec.Struct, tag=True, frozen=True):
    """All is loaded."""


class Unloadable(msgspec.Struct, tag=True, frozen=True):
    """Something cannot be loaded; the process ends. `user`: it is not our bug."""

    message: str
    user: bool


class WorkerEnded(msgspec.Struct, tag=True, frozen=True):
    """A worker ended; `status` as of `os.waitstatus_to_exitcode`."""

    pid: int
    status: int


class WorkerHello(msgspec.Struct, frozen=True):
    """A worker's first message."""

    pid: int


Order = Setup | Fork
Report = ForkerReady | Unloadable | WorkerEnded
# read-only mappings are sent as dicts
encode: Callable[[Order | Report | WorkerHello], bytes]
encode = msgspec.msgpack.Encoder(enc_hook=dict).encode
decode_order: Callable[[bytes], Order] = msgspec.msgpack.Decoder(Order).decode
decode_report: Callable[[bytes], Report] = msgspec.msgpack.Decoder(Report).decode
