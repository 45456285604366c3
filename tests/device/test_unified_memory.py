"""A card that shares the host's memory (a DGX Spark): what is built for it, starts and is refused,
and that loading holds the weights once."""

import ctypes
import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cuda.bindings", reason="needs the extra `cuda`")

from spark_engine.builder.build import build  # noqa: E402
from spark_engine.builder.native import gpu_timer  # noqa: E402
from spark_engine.builder.plan import budget  # noqa: E402
from spark_engine.builder.plan.options import Options  # noqa: E402
from spark_engine.device import cuda_driver  # noqa: E402
from spark_engine.device import gpu as device
from spark_engine.device.resources import DeviceResources  # noqa: E402
from spark_engine.device.shared_memory import KEPT  # noqa: E402
from spark_engine.engine_file import read_manifest  # noqa: E402
from spark_engine.errors import CapacityError  # noqa: E402
from spark_engine.kernel import GB10  # noqa: E402
from spark_engine.runtime.engine import load as module  # noqa: E402
from spark_engine.runtime.engine.detect import check_memory  # noqa: E402
from spark_engine.runtime.executors import native, upload  # noqa: E402
from spark_engine.runtime.executors.cache_size import SHARED, GpuMemory  # noqa: E402
from tests.checkpoints import write_checkpoint  # noqa: E402
from tests.fake_spark import GIB, TOTAL, FakeSpark  # noqa: E402
from tests.repository import ROOT  # noqa: E402
from tests.runtime import native_folder as toy  # noqa: E402
from tests.runtime.fake_gpu import FakeGpu  # noqa: E402
from tests.runtime.taken_memory import counting  # noqa: E402
from tests.soak import loading  # noqa: E402

PAGE = mmap.PAGESIZE
WEIGHTS = 256 << 20  # bytes of an engine that is started under a limit


class Card(FakeGpu):
    """A numpy GPU with a Spark's memory, as the fake driver reports it."""

    def __init__(self) -> None:
        super().__init__(toy.KERNELS)
        self.real = device.Gpu()
        self.integrated = self.real.integrated
        self.total_bytes = self.real.total_bytes

    @property
    def free_bytes(self) -> int:  # type: ignore[override]
        return self.real.free_bytes


def _spark(monkeypatch: pytest.MonkeyPatch, available: int, **more: int) -> FakeSpark:
    driver = FakeSpark()
    driver.attributes |= more
    for place in (cuda_driver, device):
        monkeypatch.setattr(place, "driver", driver)
    monkeypatch.setattr(cuda_driver, "available_memory", lambda: available)
    monkeypatch.setattr(native, "Gpu", Card)
    monkeypatch.setattr(module, "runnable_targets", lambda hosts: ("cpu", toy.TARGET))
    return driver


