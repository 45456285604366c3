"""What tests of CUDA kernels share: one GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.plugins.cuda_node import Bench


@pytest.fixture(scope="session")
def bench(cache: Path) -> Iterator[Bench]:
    """The GPU, or a skipped test."""
    pytest.importorskip("cuda.bindings", reason="needs the extra `cuda`")
    from spark_engine.device.gpu import Gpu, present
    from tests.plugins.cuda_node import Bench

    target = present()
    if target is None:
        pytest.skip("no CUDA device")
    gpu = Gpu()
    yield Bench(gpu, target, cache)
    gpu.close()
