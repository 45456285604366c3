"""What a build's defaults are decided from, counted by hand."""

from __future__ import annotations

from pathlib import Path

from spark_engine.builder.graph.lower import facts_of
from spark_engine.models.open_model import open_model
from spark_engine.tensors import DType
from tests.checkpoints import write_checkpoint

HEADS = {"linear_num_key_heads": 2, "linear_key_head_dim": 16}  # 4 values of 32


def test_facts_of_a_hybrid(tmp_path: Path) -> None:
    """Three linear layers: 4 values of 32 over keys of 16; one full layer: 2 heads of 64."""
    model = open_model(write_checkpoint(tmp_path, HEADS, "modelopt_mixed").path)
    facts = facts_of(model)
    assert (facts.max_context, facts.vocab) == (4096, 512)
    assert facts.kv_token_width == 2 * 2 * 64  # k and v
    assert facts.state_width == 3 * 4 * 32 * 16
    assert facts.conv_width == 3 * 3 * (2 * 16 + 2 * 16 + 4 * 32)  # three columns of q, k and v
    assert facts.record_width == 3 * 176  # 4·32 + 2·16 + 4 + 1, in sixteens
    assert facts.kv_dtype is DType.F8E4M3 and facts.state_dtype is DType.F32
    assert model.checkpoint is not None
    assert facts.weight_bytes == sum(t.nbytes for t in model.checkpoint.tensors.values())


def test_facts_without_a_linear_layer(tmp_path: Path) -> None:
    full = {"layer_types": ["full_attention"] * 4}
    facts = facts_of(open_model(write_checkpoint(tmp_path, full).path))
    assert facts.kv_token_width == 4 * 2 * 2 * 64 and facts.kv_dtype is None
    assert facts.state_width == facts.conv_width == facts.record_width == 0
