"""f16 and f32 checkpoints where activations are bf16: matrices are rounded once, and it is said."""

import re
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from spark_engine.builder.build import build
from spark_engine.builder.graph.lower import facts_of
from spark_engine.builder.plan.options import Options, resolve
from spark_engine.builder.report import BuildReport
from spark_engine.engine_file import open_folder
from spark_engine.errors import CheckpointError
from spark_engine.models.checkpoint.files import open_checkpoint
from spark_engine.models.open_model import open_model
from tests.checkpoints import write_checkpoint
from tests.models.edited_checkpoint import edited

BF16 = np.dtype(ml_dtypes.bfloat16)
SIZES: dict[str, Any] = {"decode": (1,), "prefill": (64,), "max_seqs": 1, "max_context": 64}
TWO = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
TWO |= {"linear_num_value_heads": 8}  # every projection has a multiple of 16 rows
TWIN = Options(target="cpu", activation="bf16", **SIZES)


def run(checkpoint: Path, folder: Path, options: Options = TWIN) -> BuildReport:
    return build(checkpoint, folder, options, lambda text: None)


def narrowed(path: Path, to: Path) -> Path:
    """The same checkpoint with every matrix stored in bf16, rounded to nearest even."""
    write_checkpoint(to, TWO, moe="moe" in path.name)
    opened = open_checkpoint(path)
    with edited(to) as tensors:
        for name in opened.tensors:
            array = opened.read(name)
            wide = array.ndim > 1 and "conv1d" not in name
            tensors[name] = array.astype(BF16) if wide else array
    return to


def rows_of(folder: Path, target: str) -> dict[str, str]:
    """A digest of each of the engine's weights, by name."""
    weights = open_folder(folder, target).weights()
    return {name: sha256(array.tobytes()).hexdigest() for name, array in weights.items()}


@pytest.mark.parametrize(("format", "moe"), [("f32", False), ("fp16", True), ("f32", True)])
def test_the_cpu_twin_holds_the_weights_of_a_bf16_checkpoint(
    tmp_path: Path, format: str, moe: bool
) -> None:
    path = write_checkpoint(tmp_path / ("moe" if moe else "dense"), TWO, format, moe=moe).path
    report = run(path, tmp_path / "wide")
    run(narrowed(path, tmp_path / "narrow"), tmp_path / "bf16")
    assert rows_of(tmp_path / "wide", "cpu") == rows_of(tmp_path / "bf16", "cpu")
    (note,) = (n for n in report.notes if "rounded" in n)
    count = len([t for t in open_model(path).tensors.values() if len(t.dims) == 2])
    assert note.startswith(f"{count} {'f32' if format == 'f32' else 'f16'} matrices are rounded")
    assert "1/512" in note and "lm_head.weight, model.embed_tokens.weight, " in note


def test_the_cpu_keeps_what_is_stored(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "model", TWO, "f32").path
    report = run(path, tmp_path / "engine", replace(TWIN, activation="auto"))
    assert not any("rounded" in n for n in report.notes)
    name = "lm_head.weight"
    stored = open_checkpoint(path).read(name)
    assert rows_of(tmp_path / "engine", "cpu")[name] == sha256(stored.tobytes()).hexdigest()


@pytest.mark.parametrize(
    ("format", "value", "fine"),
    [
        ("f32", 3.3895e38, True),  # the largest of bf16
        ("f32", 3.3965e38, False),  # would round to infinity
        ("f32", -3.4e38, False),
        ("f32", np.nan, False),
        ("fp16", 65504.0, True),
        ("fp16", np.inf, False),
    ],
)
def test_a_number_that_bf16_has_not_is_named(
    tmp_path: Path, format: str, value: float, fine: bool
) -> None:
    path = write_checkpoint(tmp_path / "model", TWO, format).path
    name = "model.layers.0.mlp.down_proj.weight"
    with edited(path) as tensors:
        tensors[name][127, 255] = value
    if fine:
        run(path, tmp_path / "engine")
        return
    said = float(tensors[name][127, 255])
    why = "bf16, which" if np.isfinite(said) else "a weight must be a number"
    with pytest.raises(CheckpointError, match=re.escape(f"{name}[127, 255] is {said}: {why}")):
        run(path, tmp_path / "engine")


def test_a_gpus_budget_counts_f32_matrices_by_half(tmp_path: Path) -> None:
    sizes = {}
    for format in ("bf16", "f32"):
        facts = facts_of(open_model(write_checkpoint(tmp_path / format, TWO, format).path))
        plans = [resolve(Options(target=t), facts) for t in ("cpu", "sm_90a")]
        sizes[format] = [facts.needs(p.precision, 64).weights for p in plans]
    cpu, gpu = (f / b for f, b in zip(sizes["f32"], sizes["bf16"], strict=True))
    assert cpu == pytest.approx(2) and gpu == pytest.approx(1, rel=0.02)


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("target", ["sm_90a", "sm_121a"])
def test_they_build_for_a_gpu(tmp_path: Path, target: str) -> None:
    options = Options(target=target, **SIZES)
    for format in ("f32", "fp16"):
        path = write_checkpoint(tmp_path / format, TWO, format).path
        report = run(path, tmp_path / f"{format}_engine", options)
        assert "are rounded to bf16" in " ".join(report.notes)
        run(narrowed(path, tmp_path / f"{format}_narrow"), tmp_path / "bf16", options)
        wide, narrow = (rows_of(tmp_path / n, target) for n in (f"{format}_engine", "bf16"))
        assert wide == narrow
