"""Broadcast of packets from rank 0 to every other rank, and their answers back.

Knows sockets and memory that the processes of a host share; knows no message. On a host a large
packet is written once, into a ring that all ranks read; its place, and every small packet, goes
through each rank's socket, as everything does between hosts.
"""

from __future__ import annotations

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

HEAD = struct.Struct("<Qq")  # a packet's bytes, and where it begins in the ring, or INLINE
INLINE = -1
SMALL = 8 << 10  # bytes that a socket carries as fast as the ring
RING_BYTES = 16 << 20
MOST_ANSWER = 1 << 20  # bytes; a rank says that it is open, or what it has fallen of
_READ = 64  # bytes from one rank's count of what it has read to the next one's
_NAP_S = 50e-6


class Ring:
    """Memory that rank 0 writes in turn, and what each rank has read of it.

    `memory` is a file of `ring_bytes(ranks)`. Positions count bytes since the start.
    """

    def __init__(self, memory: int, ranks: int) -> None:
        raw = np.frombuffer(mmap.mmap(memory, ring_bytes(ranks)), np.uint8)
        self._data = raw[:RING_BYTES]
        self._read = raw[RING_BYTES:].view(np.uint64)[:: _READ // 8]
        self._at = 0

    def place(self, nbytes: int) -> int:
        """Where the next packet begins: never across the ring's end."""
        over = self._at % RING_BYTES + nbytes > RING_BYTES
        return self._at + (-self._at % RING_BYTES if over else 0)

    def behind(self, end: int) -> list[int]:
        """Ranks that still read what would be overwritten by what ends there."""
        return [i for i, n in enumerate(self._read.tolist()) if i and end - n > RING_BYTES]

    def write(self, start: int, data: bytes) -> None:
        """Writes the packet."""
        at = start % RING_BYTES
        self._data[at : at + len(data)] = np.frombuffer(data, np.uint8)
        self._at = start + len(data)

    def read(self, start: int, nbytes: int) -> bytes:
        """A copy of the packet."""
        at = start % RING_BYTES
        return self._data[at : at + nbytes].tobytes()

    def done(self, rank: int, end: int) -> None:
        """The rank has read all that ends there."""
        self._read[rank] = end


def ring_bytes(ranks: int) -> int:
    """Bytes of the memory of a ring."""
    return RING_BYTES + ranks * _READ


class Sender:
    """Rank 0's end. `limit_s`: seconds that a rank may take to make room for a packet, in which
    this process runs."""

    def __init__(
        self, peers: Mapping[int, socket.socket], ring: Ring | None, limit_s: float = LIMIT_S
    ) -> None:
        self._peers, self._ring, self._limit_s = dict(peers), ring, limit_s
        for peer in self._peers.values():
            prepare(peer)
            peer.settimeout(limit_s)

    def send(self, data: bytes) -> None:
        """Gives every rank the packet. Raises ExecutorError naming the rank that takes none."""
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
                raise ExecutorError(f"rank {rank} is gone: it takes no more plans") from None

    def _send_all(self, peer: socket.socket, packet: bytes) -> None:
        left, clock = memoryview(packet), RunningClock()
        while left:
            try:  # by its number: a socket with a limit asks for room before each `send`
                left = left[os.write(peer.fileno(), left) :]
            except BlockingIOError:
                room = select.poll()
                room.register(peer, select.POLLOUT)
                if not room.poll(TICK_S * 1000) and clock.now() > self._limit_s:
                    raise TimeoutError from None

    def _write(self, ring: Ring, data: bytes) -> int:
        start, clock = ring.place(len(data)), RunningClock()
        while late := ring.behind(start + len(data)):
            if clock.now() > self._limit_s:
                raise self._late(late)
            time.sleep(_NAP_S)
        ring.write(start, data)
        return start

    def _late(self, ranks: list[int]) -> ExecutorError:
        late = ", ".join(map(str, ranks))
        return ExecutorError(f"rank {late} has read no plan for {self._limit_s:g} s")


class Receiver:
    """Another rank's end."""

    def __init__(self, rank: int, peer: socket.socket, ring: Ring | None) -> None:
        self._rank, self._peer, self._ring = rank, peer, ring
        self._lock = threading.Lock()
        prepare(peer)
        peer.setblocking(True)

    def receive(self) -> bytes | None:
        """The next packet; None when rank 0 has closed its end."""
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
        """Tells rank 0 something. Raises OSError where it has gone."""
        with self._lock:
            self._peer.sendall(HEAD.pack(len(data), INLINE) + data)

    def gone(self) -> bool:
        """Waits until rank 0 has closed its end; for another thread than the one that receives."""
        poll = select.poll()
        poll.register(self._peer, select.POLLRDHUP)
        while not poll.poll():
            pass
        return True


def read_answer(peer: socket.socket) -> bytes | None:
    """What a rank says; None when it has closed its end, or says what no rank does."""
    head = read(peer, HEAD.size)
    size = 0 if head is None else HEAD.unpack(head)[0]
    return None if head is None or size > MOST_ANSWER else read(peer, size)


def read(peer: socket.socket, nbytes: int) -> bytes | None:
    """So many bytes of a blocking socket; None when it was closed before them."""
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
