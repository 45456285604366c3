"""Ranks connected by NCCL: fake GPUs and a fake NCCL in numpy, two ranks in two threads."""

import importlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("cuda.bindings", reason="needs the extra `cuda`")

from spark_engine.errors import EngineError, ExecutorError  # noqa: E402
from spark_engine.runtime.executors import native  # noqa: E402
from tests.runtime import fake_nccl  # noqa: E402
from tests.runtime.executors import test_native as one_rank  # noqa: E402
from tests.runtime.fake_gpu import NOTHING, FakeGpu  # noqa: E402
from tests.runtime.fake_nccl import FakeNccl  # noqa: E402
from tests.runtime.ranks.test_communicator import meeting  # noqa: E402

T = TypeVar("T")
PART = 32  # bytes of a rank


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> FakeNccl:
    return fake_nccl.install(monkeypatch)


@pytest.fixture
def module(nccl: FakeNccl) -> Iterator[Any]:
    yield importlib.import_module(fake_nccl.MODULE)


class Ranks:
    """Two ranks: a GPU, a stream and a socket each."""

    def __init__(self, nccl: FakeNccl, kernels: Any = None, ranks: int = 2) -> None:
        self.gpus = [FakeGpu(kernels or {}) for _ in range(ranks)]
        for stream, gpu in enumerate(self.gpus, 70):
            gpu.stream = stream  # type: ignore[attr-defined]
            nccl.gpus[stream] = gpu
        self.comms: list[Any] = meeting("tcp", ranks)

    def each(self, work: Callable[[int], T]) -> list[T]:
        with ThreadPoolExecutor(len(self.gpus)) as pool:
            return [*pool.map(work, range(len(self.gpus)))]

    def close(self) -> None:
        for comm in self.comms:
            comm.close()


@pytest.fixture
def two(nccl: FakeNccl) -> Iterator[Ranks]:
    made = Ranks(nccl)
    yield made
    made.close()


