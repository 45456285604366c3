"""Model type qwen3_next: fused projections in every format, and the tokens of transformers."""

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.published import config_of
from spark_engine.builder.build import build
from spark_engine.builder.plan.options import Options
from spark_engine.errors import CheckpointError
from spark_engine.interface import Limits, Precision
from spark_engine.models.build_network import build_network
from spark_engine.models.checkpoint.files import open_checkpoint
from spark_engine.models.config.model_config import FULL, LINEAR
from spark_engine.models.families.registry import read_config
from spark_engine.models.open_model import describe, open_model, with_ranks
from spark_engine.models.weights.shards import of_rank
from spark_engine.models.weights.stored_model import Model
from spark_engine.runtime.engine.engine import Engine, EngineOptions
from spark_engine.runtime.engine.request import Request, SamplingParams
from spark_engine.tensors import DType
from tests.checkpoint_files import write_shards
from tests.models import next_configs, next_files
from tests.models.test_synthetic import drawn_of

BF16 = Precision(DType.BF16, DType.BF16, DType.F32)
VOCAB = 512
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
)


def _network(model: Model, family: str, ranks: int) -> Iterator[str]:
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
    for family in ("verify_k2", "prefill"):
        found, want = (list(_network(m, family, ranks)) for m in (model, open_model(twin)))
        assert found == want


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A file that transformers saved, with the draft head that it leaves out; and its model."""
    if not all(importlib.util.find_spec(m) for m in ("torch", "transformers")):
        pytest.skip("the oracle extra is not installed")
    import torch
    import transformers

    torch.set_num_threads(1)
    fused = next_files.write(tmp_path_factory.mktemp("model"), "f32")[1]
    load = transformers.Qwen3NextForCausalLM.from_pretrained
    loading = {"dtype": torch.float32, "attn_implementation": "eager", "output_loading_info": True}
    model, report = load(fused, **loading)
    assert not report["missing_keys"] and not report["mismatched_keys"]
    folder = fused.with_name("saved")
    model.eval().save_pretrained(folder)
    assert "hold no tensor of the draft head" in open_model(folder).draft_note
    opened, head = open_checkpoint(folder), open_checkpoint(fused)
    tensors = {name: np.array(opened.read(name)) for name in opened.tensors}
    tensors |= {n: np.array(head.read(n)) for n in head.tensors if n.startswith("mtp.")}
    write_shards(folder, tensors, 1)
    return folder, model


def test_tokens_are_those_of_transformers(saved: tuple[Path, Any], tmp_path: Path) -> None:
    """With drafts; the second and third prompt begin as one that is cached."""
    import torch

    folder, model = saved
    config = json.loads((folder / "config.json").read_text())
    assert config["rope_parameters"] and "mtp_num_hidden_layers" not in config
    sizes = {"decode": (1,), "prefill": (64, 256), "max_seqs": 2, "max_context": 384}
    build(folder, tmp_path / "engine", Options(**sizes, drafts=2), lambda text: None)
    engine = Engine.open(tmp_path / "engine", EngineOptions(drafts=2, fixed_drafts=True))
    rng = np.random.default_rng(5)
    stem, *ends = ([int(i) for i in rng.integers(0, VOCAB, n)] for n in (200, 1, 30, 90))
    greedy = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    cached = []
    for end in ends:
        prompt = [*stem, *end]
        engine.submit(Request(tuple(prompt), greedy))
        events = []
        while not engine.idle:
            events += engine.step()
        cached.append(events[-1].cached)
        made = [e.token for e in events if e.token is not None]
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *made[:-1]]])).logits[0, len(prompt) - 1 :]
        assert made == logits.argmax(-1).tolist() and len(made) == 40
    rounds = engine.stats()["rounds_by_k"]
    engine.close()
    assert cached[0] == 0 and min(cached[1:]) >= 128
    assert isinstance(rounds, dict) and rounds[2] > 50


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