def test_an_engine_that_would_starve_the_host_is_refused_before_anything_is_taken(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    toy.write(tmp_path)
    need = read_manifest(tmp_path).memory.total
    _spark(monkeypatch, KEPT + need)
    module.load(tmp_path, cache_bytes=0).close()
    driver = _spark(monkeypatch, KEPT + need - 1)
    with pytest.raises(CapacityError, match=r"next to the 10\.00 that this machine itself keeps"):
        module.load(tmp_path, cache_bytes=0)
    assert driver.held["cuMemAlloc"] == 0
    discrete = _spark(monkeypatch, 0, INTEGRATED=0)
    discrete.free = need
    module.load(tmp_path, cache_bytes=0).close()


@pytest.fixture(scope="module")
def of_cpu(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("cpu")
    checkpoint = write_checkpoint(base / "checkpoint", {"num_hidden_layers": 4}).path
    options = Options(target="cpu", decode=(1,), prefill=(64,), max_seqs=1, max_context=128)
    build(checkpoint, base / "engine", options, lambda text: None)
    return base / "engine"


def test_an_engine_of_the_cpu_leaves_the_host_its_part_too(
    monkeypatch: pytest.MonkeyPatch, of_cpu: Path
) -> None:
    need, free = read_manifest(of_cpu).memory.total, [0]
    monkeypatch.setattr(module, "available_memory", lambda: free[0])
    for integrated, least in ((1, KEPT + need), (0, need)):
        _spark(monkeypatch, 0, INTEGRATED=integrated)
        free[0] = least
        module.load(of_cpu, threads=1).close()
        free[0] -= 1
        kept = r"next to the 10\.00 that this machine" if integrated else r"GiB are free: stop"
        with pytest.raises(CapacityError, match=kept):
            module.load(of_cpu, threads=1)


def test_an_engine_of_the_cpu_is_opened_in_its_turn(
    monkeypatch: pytest.MonkeyPatch, of_cpu: Path
) -> None:
    """There it measures again: another engine may have taken the memory while it waited."""
    inside, real, free = [False], module.EXECUTORS["ort"], [50 * GIB]

    @contextmanager
    def turn(shared: bool, say: object) -> Iterator[None]:
        inside[0] = shared
        yield
        inside[0] = False

    def opened(*args: Any, sessions: Any) -> Any:
        found.append(inside[0])
        return real(*args, sessions)

    found: list[bool] = []
    monkeypatch.setattr(module, "startup_lock", turn)
    monkeypatch.setattr(module, "EXECUTORS", {"ort": opened})
    monkeypatch.setattr(module, "available_memory", lambda: 1000 if inside[0] else free[0])
    _spark(monkeypatch, 0, INTEGRATED=0)
    module.load(of_cpu, threads=1).close()
    assert found == [False, False]
    _spark(monkeypatch, 0)
    with pytest.raises(CapacityError, match="0.00 GiB are free"):
        module.load(of_cpu, threads=1)
    monkeypatch.setattr(module, "available_memory", lambda: free[0])
    module.load(of_cpu, threads=1).close()
    assert found[2:] == [True, True] and not inside[0]


@pytest.mark.parametrize(
    ("card", "gpus", "ranks"), [("gb10", 1, 1), ("h200", 2, 1), ("h200", 2, 2), ("h200", 3, 2)]
)
def test_the_refusal_says_what_would_help_here(
    monkeypatch: pytest.MonkeyPatch, of_cpu: Path, card: str, gpus: int, ranks: int
) -> None:
    """Neither what is done already, nor what needs GPUs that are absent."""
    _spark(monkeypatch, 0).gpus = gpus
    native = {"executor": "native", "target": "sm_121a", "card": card, "ranks": ranks}
    with pytest.raises(CapacityError) as refused:
        check_memory(replace(read_manifest(of_cpu), **native), 0, 0)  # type: ignore[arg-type]
    words = str(refused.value)
    assert ("--card" in words) == (card != "gb10") and ("--tp" in words) == (gpus > ranks)
    assert "--kv-tokens" in words


def test_the_host_keeps_its_part_of_a_memory_that_it_shares() -> None:
    assert GpuMemory(100 * GIB, TOTAL, shared=True).usable == 90 * GIB
    assert GpuMemory(3 * GIB, TOTAL, shared=True).usable == 0
    assert GpuMemory(3 * GIB, TOTAL).usable == 3 * GIB
    assert GpuMemory(9 * GIB, 20 * GIB, shared=True).kept == 2 * GIB, "a tenth of a small one"
    assert GpuMemory(100 * GIB, TOTAL, shared=True, host=3 * GIB).usable == 97 * GIB
    assert GpuMemory(100 * GIB, TOTAL, host=3 * GIB).usable == 100 * GIB


def test_a_user_says_what_stays_with_the_host(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, of_cpu: Path
) -> None:
    toy.write(tmp_path)
    for folder in (tmp_path, of_cpu):
        need = read_manifest(folder).memory.total
        for kept in (0, 3 * GIB, 20 * GIB):
            free = kept + need
            _spark(monkeypatch, free)
            monkeypatch.setattr(module, "available_memory", lambda free=free: free)
            module.load(folder, threads=1, cache_bytes=0, host_bytes=kept).close()
            with pytest.raises(CapacityError, match="GiB are free"):
                module.load(folder, threads=1, cache_bytes=0, host_bytes=kept + 1)


@pytest.mark.parametrize("gib", [0.5, 14, 19, 30, 60])
def test_what_is_built_for_a_spark_leaves_the_host_its_part(gib: float) -> None:
    """The default plan and the workspace fit into the memory that a process may use."""
    needs = budget.Needs(int(gib * GIB), 150 << 20, 2 << 20, 150 << 20)
    seqs = budget.sequences(GB10, needs)
    pages = budget.pages(GB10, needs, seqs)
    plan = budget.WEIGHTS * needs.weights + budget.WORKSPACE + (seqs + 1) * needs.slot
    plan += (pages + 1) * needs.page
    assert pages > 0 and plan <= budget.SHARE * GB10.card.memory
    assert plan + KEPT <= device.OURS * TOTAL
    snapshots = (device.OURS * TOTAL - KEPT - plan) // SHARED  # as a start takes them
    assert plan + KEPT + snapshots < device.OURS * TOTAL


def _timer(monkeypatch: pytest.MonkeyPatch, **bench: Any) -> Any:
    """The builder's timer, over what `bench` says of operands; it measures 1 s."""
    given = {"fill": lambda _: None, "free": lambda: None, "seconds": lambda functions: 1.0}
    made = SimpleNamespace(**given | {"work": None} | bench)
    monkeypatch.setattr(gpu_timer, "_Bench", lambda *_: made)
    timer: Any = object.__new__(gpu_timer.GpuTimer)
    timer._say, timer._functions = print, lambda *_: []
    return timer


@pytest.mark.parametrize(
    ("missing", "integrated", "available", "timed"),
    [
        (600, 1, KEPT + 1000, None),  # operands are made in the memory that they are timed in
        (600, 0, KEPT + 1000, 1.0),
        (2000, 0, KEPT + GIB, None),  # 1000 bytes of the GPU are free
        (GIB, 1, KEPT + 2 * GIB, None),  # a server has taken nearly all
        (GIB, 1, KEPT + 3 * GIB, 1.0),
    ],
)
def test_the_builders_timer_counts_its_operands_twice_and_leaves_the_host_its_part(
    monkeypatch: pytest.MonkeyPatch, missing: int, integrated: int, available: int,
    timed: float | None,
) -> None:  # fmt: skip
    timer = _timer(monkeypatch, missing=lambda _: missing)
    _spark(monkeypatch, available, INTEGRATED=integrated).free = 1000
    timer._gpu = device.Gpu()
    assert timer._measure(None, None, None) == timed


def test_the_builders_timer_waits_for_an_engine_that_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It holds the lock to measure free memory and allocate operands, and times without it."""
    inside = [False]

    @contextmanager
    def turn(shared: bool, say: object) -> Iterator[None]:
        assert say is print, "the wait is reported"
        inside[0] = shared
        yield
        inside[0] = False

    def seen(*_: object) -> float:
        found.append(inside[0])
        return 1.0

    found: list[bool] = []
    timer = _timer(monkeypatch, missing=lambda _: GIB, fill=seen, seconds=seen)
    monkeypatch.setattr(gpu_timer, "startup_lock", turn)
    for integrated, taken in ((1, [True, False]), (0, [False, False])):
        found.clear()
        _spark(monkeypatch, 50 * GIB, INTEGRATED=integrated).free = 50 * GIB
        timer._gpu = device.Gpu()
        assert timer._measure(None, None, None) == 1.0 and found == taken


def test_the_builders_timer_says_how_many_times_it_did_not_get(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where too little is free, and where another engine does not end its turn."""
    monkeypatch.setattr(gpu_timer, "key_of", lambda *_: "key")
    timer: Any = object.__new__(gpu_timer.GpuTimer)
    timer._timings = SimpleNamespace(notes=["kept"], get=lambda key: None, put=lambda *_: None)
    timer._lost = 0
    plan: Any = SimpleNamespace(launches=(), symmetric=0)
    for found in (1.0, None, CapacityError("another program has been taking memory")):

        def measure(*_: object, found: Any = found) -> float | None:
            if isinstance(found, CapacityError):
                raise found
            value: float | None = found
            return value

        timer._measure = measure
        assert timer(None, None, plan) == (1.0 if found == 1.0 else None)
    (kept, lost) = timer.notes
    assert kept == "kept" and lost.startswith("2 measurements found too little memory")
    timer._lost = 0
    assert timer.notes == ("kept",)


def test_what_an_engine_takes_is_counted_where_every_program_moves_what_is_free(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As the tests that need a GPU count it, here with a fake GPU."""
    toy.write(tmp_path)
    plan = read_manifest(tmp_path).memory.total
    _spark(monkeypatch, 50 * GIB)
    taken = counting(Card(), monkeypatch)
    loaded = module.load(tmp_path, cache_bytes=0)
    assert plan - 4096 <= taken() <= plan
    loaded.close()
    assert taken() == 0
    discrete = Card()
    discrete.integrated = False
    _spark(monkeypatch, 0, INTEGRATED=0).free = 700
    assert counting(discrete, monkeypatch)() == -700


def test_what_was_read_leaves_the_page_cache(tmp_path: Path) -> None:
    """Else a Spark holds the weights twice while it loads."""
    size = 24 << 20
    path = _file(tmp_path / "weights", size)
    if _cached(path, drop=True):
        pytest.skip("this file system keeps its pages in memory")
    left = {}
    for integrated in (False, True):
        _cached(path, drop=True)
        gpu = FakeGpu({})
        gpu.integrated = integrated
        resources = DeviceResources(gpu)  # type: ignore[arg-type]
        at = upload.Upload(resources, path, 8 << 20, lambda index, digest: None, 2).wait()
        left[integrated] = _cached(path)
        assert gpu.at(at, size).tobytes() == path.read_bytes()
        resources.close()
    assert left[True] * PAGE <= size // 4, "what was being read ahead, at most"
    assert left[False] * PAGE == size, "another start is quicker where it costs nothing"


LOADER = """
import resource, sys
from pathlib import Path
from spark_engine.device.resources import DeviceResources
from spark_engine.runtime.executors import upload
from tests.runtime.fake_gpu import FakeGpu
from tests.soak.loading import status

class Once(FakeGpu):  # memory of the plan, taken before it is counted
    def upload(self, address, array, stream):
        self.at(address, array.nbytes)[:] = array
    def record(self, event, stream): pass
    def wait_for(self, event): pass

path, gpu = Path(sys.argv[1]), Once({})
gpu.integrated = True
size = path.stat().st_size
address = gpu.allocate(size)
gpu.allocate = lambda nbytes: address
limit = int(sys.argv[2])
if limit:  # of everything that is not a file
    at = status("VmData")
    resource.setrlimit(resource.RLIMIT_DATA, (at + limit, at + limit))
before = status("VmRSS")
upload.Upload(DeviceResources(gpu), path, 64 << 20, lambda i, d: None, 16).wait()
print(status("VmHWM") - before)
"""


@pytest.mark.parametrize("limit", [0, loading.BEYOND])
def test_loading_takes_little_beyond_the_plan(tmp_path: Path, limit: int) -> None:
    """As many threads as there ever are, and a limit under which an allocation would fail."""
    path = tmp_path / "weights"
    with path.open("wb") as file:
        file.truncate(1 << 28)  # a hole: reading it costs no disk
    command = [sys.executable, "-c", LOADER, str(path), str(limit)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    beyond = int(done.stdout)
    staged = (4 + upload.SPARE) * upload.PIECE  # four chunks, so four threads
    assert beyond <= staged + (64 << 20), f"{beyond >> 20} MiB"
    most = (upload.MAX_LANES + upload.SPARE) * upload.PIECE
    assert most + beyond - staged < loading.BEYOND, "with all threads"


def test_starting_an_engine_takes_little_beyond_its_plan(tmp_path: Path) -> None:
    """The whole of it, from the folder to graphs, in a separate process, under a limit of memory
    that its weights held twice would break: a control group's, page cache included, where one can
    be made."""
    loading.write(tmp_path, WEIGHTS)
    found = loading.start(tmp_path, beyond=WEIGHTS * 3 // 4)
    assert found.plan > WEIGHTS and found.process < WEIGHTS // 2, f"{found.process >> 20} MiB"
    with pytest.raises(MemoryError):
        loading.start(tmp_path, beyond=-WEIGHTS // 2)


def _file(path: Path, size: int) -> Path:
    data = np.random.default_rng(0).integers(0, 256, size, np.uint8)
    with path.open("wb") as file:
        file.write(data.tobytes())
        file.flush()
        os.fsync(file.fileno())
    return path


def _cached(path: Path, drop: bool = False) -> int:
    """Pages of the file that are in memory, after dropping them if requested."""
    size = path.stat().st_size
    with path.open("r+b") as file:
        if drop:
            os.posix_fadvise(file.fileno(), 0, size, os.POSIX_FADV_DONTNEED)
        with mmap.mmap(file.fileno(), size) as mapped:
            seen = (ctypes.c_ubyte * -(-size // PAGE))()
            first = ctypes.c_char.from_buffer(mapped)
            libc = ctypes.CDLL(None)
            start = ctypes.c_void_p(ctypes.addressof(first))
            done = libc.mincore(start, ctypes.c_size_t(size), seen)
            del first
    assert done == 0
    return sum(byte & 1 for byte in seen)
