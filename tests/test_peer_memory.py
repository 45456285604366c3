"""Regions that ranks read of each other, on a driver that hands out numbers."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

pytest.importorskip("cuda.bindings")

from spark_engine import cuda_driver, device, peer_memory
from spark_engine.device import Gpu
from spark_engine.device_resources import DeviceResources
from spark_engine.errors import EngineError
from spark_engine.peer_memory import GRANULE, HANDLE_BYTES, PeerMemory
from tests import fake_driver
from tests.fake_driver import FakeDriver, real


class Driver(FakeDriver):
    """Its handles are the address eight times over; an opened one lies 1000 further."""

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
    told: list[bytes] = []

    def gather(handle: bytes) -> list[bytes]:
        told.append(handle)
        assert any(call[0] == "cuStreamSynchronize" for call in driver.asked), "zeros come first"
        others = [(70).to_bytes(8, "little") * 8, handle, (90).to_bytes(8, "little") * 8]
        return others

    peers = PeerMemory(resources, GRANULE + 1, 1, gather)
    sizes = [call[1] for call in driver.asked if call[0] == "cuMemAlloc"]
    assert sizes == [2 * GRANULE, 24]
    assert peers.addresses == (1070, peers.own, 1090) and uploaded == [[*peers.addresses]]
    assert int.from_bytes(told[0][:8], "little") == peers.own
    assert driver.held["cuIpcOpenMemHandle"] == 2
    resources.close()
    gpu.close()
    assert not +driver.held


def test_gpus_without_peer_access_are_named(driver: Driver) -> None:
    driver.fails = ("cuIpcOpenMemHandle",)
    gpu = Gpu()
    resources = DeviceResources(gpu)
    with pytest.raises(EngineError, match="the GPU of rank 0 cannot read that of rank 1"):
        PeerMemory(resources, 8, 0, lambda handle: [handle, handle])
    resources.close()
    gpu.close()
    assert not +driver.held
