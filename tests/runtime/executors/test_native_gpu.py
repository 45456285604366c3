"""Native engines on a real GPU: freed memory and resident blocks."""

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cuda.bindings", reason="needs the extra `cuda`")

from spark_engine.builder.build import build  # noqa: E402
from spark_engine.builder.plan.options import Options  # noqa: E402
from spark_engine.device.cuda_driver import attribute, driver, values  # noqa: E402
from spark_engine.device.gpu import Gpu  # noqa: E402
from spark_engine.errors import EngineError  # noqa: E402
from spark_engine.manifest import Manifest  # noqa: E402
from spark_engine.runtime.engine import load as loading  # noqa: E402
from spark_engine.runtime.engine.engine import Engine  # noqa: E402
from spark_engine.runtime.engine.load import load  # noqa: E402
from spark_engine.runtime.engine.request import Request, SamplingParams  # noqa: E402
from spark_engine.runtime.executors.cache_size import (  # noqa: E402
    MOST,
    SHARE,
    SHARED,
    GpuMemory,
    device_rows,
)
from spark_engine.runtime.executors.native import NativeExecutor  # noqa: E402
from spark_engine.runtime.executors.program import Program  # noqa: E402
from tests.checkpoints import write_checkpoint  # noqa: E402
from tests.device.on_gpu import HERE, on_gpu  # noqa: E402
from tests.runtime.engine.drive import said  # noqa: E402
from tests.runtime.taken_memory import Taken, counting  # noqa: E402

