"""At most one open engine per process on a GPU, and none under NVIDIA MPS.

The lock is process-wide, like the device's context. Knows no engine.
"""

import threading
from collections.abc import Callable

from spark_engine.device.gpu import Gpu
from spark_engine.errors import EngineError

# Held by the open engine.
_GPU_IN_USE = threading.Lock()


def lock_gpu() -> Callable[[], None]:
    """Acquires the GPU and returns the function that releases it. Raises EngineError if this
    process has an open engine."""
    if not _GPU_IN_USE.acquire(blocking=False):
        raise EngineError(
            "this process has an engine open on the GPU already, and blocks of two could deadlock: "
            "close that one first, or open this one in another process"
        )
    return _GPU_IN_USE.release


def refuse_mps(gpu: Gpu) -> None:
    """Raises EngineError if this process shares its GPU context through MPS."""
    if gpu.shared_by_mps:
        raise EngineError(
            "this GPU is shared through NVIDIA MPS, under which another process's blocks may keep "
            "an engine's cooperating blocks from running together: run without MPS (`echo quit | "
            "nvidia-cuda-mps-control` stops it)"
        )