def test_parts_of_all_ranks_come_to_all(two: Ranks, module: Any, nccl: FakeNccl) -> None:
    rng = np.random.default_rng(0)
    parts = rng.standard_normal((2, PART // 2)).astype(ml_dtypes.bfloat16)

    def rank(number: int) -> tuple[bytes, bytes]:
        gpu = two.gpus[number]
        made = module.Nccl(gpu, two.comms[number])
        x, both, y = gpu.allocate(PART), gpu.allocate(2 * PART), gpu.allocate(PART)
        gpu.upload(x, parts[number])
        made.queueing("all_gather", (x, both, PART))()
        made.queueing("all_reduce", (x, y, PART))()
        gpu.wait()
        found = gpu.at(both, 2 * PART).tobytes(), gpu.at(y, PART).tobytes()
        two.comms[number].barrier()  # the other rank may still read the memory
        for place in (x, both, y):
            gpu.free(place)
        made.close()
        return found

    total = parts[0].astype(np.float32) + parts[1].astype(np.float32)
    assert two.each(rank) == [(parts.tobytes(), total.astype(parts.dtype).tobytes())] * 2
    assert nccl.calls[:2] == ["all_gather", "all_reduce"], "the first calls are its own"
    assert all(comm.aborted for comm in nccl.comms)
    assert not any(gpu.blocks for gpu in two.gpus), "the first calls' memory was not freed"


def test_a_step_that_waits_for_a_rank_ends_with_the_group(
    two: Ranks, module: Any, nccl: FakeNccl
) -> None:
    """Otherwise the device waits for the failed rank without end, and closing the engine waits for
    the device."""
    made = two.each(lambda rank: module.Nccl(two.gpus[rank], two.comms[rank]))
    gpu = two.gpus[0]
    x, y = gpu.allocate(PART), gpu.allocate(PART)
    made[0].queueing("all_reduce", (x, y, PART))()
    step = threading.Thread(target=gpu.wait)
    step.start()
    time.sleep(0.05)
    assert step.is_alive()
    two.comms[0].abort("rank 1 is gone")
    step.join(30)
    assert not step.is_alive()
    made[0].close()
    with pytest.raises(ExecutorError, match="rank 1 is gone"):
        two.comms[0].barrier()
    assert [comm.aborted for comm in nccl.comms].count(True) == 1


def refusals(two: Ranks, module: Any, *limits_s: float) -> list[str]:
    """What each rank says, given its time limit, where no connection is made."""

    def rank(number: int) -> str:
        with pytest.raises(ExecutorError) as error:
            module.Nccl(two.gpus[number], two.comms[number], *limits_s[number : number + 1])
        return str(error.value)

    return two.each(rank)


def test_a_connection_timeout_names_the_remedy(two: Ranks, module: Any, nccl: FakeNccl) -> None:
    nccl.late.clear()
    found = refusals(two, module, 0.05, 0.05)
    nccl.late.set()
    for number, words in enumerate(found):
        assert f"not connected rank {number} with the others in 0.05 s" in words
        assert "NCCL_SOCKET_IFNAME" in words


def test_what_nccl_refuses_is_said_in_its_words(two: Ranks, module: Any, nccl: FakeNccl) -> None:
    nccl.says = "unhandled system error"
    words = "NCCL: unhandled system error: NCCL_SOCKET"
    assert all(words in text for text in refusals(two, module))


def test_a_library_that_is_missing_is_named(module: Any, nccl: FakeNccl, two: Ranks) -> None:
    def missing() -> Any:
        raise RuntimeError('Failure finding "libnccl.so.2"')

    nccl.get_unique_id = missing  # type: ignore[method-assign]
    with pytest.raises(ExecutorError, match=r"libnccl.so.2.*install .*nccl4py"):
        module.Nccl(two.gpus[0], two.comms[0])


def test_an_end_that_hangs_is_left(
    two: Ranks, module: Any, nccl: FakeNccl, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other ranks may have ended: closing waits for none of them."""
    hung = threading.Event()
    monkeypatch.setattr(module, "CLOSE_S", 0.05)
    nccl.comm_abort = lambda comm: hung.wait(60)  # type: ignore[assignment, method-assign]
    made = two.each(lambda rank: module.Nccl(two.gpus[rank], two.comms[rank]))
    begin = time.monotonic()
    made[0].close()
    assert time.monotonic() - begin < 30
    hung.set()


def test_the_first_error_of_a_half_made_connection_is_reported(
    two: Ranks, module: Any, nccl: FakeNccl
) -> None:
    """The communicator exists; its first call fails, as does aborting it: it is aborted once."""
    ends: list[Any] = []

    def refuse(*_: object) -> None:
        raise nccl.NCCLError("a first call is refused")

    def end(comm: Any) -> None:
        ends.append(comm)
        raise nccl.NCCLError("an end is refused")

    nccl.all_gather = refuse  # type: ignore[method-assign]
    nccl.comm_abort = end  # type: ignore[method-assign]
    assert all("NCCL: a first call is refused" in words for words in refusals(two, module))
    assert sorted(comm.rank for comm in ends) == [0, 1]
    assert not any(gpu.blocks for gpu in two.gpus), "the first calls' memory was not freed"
    two.comms[0].abort("rank 1 is gone")
    assert len(ends) == 2, "it is aborted only once"


def test_a_connection_ends_with_the_group(two: Ranks, module: Any, nccl: FakeNccl) -> None:
    """It does not wait for its own limit of two minutes."""
    nccl.late.clear()
    joining, join = threading.Event(), nccl.comm_init_rank

    def joins(ranks: int, unique: Any, rank: int) -> Any:
        if rank == 0:
            joining.set()
        return join(ranks, unique, rank)

    def leave() -> None:
        assert joining.wait(60)
        two.comms[0].abort("rank 1 is gone")

    nccl.comm_init_rank = joins  # type: ignore[method-assign]
    leaving = threading.Thread(target=leave)
    leaving.start()
    begin = time.monotonic()
    found = refusals(two, module, 60.0, 0.2)
    assert time.monotonic() - begin < 30
    leaving.join()
    nccl.late.set()
    assert found[0] == "rank 0 was connecting when the ranks ended"
    assert "not connected rank 1" in found[1]


def test_what_is_connected_too_late_is_freed(two: Ranks, module: Any, nccl: FakeNccl) -> None:
    """The caller waits no longer, and no call is made on a closed device."""

    def join(ranks: int, unique: Any, rank: int) -> Any:
        nccl.late.wait()
        nccl.comms.append(fake_nccl.Comm(fake_nccl.Place(ranks), rank))
        return nccl.comms[-1]

    nccl.comm_init_rank = join  # type: ignore[method-assign]
    nccl.late.clear()
    assert all("not connected" in words for words in refusals(two, module, 0.05, 0.05))
    nccl.late.set()
    until = time.monotonic() + 60
    while time.monotonic() < until and [c.aborted for c in nccl.comms] != [True] * 2:
        time.sleep(0.01)
    assert [comm.aborted for comm in nccl.comms] == [True] * 2
    assert not nccl.calls and not any(gpu.blocks for gpu in two.gpus)


def folder(base: Path, symmetric: int) -> Any:
    return one_rank.described(base / "w", symmetric)


def body() -> dict[str, Any]:
    """A kernel writes this rank's part, NCCL gathers both, and a kernel reads them."""
    write = one_rank.launch_row(0, ["rank"], ["arena", 0, PART])
    call = one_rank.launch_row(1, ["arena", 0, PART], ["arena", 256, 2 * PART], ["i64", PART])
    read = one_rank.launch_row(2, ["arena", 256, 2 * PART], ["output", "next_tokens"])
    kernels = [
        {"cubin": 0, "symbol": "write", "shared": 0},
        {"cubin": None, "symbol": "all_gather", "shared": 0},
        {"cubin": 0, "symbol": "read", "shared": 0},
    ]
    return {**one_rank.BODY, "kernels": kernels, "launches": [write, call, read]}


def write(gpu: FakeGpu, rank: int, at: int) -> None:
    gpu.at(at, PART)[:] = rank + 3


def read(gpu: FakeGpu, at: int, to: int) -> None:
    first, second = gpu.at(at, 2 * PART)[[0, PART]]
    gpu.at(to, 12).view(np.int32)[:] = 10 * int(first) + int(second)


@pytest.mark.parametrize("graphs", [True, False])
def test_a_bucket_calls_the_library_between_its_kernels(
    nccl: FakeNccl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, graphs: bool
) -> None:
    ranks = Ranks(nccl, {"write": write, "read": read})
    mine = threading.local()
    monkeypatch.setattr(native, "lock_gpu", lambda: lambda: None)
    monkeypatch.setattr(native, "Gpu", lambda: ranks.gpus[mine.rank])
    asked: list[int] = []

    def rank(number: int) -> list[list[int]]:
        mine.rank = number
        gpu, said = ranks.gpus[number], []

        def rows(available: Any) -> int:
            asked.append(len(nccl.comms))
            return 0

        engine = native.NativeEngine(
            folder(tmp_path, 0), rows, lambda stage: None, graphs, comm=ranks.comms[number]
        )
        executor = engine.open(one_rank.header(), one_rank.payload(body()), Path(), 1)
        specs = {("decode", one_rank.ROWS): executor.specs}
        memory = one_rank.EngineMemory(
            one_rank.STATES, one_rank.tables(one_rank.LIMITS), specs, 2, engine.states,
            engine.tables,
        )  # fmt: skip
        for turn in range(2):
            buffers = memory.buffers("decode", one_rank.ROWS, turn)
            executor.launch(buffers)()
            said.append(buffers["next_tokens"].tolist())
        executor.close()
        assert gpu.held == NOTHING
        return said

    assert ranks.each(rank) == [[[34] * 3] * 2] * 2
    assert asked == [2, 2], "NCCL allocates before the rest is planned"
    assert nccl.calls == ["all_gather", "all_reduce", *["all_gather"] * 3]
    assert all(comm.aborted for comm in nccl.comms)
    ranks.close()


def test_calls_without_a_library_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that read each other's memory have no other connection."""
    gpu = FakeGpu({"write": write, "read": read})
    monkeypatch.setattr(native, "Gpu", lambda: gpu)
    engine = native.NativeEngine(folder(tmp_path, 0), lambda available: 0, lambda stage: None)
    with pytest.raises(EngineError, match="the payload calls all_gather of NCCL"):
        engine.open(one_rank.header(), one_rank.payload(body()), Path(), 1)
    strange = body()
    strange["kernels"][1]["symbol"] = "broadcast"
    with pytest.raises(EngineError, match="'broadcast' is not an NCCL call"):
        engine.open(one_rank.header(), one_rank.payload(strange), Path(), 1)
    engine.close()
