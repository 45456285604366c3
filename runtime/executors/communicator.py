"""The protocol of a rank's communicator: what an engine of several ranks exchanges on the host."""

from collections.abc import Callable
from typing import Protocol

from spark_engine.tensors import Array


class Communicator(Protocol):
    """One rank's end. All ranks make the same calls in the same order.

    Each call raises ExecutorError naming a rank that has ended, exceeds the time limit, or makes
    another call.
    """

    rank: int  # from 0
    ranks: int
    limit_s: float  # time limit of a call that waits for other ranks
    here: bool  # all ranks are on this host

    def all_reduce(self, array: Array) -> Array:
        """The sum over ranks of arrays of one shape and dtype, in a new array of that dtype."""

    def all_gather(self, array: Array) -> Array:
        """The arrays of all ranks, [ranks, *shape]."""

    def barrier(self) -> None:
        """Returns when all ranks have called it."""

    def abort(self, why: str) -> None:
        """Ends the waiting call and all later ones; callable from another thread."""

    def at_abort(self, work: Callable[[], None]) -> None:
        """Registers a function for `abort` to call."""

    def at_wait(self, work: Callable[[], None]) -> None:
        """Registers a function that every waiting call repeats."""

    def close(self) -> None:
        """Frees all resources. May be called twice."""
