"""`--mlp-activations fp8`: NVFP4 MLPs of prefill alone are W4A8, and only where there are such."""

from dataclasses import replace
from pathlib import Path

import pytest

from spark_engine.builder.build import build
from spark_engine.builder.graph.lower import check_mlps, facts_of, lower
from spark_engine.builder.plan.options import Options, resolve
from spark_engine.check.check import run_check
from spark_engine.errors import OptionError
from spark_engine.interface import DECODE, PREFILL
from spark_engine.models.open_model import open_model
from spark_engine.plugins.formats.nvfp4 import A8_COLUMNS, W4A8
from spark_engine.plugins.kernels.gemm.linear_nvfp4_kernels import A8
from spark_engine.progress import Progress
from tests.checkpoints import write_checkpoint

FP8 = Options(
    target="cpu", decode=(1,), prefill=(64,), max_seqs=1, max_context=128, mlp_activations="fp8"
)
OP = "nvfp4_linear_a8"


def test_prefill_alone_multiplies_in_fp8(tmp_path: Path) -> None:
    """Gate, up and down of each of four layers; every op is its reference."""
    write_checkpoint(tmp_path / "checkpoint", format="modelopt_mixed")
    model = open_model(tmp_path / "checkpoint")
    plan = resolve(FP8, facts_of(model))
    found = {
        family: [n.name for n in lower(model, plan, family).graph.nodes if n.op == OP]
        for family in (DECODE, PREFILL)
    }
    leaves = ("gate_proj.y", "up_proj.y", "down_proj.y")
    wanted = [f"layers.{i}.mlp.{leaf}" for i in range(4) for leaf in leaves]
    assert (found[DECODE], found[PREFILL]) == ([], wanted)
    built = build(tmp_path / "checkpoint", tmp_path / "engine", FP8, lambda text: None)
    named = [q.module for q in built.manifest.quantisation if q.format == W4A8.name]
    assert len(named) == 12 and all(".mlp." in module for module in named)
    report = run_check(tmp_path / "engine", None, ("op", "model"), Progress(None))
    assert report.passed, report.headlines


def test_it_is_the_default_on_a_gpu_alone(tmp_path: Path) -> None:
    for format, made in (("modelopt_mixed", 12), ("bf16", 0)):
        write_checkpoint(tmp_path / format, format=format)
        model = open_model(tmp_path / format)
        for changes, wanted in (
            ({"target": "sm_90a"}, made),
            ({"target": "sm_121a"}, made),
            ({"target": "sm_90a", "mlp_activations": "bf16"}, 0),
            ({"target": "sm_90a", "invariant": True}, 0),
            ({"target": "cpu"}, 0),
        ):
            asked: Options = replace(FP8, **{"mlp_activations": "auto", **changes})
            plan = resolve(asked, facts_of(model))
            check_mlps(model, plan)
            found = [n for n in lower(model, plan, PREFILL).graph.nodes if n.op == OP]
            assert len(found) == wanted, (format, changes)


@pytest.mark.parametrize(
    ("sizes", "made"),
    [({"intermediate_size": 80}, 8), ({"hidden_size": 96}, 4)],  # of gate, up, down in 4 layers
)
def test_sizes_without_a_kernel_stay_bf16(sizes: dict[str, int], made: int, tmp_path: Path) -> None:
    assert A8_COLUMNS == A8.slab
    write_checkpoint(tmp_path, sizes, format="modelopt_mixed")
    model = open_model(tmp_path)
    plan = resolve(replace(FP8, target="sm_90a", mlp_activations="auto"), facts_of(model))
    nodes = lower(model, plan, PREFILL).graph.nodes
    assert len([n for n in nodes if n.op == OP]) == made


@pytest.mark.parametrize(
    ("format", "moe", "options", "words"),
    [
        ("bf16", False, FP8, "no dense MLP in NVFP4"),
        ("nvfp4_a4", False, FP8, "no dense MLP in NVFP4"),
        ("modelopt_mixed", True, FP8, "no dense MLP in NVFP4"),
        ("modelopt_mixed", False, replace(FP8, mlp_activations="int8"), "int8 is not known"),
    ],
)
def test_what_it_cannot_do_is_said(
    format: str, moe: bool, options: Options, words: str, tmp_path: Path
) -> None:
    write_checkpoint(tmp_path / "checkpoint", format=format, moe=moe)
    with pytest.raises(OptionError, match=f"--mlp-activations .*{words}"):
        build(tmp_path / "checkpoint", tmp_path / "engine", options, lambda text: None)
    assert not (tmp_path / "engine").exists()
