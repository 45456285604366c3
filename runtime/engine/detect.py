"""What this machine is: the targets whose engines run here."""

from __future__ import annotations


def runnable_targets() -> tuple[str, ...]:
    """The build targets whose engines run here, preferred first."""
    gpu = _gpu_target()
    return ("cpu",) if gpu is None else ("cpu", gpu)


def _gpu_target() -> str | None:
    try:
        from spark_engine.device import architecture
    except ImportError:  # without the extra `cuda`
        return None
    return architecture()
