"""Regions that ranks read from each other, with a fake driver."""

import ctypes
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cuda.bindings")

from spark_engine.device import cuda_driver, peer_memory
from spark_engine.device import gpu as device
from spark_engine.device.gpu import Gpu
from spark_engine.device.peer_memory import GRANULE, HANDLE_BYTES, PeerMemory
from spark_engine.device.resources import DeviceResources
from spark_engine.errors import EngineError, ExecutorError
from spark_engine.runtime.executors import peers
from tests import fake_driver
from tests.fake_driver import FakeDriver, real


class Driver(FakeDriver):
    """A handle is the address eight times; an opened one has 1000 added."""

    def _answer(self, name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
        if name == "cuIpcGetMemHandle":
            handle = real.CUipcMemHandle()
            ctypes.memmove(handle.getPtr(), args[0].to_bytes(8, "little") * 8, HANDLE_BYTES)
            return (handle,)
        return super()._answer(name, args)

    def cuIpcOpenMemHandle(self, handle: Any, flags: int) -> tuple[Any, ...]:  # noqa: N802
        self.asked.append(("cuIpcOpenMemHandle", flags))
        if "cuIpcOpenMemHandle" in self.fails:
            return (real.CUresult.CUDA_ERROR_PEER_ACCESS_UNSUPPORTED,)
        self.held["cuIpcOpenMemHandle"] += 1
        data = ctypes.string_at(handle.getPtr(), HANDLE_BYTES)
        return real.CUresult.CUDA_SUCCESS, 1000 + int.from_bytes(data[-8:], "little")


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    for module in (cuda_driver, device, peer_memory):
        monkeypatch.setattr(module, "driver", made)
    monkeypatch.setitem(fake_driver.ENDS, "cuIpcCloseMemHandle", "cuIpcOpenMemHandle")
    return made


def test_every_ranks_region_is_known_and_closed_again(driver: Driver) -> None:
    uploaded: list[list[int]] = []
    gpu = Gpu()
    gpu.upload = lambda address, array: uploaded.append(array.tolist())  # type: ignore[method-assign]
    resources = DeviceResources(gpu)
    handles: list[bytes] = []

    def gather(handle: bytes) -> list[bytes]:
        handles.append(handle)
        assert any(call[0] == "cuStreamSynchronize" for call in driver.asked), "zeros come first"
        others = [(70).to_bytes(8, "little") * 8, handle, (90).to_bytes(8, "little") * 8]
        return others

    held: list[tuple[int, int]] = []

    def part() -> None:
        held.append((driver.held["cuIpcOpenMemHandle"], driver.held["cuMemAlloc"]))

    memory = PeerMemory(resources, GRANULE + 1, 1, gather, part)
    sizes = [call[1] for call in driver.asked if call[0] == "cuMemAlloc"]
    assert sizes == [2 * GRANULE, 24]
    assert memory.addresses == (1070, memory.own, 1090) and uploaded == [[*memory.addresses]]
    assert int.from_bytes(handles[0][:8], "little") == memory.own
    assert driver.held["cuIpcOpenMemHandle"] == 2 and held == []
    resources.close()
    assert held == [(0, 1)], "others may still have what is freed here, or it was freed before"
    gpu.close()
    assert not +driver.held


class Comm:
    """A communicator in which the other rank reaches only the first barrier."""

    rank, limit_s = 0, 40.0

    def __init__(self) -> None:
        self.limits: list[float] = []

    def all_gather(self, array: Any) -> Any:
        return np.stack([array, array])

    def barrier(self) -> None:
        self.limits.append(self.limit_s)
        if len(self.limits) > 1:
            raise ExecutorError("rank 1 is gone")


def test_a_process_that_has_ended_is_not_waited_for(driver: Driver) -> None:
    gpu, comm = Gpu(), Comm()
    gpu.upload = lambda address, array: None  # type: ignore[method-assign]
    resources = DeviceResources(gpu)
    peers.connect_peers(resources, 8, comm)
    resources.close()
    assert comm.limits == [40.0, peers.PART_S]
    gpu.close()
    assert not +driver.held


def test_gpus_without_peer_access_are_named(driver: Driver) -> None:
    driver.fails = ("cuIpcOpenMemHandle",)
    gpu = Gpu()
    resources = DeviceResources(gpu)
    with pytest.raises(EngineError, match="the GPU of rank 0 cannot read that of rank 1"):
        PeerMemory(resources, 8, 0, lambda handle: [handle, handle], lambda: None)
    resources.close()
    gpu.close()
    assert not +driver.held
