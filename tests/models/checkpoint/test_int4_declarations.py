"""GPTQ, AutoRound, AWQ and integer groups of compressed-tensors: what is plain, what is refused."""

from typing import Any

import pytest

from spark_engine.errors import CheckpointError
from spark_engine.models.checkpoint.quant_schemes import Dialect, Scheme
from spark_engine.models.checkpoint.quant_table import QuantTable, declarations, quant_table
from spark_engine.models.checkpoint.tensor_list import Row
from spark_engine.models.open_model import describe
from tests.checkpoints import text_config

Json = dict[str, Any]
DENSE, MOE = (describe(text_config(moe)).rows for moe in (False, True))
GPTQ: Json = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}
ROUND: Json = {"quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": True}
AWQ: Json = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"}
INT: Json = {"num_bits": 4, "type": "int", "group_size": 32, "strategy": "group"}
PLAIN, G128 = Scheme.PLAIN, Scheme.INT4_G128


def table(row: Json, rows: tuple[Row, ...] = DENSE) -> QuantTable:
    return quant_table(rows, declarations({"quantization_config": row}, {}))


def compressed(weights: Json, inputs: Json | None = None, **more: Any) -> Json:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}} | more


def test_dynamic_entries_of_gptq() -> None:
    """The first that matches from a name's start counts; entries may change the group."""
    rules: Json = {r"+:.*\.layers\.0\..*down_proj": {"group_size": 32}, "-:.*layers.0": {}}
    rules |= {r".*layers\.1\.mlp": {"group_size": 64}, "-:mlp": {}}
    found = table(GPTQ | {"dynamic": rules, "lm_head": True, "checkpoint_format": "gptq_v2"})
    assert found["layers.0.mlp.down_proj"] is Scheme.INT4_G32
    assert found["layers.0.mlp.up_proj"] is PLAIN
    assert found["layers.1.mlp.up_proj"] is Scheme.INT4_G64
    assert found["layers.2.mlp.up_proj"] is found["lm_head"] is G128
    assert found.dialect is Dialect.GPTQ_V2


def test_gptq_of_some_modules_of_a_block() -> None:
    found = table(GPTQ | {"modules_in_block_to_quantize": [["mlp.up_proj"], ["mlp.gate_proj"]]})
    assert found["layers.0.mlp.up_proj"] is found["layers.3.mlp.gate_proj"] is G128
    assert found["layers.0.mlp.down_proj"] is found["layers.3.self_attn.q_proj"] is PLAIN


@pytest.mark.parametrize("blocks", ["model.language_model.layers,x", ["model.layers"], None])
def test_auto_round_entries_by_name_and_pattern(blocks: Any) -> None:
    extra: Json = {
        "model.language_model.layers.0.mlp.up_proj": {"bits": 16, "data_type": "float"},
        r".*linear_attn\.in_proj_[ab]$": {"bits": 16},
        "model.layers.1.mlp.down_proj": {"group_size": 32},
    }
    found = table(ROUND | {"extra_config": extra, "block_name_to_quantize": blocks})
    assert found["layers.0.mlp.up_proj"] is found["layers.1.linear_attn.in_proj_a"] is PLAIN
    assert found["layers.1.mlp.down_proj"] is Scheme.INT4_G32
    assert found["layers.0.mlp.down_proj"] is found["layers.3.self_attn.q_proj"] is G128
    assert found["lm_head"] is PLAIN and found.dialect is Dialect.GPTQ


def test_auto_round_of_the_head_and_in_awqs_packing() -> None:
    extra = {"lm_head": {"bits": 4, "group_size": 64}}
    found = table(ROUND | {"extra_config": extra, "packing_format": "auto_round:auto_awq"})
    assert found["lm_head"] is Scheme.INT4_G64 and found.dialect is Dialect.AWQ


def test_awq_words() -> None:
    found = table(AWQ | {"modules_to_not_convert": ["linear_attn", "layers.1.", "shared"]}, MOE)
    assert found["layers.0.linear_attn.in_proj_z"] is found["layers.1.mlp.experts"] is PLAIN
    assert found["layers.0.mlp.shared_expert.up_proj"] is found["lm_head"] is PLAIN
    assert found["layers.0.mlp.experts"] is found["layers.3.self_attn.k_proj"] is G128
    assert table({"quant_method": "awq", "w_bit": 4, "q_group_size": 32})["layers.0.mlp.up_proj"]


REFUSED = [
    (GPTQ | {"bits": 8}, "GPTQ: bits 8, group_size 128"),
    (GPTQ | {"bits": 3}, "GPTQ: bits 3"),
    (GPTQ | {"group_size": -1}, "GPTQ: bits 4, group_size -1"),
    (GPTQ | {"checkpoint_format": "marlin"}, "GPTQ: checkpoint_format is 'marlin'"),
    (GPTQ | {"dynamic": {"+:.*down": {"bits": 8}}}, "GPTQ: bits 8, group_size 128"),
    (ROUND | {"bits": 2}, "AutoRound: bits 2"),
    (ROUND | {"packing_format": "auto_round:fp8"}, "AutoRound: packing_format is"),
    (ROUND | {"data_type": "mx_fp", "group_size": 32}, "AutoRound: bits 4, .* data_type 'mx_fp'"),
    (ROUND | {"act_bits": 8}, "AutoRound: bits 4, .*act_bits 8"),
    (ROUND | {"extra_config": {".*up_proj": {"bits": 8}}}, "AutoRound: bits 8"),
    (AWQ | {"version": "gemv"}, "AWQ: version is 'gemv'"),
    ({"quant_method": "awq"}, "AWQ: bits None"),
    (compressed(INT | {"num_bits": 8}), "int8: bits 8"),
    (compressed(INT, {"num_bits": 8, "type": "int"}), "int4: activations are quantised"),
]


@pytest.mark.parametrize(("row", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_the_rest_is_refused_by_name(row: Json, words: str) -> None:
    with pytest.raises(CheckpointError, match=words) as caught:
        table(row)
    assert len(str(caught.value)) <= 300 and "4 bits in groups of" in str(caught.value)
