"""What tests of CUDA kernels share: one GPU, and what runs of them where there is none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import pytest

if TYPE_CHECKING:
    from tests.plugins.cuda_node import Bench


@pytest.fixture(autouse=True)
def planned(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests of a GPU where there is none, and those marked `kernels` unless `make kernels` asks for
    them, run until they compile: so every run sees what they say of tactics."""
    used = request.getfixturevalue("bench") if "bench" in request.fixturenames else None
    marked = request.node.get_closest_marker("kernels") is not None
    asked = "kernels" in request.config.getoption("-m")
    if getattr(used, "absent", False) or (marked and not asked):
        from spark_engine.builder.native import nvrtc

        def skipped(*_: object, **__: object) -> NoReturn:
            pytest.skip("it is planned here; a GPU runs it, or make kernels compiles it")

        for name in ("compile", "compile_all"):
            monkeypatch.setattr(nvrtc, name, skipped)


@pytest.fixture(scope="session")
def bench(cache: Path) -> Iterator[Bench]:
    """The GPU; where there is none, tests run until they use more of it than its target."""
    pytest.importorskip("cuda.bindings", reason="needs the extra `cuda`")
    from spark_engine.device.gpu import Gpu, present
    from spark_engine.kernel import H200
    from tests.plugins.cuda_node import Bench

    class Absent(Bench):
        absent = True

        def __init__(self) -> None:
            self.target = H200

        def __getattr__(self, name: str) -> NoReturn:
            pytest.skip("no CUDA device")

    target = present()
    if target is None:
        yield Absent()
        return
    gpu = Gpu()
    yield Bench(gpu, target, cache)
    gpu.close()
