"""What the builder's tests share."""

import pytest


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines for a GPU hold empty kernels: all but the machine code is as it is."""
    pytest.importorskip("cuda.bindings", reason="needs the extra `cuda`")
    from spark_engine.builder.native import nvrtc, program
    from tests.builder.empty_cubins import compile_jobs

    monkeypatch.setattr(program, "compile_jobs", compile_jobs)
    monkeypatch.setattr(nvrtc.Compiler, "start", lambda self, jobs: None)
