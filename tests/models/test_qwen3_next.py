"""Model type qwen3_next: fused projections in every format, and the tokens of transformers."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.published import config_of
from spark_engine.builder.graph.lower import facts_of
from spark_engine.errors import CheckpointError
from spark_engine.interface import Limits, Precision
from spark_engine.models.build_network import build_network
from spark_engine.models.config.model_config import FULL, LINEAR
from spark_engine.models.families.registry import read_config
from spark_engine.models.open_model import describe, open_model, with_ranks
from spark_engine.models.weights.shards import of_rank
from spark_engine.models.weights.stored_model import Model
from spark_engine.tensors import DType
from tests.models import next_configs, next_files
from tests.models.test_synthetic import drawn_of

BF16 = Precision(DType.BF16, DType.BF16, DType.F32)
# (format, of the draft head, ranks)
FILES = (
    ("bf16", "", 1),
    ("bf16", "", 2),
    ("fp8", "", 1),
    ("fp8_block", "fp8_block", 1),
    ("fp8_block", "", 2),
    ("nvfp4", "nvfp4", 1),
    ("nvfp4_a4", "", 2),
    ("ct_nvfp4", "", 1),
    ("ct_fp8_channel", "", 2),
)


def network_of(model: Model, family: str, ranks: int) -> Iterator[str]:
    """Every node and every weight of every rank, in order."""
    model = with_ranks(model, ranks, 64)
    assert model.checkpoint is not None
    limits = Limits(4, 256, 16, model.config.vocab, drafts=2, gdn_ring=4)
    made = build_network(model, family, limits, BF16)
    for node in made.graph.nodes:
        yield f"{node.op} {node.attrs} {node.inputs} {node.outputs}"
    for name, weight in made.weights.items():
        for rank in range(ranks):
            value = of_rank(weight.recipe, rank).evaluate(model.checkpoint)
            yield f"{name} {rank} {value.dtype} {value.shape} {value.tobytes().hex()}"


@pytest.mark.parametrize(("format", "head", "ranks"), FILES)
def test_the_network_is_that_of_four_projections(
    format: str, head: str, ranks: int, tmp_path: Path
) -> None:
    """Node by node and byte by byte, the draft head's included."""
    config = {"moe_intermediate_size": 256, "shared_expert_intermediate_size": 256}
    twin, fused = next_files.write(tmp_path, format, head=head or None, config=config)
    model = open_model(fused)
    names = {name.split(".")[-2] for name in model.tensors if ".in_proj_" in name}
    assert names == set(next_files.FUSED) and model.has_drafts
    assert model.parameters == open_model(twin).parameters
    if format == "bf16":  # a file of fused matrices has fewer scales
        assert facts_of(model).weight_bytes == facts_of(open_model(twin)).weight_bytes
    for family in ("verify_k2", "prefill"):
        found, want = (list(network_of(m, family, ranks)) for m in (model, open_model(twin)))
        assert found == want


def test_the_published_file_has_these_tensors() -> None:
    """Counts of Qwen/Qwen3-Next-80B-A3B-Instruct-FP8; its config.json names no draft head."""
    model = describe(next_configs.config("fp8_block"))
    assert model.has_drafts and model.config.layers[:4] == (LINEAR, LINEAR, LINEAR, FULL)
    assert model.config.rope.dims == 64 and model.config.rope.theta == 1e7
    assert len(model.tensors) == 151_479
    assert sum(int(np.prod(t.dims)) for t in model.tensors.values()) == 81_329_784_384
    assert model.parameters == 79_674_391_296
    p = "model.layers.0.linear_attn.in_proj"
    assert model.tensors[f"{p}_qkvz.weight_scale_inv"].dims == (96, 16)
    assert model.tensors[f"{p}_ba.weight"].dims == (64, 2048)
    assert model.tensors[f"{p}_ba.weight"].dtype is DType.BF16
    bf16 = describe(next_configs.config())
    assert "model.layers.47.mlp.experts.511.up_proj.weight" in bf16.tensors
    assert "mtp.layers.0.mlp.experts.511.up_proj.weight" in bf16.tensors


def test_the_benchmarks_have_the_published_size(tmp_path: Path) -> None:
    for layout, format in (("nvfp4-experts", "nvfp4_a4"), ("fp8-block", "fp8_block")):
        rule, full = config_of(f"80b-a3b:{layout}"), next_configs.config(format)
        assert read_config(rule) == read_config(full)
        few = {"num_hidden_layers": 4}
        made, published = describe(rule | few), describe(full | few)
        assert made.tensors == published.tensors and made.table.modules == published.table.modules
    drawn = drawn_of(next_configs.write(tmp_path, "nvfp4", num_hidden_layers=1))
    assert drawn.read("model.layers.0.linear_attn.in_proj_qkvz.weight").shape == (12288, 1024)
    assert drawn.read("mtp.layers.0.mlp.experts.511.down_proj.weight").shape == (2048, 512)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"decoder_sparse_step": 2}, "decoder_sparse_step is 2; supported: 1"),
        ({"mlp_only_layers": [0]}, r"mlp_only_layers is \[0\]"),
        ({"norm_topk_prob": False}, "norm_topk_prob is False"),
        ({"num_experts": 0}, "num_experts is 0"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "rope_type is 'llama3'"),
    ],
)
def test_values_that_are_not_computed(change: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        describe(next_configs.config(**change))
