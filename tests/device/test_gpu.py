"""A real GPU: overlapping launches in graphs, copies of states in both directions, errors."""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

device = pytest.importorskip("spark_engine.device.gpu")
nvrtc = pytest.importorskip("spark_engine.builder.native.nvrtc")

from spark_engine.device.cuda_driver import driver, value, values  # noqa: E402
from spark_engine.device.resources import DeviceResources  # noqa: E402
from spark_engine.errors import CapacityError, ExecutorError  # noqa: E402
from spark_engine.kernel import TARGETS, Launch, Pointer, Scalar  # noqa: E402
from spark_engine.manifest import StateInfo  # noqa: E402
from spark_engine.runtime.executors import device_memory  # noqa: E402
from spark_engine.tensors import DType, TensorSpec  # noqa: E402

ARCHITECTURE = device.architecture()
on_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(ARCHITECTURE is None, reason="needs a GPU with a target's name"),
]
COUNT = 4096
# `plain` knows nothing of overlapping and is slow; `early` lets the next start at once; both it
# and `after` wait before they read. Each writes the sum of its number and what it read.
SOURCE = """
__device__ void spin(long long cycles) {
  for (long long end = clock64() + cycles; clock64() < end;) { }
}
__device__ void hand_on(const int* from, int* to, int add) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  to[i] = from[i] + add;
}
extern "C" __global__ void plain(const int* from, int* to, int add) {
  spin(20000);
  hand_on(from, to, add);
}
extern "C" __global__ void early(const int* from, int* to, int add) {
  asm volatile("griddepcontrol.launch_dependents;");
  asm volatile("griddepcontrol.wait;" ::: "memory");
  spin(20000);
  hand_on(from, to, add);
}
extern "C" __global__ void after(const int* from, int* to, int add) {
  asm volatile("griddepcontrol.wait;" ::: "memory");
  hand_on(from, to, add);
}
extern "C" __global__ void wild(int* to) { to[(1ll << 44) + threadIdx.x] = 1; }
"""
KERNELS = ("plain", "early", "after", "wild")


def cubin(folder: Path, target: str) -> bytes:
    (folder / "chain.cu").write_text(SOURCE)
    job = nvrtc.Job("chain.cu", (), KERNELS)
    code: bytes = nvrtc.compile(job, TARGETS[target], None, folder).code
    return code


@pytest.fixture
def gpu() -> Iterator[Any]:
    opened = device.Gpu()
    yield opened
    opened.close()


@pytest.mark.parametrize("target", sorted(TARGETS))
def test_the_kernels_below_compile(tmp_path: Path, target: str) -> None:
    assert cubin(tmp_path, target)


