"""Sums, gathered arrays and barriers of ranks: equal bits on all, over sockets of both kinds."""

import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, TypeVar

import ml_dtypes
import numpy as np
import pytest

from spark_engine.errors import ExecutorError
from spark_engine.runtime.executors.communicator import Communicator
from spark_engine.runtime.ranks import running_clock
from spark_engine.runtime.ranks.communicator import LinkCommunicator
from spark_engine.runtime.ranks.links import Links

T = TypeVar("T")
TRANSPORTS = ("unix", "tcp")
HANGS_S = 120.0  # ends a test that hangs


def meeting(transport: str, ranks: int, limit_s: float = HANGS_S) -> list[Communicator]:
    """Every rank's communicator; threads replace processes."""
    peers: list[dict[int, socket.socket]] = [{} for _ in range(ranks)]
    for i in range(ranks):
        for j in range(i + 1, ranks):
            peers[i][j], peers[j][i] = _pair(transport)
    return [LinkCommunicator(rank, peers[rank], limit_s) for rank in range(ranks)]


def _pair(transport: str) -> tuple[socket.socket, socket.socket]:
    if transport == "unix":
        return socket.socketpair()
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        return one, server.accept()[0]


def together(comms: list[Communicator], work: Callable[[Communicator], T]) -> list[T]:
    with ThreadPoolExecutor(len(comms)) as pool:
        found = [pool.submit(work, comm) for comm in comms]
    for comm in comms:
        comm.close()
    return [one.result() for one in found]


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float32])
def test_all_ranks_have_the_bits_of_the_sum_in_their_order(
    transport: str, ranks: int, dtype: type
) -> None:
    rng = np.random.default_rng(0)
    parts = rng.standard_normal((ranks, 7, 33)).astype(dtype)
    parts[0] *= 100  # another order of the sum rounds differently
    found = together(meeting(transport, ranks), lambda comm: comm.all_reduce(parts[comm.rank]))
    total = np.zeros((7, 33), np.float32)
    for part in parts:
        total = total + part.astype(np.float32)
    for one in found:
        assert one.dtype == parts.dtype
        assert one.tobytes() == total.astype(dtype).tobytes()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_calls_follow_each_other_and_arrays_may_be_larger_than_a_buffer(transport: str) -> None:
    ranks = 3

    def work(comm: Communicator) -> None:
        rng = np.random.default_rng(comm.rank)
        for turn in range(40):
            if comm.rank == turn % ranks:
                time.sleep(rng.uniform(0, 0.002))
            mine = np.arange(turn * 3, dtype=np.float32) + 1000 * comm.rank
            found = comm.all_reduce(mine)
            assert (found == 3 * np.arange(turn * 3) + 3000).all()
            gathered = comm.all_gather(np.array([[comm.rank, turn]], np.int64))
            assert gathered.tolist() == [[[rank, turn]] for rank in range(ranks)]
            comm.barrier()
        large = np.full(1 << 20, comm.rank, np.float32)  # more than the system's buffers hold
        assert (comm.all_reduce(large) == 3).all()

    together(meeting(transport, ranks), work)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_late_rank_is_named_in_time(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that stops until the other ranks wait only for rank 1."""
    comms = meeting(transport, 3, limit_s=0.2)
    missing: dict[int, set[int]] = {}
    wait = Links._wait

    def watched(links: Links, out: dict[int, object], in_: dict[int, object], *more: Any) -> None:
        missing[links.rank] = {*out, *in_}
        wait(links, out, in_, *more)  # type: ignore[arg-type]

    def clock() -> float:
        alone = all(missing.get(rank) == {1} for rank in (0, 2))
        return 100.3 if alone else 100.0

    monkeypatch.setattr(Links, "_wait", watched)
    monkeypatch.setattr(running_clock, "time", SimpleNamespace(monotonic=clock))

    def work(comm: Communicator) -> str:
        if comm.rank == 1:
            return ""
        with pytest.raises(ExecutorError) as error:
            comm.all_reduce(np.ones(4, np.float32))
        return str(error.value)

    words = together(comms, work)
    assert all("rank 1 did not reach all_reduce 0 of 16 bytes in 0.2 s" in words[r] for r in (0, 2))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_ended_rank_is_named_at_once(transport: str) -> None:
    comms = meeting(transport, 2)

    def work(comm: Communicator) -> str:
        if comm.rank == 1:
            comm.close()
            return ""
        with pytest.raises(ExecutorError) as error:
            comm.barrier()
            comm.barrier()
        return str(error.value)

    assert "rank 1 is gone" in together(comms, work)[0], "not a timeout"


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(("call", "size"), [("all_reduce", 5), ("all_gather", 4)])
def test_ranks_at_different_calls_are_reported(transport: str, call: str, size: int) -> None:
    """Also with as many bytes: else the ranks would exchange the bytes of different calls."""

    def work(comm: Communicator) -> str:
        with pytest.raises(ExecutorError) as error:
            if comm.rank:
                getattr(comm, call)(np.ones(size, np.float32))
            else:
                comm.all_reduce(np.ones(4, np.float32))
        return str(error.value)

    words = together(meeting(transport, 2), work)
    where = f"rank 1 is at {call} 0 of {4 * size} bytes, rank 0 at all_reduce 0 of 16 bytes"
    assert where in words[0] and "do not run the same plan" in words[1]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_another_thread_ends_a_call(transport: str) -> None:
    one, other = meeting(transport, 2)
    threading.Timer(0.1, one.abort, ("the engine is closed",)).start()
    with pytest.raises(ExecutorError, match="the engine is closed"):
        one.barrier()
    one.close()
    other.close()
