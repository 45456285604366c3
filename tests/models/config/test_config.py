"""config.json at the border: what is read, from where, and what is refused."""

from typing import Any

import pytest

from spark_engine.errors import CheckpointError
from spark_engine.models.config.model_config import FULL, LINEAR, ModelConfig
from spark_engine.models.families.qwen3_5.config import Qwen3_5Config
from spark_engine.models.families.registry import read_config
from spark_engine.tensors import DType
from tests.checkpoints import text_config
from tests.models import nvidia_configs

Json = dict[str, Any]


def _read(**change: object) -> ModelConfig:
    """The small dense config with keys set, or removed with ...."""
    config = text_config(moe=False) | change
    return read_config({k: v for k, v in config.items() if v is not ...})


@pytest.mark.parametrize("given", ["model_type", "architectures", "text_config"])
def test_one_name_of_the_family_is_enough(given: str) -> None:
    names: Json = {"model_type": "qwen3_5", "architectures": ["Qwen3_5ForCausalLM"]}
    inner = text_config(moe=False) | {"model_type": "qwen3_5_text"}
    row = inner | {key: names[key] if key == given else ... for key in names}
    found = _read(**row, **({"text_config": inner} if given == "text_config" else {}))
    assert found.model_type == "qwen3_5" and found.nested == (given == "text_config")


def test_published_configs() -> None:
    dense = read_config(nvidia_configs.pair("27B")[0])
    assert (dense.hidden, dense.heads, dense.kv_heads, dense.head_dim) == (5120, 24, 4, 256)
    assert (dense.conv_channels, dense.value_width, len(dense.layers)) == (10240, 6144, 64)
    assert dense.layers[:4] == (LINEAR, LINEAR, LINEAR, FULL) and dense.nested
    assert isinstance(dense, Qwen3_5Config)
    assert (dense.intermediate, dense.moe) == (17408, None)
    assert (dense.mtp_layers, dense.mtp_embeddings) == (1, False)
    assert dense.rope.dims == 64 and dense.rope.theta == 1e7
    moe = read_config(nvidia_configs.pair("35B-A3B")[0])
    assert moe.moe is not None and (moe.moe.experts, moe.moe.top_k) == (256, 8)
    assert moe.model_type == "qwen3_5_moe" and moe.intermediate is None


@pytest.mark.parametrize("interval", [..., 2, 3])
def test_layer_types_from_the_interval(interval: object) -> None:
    layers = _read(layer_types=..., full_attention_interval=interval).layers
    step = 4 if interval is ... else interval
    assert [i for i, k in enumerate(layers) if k == FULL] == [
        i for i in range(4) if (i + 1) % step == 0
    ]


def test_nested_and_flat_are_one() -> None:
    flat = text_config(moe=True)
    nested = {"model_type": "qwen3_5_moe", "text_config": flat}
    a, b = read_config(flat), read_config(nested)
    assert b.nested and not a.nested
    assert {k: v for k, v in vars(a).items() if k != "nested"} == {
        k: v for k, v in vars(b).items() if k != "nested"
    }


def test_eos_ids_of_both_files_in_order() -> None:
    config = text_config(moe=False) | {"eos_token_id": 7}
    assert read_config(config, {"eos_token_id": [9, 7]}).eos_token_ids == (9, 7)
    assert read_config(config, {"eos_token_id": 3}).eos_token_ids == (3, 7)
    assert read_config(config | {"eos_token_id": None}).eos_token_ids == ()
    text = config | {"eos_token_id": [4, 5]}
    outer = {"model_type": "qwen3_5", "text_config": text, "eos_token_id": [5, 6]}
    assert read_config(outer, {"eos_token_id": [8, 9]}).eos_token_ids == (8, 9, 4, 5, 6)
    assert read_config(outer | {"eos_token_id": 2}, {}).eos_token_ids == (4, 5, 2)
    with pytest.raises(CheckpointError, match="eos_token_id is 'x'"):
        read_config(config, {"eos_token_id": "x"})


def test_tied_in_both_places_and_the_outer_word_counts() -> None:
    assert not _read().tied and not _read(tie_word_embeddings=...).tied
    assert _read(tie_word_embeddings=True).tied
    text = text_config(moe=False)
    outer: Json = {"model_type": "qwen3_5", "text_config": text, "tie_word_embeddings": True}
    assert read_config(outer).tied
    del outer["tie_word_embeddings"]
    assert not read_config(outer).tied


def test_state_dtype() -> None:
    assert _read(mamba_ssm_dtype="bfloat16").state_dtype is DType.BF16
    assert _read(mamba_ssm_dtype=...).state_dtype is DType.F32
    assert _read(torch_dtype="torch.float16").dtype is DType.F16


