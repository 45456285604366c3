"""What tests on a real GPU share: its target's name, and the marks that skip them elsewhere."""

import pytest

pytest.importorskip("cuda.bindings", reason="needs the extra `cuda`")

from spark_engine.device.gpu import architecture, count  # noqa: E402

HERE, GPUS = architecture() or "", count()


def on_gpu(seconds: int = 600, gpus: int = 1) -> list[pytest.MarkDecorator]:
    """`pytestmark` of a module; a test may take so long."""
    lacks = not HERE or gpus > GPUS
    skip = pytest.mark.skipif(lacks, reason=f"needs GPUs with a target's name: {gpus}")
    return [pytest.mark.gpu, pytest.mark.timeout(seconds), skip]
