"""What a launch costs inside a CUDA graph, with and without programmatic overlap.

`python -m benchmarks.launch_gap` captures chains of kernels that do next to nothing (each block
adds to its element) and replays them: microseconds of one launch on the device, by events, and of
one replay on the host. "aware" kernels let the next one start at once and wait before they read.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import graphs
from spark_engine.builder.native import nvrtc
from spark_engine.device.gpu import Gpu
from spark_engine.kernel import Launch, Pointer

REPLAYS = 60
SOURCE = """
extern "C" __global__ void plain(int* x) { x[blockIdx.x * 256 + threadIdx.x] += 1; }
extern "C" __global__ void aware(int* x) {
  asm volatile("griddepcontrol.launch_dependents;");
  asm volatile("griddepcontrol.wait;" ::: "memory");
  x[blockIdx.x * 256 + threadIdx.x] += 1;
}
"""
SYMBOLS = ("aware", "plain")


def kernels(gpu: Gpu) -> dict[str, Any]:
    """The two kernels."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "gap.cu").write_text(SOURCE)
        job = nvrtc.Job("gap.cu", (), SYMBOLS)
        return gpu.load(nvrtc.compile(job, graphs.target_here(), None, Path(folder)).code, SYMBOLS)


def chain(gpu: Gpu, function: Any, symbol: str, blocks: int, count: int) -> tuple[Any, int, int]:
    """A graph of `count` launches, its programmatic edges, and its memory."""
    address = gpu.allocate(4 * 256 * blocks)
    pdl = symbol == "aware"
    shape = ((blocks, 1, 1), (256, 1, 1), (Pointer("input", 0),))
    launch = gpu.prepare(function, Launch(symbol, *shape, pdl=pdl).shape, [address])
    launch()
    gpu.wait()
    gpu.begin_capture()
    for _ in range(count):
        launch()
    graph, edges = gpu.end_counted_capture()
    return graph, edges, address


def main() -> None:
    """Prints a line for each kind, grid and length."""
    gpu = Gpu()
    found = kernels(gpu)
    for symbol in SYMBOLS:
        for blocks in (1, 132, 1056):
            for count in (100, 700):
                graph, edges, address = chain(gpu, found[symbol], symbol, blocks, count)
                device, host = [], []
                for _ in range(REPLAYS):
                    first, last = gpu.event(True), gpu.event(True)
                    gpu.record(first)
                    start = time.perf_counter()
                    gpu.replay(graph)
                    host.append(time.perf_counter() - start)
                    gpu.record(last)
                    gpu.wait_for(last)
                    device.append(gpu.milliseconds(first, last) * 1e3 / count)
                gpu.destroy_graph(graph)
                gpu.free(address)
                print(f"  {symbol} {blocks:5d} blocks {count:4d} launches ({edges} programmatic): "
                      f"{statistics.median(device):5.2f} us a launch, "
                      f"replay {statistics.median(host) * 1e6:6.1f} us on the host")  # fmt: skip
    gpu.close()


if __name__ == "__main__":
    main()
