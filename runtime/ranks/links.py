"""Sockets between the ranks of an engine, with timeouts that name the rank that did not answer.

Knows sockets and time limits; knows neither arrays nor plans. A process that ends closes its
sockets, which ends the others' waits at once; a process that hangs is named after the limit.
"""

import contextlib
import select
import socket
import struct
from collections.abc import Callable, Mapping

from spark_engine.errors import ExecutorError
from spark_engine.runtime.ranks.running_clock import TICK_S, RunningClock
from spark_engine.tensors import Bytes

LIMIT_S = 8.0  # seconds; below the server's watchdog, so that the message can name the rank
CPU_LIMIT_S = 40.0  # the same for CPU engines, as hosts may be slower or busier
HEAD = struct.Struct("<QQ12s")  # of a call: its number, its bytes, its name
_IDLE_S, _INTERVAL_S, _PROBES = 5, 2, 3  # TCP keepalive: probes of a silent peer


class Links:
    """A socket to every other rank, by rank; a call uses all of them.

    `limit_s`: time limit of a call, not counting time in which this process is stopped; the owner
    may change it.
    """

    def __init__(
        self, rank: int, peers: Mapping[int, socket.socket], limit_s: float = LIMIT_S
    ) -> None:
        self.rank, self.ranks, self.limit_s = rank, len(peers) + 1, limit_s
        self._peers = dict(sorted(peers.items()))
        self._calls = 0
        self._why: str | None = None
        self._at_wait: Callable[[], None] = lambda: None
        for peer in self._peers.values():
            prepare(peer)
            peer.setblocking(False)

    def at_wait(self, work: Callable[[], None]) -> None:
        """Registers a function that runs every TICK_S while a call waits."""
        self._at_wait = work

    def exchange(self, what: str, nbytes: int, body: bytes | Bytes = b"") -> dict[int, bytearray]:
        """Sends this call's head and body to every peer and returns their bodies, by rank.

        All ranks make the same calls in the same order; `what` and `nbytes` identify the call.
        Raises ExecutorError naming a rank that has ended, makes another call, or exceeds the limit.
        """
        head = HEAD.pack(self._calls, nbytes, what.encode())
        out = memoryview(head + bytes(body))
        size = len(out)
        call = f"{what} {self._calls} of {nbytes} bytes"
        self._calls += 1
        left_out = {rank: out for rank in self._peers}
        taken = {rank: bytearray(size) for rank in self._peers}
        left_in = {rank: memoryview(data) for rank, data in taken.items()}
        clock = RunningClock()
        while left_out or left_in:
            moved = self._send(left_out, call)
            moved = self._receive(left_in, taken, head, call) or moved
            if not moved and (left_out or left_in):
                self._wait(left_out, left_in, self.limit_s - clock.now(), call)
        return {rank: data[HEAD.size :] for rank, data in taken.items()}

    def abort(self, why: str) -> None:
        """Ends every call in any thread with an ExecutorError that contains `why`."""
        self._why = self._why or why
        for peer in self._peers.values():
            with contextlib.suppress(OSError):
                peer.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for peer in self._peers.values():
            peer.close()

    def _send(self, left: dict[int, memoryview], call: str) -> bool:
        moved = False
        for rank in list(left):
            try:
                count = self._peers[rank].send(left[rank])
            except BlockingIOError:
                continue
            except OSError:
                raise self._gone(rank, call) from None
            moved = True
            left[rank] = left[rank][count:]
            if not left[rank]:
                del left[rank]
        return moved

    def _receive(
        self, left: dict[int, memoryview], taken: Mapping[int, bytearray], head: bytes, call: str
    ) -> bool:
        moved = False
        for rank in list(left):
            try:
                count = self._peers[rank].recv_into(left[rank])
            except BlockingIOError:
                continue
            except OSError:
                count = 0
            if not count:
                raise self._gone(rank, call)
            moved = True
            left[rank] = left[rank][count:]
            done = len(taken[rank]) - len(left[rank])
            if done >= len(head) and taken[rank][: len(head)] != head:
                number, nbytes, name = HEAD.unpack_from(taken[rank])
                what = name.rstrip(b"\0").decode("ascii", "replace")
                raise ExecutorError(
                    f"rank {rank} is at {what} {number} of {nbytes} bytes, rank {self.rank} at "
                    f"{call}: the ranks do not run the same plan"
                )
            if not left[rank]:
                del left[rank]
        return moved

    def _wait(
        self,
        left_out: Mapping[int, memoryview],
        left_in: Mapping[int, memoryview],
        due: float,
        call: str,
    ) -> None:
        if due <= 0:
            late = ", ".join(str(rank) for rank in sorted({*left_out, *left_in}))
            raise ExecutorError(
                f"rank {late} did not reach {call} in {self.limit_s:g} s; rank {self.rank} "
                "waits no longer"
            )
        poll = select.poll()
        for rank, peer in self._peers.items():
            events = select.POLLIN * (rank in left_in) | select.POLLOUT * (rank in left_out)
            if events:
                poll.register(peer, events)
        self._at_wait()
        poll.poll(min(due, TICK_S) * 1000)

    def _gone(self, rank: int, call: str) -> ExecutorError:
        words = f"rank {rank} is gone: its connection closed while rank {self.rank} was at {call}"
        return ExecutorError(self._why or words)


def prepare(peer: socket.socket) -> None:
    """Disables Nagle's delay, and enables keepalive to detect a vanished host."""
    if peer.family == socket.AF_UNIX:
        return
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", _IDLE_S),
        ("TCP_KEEPINTVL", _INTERVAL_S),
        ("TCP_KEEPCNT", _PROBES),
        ("TCP_USER_TIMEOUT", 1000 * (_IDLE_S + _INTERVAL_S * _PROBES)),
    ):
        if hasattr(socket, name):  # not on every platform; Linux has all of them
            peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
