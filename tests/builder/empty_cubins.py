"""Native engines with empty cubins: made in seconds, and every record is as it would be."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from spark_engine.builder.build import build
from spark_engine.builder.native import nvrtc, program
from spark_engine.builder.plan.options import Options
from spark_engine.kernel import Launch
from tests.checkpoints import write_checkpoint
from tests.repository import ROOT

TINY = ROOT / "models" / "tiny" / "checkpoint"
HEADS = {"linear_num_value_heads": 8}  # so that every projection has a multiple of 16 rows
OPTIONS = Options(
    "sm_90a", decode=(1, 32), prefill=(128,), max_seqs=32, max_context=256, timing=False
)


class EmptyCubin(nvrtc.Cubin):
    """Of kernels that declare no dynamic shared memory, and are not asked for it."""

    def launched(self, launch: Launch) -> Launch:
        return replace(launch, shared=max(launch.shared, 0))


def compile_jobs(jobs: Iterable[nvrtc.Job], *_: object) -> program.Cubins:
    """Instead of `program.compile_jobs`."""
    return {(j.source, j.defines): EmptyCubin(b"nothing", {}) for j in jobs}


def built(path: Path, format: str = "tiny") -> Path:
    """An engine of the embedded model ("tiny"), or of a random checkpoint of a format."""
    checkpoint = TINY
    if format != "tiny":
        checkpoint = path / "checkpoint"
        write_checkpoint(checkpoint, format=format, config_kwargs=HEADS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program, "compile_jobs", compile_jobs)
        build(checkpoint, path / "engine", OPTIONS, lambda text: None)
    return path / "engine"
