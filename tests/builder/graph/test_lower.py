"""What a build's defaults are decided from, counted by hand."""

from dataclasses import replace
from pathlib import Path

import pytest

from spark_engine.builder.graph import lower
from spark_engine.builder.graph.lower import facts_of
from spark_engine.builder.plan.drafts import HeadFacts
from spark_engine.models.checkpoint.quant_schemes import Scheme
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


def test_facts_of_a_draft_head(tmp_path: Path) -> None:
    """One layer more that keeps keys and values; NVFP4 rows of 128 columns: 64 + 8 bytes."""
    config = HEADS | {"mtp_num_hidden_layers": 1}
    facts = facts_of(open_model(write_checkpoint(tmp_path / "a", config, "modelopt_mixed").path))
    assert facts.conv_channels == 3 * (2 * 16 + 2 * 16 + 4 * 32)
    assert facts.head == HeadFacts(2 * 2 * 64, 72, True, (1,))
    assert facts.kv_token_width == 2 * 2 * 64
    tied = config | {"tie_word_embeddings": True, "eos_token_id": [2, 7]}
    facts = facts_of(open_model(write_checkpoint(tmp_path / "b", tied, "f32").path))
    assert facts.head == HeadFacts(2 * 2 * 64, 4 * 128, False, (2, 7))
    assert facts_of(open_model(write_checkpoint(tmp_path / "c", HEADS).path)).head is None


def test_the_list_of_drafts_needs_rows_with_their_own_scales(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[tuple[int, Path]] = []
    monkeypatch.setattr(lower, "listed", lambda *given: read.append(given) or (1, 2))
    for name, tied in (("a", False), ("b", True)):
        config = HEADS | {"mtp_num_hidden_layers": 1, "tie_word_embeddings": tied}
        path = write_checkpoint(tmp_path / name, config, "f32").path
        model = open_model(path)
        facts = facts_of(model)
        assert facts.head is not None and facts.head.listed == (1, 2)
        assert read.pop() == (512, path)
        modules = {e.row.module for e in model.expected.values()}
        matrix = next(m for m in modules if m.endswith("embed_tokens" if tied else "lm_head"))
        schemes = {**model.table.modules, matrix: Scheme.FP8_BLOCK}
        blocks = replace(model, table=replace(model.table, modules=schemes))
        facts = facts_of(blocks)
        assert facts.head is not None and facts.head.listed == () and not read


def test_facts_without_a_linear_layer(tmp_path: Path) -> None:
    full = {"layer_types": ["full_attention"] * 4}
    facts = facts_of(open_model(write_checkpoint(tmp_path, full).path))
    assert facts.kv_token_width == 4 * 2 * 2 * 64 and facts.kv_dtype is None
    assert facts.state_width == facts.conv_width == facts.record_width == 0
