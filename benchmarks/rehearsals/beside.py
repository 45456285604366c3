"""Another program on the GPU: it computes on all multiprocessors until it is ended."""

from __future__ import annotations

import fcntl
import os
import tempfile
from pathlib import Path

from spark_engine.builder.native import nvrtc
from spark_engine.kernel import H200, Shape
from spark_engine.rehearsal import VARIABLE

SOURCE = """
extern "C" __global__ void busy(float* x, int rounds) {
  float a = x[threadIdx.x], b = a + 1.0f;
  for (int i = 0; i < rounds; ++i) { a = a * b + 0.5f; b = b * a - 0.25f; }
  x[threadIdx.x] = a + b;
}
"""
ROUNDS, THREADS, QUEUED = 100_000, 256, 20  # about a millisecond a launch


def main() -> None:
    """Queues and waits, without end."""
    os.environ.pop(VARIABLE, None)  # it is the other one: all of the GPU
    lock = (Path(tempfile.gettempdir()) / "rehearsal_beside.lock").open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)  # one is enough for all who rehearse; then the next
    from spark_engine.device import Gpu, present

    gpu, target = Gpu(), present() or H200
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "busy.cu").write_text(SOURCE)
        job = nvrtc.Job("busy.cu", (), ("busy",))
        code = nvrtc.compile(job, target, None, Path(folder)).code
    function = gpu.load(code, ("busy",))["busy"]
    address = gpu.allocate(4 * THREADS)
    gpu.fill(address, 0, 4 * THREADS)
    shape = Shape((4 * gpu.multiprocessors, 1, 1), (THREADS, 1, 1), ("address", "i32"))
    queue = gpu.prepare(function, shape, (address, ROUNDS))
    while True:
        for _ in range(QUEUED):
            queue()
        gpu.wait()


if __name__ == "__main__":
    main()
