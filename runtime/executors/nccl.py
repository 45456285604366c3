"""NCCL between the ranks of an engine: this rank's end, and calls that wait on the GPU's stream.

The one file that imports nccl4py (the extra `nccl`). Knows addresses and a stream; knows no op. How
the bytes travel, RDMA or sockets, is NCCL's to choose, and its own variables (NCCL_*) tell it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

import numpy as np
from nccl.bindings import nccl

from spark_engine.device import Gpu
from spark_engine.errors import ExecutorError
from spark_engine.hints import extra
from spark_engine.runtime.executors.peers import Ranked

COME_S = 120.0  # for all ranks to be connected
CLOSE_S = 5.0
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
    ExecutorError where NCCL is missing, refuses, or has not connected all ranks in `limit_s`.
    """

    def __init__(self, gpu: Gpu, comm: Ranked, limit_s: float = COME_S) -> None:
        self._gpu, self._left, self._lock = gpu, False, threading.Lock()
        self._comm: object = None
        asked = nccl.UniqueId()
        if comm.rank == 0:
            asked = _told(nccl.get_unique_id)
        rows = comm.all_gather(np.frombuffer(bytes(asked), np.uint8))
        ranks, place = len(rows), nccl.UniqueId.from_buffer(rows[0].tobytes())

        def connect() -> None:
            gpu.use()
            self._comm = _told(lambda: nccl.comm_init_rank(ranks, place, comm.rank))
            self._try(ranks)

        comm.at_abort(self.abort)
        if not _within(limit_s, connect):
            self.close()  # what waits on the stream ends
            raise ExecutorError(
                f"NCCL has not connected rank {comm.rank} with the others in {limit_s:g} s: "
                f"{NETWORK}"
            )

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
        """Lets the other ranks go without waiting for them; nothing may be queued any more."""
        if not self._let_go(CLOSE_S):
            log.warning("NCCL has not closed in %g s; it is left", CLOSE_S)

    def _let_go(self, limit_s: float) -> bool:
        with self._lock:
            left, self._left = self._left or self._comm is None, True
        return left or _within(limit_s, lambda: _told(lambda: nccl.comm_abort(self._comm)))

    def _try(self, ranks: int) -> None:
        source, to = self._gpu.allocate(SMALL), self._gpu.allocate(ranks * SMALL)
        self._gpu.fill(source, 0, SMALL)
        for symbol in ("all_gather", "all_reduce"):
            self.queueing(symbol, (source, to, SMALL))()
        self._gpu.wait()
        self._gpu.free(to)
        self._gpu.free(source)


def _told(call: Callable[[], object]) -> object:
    """What the call gives. Raises ExecutorError with NCCL's words."""
    try:
        return call()
    except nccl.NCCLError as error:
        raise ExecutorError(f"NCCL says {error}: {NETWORK}") from error
    except RuntimeError as error:
        raise ExecutorError(f"NCCL is not to be loaded ({error}): {extra('nccl')}") from error


def _within(limit_s: float, work: Callable[[], object]) -> bool:
    """Does the work in a thread of its own; False when it has not ended in time. Raises what it
    raises."""
    failed: list[BaseException] = []

    def guarded() -> None:
        try:
            work()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=guarded, name="nccl", daemon=True)
    thread.start()
    thread.join(limit_s)
    if failed:
        raise failed[0]
    return not thread.is_alive()
