"""NCCL made of numpy, between GPUs of numpy in one process: a thread for each rank.

Keeps what is promised and no more: ranks meet in `comm_init_rank`, calls are queued on a stream and
move bytes when it comes to them, by when every rank must have queued the same call. `install`
puts it in the place of `nccl.bindings.nccl`.
"""

from __future__ import annotations

import sys
import threading
from enum import IntEnum
from types import ModuleType
from typing import Any, ClassVar

import ml_dtypes
import numpy as np
import pytest

from tests.runtime.fake_gpu import FakeGpu

MODULE = "spark_engine.runtime.executors.nccl"


class NCCLError(Exception):
    """What NCCL says."""


class DataType(IntEnum):
    Uint8, Bfloat16 = 1, 9


class RedOp(IntEnum):
    Sum = 0


class UniqueId:
    """128 bytes by which ranks find each other."""

    def __init__(self, data: bytes = b"\0" * 128) -> None:
        self.data = data

    def __bytes__(self) -> bytes:
        return self.data

    @staticmethod
    def from_buffer(data: bytes) -> UniqueId:
        assert len(data) == 128 and any(data), "this id was not requested"
        return UniqueId(bytes(data))


class Place:
    """Where the ranks of one communicator leave their bytes."""

    def __init__(self, ranks: int) -> None:
        self.left: dict[int, tuple[tuple[Any, ...], Any]] = {}
        self.barrier = threading.Barrier(ranks, timeout=30)


class Comm:
    def __init__(self, place: Place, rank: int) -> None:
        self.place, self.rank, self.aborted = place, rank, False


class FakeNccl(ModuleType):
    """`gpus` by stream. `late`: seconds that joining takes; `says`: what every call raises."""

    NCCLError, DataType, RedOp, UniqueId = NCCLError, DataType, RedOp, UniqueId
    made: ClassVar[int] = 0

    def __init__(self) -> None:
        super().__init__("nccl.bindings.nccl")
        self.gpus: dict[int, FakeGpu] = {}
        self.comms: list[Comm] = []
        self.calls: list[str] = []
        self.late = threading.Event()
        self.late.set()
        self.says = ""
        self._places: dict[bytes, Place] = {}
        self._lock = threading.Lock()

    def get_unique_id(self) -> UniqueId:
        FakeNccl.made += 1
        return UniqueId(FakeNccl.made.to_bytes(128, "little"))

    def comm_init_rank(self, ranks: int, unique: UniqueId, rank: int) -> Comm:
        if self.says:
            raise NCCLError(self.says)
        self.late.wait()
        with self._lock:
            place = self._places.setdefault(bytes(unique), Place(ranks))
            comm = Comm(place, rank)
            self.comms.append(comm)
        place.barrier.wait()
        return comm

    def comm_abort(self, comm: Comm) -> None:
        assert not comm.aborted
        comm.aborted = True
        comm.place.barrier.abort()

    def all_gather(
        self, source: int, to: int, count: int, dtype: int, comm: Comm, stream: int
    ) -> None:
        assert dtype == DataType.Uint8
        self._queue("all_gather", source, to, count, comm, stream)

    def all_reduce(
        self, source: int, to: int, count: int, dtype: int, op: int, comm: Comm, stream: int
    ) -> None:
        assert (dtype, op) == (DataType.Bfloat16, RedOp.Sum)
        self._queue("all_reduce", source, to, 2 * count, comm, stream)

    def _queue(self, name: str, source: int, to: int, nbytes: int, comm: Comm, stream: int) -> None:
        gpu = self.gpus[stream]

        def run() -> None:
            if comm.rank == 0:
                self.calls.append(name)
            try:
                parts = self._meet(comm, (name, nbytes), gpu.at(source, nbytes).copy())
            except threading.BrokenBarrierError:  # a rank has aborted: no bytes are left
                assert comm.aborted, "this would wait without end"
                return
            if name == "all_gather":
                gpu.at(to, len(parts) * nbytes)[:] = np.concatenate(parts)
                return
            total = np.zeros(nbytes // 2, np.float32)
            for part in reversed(parts):  # another order than the ranks'
                total += part.view(ml_dtypes.bfloat16).astype(np.float32)
            gpu.at(to, nbytes)[:] = total.astype(ml_dtypes.bfloat16).view(np.uint8)

        gpu._add(run) if gpu.recording is None else gpu.recording.append(run)

    def _meet(self, comm: Comm, call: tuple[Any, ...], own: Any) -> list[Any]:
        place = comm.place
        place.left[comm.rank] = call, own
        place.barrier.wait()
        found = [place.left[rank] for rank in range(place.barrier.parties)]
        place.barrier.wait()
        assert all(other == call for other, _ in found), "the ranks make other calls"
        return [part for _, part in found]


def install(monkeypatch: pytest.MonkeyPatch) -> FakeNccl:
    """The fake where nccl4py would be, for what imports it from here on."""
    fake, package, bindings = FakeNccl(), ModuleType("nccl"), ModuleType("nccl.bindings")
    bindings.nccl = fake  # type: ignore[attr-defined]
    for name, module in (("nccl", package), ("nccl.bindings", bindings)):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "nccl.bindings.nccl", fake)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    return fake
