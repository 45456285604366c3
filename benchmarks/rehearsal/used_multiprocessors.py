"""On how many multiprocessors do launches really run: those on the stream, and those of a graph.

Knows the partition by what blocks say of themselves alone.
"""

import tempfile
from pathlib import Path

import numpy as np

from benchmarks.graphs import target_here
from spark_engine.builder.native import nvrtc
from spark_engine.device.gpu import Gpu
from spark_engine.device.resources import DeviceResources
from spark_engine.kernel import Launch, Pointer

MOST = 1024  # numbers that a multiprocessor may have
BLOCKS, THREADS = 4096, 256
SOURCE = """
extern "C" __global__ void where(int* seen) {
  unsigned id;
  asm volatile("mov.u32 %0, %smid;" : "=r"(id));
  if (threadIdx.x == 0) seen[id] = 1;
  for (int i = 0; i < 20; ++i) __nanosleep(1000);
}
"""


def seen(gpu: Gpu) -> dict[str, object]:
    """The kind of part, the multiprocessors that it should have, and those that blocks ran on."""
    launch = Launch("where", (BLOCKS, 1, 1), (THREADS, 1, 1), (Pointer("input", 0),))
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "where.cu").write_text(SOURCE)
        job = nvrtc.Job("where.cu", (), ("where",))
        code = nvrtc.compile(job, target_here(), None, Path(folder)).code
    function = gpu.load(code, ("where",))["where"]
    held = DeviceResources(gpu)
    found = []
    try:
        for graph in (False, True):
            address = held.zeros(4 * MOST)
            gpu.wait()

            def queue(address: int = address) -> None:
                gpu.launch(function, launch, (address,))

            if graph:
                gpu.replay(held.graph(queue))
            else:
                queue()
            marks = np.empty(MOST, np.int32)
            gpu.download(marks, address)
            gpu.wait()
            found.append(int(marks.sum()))
    finally:
        held.close()
    kind, count = gpu.kind, gpu.multiprocessors
    right = all(n == count for n in found)
    return {"kind": kind, "multiprocessors": count, "seen": found, "right": right}
