"""Calls of the driver, with a fake driver: memory, resident blocks, release of resources.

Items 4, 5 and 11 of the hazards.
"""

import ctypes
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cuda.bindings", reason="needs the extra `cuda`")

from cuda.bindings import driver as real  # noqa: E402

from spark_engine.device import cuda_driver  # noqa: E402
from spark_engine.device import gpu as device
from spark_engine.device.resources import DeviceResources  # noqa: E402
from spark_engine.errors import CapacityError, ExecutorError  # noqa: E402
from spark_engine.kernel import Shape  # noqa: E402
from spark_engine.runtime.engine import load as module  # noqa: E402
from spark_engine.runtime.executors import native  # noqa: E402
from tests.fake_driver import FakeDriver  # noqa: E402
from tests.runtime import native_folder as toy  # noqa: E402
from tests.runtime.fake_gpu import FakeGpu  # noqa: E402

LITTLE, MUCH = 1 << 20, 1 << 36


def use(monkeypatch: pytest.MonkeyPatch, driver: FakeDriver, available: int | None = MUCH) -> None:
    """Installs the fake driver and this figure of available host memory."""
    for place in (cuda_driver, device):
        monkeypatch.setattr(place, "driver", driver)
    monkeypatch.setattr(cuda_driver, "available_memory", lambda: available)


def test_an_integrated_gpu_has_what_the_host_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver counts the page cache as taken there."""
    driver = FakeDriver(LITTLE, INTEGRATED=1)
    use(monkeypatch, driver)
    gpu = device.Gpu()
    assert gpu.free_bytes == MUCH
    assert not any(call[0] == "cuMemGetInfo" for call in driver.asked)
    use(monkeypatch, FakeDriver(MUCH, INTEGRATED=1), available=LITTLE)
    assert device.Gpu().free_bytes == LITTLE


def test_a_gpu_with_separate_memory_has_what_the_driver_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use(monkeypatch, FakeDriver(LITTLE))
    assert device.Gpu().free_bytes == LITTLE
    use(monkeypatch, FakeDriver(LITTLE, INTEGRATED=1), available=None)
    assert device.Gpu().free_bytes == LITTLE, "where the host says nothing"


@pytest.mark.parametrize("call", ["cuMemAlloc", "cuMemHostAlloc"])
def test_out_of_memory_names_what_empties_it(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """In a memory shared with the host, most of the available bytes may be page cache."""
    for integrated in (0, 1):
        driver = FakeDriver(LITTLE, fails=(call,), INTEGRATED=integrated)
        driver.error = "OUT_OF_MEMORY"
        use(monkeypatch, driver)
        monkeypatch.setattr(cuda_driver, "free_memory", lambda: 1 << 29)
        gpu = device.Gpu()
        with pytest.raises(CapacityError, match=r"OUT_OF_MEMORY \(2\) to 5\.00 GiB") as refused:
            (gpu.allocate if call == "cuMemAlloc" else gpu.pinned)(5 << 30)
        words = str(refused.value)
        assert ("64.00 are available and 0.50 are free" in words) == bool(integrated)
        assert ("echo 3 | sudo tee /proc/sys/vm/drop_caches" in words) == bool(integrated)
        assert "--kv-tokens" in words
    driver.fails = (call, "cuCtxGetDevice")
    with pytest.raises(CapacityError, match="stop other programs on the GPU"):
        gpu.allocate(1) if call == "cuMemAlloc" else gpu.pinned(1)


def test_an_engine_opens_on_an_integrated_gpu_with_memory_in_page_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Card(FakeGpu):
        def __init__(self) -> None:
            super().__init__(toy.KERNELS)
            self.real = device.Gpu()

        @property
        def free_bytes(self) -> int:  # type: ignore[override]
            return self.real.free_bytes

    toy.write(tmp_path)
    monkeypatch.setattr(native, "Gpu", Card)
    monkeypatch.setattr(module, "runnable_targets", lambda hosts: ("cpu", toy.TARGET))
    use(monkeypatch, FakeDriver(1000, INTEGRATED=1))
    module.load(tmp_path).close()
    use(monkeypatch, FakeDriver(MUCH, INTEGRATED=1), available=1000)
    with pytest.raises(CapacityError, match="0.00 GiB are free"):
        module.load(tmp_path)


def test_copies_within_a_device_are_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the binding's own types, which it does not make of numbers."""
    driver = FakeDriver()
    use(monkeypatch, driver)
    gpu = device.Gpu()
    gpu.copy_all([])
    gpu.copy_all([(1 << 40, 2, 3), (4, 5, 6)])
    (call,) = [asked for asked in driver.asked if asked[0].startswith("cuMemcpy")]
    name, to, source, sizes, count, how, first, kinds, stream = call
    assert (name, sizes, count, first, kinds) == ("cuMemcpyBatchAsync", [3, 6], 2, [0], 1)
    assert [int(p) for p in to] == [1 << 40, 4] and [int(p) for p in source] == [2, 5]
    assert {type(p) for p in (*to, *source)} == {real.CUdeviceptr} and stream is gpu.stream
    order = real.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
    assert [h.srcAccessOrder for h in how] == [order]