MIB = 1 << 20
pytestmark = on_gpu()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An engine with launches in which blocks wait for one another."""
    base = tmp_path_factory.mktemp("native")
    config = {"linear_num_value_heads": 8, "intermediate_size": 4096}
    write_checkpoint(base / "checkpoint", format="modelopt_mixed", config_kwargs=config)
    sizes: dict[str, Any] = {"decode": (1, 4), "prefill": (128,), "max_seqs": 4}
    options = Options(target=HERE, max_context=256, timing=False, **sizes)
    build(base / "checkpoint", base / "engine", options, lambda text: None)
    return base / "engine"


@pytest.fixture
def gpu() -> Iterator[Gpu]:
    """Keeps the context, so that memory which an engine does not free is visible."""
    opened = Gpu()
    yield opened
    opened.close()


def generate(engine: Engine) -> list[int]:
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    return said(engine, Request((1, 2, 3), params))[0]


def test_a_second_engine_is_refused_and_the_first_continues(folder: Path) -> None:
    first = Engine.open(folder)
    wanted = generate(first)
    with pytest.raises(EngineError, match="has an engine open on the GPU"):
        Engine.open(folder)
    assert generate(first) == wanted
    first.close()
    again = Engine.open(folder)
    assert generate(again) == wanted
    again.close()


@pytest.fixture
def taken(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> Taken:
    """Bytes allocated on the GPU, relative to an arbitrary zero."""
    return counting(gpu, monkeypatch)


def lost(taken: Taken, use: Callable[[], None]) -> int:
    """Bytes that each use after the first one leaves allocated; the driver's own allocations happen
    in the first."""
    found = []
    for _ in range(3):
        use()
        found.append(taken())
    return found[2] - found[1]


def bare() -> None:
    """The context and the stream alone. The driver (580.159.04) keeps 4 MiB of every destroyed
    green context, which an engine of a rehearsal has; it keeps nothing of other contexts."""
    Gpu().close()


def test_memory_comes_back(folder: Path, taken: Taken) -> None:
    def use() -> None:
        engine = Engine.open(folder)
        generate(engine)
        engine.close()

    assert abs(lost(taken, use) - lost(taken, bare)) <= MIB


def test_memory_comes_back_when_a_bucket_is_refused(
    folder: Path, taken: Taken, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, count = NativeExecutor._capture, 0

    def refuse_the_last(self: NativeExecutor, payload: bytes) -> Any:
        nonlocal count
        count += 1
        if count % 3 == 0:
            raise EngineError("refused")
        return real(self, payload)

    monkeypatch.setattr(NativeExecutor, "_capture", refuse_the_last)

    def use() -> None:
        with pytest.raises(EngineError, match="refused"):
            load(folder)

    assert abs(lost(taken, use) - lost(taken, bare)) <= MIB


def test_the_plan_is_what_the_device_gives(folder: Path, taken: Taken) -> None:
    load(folder).close()
    before = taken()
    loaded = load(folder, cache_bytes=0)
    assert loaded.folder and loaded.device_states and loaded.device_states.snapshot_rows == 0
    planned, more = loaded.folder.manifest.memory.total, taken() - before
    loaded.close()
    # In addition: partly used pages of 2 MiB, cubins, graphs.
    assert planned - 2 * MIB <= more <= planned + 128 * MIB, (planned, more)


def test_the_cache_takes_its_share_of_free_memory(
    folder: Path, gpu: Gpu, taken: Taken, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A share of the memory that is free at the start; if the host shares it, other programs change
    it."""
    memories: list[GpuMemory] = []

    def rows_in(manifest: Manifest, available: GpuMemory, asked: int | None) -> int:
        memories.append(available)
        return device_rows(manifest, available, asked)

    monkeypatch.setattr(loading, "device_rows", rows_in)
    load(folder).close()
    before, free = taken(), gpu.free_bytes
    loaded = load(folder)
    assert loaded.folder and loaded.device_states
    memory, store = loaded.folder.manifest.memory, loaded.device_states
    more, kept = taken() - before, store.snapshot_rows * store.snapshot_bytes
    loaded.close()
    available = memories[-1]
    assert (available.total, available.shared) == (gpu.total_bytes, gpu.integrated)
    assert gpu.integrated or abs(available.free - free) <= 128 * MIB, (available, free)
    part = (available.usable - memory.total) // (SHARED if gpu.integrated else SHARE)
    most = min(part, gpu.total_bytes // MOST)
    assert most - store.snapshot_bytes < kept <= most
    assert abs(more - memory.total - kept) <= 160 * MIB, (more, memory, kept)


def test_resident_launches_fit_and_larger_ones_are_refused(folder: Path, gpu: Gpu) -> None:
    loaded = load(folder)
    assert loaded.folder and loaded.open_bucket
    sms, seen = gpu.multiprocessors, 0
    for bucket in loaded.folder.manifest.buckets:
        file = loaded.folder.engine(bucket)
        program = Program.read(file.payload)
        for number, record in enumerate(program.launches):
            if not record.resident:
                continue
            seen += 1
            kernel = program.kernels[record.kernel]
            (function,) = gpu.load(kernel.cubin, [kernel.symbol], kernel.shared).values()
            available = gpu.resident_blocks(function, record.shape)
            assert available % sms == 0 and math.prod(record.shape.grid) <= sms <= available
            if seen == 1:
                wide = widened(file.payload, number, available + 1)
                with pytest.raises(
                    EngineError, match=f"launches {available + 1} blocks.*runs {available} at"
                ):
                    loaded.open_bucket(file.header, wide, folder, 1)
    assert seen, "no launch waits"
    loaded.close()


def widened(payload: bytes, number: int, blocks: int) -> bytes:
    """The payload with another grid of one launch."""
    length = int.from_bytes(payload[:8], "little")
    body = json.loads(payload[8 : 8 + length])
    body["launches"][number]["grid"] = [blocks, 1, 1]
    text = json.dumps(body).encode()
    return len(text).to_bytes(8, "little") + text + payload[8 + length :]


def test_the_card_reports_shared_memory_and_mps(gpu: Gpu) -> None:
    assert attribute(gpu._device, "MPS_ENABLED") in (0, 1) and not gpu.shared_by_mps
    if not attribute(gpu._device, "INTEGRATED"):
        assert abs(gpu.free_bytes - int(values(driver.cuMemGetInfo())[0])) <= MIB
