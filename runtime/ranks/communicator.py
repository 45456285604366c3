"""Collectives between ranks on the host: all-reduce, all-gather and barrier of numpy arrays.

Arrays pass through memory that the processes of a host share, or through sockets between hosts.
Every rank sums in rank order, in f32, and rounds once, so that all ranks have equal bits. Knows no
plan and no collective on a device.
"""

import mmap
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import numpy as np

from spark_engine.errors import ExecutorError
from spark_engine.runtime.ranks.links import Links
from spark_engine.tensors import Array, Bytes

SLOT_BYTES = 4 << 20  # bytes that a rank exchanges at once; larger arrays go in pieces
Piece: TypeAlias = tuple[int, list[Bytes]]  # index of the first element, bytes by rank


class _OverLinks:
    """Base class of both communicators, which differ in how they gather pieces of bytes."""

    def __init__(self, links: Links) -> None:
        self.rank, self.ranks = links.rank, links.ranks
        self._links = links
        self._ends: list[Callable[[], None]] = []

    @property
    def limit_s(self) -> float:
        return self._links.limit_s

    @limit_s.setter
    def limit_s(self, seconds: float) -> None:
        self._links.limit_s = seconds

    def all_reduce(self, array: Array) -> Array:
        flat = np.ascontiguousarray(array).reshape(-1)
        total = np.empty_like(flat)
        for start, parts in self._pieces("all_reduce", flat):
            typed = [part.view(flat.dtype) for part in parts]
            end = start + len(typed[0])
            total[start:end] = sum_of(typed)
        return total.reshape(array.shape)

    def all_gather(self, array: Array) -> Array:
        flat = np.ascontiguousarray(array).reshape(-1)
        found = np.empty((self.ranks, len(flat)), flat.dtype)
        for start, parts in self._pieces("all_gather", flat):
            for row, part in zip(found, parts, strict=True):
                typed = part.view(flat.dtype)
                row[start : start + len(typed)] = typed
        return found.reshape(self.ranks, *array.shape)

    def barrier(self) -> None:
        self._links.exchange("barrier", 0)

    def abort(self, why: str) -> None:
        self._links.abort(why)
        while self._ends:
            self._ends.pop()()

    def at_abort(self, work: Callable[[], None]) -> None:
        self._ends.append(work)

    def at_wait(self, work: Callable[[], None]) -> None:
        self._links.at_wait = work

    def _pieces(self, what: str, flat: Array) -> Iterator[Piece]:
        raise NotImplementedError


class TcpCommunicator(_OverLinks):
    """Ranks of several hosts: arrays pass through the links."""

    here = False

    def _pieces(self, what: str, flat: Array) -> Iterator[Piece]:
        own = flat.view(np.uint8)
        found = self._links.exchange(what, own.nbytes, own)
        by_rank = {rank: np.frombuffer(data, np.uint8) for rank, data in found.items()}
        by_rank[self.rank] = own
        yield 0, [by_rank[rank] for rank in range(self.ranks)]

    def close(self) -> None:
        self._links.close()


class SharedCommunicator(_OverLinks):
    """Ranks of one host: arrays are in memory that all have mapped; the links synchronise access.

    `memory` is a file of `shared_bytes(ranks)`, such as a memfd. A rank writes its two slots in
    turn: when every peer has started the next call, every peer has read the last one.
    """

    here = True

    def __init__(self, links: Links, memory: int) -> None:
        super().__init__(links)
        size = shared_bytes(links.ranks)
        raw = np.frombuffer(mmap.mmap(memory, size), np.uint8)
        self._slots: Bytes | None = raw.reshape(2, links.ranks, SLOT_BYTES)
        self._turn = 0

    def _pieces(self, what: str, flat: Array) -> Iterator[Piece]:
        most = SLOT_BYTES // flat.itemsize
        for start in range(0, max(1, len(flat)), most):
            yield start, self._shown(what, flat[start : start + most].view(np.uint8))

    def _shown(self, what: str, own: Bytes) -> list[Bytes]:
        """One slot's bytes of all ranks, valid until the call after the next one."""
        if self._slots is None:
            raise ExecutorError(f"rank {self.rank}'s communicator is closed")
        slots = self._slots[self._turn]
        self._turn ^= 1
        slots[self.rank, : len(own)] = own
        self._links.exchange(what, len(own))
        return [slot[: len(own)] for slot in slots]

    def close(self) -> None:
        """Closes the links and unmaps the memory."""
        self._links.close()
        self._slots = None


def shared_bytes(ranks: int) -> int:
    """Bytes of the memory that the ranks of a host share; unused pages occupy no memory."""
    return 2 * ranks * SLOT_BYTES


def sum_of(parts: Sequence[Array]) -> Array:
    """The sum in f32, in rank order, rounded once to the parts' dtype."""
    total = parts[0].astype(np.float32)
    for part in parts[1:]:
        total += part.astype(np.float32)
    found: Array = total.astype(parts[0].dtype)
    return found
