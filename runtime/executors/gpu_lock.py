"""One open engine a process on a GPU, and none under NVIDIA MPS.

Knows the one lock of the process; knows no engine.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from spark_engine.device.gpu import Gpu
from spark_engine.errors import EngineError

# Taken by the engine that is open: like the device's context, one for the whole process.
_GPU_IN_USE = threading.Lock()


def lock_gpu() -> Callable[[], None]:
    """Takes the GPU; what gives it back. Raises EngineError while this process has it."""
    if not _GPU_IN_USE.acquire(blocking=False):
        raise EngineError(
            "this process has an engine open on the GPU already, and blocks of two could deadlock: "
            "close that one first, or open this one in another process"
        )
    return _GPU_IN_USE.release


def refuse_mps(gpu: Gpu) -> None:
    """Raises EngineError where other processes share the context."""
    if gpu.shared_by_mps:
        raise EngineError(
            "this GPU is shared through NVIDIA MPS, where blocks that wait for one another may "
            "lack those of another process's place: run without MPS (`echo quit | "
            "nvidia-cuda-mps-control` stops it), where processes take turns"
        )