@pytest.mark.parametrize(
    ("product", "capability", "sms", "gib", "card"),
    [
        ("NVIDIA H200", (9, 0), 132, 139.8, "h200"),
        ("NVIDIA H100 80GB HBM3", (9, 0), 132, 79.1, "h100"),
        ("NVIDIA H100 PCIe", (9, 0), 114, 79.1, "NVIDIA H100 PCIe, 114 SMs, 79 GiB"),
        ("NVIDIA GB10", (12, 1), 48, 119.6, "gb10"),  # of which a process has seven eighths
        ("NVIDIA GB9", (12, 1), 24, 64.0, "NVIDIA GB9, 24 SMs, 56 GiB"),
        ("NVIDIA A100", (8, 0), 108, 80.0, None),
    ],
)
def test_the_card_that_is_present(
    monkeypatch: pytest.MonkeyPatch,
    product: str,
    capability: tuple[int, int],
    sms: int,
    gib: float,
    card: str | None,
) -> None:
    major, minor = capability
    driver = FakeDriver(
        MULTIPROCESSOR_COUNT=sms, INTEGRATED=int(capability == (12, 1)),
        COMPUTE_CAPABILITY_MAJOR=major, COMPUTE_CAPABILITY_MINOR=minor,
    )  # fmt: skip
    driver.product, driver.total = product, int(gib * (1 << 30))
    use(monkeypatch, driver)
    found = device.present()
    assert (found.card.name if found else None) == card
    assert device.architecture() == (found.name if found else None)
    driver.fails = ("cuInit",)
    assert device.present() is None


def test_mps_is_what_the_device_says(monkeypatch: pytest.MonkeyPatch) -> None:
    for word in (0, 1):
        use(monkeypatch, FakeDriver(MPS_ENABLED=word))
        assert device.Gpu().shared_by_mps is bool(word)
    driver = FakeDriver()
    use(monkeypatch, driver)
    gpu = device.Gpu()
    driver.fails = ("cuDeviceGetAttribute",)
    assert gpu.shared_by_mps is False, "a driver that does not know the word"


class Occupied(FakeDriver):
    """Three blocks a multiprocessor, or seven clusters."""

    def _answer(self, name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
        if name == "cuOccupancyMaxActiveBlocksPerMultiprocessor":
            assert args == ("kernel", 256, 5000)
            return (3,)
        if name == "cuOccupancyMaxActiveClusters":
            assert args[0] == "kernel" and args[1].numAttrs == 1
            return (7,)
        return super()._answer(name, args)


def test_the_number_of_blocks_that_fit_is_the_drivers(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, Occupied(MULTIPROCESSOR_COUNT=50))
    gpu = device.Gpu()
    single = Shape((400, 1, 1), (32, 8, 1), (), 5000)
    assert gpu.resident_blocks("kernel", single) == 150
    clusters = Shape((400, 1, 1), (32, 8, 1), (), 5000, (2, 2, 1))
    assert gpu.resident_blocks("kernel", clusters) == 28


def test_packed_arguments_are_addresses_of_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a launch gets is what ctypes would make of each value; a value is there once."""
    driver = FakeDriver()
    use(monkeypatch, driver)
    values = [(1 << 63) + 5, -7, -(1 << 40), 0.1, 3]
    kinds = ["address", "i32", "i64", "f32", "i32"]
    uses = [[4, 0, 1, 2, 3], [], [1, 1, 0]]
    gpu = device.Gpu()
    shape = Shape((1, 1, 1), (1, 1, 1), ())
    queues = [gpu.prepare("kernel", shape, args) for args in gpu.pack(values, kinds, uses)]
    for queue in queues:
        queue()
    types = {"address": ctypes.c_uint64, "i32": ctypes.c_int32, "i64": ctypes.c_int64}
    types |= {"f32": ctypes.c_float}
    given = [call[3] for call in driver.asked if call[0] == "cuLaunchKernelEx"]
    for use_, pointers in zip(uses, given, strict=True):
        found = [types[kinds[i]].from_address(p).value for i, p in zip(use_, pointers, strict=True)]
        assert found == [types[kinds[i]](values[i]).value for i in use_]
    assert given[2][0] == given[2][1] == given[0][2] and given[2][2] == given[0][1]


NONE: Counter[str] = Counter()


def test_what_the_driver_hands_out_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeDriver()
    use(monkeypatch, driver)
    gpu = device.Gpu()
    resources = DeviceResources(gpu)
    resources.zeros(5), resources.event(), resources.graph(lambda: None)
    modules = [gpu.module(code) for code in (b"x", b"y", b"z")]
    gpu.unload(modules[1])
    assert driver.held["cuModuleLoadData"] == 2 and driver.held["cuStreamEndCapture"] == 0
    resources.close()
    gpu.close()
    gpu.close()
    assert +driver.held == -driver.held == NONE, driver.held


@pytest.mark.parametrize("call", ["cuStreamCreate", "cuGraphInstantiate", "cuStreamEndCapture"])
def test_what_was_made_before_a_failure_comes_back(
    monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    driver = FakeDriver(fails=(call,))
    use(monkeypatch, driver)
    with pytest.raises(ExecutorError, match="UNKNOWN"):
        gpu = device.Gpu()
        resources = DeviceResources(gpu)
        try:
            resources.graph(lambda: None)
        finally:
            resources.close()
            gpu.close()
    assert +driver.held == -driver.held == NONE, driver.held


def test_a_recording_that_fails_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeDriver()
    use(monkeypatch, driver)
    gpu = device.Gpu()

    def broken() -> None:
        raise ExecutorError("a launch was refused")

    with pytest.raises(ExecutorError, match="a launch was refused"):
        DeviceResources(gpu).graph(broken)
    calls = [call[0] for call in driver.asked]
    assert calls.count("cuStreamBeginCapture") == calls.count("cuStreamEndCapture") == 1
    gpu.close()
    assert +driver.held == -driver.held == NONE, driver.held


def test_one_part_that_fails_keeps_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """A context that is lost answers every call so."""
    driver = FakeDriver()
    use(monkeypatch, driver)
    gpu = device.Gpu()
    gpu.module(b"x")
    driver.fails = ("cuModuleUnload", "cuStreamDestroy")
    with pytest.raises(ExecutorError):
        gpu.close()
    assert driver.held["cuDevicePrimaryCtxRetain"] == 0