class Chain:
    """Launches that hand numbers from one array to the next: 0, 1, 3, 6, …"""

    def __init__(self, gpu: Any, code: bytes, names: list[str]) -> None:
        self.gpu, self.count = gpu, len(names)
        self.arrays = [gpu.allocate(4 * COUNT) for _ in range(len(names) + 1)]
        for address in self.arrays:
            gpu.fill(address, 0, 4 * COUNT)
        found = gpu.load(code, KERNELS)
        args = (Pointer("input", 0), Pointer("input", 1), Scalar("i32", 0))
        self.launches = []
        for i, name in enumerate(names):
            launch = Launch(name, (COUNT // 128, 1, 1), (128, 1, 1), args, pdl=name != "plain")
            given = (self.arrays[i], self.arrays[i + 1], i + 1)
            self.launches.append(gpu.prepare(found[name], launch.shape, given))

    def captured(self) -> tuple[Any, int]:
        """The graph, and how many of its edges are programmatic."""
        self.gpu.wait()
        self.gpu.begin_capture()
        for launch in self.launches:
            launch()
        graph = value(driver.cuStreamEndCapture(self.gpu.stream))
        count = int(values(driver.cuGraphGetEdges(graph, 0))[3])
        edges = values(driver.cuGraphGetEdges(graph, count))[2] if count else []
        early = driver.CUgraphDependencyType.CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC.value
        return self.gpu._instantiate(graph), sum(edge.type == early for edge in edges)

    def poison(self) -> None:
        for address in self.arrays[1:]:
            self.gpu.fill(address, 0xAA, 4 * COUNT)

    def last(self) -> Any:
        array = np.empty(COUNT, np.int32)
        self.gpu.download(array, self.arrays[-1])
        self.gpu.wait()
        return array


CHAINS = {
    "unaware before aware": ["plain", "after"] * 6,
    "early before aware": ["early", "after"] * 6,
    "early before unaware": ["early", "plain"] * 6,
    "early before early": ["early"] * 12,
    "mixed": ["plain", "early", "early", "plain", "after", "early", "plain", "plain", "after"],
}


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.usefixtures("gpu")
class TestOverlappingLaunches:
    pytestmark = on_gpu

    def test_a_graph_keeps_the_overlap_and_the_order(
        self, gpu: Any, tmp_path: Path, name: str
    ) -> None:
        names = CHAINS[name]
        assert ARCHITECTURE is not None
        chain = Chain(gpu, cubin(tmp_path, ARCHITECTURE), names)
        graph, programmatic = chain.captured()
        assert programmatic == sum(n != "plain" for n in names[1:])
        want = sum(range(1, len(names) + 1))
        for _ in range(50):
            chain.poison()
            gpu.replay(graph)
            np.testing.assert_array_equal(chain.last(), want)


@pytest.mark.gpu
@on_gpu[1]
def test_snapshots_come_back_from_other_places(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_memory, "STAGE", 1 << 20)
    slot = StateInfo(TensorSpec("layers.0.gdn_state", DType.F32, (5, 300, 1000)), "slot")
    page = StateInfo(TensorSpec("layers.1.k_pages", DType.BF16, (40, 4, 64, 128)), "page")
    resources = DeviceResources(gpu)
    states = device_memory.DeviceStates(resources, (slot, page))
    rng = np.random.default_rng(1)
    written = {}
    for info in (slot, page):
        values = rng.integers(0, 256, info.spec.nbytes, np.uint8)
        written[info.spec.name] = values.reshape(info.spec.dims[0], -1)
        gpu.upload(states.addresses[info.spec.name], values)
    pages = [3, 4, 5, 30, 1, 39, 0]
    saved = states.save(2, pages)
    rows = saved.rows[slot.spec.name].view(np.uint8).reshape(-1)
    np.testing.assert_array_equal(rows, written[slot.spec.name][2])
    found = saved.pages[page.spec.name].view(np.uint8).reshape(len(pages), -1)
    np.testing.assert_array_equal(found, written[page.spec.name][pages])
    others = [10, 20, 11, 12, 13, 31, 32]
    states.restore(saved, 4, others)
    again = states.save(4, others)
    for name in saved.pages:
        np.testing.assert_array_equal(
            again.pages[name].view(np.uint8), saved.pages[name].view(np.uint8)
        )
    np.testing.assert_array_equal(again.rows[slot.spec.name], saved.rows[slot.spec.name])
    resources.close()


@pytest.mark.gpu
@on_gpu[1]
def test_rows_pages_and_counts_are_copied_on_the_device(gpu: Any) -> None:
    """After queued work, many at once, and no other byte."""
    counts = StateInfo(TensorSpec("token_counts", DType.I32, (5, 1000)), "slot")
    layers = [
        StateInfo(TensorSpec(f"layers.{i}.gdn_state", DType.F32, (5, 300, 10 + i)), "sequence")
        for i in range(200)
    ]
    page = StateInfo(TensorSpec("layers.1.k_pages", DType.BF16, (40, 4, 64, 128)), "page")
    resources = DeviceResources(gpu)
    states = device_memory.DeviceStates(resources, (counts, *layers, page), 9)
    rng = np.random.default_rng(1)
    wanted = {}
    for info in (counts, *layers, page):
        rows = info.spec.dims[0] + (9 if info.unit == "sequence" else 0)
        wanted[info.spec.name] = rng.integers(0, 256, (rows, info.row_bytes), np.uint8)
        gpu.upload(states.addresses[info.spec.name], wanted[info.spec.name])
    states.copy_rows([(2, 13), (0, 5), (7, 1)])
    states.copy_rows([(13, 6)])  # reads what the call before wrote
    states.copy_pages([(39, 0), (4, 5)])
    for slot in (3, 0, 1, 2, 3, 0, 1):
        states.set_counts(slot, [slot, 999], [7] * slot)
    states.set_counts(1, [])
    for info in layers:
        wanted[info.spec.name][[13, 5, 1, 6]] = wanted[info.spec.name][[2, 0, 7, 2]]
    wanted[page.spec.name][[0, 5]] = wanted[page.spec.name][[39, 4]]
    for slot in range(4):
        row = np.zeros(1000, np.int32)
        if slot != 1:
            row[[slot, 999]] = 1
            row[7] = 2 * slot
        wanted[counts.spec.name][slot] = row.view(np.uint8)
    for info in (counts, *layers, page):
        found = np.empty_like(wanted[info.spec.name])
        gpu.download(found, states.addresses[info.spec.name])
        gpu.wait()
        np.testing.assert_array_equal(found, wanted[info.spec.name], info.spec.name)
    resources.close()


@pytest.mark.gpu
@on_gpu[1]
def test_between_marks_of_a_graph_is_no_time_of_the_host(gpu: Any) -> None:
    with closing(DeviceResources(gpu)) as held:
        first, last = held.event(timed=True), held.event(timed=True)
        memory = held.memory(1 << 28)

        def record() -> None:
            gpu.mark(first)
            gpu.fill(memory, 7, 1 << 28)
            gpu.mark(last)

        graph, times = held.graph(record), []
        for pause in (0.05, 0, 0, 0.05):
            time.sleep(pause)
            gpu.replay(graph)
            gpu.wait()
            times.append(gpu.milliseconds(first, last))
    assert 0.01 < min(times[1:]) and max(times) < 20, "256 MiB; the pauses are 50 ms"


@pytest.mark.gpu
@on_gpu[1]
def test_too_much_memory_is_the_machines_limit_and_no_bug(gpu: Any) -> None:
    with pytest.raises(CapacityError, match="OUT_OF_MEMORY.*--max-context"):
        gpu.allocate(1 << 45)


@pytest.mark.gpu
@on_gpu[1]
def test_a_kernel_that_leaves_its_memory_is_named_with_the_remedy(tmp_path: Path) -> None:
    """In a separate process: the context is lost."""
    assert ARCHITECTURE is not None
    (tmp_path / "cubin").write_bytes(cubin(tmp_path, ARCHITECTURE))
    done = subprocess.run(
        [sys.executable, "-c", WILD, str(tmp_path / "cubin")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "ExecutorError" in done.stdout and "ILLEGAL_ADDRESS" in done.stdout
    assert "start the engine again" in done.stdout


WILD = """
import sys
import time
from pathlib import Path
from spark_engine.errors import ExecutorError
from spark_engine.kernel import Launch, Pointer
from spark_engine.device.gpu import Gpu
gpu = Gpu()
launch = Launch("wild", (1, 1, 1), (32, 1, 1), (Pointer("input", 0),))
found = gpu.load(Path(sys.argv[1]).read_bytes(), ["wild"])
gpu.launch(found["wild"], launch, [gpu.allocate(4)])
try:
    gpu.wait()
except ExecutorError as error:
    print(type(error).__name__, error)
"""


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("CUDA_ERROR_ILLEGAL_ADDRESS", ExecutorError, "start the engine again.*compute-sanitizer"),
        ("CUDA_ERROR_OUT_OF_MEMORY", CapacityError, "--max-context"),
        ("CUDA_ERROR_NO_BINARY_FOR_GPU", ExecutorError, "rebuild the engine for this GPU"),
        ("CUDA_ERROR_UNKNOWN", ExecutorError, "nvidia-smi"),
    ],
)
def test_each_error_says_what_to_do(name: str, kind: type[Exception], words: str) -> None:
    code = getattr(device.driver.CUresult, name)
    with pytest.raises(kind, match=f"{name}.*{words}"):
        device.value((code,))
