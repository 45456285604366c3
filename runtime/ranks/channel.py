"""Broadcast of packets from rank 0 to the other ranks, and their answers.

Knows sockets and memory that the processes of a host share; knows no message. On one host rank 0
writes a large packet once into a ring that all ranks read, and sends its position through each
rank's socket. Small packets, and all packets between hosts, go through the sockets.
"""

import mmap
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Mapping

import numpy as np

from spark_engine.errors import ExecutorError
from spark_engine.runtime.ranks.links import LIMIT_S, prepare
from spark_engine.runtime.ranks.running_clock import TICK_S, RunningClock

HEAD = struct.Struct("<Qq")  # a packet's size in bytes, and its start in the ring, or INLINE
INLINE = -1
SMALL = 8 << 10  # bytes up to which a socket is as fast as the ring
RING_BYTES = 16 << 20
MOST_ANSWER = 1 << 20  # bytes; an answer is a state of opening or an error
_READ = 64  # bytes between the read counters of two ranks
_NAP_S = 50e-6


class PacketRing:
    """A ring that rank 0 writes, and the read counter of each rank.

    `memory` is a file of `ring_bytes(ranks)`. Positions count bytes since the start.
    """

    def __init__(self, memory: int, ranks: int) -> None:
        raw = np.frombuffer(mmap.mmap(memory, ring_bytes(ranks)), np.uint8)
        self._data = raw[:RING_BYTES]
        self._read = raw[RING_BYTES:].view(np.uint64)[:: _READ // 8]
        self._at = 0

    def place(self, nbytes: int) -> int:
        """Start of the next packet, such that it does not cross the ring's end."""
        over = self._at % RING_BYTES + nbytes > RING_BYTES
        return self._at + (-self._at % RING_BYTES if over else 0)

    def behind(self, end: int) -> list[int]:
        """Ranks that have not read the bytes which a packet that ends here would overwrite."""
        return [i for i, n in enumerate(self._read.tolist()) if i and end - n > RING_BYTES]

    def write(self, start: int, data: bytes) -> None:
        at = start % RING_BYTES
        self._data[at : at + len(data)] = np.frombuffer(data, np.uint8)
        self._at = start + len(data)

    def read(self, start: int, nbytes: int) -> bytes:
        """A copy of the packet."""
        at = start % RING_BYTES
        return self._data[at : at + nbytes].tobytes()

    def done(self, rank: int, end: int) -> None:
        self._read[rank] = end


def ring_bytes(ranks: int) -> int:
    return RING_BYTES + ranks * _READ


class Sender:
    """Rank 0's end. `limit_s`: seconds for a rank to accept a packet, not counting time in which
    this process is stopped."""

    def __init__(
        self, peers: Mapping[int, socket.socket], ring: PacketRing | None, limit_s: float = LIMIT_S
    ) -> None:
        self._peers, self._ring, self._limit_s = dict(peers), ring, limit_s
        for peer in self._peers.values():
            prepare(peer)
            peer.settimeout(limit_s)

    def send(self, data: bytes) -> None:
        """Sends the packet to every rank. Raises ExecutorError naming a rank that does not accept
        it."""
        start, inline = INLINE, data
        if self._ring is not None and SMALL < len(data) <= RING_BYTES // 2:
            start, inline = self._write(self._ring, data), b""
        packet = HEAD.pack(len(data), start) + inline
        for rank, peer in self._peers.items():
            try:
                self._send_all(peer, packet)
            except TimeoutError:
                raise self._late([rank]) from None
            except OSError:
                raise ExecutorError(f"rank {rank} is gone: it accepts no more packets") from None

    def _send_all(self, peer: socket.socket, packet: bytes) -> None:
        left, clock = memoryview(packet), RunningClock()
        while left:
            try:  # by descriptor: a socket object with a timeout polls before each `send`
                left = left[os.write(peer.fileno(), left) :]
            except BlockingIOError:
                poller = select.poll()
                poller.register(peer, select.POLLOUT)
                if not poller.poll(TICK_S * 1000) and clock.now() > self._limit_s:
                    raise TimeoutError from None

    def _write(self, ring: PacketRing, data: bytes) -> int:
        start, clock = ring.place(len(data)), RunningClock()
        while late := ring.behind(start + len(data)):
            if clock.now() > self._limit_s:
                raise self._late(late)
            time.sleep(_NAP_S)
        ring.write(start, data)
        return start

    def _late(self, ranks: list[int]) -> ExecutorError:
        late = ", ".join(map(str, ranks))
        return ExecutorError(f"rank {late} has read no packet for {self._limit_s:g} s")


class Receiver:
    """The end of another rank."""

    def __init__(self, rank: int, peer: socket.socket, ring: PacketRing | None) -> None:
        self._rank, self._peer, self._ring = rank, peer, ring
        self._lock = threading.Lock()
        prepare(peer)
        peer.setblocking(True)

    def receive(self) -> bytes | None:
        """The next packet; None if rank 0 has closed its end."""
        head = read(self._peer, HEAD.size)
        if head is None:
            return None
        size, start = HEAD.unpack(head)
        if start == INLINE:
            return read(self._peer, size)
        assert self._ring is not None
        data = self._ring.read(start, size)
        self._ring.done(self._rank, start + size)
        return data

    def answer(self, data: bytes) -> None:
        """Sends an answer to rank 0. Raises OSError if rank 0 has ended."""
        with self._lock:
            self._peer.sendall(HEAD.pack(len(data), INLINE) + data)

    def gone(self) -> bool:
        """Blocks until rank 0 has closed its end; called from a thread that does not receive."""
        poll = select.poll()
        poll.register(self._peer, select.POLLRDHUP)
        while not poll.poll():
            pass
        return True


def read_answer(peer: socket.socket) -> bytes | None:
    """A rank's answer; None if it has closed its end, or the size is invalid."""
    head = read(peer, HEAD.size)
    size = 0 if head is None else HEAD.unpack(head)[0]
    return None if head is None or size > MOST_ANSWER else read(peer, size)


def read(peer: socket.socket, nbytes: int) -> bytes | None:
    """This many bytes from a blocking socket; None if it was closed before."""
    data = bytearray()
    while len(data) < nbytes:
        try:
            part = peer.recv(nbytes - len(data))
        except OSError:
            return None
        if not part:
            return None
        data += part
    return bytes(data)
