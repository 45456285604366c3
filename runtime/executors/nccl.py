"""NCCL between the ranks of an engine: this rank's end, and calls that wait on the GPU's stream.

The one file that imports nccl4py (the extra `nccl`). Knows addresses and a stream; knows no op. How
the bytes travel, RDMA or sockets, is NCCL's to choose, and its own variables (NCCL_*) tell it.
"""

from __future__ import annotations

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
from spark_engine.runtime.executors.peers import Communicator

COME_S = 120.0  # for all ranks to be connected
CLOSE_S = 5.0
TICK_S = 0.05  # how often it looks whether the ranks have ended
SMALL = 256  # bytes of the first calls
NETWORK = (
    "NCCL_SOCKET_IFNAME names the interface between the hosts, whose firewalls must let NCCL's "
    "ports through, and NCCL_DEBUG=INFO tells more"
)
BF16, BYTES, SUM = int(nccl.DataType.Bfloat16), int(nccl.DataType.Uint8), int(nccl.RedOp.Sum)
log = logging.getLogger(__name__)


class Nccl:
    """One rank's end; all ranks make theirs at the same time, and the same calls in one order.

    `comm` tells the ranks where rank 0 waits. The first calls are made here, over memory of their
    own, so that what NCCL keeps on the GPU is taken before anybody asks how much is free. Raises
    ExecutorError where NCCL is missing, refuses, or has not connected all ranks in `limit_s`, and
    where `comm` is aborted meanwhile; then it is closed, whatever NCCL had made by then.
    """

    def __init__(self, gpu: Gpu, comm: Communicator, limit_s: float = COME_S) -> None:
        self._gpu, self._left, self._lock = gpu, threading.Event(), threading.Lock()
        self._comm: object = None
        asked = nccl.UniqueId()
        if comm.rank == 0:
            asked = _told(nccl.get_unique_id)
        rows = comm.all_gather(np.frombuffer(bytes(asked), np.uint8))
        ranks, place = len(rows), nccl.UniqueId.from_buffer(rows[0].tobytes())

        def connect() -> None:
            gpu.use()
            if self._joined(_told(lambda: nccl.comm_init_rank(ranks, place, comm.rank))):
                self._try(ranks)

        comm.at_abort(self.abort)
        work = _Work(connect)
        try:
            connected = work.ended(limit_s, self._left)
            if self._left.is_set():
                raise ExecutorError(f"rank {comm.rank} was being connected when the ranks ended")
            if not connected:
                raise ExecutorError(
                    f"NCCL has not connected rank {comm.rank} with the others in {limit_s:g} s: "
                    f"{NETWORK}"
                )
        except BaseException:
            self.close()  # what waits on the stream ends
            if self._comm is not None:  # and gives back what it tried with
                with suppress(Exception):
                    work.ended(CLOSE_S)
            raise

    def queueing(self, symbol: str, args: Sequence[int | float]) -> Callable[[], None]:
        """What puts the call on the stream: "all_gather" of (from, to, bytes of this rank), or
        "all_reduce" of bf16, whose bytes are as many on every rank."""
        source, to, nbytes = (int(arg) for arg in args)
        stream = int(self._gpu.stream)

        def gather() -> None:
            _told(lambda: nccl.all_gather(source, to, nbytes, BYTES, self._comm, stream))

        def add() -> None:
            count = nbytes // 2
            _told(lambda: nccl.all_reduce(source, to, count, BF16, SUM, self._comm, stream))

        return {"all_gather": gather, "all_reduce": add}[symbol]

    def abort(self) -> None:
        """Ends what waits for other ranks on the stream, whose results are nobody's; for another
        thread."""
        self._let_go(0.0)

    def close(self) -> None:
        """Lets the other ranks go without waiting for them; nothing may be queued any more. Raises
        nothing: what led to it is what is to be told."""
        try:
            if not self._let_go(CLOSE_S):
                log.warning("NCCL has not closed in %g s; it is left", CLOSE_S)
        except ExecutorError as error:
            log.warning("NCCL is left as it is: %s", error)

    def _let_go(self, limit_s: float) -> bool:
        with self._lock:
            left = self._left.is_set() or self._comm is None
            self._left.set()
        return left or _Work(lambda: _told(lambda: nccl.comm_abort(self._comm))).ended(limit_s)

    def _joined(self, made: object) -> bool:
        """Keeps what NCCL has made. False, and it is given back, where nobody waits for it."""
        with self._lock:
            self._comm, left = made, self._left.is_set()
        if left:
            _told(lambda: nccl.comm_abort(made))
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
                with suppress(ExecutorError):  # a device that is lost has said so before
                    self._gpu.free(place)


def _told(call: Callable[[], object]) -> object:
    """What the call gives. Raises ExecutorError with NCCL's words."""
    try:
        return call()
    except nccl.NCCLError as error:
        raise ExecutorError(f"NCCL says {error}: {NETWORK}") from error
    except RuntimeError as error:
        raise ExecutorError(f"NCCL cannot be loaded ({error}): {extra('nccl')}") from error


class _Work:
    """Something that may never end, in a thread of its own."""

    def __init__(self, work: Callable[[], object]) -> None:
        self._work, self._failed = work, list[BaseException]()
        self._thread = threading.Thread(target=self._run, name="nccl", daemon=True)
        self._thread.start()

    def ended(self, limit_s: float, left: threading.Event | None = None) -> bool:
        """False when it has not ended in time, or before `left`. Raises what it raised."""
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
