"""Collectives between ranks on the host: all-reduce, all-gather and barrier of numpy arrays.

Arrays pass through the sockets between the ranks, on one host and between hosts. Every rank sums in
rank order, in f32, and rounds once, so that all ranks have equal bits. Knows no plan and no
collective on a device.
"""

import socket
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from spark_engine.runtime.ranks.links import LIMIT_S, Links
from spark_engine.tensors import Array


class LinkCommunicator(Links):
    """A rank's communicator over its sockets; `here`: all ranks are on this host."""

    def __init__(
        self,
        rank: int,
        peers: Mapping[int, socket.socket],
        limit_s: float = LIMIT_S,
        here: bool = False,
    ) -> None:
        super().__init__(rank, peers, limit_s)
        self.here = here
        self._ends: list[Callable[[], None]] = []

    def all_reduce(self, array: Array) -> Array:
        return sum_of(self.parts(array, "all_reduce"))

    def all_gather(self, array: Array) -> Array:
        return np.stack(self.parts(array))

    def barrier(self) -> None:
        self.exchange("barrier", 0)

    def abort(self, why: str) -> None:
        super().abort(why)
        while self._ends:
            self._ends.pop()()

    def at_abort(self, work: Callable[[], None]) -> None:
        self._ends.append(work)

    def parts(self, array: Array, what: str = "all_gather") -> list[Array]:
        """The arrays of all ranks, in order; `what` names the call."""
        own = np.ascontiguousarray(array).reshape(array.shape)
        found = self.exchange(what, own.nbytes, own.reshape(-1).view(np.uint8))
        parts = {k: np.frombuffer(v, own.dtype).reshape(own.shape) for k, v in found.items()}
        return [own if rank == self.rank else parts[rank] for rank in range(self.ranks)]


def sum_of(parts: Sequence[Array]) -> Array:
    """The sum in f32, in rank order, rounded once to the parts' dtype."""
    total = parts[0].astype(np.float32)
    for part in parts[1:]:
        total += part.astype(np.float32)
    found: Array = total.astype(parts[0].dtype)
    return found
