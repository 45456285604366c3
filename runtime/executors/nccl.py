"""NCCL between the ranks of an engine: this rank's communicator, and calls queued on the GPU's
stream.

The only file that imports nccl4py (the extra `nccl`). Knows addresses and a stream; knows no op.
NCCL and its own variables (NCCL_*) select the transport, RDMA or sockets.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import numpy as np
from nccl.bindings import nccl

from spark_engine.device.gpu import Gpu
from spark_engine.errors import ExecutorError
from spark_engine.hints import extra
from spark_engine.runtime.executors.communicator import Communicator

CONNECT_S = 120.0  # time limit of connecting all ranks
CLOSE_S = 5.0
TICK_S = 0.05  # polling interval for the end of the ranks
SMALL = 256  # bytes of the first calls
NETWORK = (
    "NCCL_SOCKET_IFNAME names the interface between the hosts; their firewalls must let NCCL's "
    "ports through, and NCCL_DEBUG=INFO logs details"
)
BF16, BYTES, SUM = int(nccl.DataType.Bfloat16), int(nccl.DataType.Uint8), int(nccl.RedOp.Sum)
log = logging.getLogger(__name__)


class Nccl:
    """One rank's NCCL communicator; all ranks create theirs at the same time and make the same
    calls in the same order.

    Rank 0 sends its NCCL id through `comm`. The constructor makes the first calls over temporary
    memory, so that NCCL allocates its GPU memory before the free memory is measured. Raises
    ExecutorError if NCCL is missing or fails, if it has not connected all ranks after `limit_s`, or
    if `comm` is aborted meanwhile; then it closes what NCCL has created.
    """

    def __init__(self, gpu: Gpu, comm: Communicator, limit_s: float = CONNECT_S) -> None:
        self._gpu, self._left, self._lock = gpu, threading.Event(), threading.Lock()
        self._comm: object = None
        asked = nccl.UniqueId()
        if comm.rank == 0:
            asked = _checked(nccl.get_unique_id)
        rows = comm.all_gather(np.frombuffer(bytes(asked), np.uint8))
        ranks, place = len(rows), nccl.UniqueId.from_buffer(rows[0].tobytes())

        def connect() -> None:
            gpu.use()
            if self._accepted(_checked(lambda: nccl.comm_init_rank(ranks, place, comm.rank))):
                self._try(ranks)

        comm.at_abort(self.abort)
        work = _Work(connect)
        try:
            connected = work.ended(limit_s, self._left)
            if self._left.is_set():
                raise ExecutorError(f"rank {comm.rank} was connecting when the ranks ended")
            if not connected:
                raise ExecutorError(
                    f"NCCL has not connected rank {comm.rank} with the others in {limit_s:g} s: "
                    f"{NETWORK}"
                )
        except BaseException:
            self.close()  # ends what waits on the stream, so that memory can be freed
            if self._comm is not None:
                with suppress(Exception):
                    work.ended(CLOSE_S)
            raise

    def queueing(self, symbol: str, args: Sequence[int | float]) -> Callable[[], None]:
        """A function that queues the call on the stream: "all_gather" of (from, to, bytes of this
        rank), or "all_reduce" of bf16 with equal byte counts on every rank."""
        source, to, nbytes = (int(arg) for arg in args)
        stream = int(self._gpu.stream)

        def gather() -> None:
            _checked(lambda: nccl.all_gather(source, to, nbytes, BYTES, self._comm, stream))

        def add() -> None:
            count = nbytes // 2
            _checked(lambda: nccl.all_reduce(source, to, count, BF16, SUM, self._comm, stream))

        return {"all_gather": gather, "all_reduce": add}[symbol]

    def abort(self) -> None:
        """Ends calls that wait for other ranks on the stream; their results are invalid. Callable
        from another thread."""
        self._destroy(0.0)

    def close(self) -> None:
        """Destroys the communicator without waiting for the other ranks; no call may be queued
        afterwards. Logs errors instead of raising them: the caller may be handling an earlier
        error."""
        try:
            if not self._destroy(CLOSE_S):
                log.warning("NCCL did not close in %g s; its resources stay allocated", CLOSE_S)
        except ExecutorError as error:
            log.warning("NCCL did not close: %s", error)

    def _destroy(self, limit_s: float) -> bool:
        with self._lock:
            left = self._left.is_set() or self._comm is None
            self._left.set()
        return left or _Work(lambda: _checked(lambda: nccl.comm_abort(self._comm))).ended(limit_s)

    def _accepted(self, made: object) -> bool:
        """Stores the communicator that NCCL has made. Returns False, and aborts it, if the caller
        has stopped waiting."""
        with self._lock:
            self._comm, left = made, self._left.is_set()
        if left:
            _checked(lambda: nccl.comm_abort(made))
        return not left

    def _try(self, ranks: int) -> None:
        held: list[int] = []
        try:
            for nbytes in (SMALL, ranks * SMALL):
                held.append(self._gpu.allocate(nbytes))
            source, to = held
            self._gpu.fill(source, 0, SMALL)
            for symbol in ("all_gather", "all_reduce"):
                self.queueing(symbol, (source, to, SMALL))()
            self._gpu.wait()
        finally:
            for place in reversed(held):
                with suppress(ExecutorError):  # a lost device has already raised
                    self._gpu.free(place)


def _checked(call: Callable[[], object]) -> object:
    """The call's result. Raises ExecutorError with NCCL's message."""
    try:
        return call()
    except nccl.NCCLError as error:
        raise ExecutorError(f"NCCL: {error}: {NETWORK}") from error
    except RuntimeError as error:
        raise ExecutorError(f"NCCL cannot be loaded ({error}): {extra('nccl')}") from error


class _Work:
    """A call that may never return, in its own thread."""

    def __init__(self, work: Callable[[], object]) -> None:
        self._work, self._failed = work, list[BaseException]()
        self._thread = threading.Thread(target=self._run, name="nccl", daemon=True)
        self._thread.start()

    def ended(self, limit_s: float, left: threading.Event | None = None) -> bool:
        """Whether the call has ended; False after `limit_s`, or once `left` is set. Raises the
        call's exception."""
        until = time.monotonic() + limit_s
        while self._thread.is_alive() and not (left and left.is_set()):
            rest = max(0.0, until - time.monotonic())
            self._thread.join(min(rest, TICK_S))
            if not rest:
                break
        if self._failed:
            raise self._failed[0]
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self._failed.append(error)
