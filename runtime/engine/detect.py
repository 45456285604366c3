"""What this machine is: the targets whose engines run here."""

from __future__ import annotations

from importlib.util import find_spec

RTX = "rtx", ((8, 9), (12, 0), (12, 1))  # TensorRT-RTX's target, and the GPUs it is built for


def runnable_targets(hosts: tuple[str, ...]) -> tuple[str, ...]:
    """The build targets whose engines run here: those that need no GPU, and the GPU's."""
    return (*hosts, *_gpu_targets())


def _gpu_targets() -> tuple[str, ...]:
    try:
        from spark_engine.device import architecture, capability
    except ImportError:  # without the extra `cuda`
        return ()
    name, gpu = architecture(), capability()
    own = () if name is None else (name,)
    target, known = RTX
    return (*own, target) if gpu in known and find_spec("tensorrt_rtx") else own
