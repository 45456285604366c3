"""Another program on the GPU: it computes on all multiprocessors until it is ended.

One is enough for all rehearsals at a time. It touches a file whenever launches of it have ended,
so that `Pulse` can distinguish a process that computes from one that only exists.
"""

import fcntl
import os
import tempfile
from pathlib import Path

from spark_engine.builder.native import nvrtc
from spark_engine.device.rehearsal import VARIABLE
from spark_engine.kernel import H200, Shape

SOURCE = """
extern "C" __global__ void busy(float* x, int rounds) {
  float a = x[threadIdx.x], b = a + 1.0f;
  for (int i = 0; i < rounds; ++i) { a = a * b + 0.5f; b = b * a - 0.25f; }
  x[threadIdx.x] = a + b;
}
"""
LOCK = Path(tempfile.gettempdir()) / "rehearsal_beside.lock"
ROUNDS, THREADS, QUEUED = 100_000, 256, 20  # about a millisecond a launch


class Pulse:
    """Whether the program computed since it was asked last."""

    def __init__(self, path: Path = LOCK) -> None:
        self._path, self._last = path, 0
        self.beats()

    def beats(self) -> bool:
        """False where none has ended launches since."""
        now = self._path.stat().st_mtime_ns if self._path.exists() else 0
        last, self._last = self._last, now
        return now > last


def main() -> None:
    """Queues and waits, without end."""
    os.environ.pop(VARIABLE, None)  # it is the other one: all of the GPU
    lock = LOCK.open("a")  # only computing changes its time
    fcntl.flock(lock, fcntl.LOCK_EX)  # the next one waits
    from spark_engine.device.gpu import Gpu, present

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
        os.utime(lock.fileno())


if __name__ == "__main__":
    main()
