"""122B-A10B and 397B-A17B: every node of every bucket has a kernel, in each format, on each target.

Configs are the published ones with one group of layers; weights are never drawn.
"""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cuda.bindings", reason="needs the extra `cuda`")

from benchmarks.weightless_plan import decided_of, options  # noqa: E402
from spark_engine.builder.native import nvrtc  # noqa: E402
from spark_engine.builder.native.program import BucketTactics  # noqa: E402
from spark_engine.kernel import TARGETS, Target  # noqa: E402
from spark_engine.models.checkpoint.tensor_list import linears  # noqa: E402
from spark_engine.models.families.registry import family_of, read_config  # noqa: E402
from tests.checkpoint_files import quantisation_configs  # noqa: E402
from tests.models import nvidia_configs  # noqa: E402

FORMATS = ("bf16", "fp8", "fp8_block", "nvfp4", "nvfp4_a4", "modelopt_mixed", "published")
ROWS: dict[str, Any] = {"decode": (1, 128), "prefill": (4096,), "max_seqs": 128, "drafts": 3}
ROWS |= {"verify": ((1, 1), (128, 3))}
LAYERS = 4
GROWN = ("attention_decode", "moe_router", "grouped_moe", "moe_norm_quant")
TO_EACH_TARGET = pytest.mark.parametrize("target", TARGETS.values(), ids=lambda t: t.name)
OF_EACH_SIZE = pytest.mark.parametrize("model", nvidia_configs.LARGE)


def checkpoint(folder: Path, model: str, format: str) -> Path:
    """A folder of configs, in one of the formats."""
    config, hf = nvidia_configs.large(model)
    text = config["text_config"]
    text |= {"num_hidden_layers": LAYERS, "layer_types": text["layer_types"][:LAYERS]}
    if format != "published":
        known = read_config(config)
        names = [linear.module for linear in linears(family_of(known).tensors(known))]
        full = [n if n == "lm_head" else f"model.language_model.{n}" for n in names]
        config["quantization_config"], hf = quantisation_configs(format, full)
    files = {"config.json": config, "hf_quant_config.json": hf, "synthetic.json": {"seed": 0}}
    for name, content in files.items():
        if content:
            (folder / name).write_text(json.dumps(content))
    return folder


def buckets(folder: Path, target: Target, **more: Any) -> list[BucketTactics]:
    """The buckets of a build, which raises where a node has no kernel."""
    return list(decided_of(folder, options(target.name, **ROWS, **more)))


@OF_EACH_SIZE
@pytest.mark.parametrize("format", FORMATS)
def test_every_bucket_has_its_kernels(format: str, model: str, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, model, format)
    for target in TARGETS.values():
        found = buckets(folder, target)
        assert {b.size.family for b in found} >= {"decode", "verify_k1", "verify_k3", "prefill"}
        assert {n.op for b in found for n, _ in b.nodes} >= {"attention_decode", "moe_router"}
        for ranks in (2, 4) if format == "nvfp4" else ():
            assert buckets(folder, target, tp=ranks)


@pytest.mark.kernels
@TO_EACH_TARGET
@OF_EACH_SIZE
@pytest.mark.parametrize("format", ["published", "nvfp4", "fp8_block", "bf16"])
def test_the_chosen_kernels_of_decode_compile_without_spills(
    format: str, model: str, target: Target, tmp_path: Path, cache: Path
) -> None:
    found = buckets(checkpoint(tmp_path, model, format), target)
    chosen = [c for b in found if b.size.family == "decode" for n, c in b.nodes if n.op in GROWN]
    for choice in chosen:
        assert choice.tactic is not None and choice.plan is not None
        for launch in choice.plan.launches:
            source = launch.source or choice.tactic.source
            cubin = nvrtc.compile(
                nvrtc.Job(source, launch.defines, (launch.symbol,)), target, cache
            )
            usage = cubin.usage[launch.symbol]
            assert usage.spills == 0, (choice.tactic.name, usage)
            assert usage.shared + cubin.launched(launch).shared <= target.shared_bytes
            assert launch.block[0] * usage.registers <= 65536, (choice.tactic.name, usage)
