"""`spark-check` of engines for the GPU that is here, against references and the CPU's engine."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cuda.bindings", reason="needs the extra `cuda`")

from spark_engine.builder.build import build  # noqa: E402
from spark_engine.builder.plan.options import Options  # noqa: E402
from spark_engine.check.check import run_check  # noqa: E402
from spark_engine.check.verdicts.report import Level  # noqa: E402
from spark_engine.command import DIVERGED
from spark_engine.device.gpu import architecture, count  # noqa: E402
from spark_engine.engine_file import WEIGHTS  # noqa: E402
from spark_engine.errors import OptionError  # noqa: E402
from spark_engine.progress import Progress  # noqa: E402
from spark_engine.runtime.offline.embedded import find_checkpoint  # noqa: E402
from spark_engine.weights_file import read_index  # noqa: E402
from tests.check.faulty_engines import scaled  # noqa: E402
from tests.checkpoints import write_checkpoint  # noqa: E402

QUIET = Progress(None)

HERE = architecture()
SIZES = {"decode": (1, 4), "prefill": (64, 128), "max_context": 192, "max_seqs": 4}
LEVELS = ("model", "layer", "op", "text")


def built(folder: Path, target: str, kv: str = "auto", format: str = "modelopt_mixed") -> Path:
    checkpoint = folder / "checkpoint"
    if not checkpoint.exists():
        # Every expert: a random router would choose others for a tenth of the rows.
        every = {"num_experts_per_tok": 8} if (moe := format == "gptq") else {}
        write_checkpoint(checkpoint, every, format=format, moe=moe)
    options = Options(target=target, kv_dtype=kv, timing=None, **SIZES)  # type: ignore[arg-type]
    build(checkpoint, folder / target, options, lambda text: None)
    return folder / target


@pytest.mark.gpu
@pytest.mark.skipif(HERE is None, reason="no CUDA device")
@pytest.mark.parametrize("format", ["modelopt_mixed", "gptq", "ct_int4"])
def test_a_native_engine_agrees_with_references_and_with_the_cpu(
    tmp_path: Path, format: str
) -> None:
    assert HERE is not None
    engine = built(tmp_path, HERE, format=format)
    with pytest.raises(OptionError, match="--against its checkpoint"):
        run_check(engine, None, LEVELS, QUIET)
    others = [tmp_path / "checkpoint"]
    if format != "gptq":  # a random mixture makes bf16's rounding large next to f32: KL 0.03
        others.append(built(tmp_path, "cpu", "bf16"))
    for other in others:
        report = run_check(engine, other, LEVELS, QUIET)
        names = [level.name for level in report.levels]
        assert names == [*["op"] * (other.name == "checkpoint"), "layer", "text"]
        assert report.passed, (report.first, report.headlines, other)
        assert _figures(report.levels[-2], "logits")["rel_l2"] > 0, "equal bits: one ran twice"
        assert _figures(report.levels[-1], "greedy text")["tokens"] > 80


@pytest.mark.gpu
@pytest.mark.skipif(count() < 2, reason="needs two GPUs")
def test_an_engine_of_two_ranks_agrees_with_references_and_with_the_cpu(tmp_path: Path) -> None:
    """Of the GPUs' ranks what rank 0 computes; the CPU's are all seen."""
    assert HERE is not None
    config = {"linear_num_value_heads": 32, "linear_num_key_heads": 8}
    write_checkpoint(tmp_path / "checkpoint", config, "nvfp4")
    made = {}
    for target, kv in ((HERE, "auto"), ("cpu", "bf16")):
        options = Options(target=target, kv_dtype=kv, tp=2, timing=None, **SIZES)  # type: ignore[arg-type]
        made[target] = tmp_path / target
        report = build(tmp_path / "checkpoint", made[target], options, print, record=True)
        assert report.manifest.greedy.md5, report.notes
    for other in (tmp_path / "checkpoint", made["cpu"]):
        report = run_check(made[HERE], other, (*LEVELS, "record"), QUIET)
        assert report.passed, (report.first, report.headlines, other)
        shown = {f.name for level in report.levels for f in level.findings}
        assert {"logits", "layers.0.gdn_state"} <= shown and "layers.0.rank1.gdn_state" not in shown


@pytest.mark.gpu
@pytest.mark.skipif(HERE is None, reason="no CUDA device")
def test_a_graph_left_unfused_agrees_too(tmp_path: Path) -> None:
    """Stand-alone quantisers, norms, gates and joins have kernels as well."""
    assert HERE is not None
    checkpoint = tmp_path / "checkpoint"
    write_checkpoint(checkpoint, format="modelopt_mixed")
    build(checkpoint, tmp_path / "plain", Options(target=HERE, fuse=False, **SIZES), print)  # type: ignore[arg-type]
    report = run_check(tmp_path / "plain", checkpoint, LEVELS, QUIET)
    assert report.passed, report.first


def _figures(level: Level, name: str) -> dict[str, float]:
    return next(f.figures for f in level.findings if f.name == name)


PLANTED = {  # a scale, 2 % too large, and the module that the report begins with
    "layers.2.linear_attn.out_proj.weight_scale": "layers.2.linear_attn.out_proj",
    "layers.3.mlp.experts.w2_scale2+shared": "layers.3.mlp.experts",
    "layers.7.self_attn.o_proj.weight_scale": "layers.7.self_attn.o_proj",
}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model's engine."""
    assert HERE is not None
    engine = tmp_path_factory.mktemp("embedded") / "sound"
    build(find_checkpoint(), engine, Options(target=HERE, timing=None), lambda text: None)
    return engine


@pytest.mark.gpu
@pytest.mark.skipif(HERE is None, reason="no CUDA device")
def test_the_embedded_engine_is_checked_to_the_op_within_a_minute(sound: Path) -> None:
    """By the command, from nothing but the engine and its checkpoint."""
    code, report, seconds = _command(sound, find_checkpoint())
    failed = [f for level in report["levels"] for f in level["findings"] if not f["passed"]]
    assert (code, report["modules"]) == (0, []), (report["first_divergence"], failed[:3])
    assert [level["name"] for level in report["levels"]] == ["op", "layer", "text"]
    assert seconds < 60


@pytest.mark.gpu
@pytest.mark.skipif(HERE is None, reason="no CUDA device")
@pytest.mark.parametrize("tensor", PLANTED)
def test_a_planted_scale_is_found_within_a_minute(sound: Path, tmp_path: Path, tensor: str) -> None:
    module = PLANTED[tensor]
    names = set(read_index(sound / WEIGHTS))
    assert tensor in names, sorted(n for n in names if "scale" in n)
    bad = scaled(sound, tmp_path / module, tensor)
    code, report, seconds = _command(bad, find_checkpoint())
    assert code == DIVERGED and seconds < 60
    assert report["modules"][0].startswith(f"{module}: "), report["modules"]
    assert report["first_divergence"].startswith(f"{module} (")
    assert len(report["modules"]) == 1, "a sound node is blamed"


def _command(engine: Path, checkpoint: Path) -> tuple[int, dict[str, Any], float]:
    """Exit code, report and seconds of `spark-check`."""
    words = [str(engine), "--against", str(checkpoint), "--json"]
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "spark_engine.check.cli", *words], capture_output=True, text=True
    )
    print(done.stderr)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout), time.monotonic() - start
