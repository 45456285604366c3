"""`spark-check` of engines for the GPU that is here, against references and the CPU's engine."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("cuda.bindings", reason="needs the extra `cuda`")

from spark_engine.builder import nvrtc  # noqa: E402
from spark_engine.builder.build import build  # noqa: E402
from spark_engine.builder.options import Options  # noqa: E402
from spark_engine.check.check import run_check  # noqa: E402
from spark_engine.check.report import Level  # noqa: E402
from spark_engine.errors import OptionError  # noqa: E402
from tests.checkpoints import write_checkpoint  # noqa: E402

HERE = nvrtc.present_target()
SIZES = {"decode": (1, 4), "prefill": (64, 128), "max_context": 192, "max_seqs": 4}
LEVELS = ("model", "layer", "op", "text")


def built(folder: Path, target: str, kv: str = "auto") -> Path:
    """An engine of one random checkpoint."""
    checkpoint = folder / "checkpoint"
    if not checkpoint.exists():
        write_checkpoint(checkpoint, format="modelopt_mixed")
    options = Options(target=target, kv_dtype=kv, timing=None, **SIZES)  # type: ignore[arg-type]
    build(checkpoint, folder / target, options, lambda text: None)
    return folder / target


@pytest.mark.gpu
@pytest.mark.skipif(HERE is None, reason="no CUDA device")
def test_a_native_engine_agrees_with_references_and_with_the_cpu(tmp_path: Path) -> None:
    assert HERE is not None
    engine = built(tmp_path, HERE)
    with pytest.raises(OptionError, match="--against its checkpoint"):
        run_check(engine, None, LEVELS, lambda text: None)
    for other in (tmp_path / "checkpoint", built(tmp_path, "cpu", "bf16")):
        report = run_check(engine, other, LEVELS, lambda text: None)
        assert [level.name for level in report.levels] == ["layer", "text"]
        assert report.passed, (report.first, other)
        assert _figures(report.levels[0], "logits")["rel_l2"] > 0, "equal bits: one ran twice"
        assert _figures(report.levels[1], "greedy text")["tokens"] > 100


@pytest.mark.gpu
@pytest.mark.skipif(HERE is None, reason="no CUDA device")
def test_a_graph_left_unfused_agrees_too(tmp_path: Path) -> None:
    """Stand-alone quantisers, norms, gates and joins have kernels as well."""
    assert HERE is not None
    checkpoint = tmp_path / "checkpoint"
    write_checkpoint(checkpoint, format="modelopt_mixed")
    build(checkpoint, tmp_path / "plain", Options(target=HERE, fuse=False, **SIZES), print)  # type: ignore[arg-type]
    report = run_check(tmp_path / "plain", checkpoint, LEVELS, lambda text: None)
    assert report.passed, report.first


def _figures(level: Level, name: str) -> dict[str, float]:
    return next(f.figures for f in level.findings if f.name == name)
