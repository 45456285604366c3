"""What this machine is: the targets whose engines run here."""

from __future__ import annotations


def runnable_targets(hosts: tuple[str, ...]) -> tuple[str, ...]:
    """The build targets whose engines run here: those that need no GPU, and the GPU's."""
    gpu = _gpu_target()
    return hosts if gpu is None else (*hosts, gpu)


def _gpu_target() -> str | None:
    try:
        from spark_engine.device import architecture
    except ImportError:  # without the extra `cuda`
        return None
    return architecture()