REFUSED: list[tuple[Json, str]] = [
    ({"model_type": "llama"}, "'llama'.*qwen3_5_moe_text.*Qwen3_5ForCausalLM"),
    ({"model_type": None, "architectures": None}, "model_type is None"),
    ({"architectures": ["Qwen3_5ForTokenClassification"]}, "Qwen3_5ForConditionalGeneration"),
    ({"text_config": {"model_type": "qwen3_5_moe_text"}}, "contradicts"),
    ({"text_config": 3}, "text_config is 3"),
    ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; supported: 'silu'"),
    ({"norm_topk_prob": False}, "norm_topk_prob is False"),
    ({"output_gate_type": "tanh"}, "output_gate_type is 'tanh'.*'swish'"),
    ({"attn_output_gate": False}, "attn_output_gate is False"),
    ({"attention_bias": True}, "attention_bias is True"),
    ({"mamba_ssm_dtype": "float64"}, "mamba_ssm_dtype is 'float64'"),
    ({"dtype": "int8"}, "dtype is 'int8'"),
    ({"hidden_size": ...}, "hidden_size is None.*required"),
    ({"hidden_size": "5120"}, "hidden_size is '5120'"),
    ({"vocab_size": 0}, "vocab_size is 0"),
    ({"num_hidden_layers": True}, "num_hidden_layers is True"),
    ({"rms_norm_eps": -1.0}, "rms_norm_eps is -1.0"),
    ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim is 1: expected .* at least 2"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
    ({"rms_norm_eps": float("inf")}, "rms_norm_eps is inf"),
    ({"layer_types": ["full_attention"]}, "expected 4 entries"),
    ({"layer_types": ["sliding_attention"] * 4}, "'full_attention'"),
    ({"num_key_value_heads": 3}, "num_attention_heads is 4"),
    ({"linear_num_key_heads": 3}, "linear_num_value_heads is 4"),
    ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'"),
    ({"rope_parameters": {"rope_type": "llama3"}}, "rope_type is 'llama3'; supported: default"),
    ({"rope_parameters": {"rope_type": "default"}}, "rope_theta is None"),
    ({"head_dim": 6}, "partial_rotary_factor 0.25 of head_dim 6 gives 1"),
    ({"vision_config": {"depth": -1}}, "vision_config: depth is -1"),
]


@pytest.mark.parametrize(("change", "words"), REFUSED, ids=[str(c)[:50] for c, _ in REFUSED])
def test_what_is_not_computed_is_refused(change: Json, words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        _read(**change)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("hc_count", 4), ("ple_layer_ids", [2]), ("indexer_n_heads", 4), ("hc_lowrank", 320)),
        *(("n_shared_experts", 1), ("q_lora_rank", 1536), ("final_logit_softcapping", 30.0)),
        *(("use_qk_norm", True), ("routed_scaling_factor", 2.5), ("index_topk", 2048)),
        *(("scoring_func", "sigmoid"), ("num_kv_shared_layers", 20), ("swa_period", 4)),
        *(("hidden_size_per_layer_input", 256), ("attn_logit_scale", 0.5), ("num_loops", 2)),
    ],
)
def test_keys_of_other_networks_are_named(key: str, value: object) -> None:
    text = text_config(moe=True)
    nested: Json = {"model_type": "qwen3_5_moe", "text_config": text | {key: value}}
    words = rf"{key} \(.*\): qwen3_5_moe has no such key, so this is another network"
    for config in (text | {key: value}, nested, {**nested, "text_config": text, key: value}):
        with pytest.raises(CheckpointError, match=words) as caught:
            read_config(config)
        assert len(str(caught.value)) <= 300
    for off in (None, False, 0, [], {}, "", 1.0):
        assert read_config(text | {key: off}).hidden == 128


def test_keys_without_effect_are_ignored() -> None:
    harmless: Json = {
        "unsloth_version": "2026.8", "unsloth_fixed": True, "use_cache": False, "top_k": 20,
        "attn_implementation": "sdpa", "use_flash_attn": True, "num_logits_to_keep": 1,
        "n_ctx": 4096, "expert_parallel_size": 2, "_attn_implementation_internal": "eager",
        "router_aux_loss_coef": 0.001, "num_labels": 2, "id2label": {"0": "x"}, "num_epochs": 3,
        "auto_map": {"AutoConfig": "x.y"}, "tokenizer_class": "Qwen2Tokenizer", "max_length": 20,
        "transformers_version": "5.24.0", "initializer_range": 0.02, "max_window_layers": 28,
        "attention_dropout": 0.1, "output_router_logits": True, "mtp_loss_weight": 0.3,
        "mergekit": {"method": "slerp"}, "temperature": 0.6, "image_token_id": 5,
        "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True,
        "rope_theta": 10000000, "partial_rotary_factor": 0.25, "use_sliding_window": False,
    }  # fmt: skip
    assert _read(**harmless) == _read()


def test_many_unknown_keys_are_counted() -> None:
    with pytest.raises(CheckpointError, match=r"hc_a \('x+\.\.\.\), hc_b \(1\) and 7 more keys: "):
        _read(hc_a="x" * 10_000, **{f"hc_{c}": 1 for c in "bcdefghi"})


def test_more_chosen_experts_than_there_are() -> None:
    with pytest.raises(CheckpointError, match="num_experts_per_tok is 9"):
        read_config(text_config(True, {"num_experts_per_tok": 9}))
