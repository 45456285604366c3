"""config.json of model types qwen3_5 and qwen3_5_moe, converted once into a frozen dataclass.

Knows the keys and defaults (transformers 5.x, `configuration_qwen3_5*.py`), and refuses values that
the network does not support. The folder of qwen3_5_moe reads the keys of the experts.
"""

from collections.abc import Callable
from dataclasses import dataclass

from spark_engine.errors import CheckpointError
from spark_engine.models.config.json_values import Json, Reader
from spark_engine.models.config.model_config import FULL, LINEAR, ModelConfig, MoeConfig
from spark_engine.models.config.published_values import (
    DTYPES,
    dtype,
    eos_token_ids,
    is_nested,
    is_tied,
    text_of,
)
from spark_engine.models.config.rope import rope_from_hf
from spark_engine.models.config.unknown_keys import refuse_unknown
from spark_engine.tensors import DType

MOST_LAYERS = 1024


@dataclass(frozen=True)
class VisionConfig:
    """The sizes of the vision tower, and its activation's name."""

    depth: int
    hidden: int
    heads: int
    intermediate: int
    out_hidden: int
    channels: int
    patch: int
    temporal_patch: int
    merge: int
    positions: int
    deepstack: int
    act: str


@dataclass(frozen=True)
class Qwen3_5Config(ModelConfig):
    """The text network, and the other parts in its files.

    `mtp_embeddings`: the draft head has a separate embedding.
    """

    mtp_embeddings: bool
    vision: VisionConfig | None


def read(config: Json, generation: Json) -> Qwen3_5Config:
    """Reads config.json (and generation_config.json, for its eos ids).

    Raises CheckpointError naming the key when a value is missing, malformed or unsupported.
    """
    return read_as("qwen3_5", config, generation)


def read_as(
    model_type: str,
    config: Json,
    generation: Json,
    moe: Callable[[Reader], MoeConfig] | None = None,
) -> Qwen3_5Config:
    """`read` for a family with these keys; `moe` reads those of its experts, if any."""
    text = text_of(config)
    _check_supported(text)
    refuse_unknown(config, text.row, model_type)
    rope = rope_from_hf(text.row, config)
    return Qwen3_5Config(
        model_type=model_type,
        nested=is_nested(config),
        layers=_layers(text),
        hidden=text.count("hidden_size"),
        vocab=text.count("vocab_size"),
        **_heads(text),
        rope=rope,
        conv_kernel=text.count("linear_conv_kernel_dim", 4, least=2),  # it keeps one token less
        eps=text.number("rms_norm_eps", 1e-6),
        intermediate=text.count("intermediate_size") if moe is None else None,
        moe=None if moe is None else moe(text),
        tied=is_tied(config, text.row),
        max_position=max(text.count("max_position_embeddings", 32768), rope.positions),
        dtype=dtype(config, text.row),
        state_dtype=DTYPES.get(str(text.row.get("mamba_ssm_dtype")), DType.F32),
        eos_token_ids=eos_token_ids(generation, text.row, config),
        mtp_layers=text.optional("mtp_num_hidden_layers"),
        mtp_embeddings=bool(text.row.get("mtp_use_dedicated_embeddings")),
        vision=_vision(config.get("vision_config")),
    )


def _check_supported(text: Reader) -> None:
    """Raises CheckpointError for switches of the configuration that this network does not
    support."""
    wanted: dict[str, tuple[object, ...]] = {
        "hidden_act": (None, "silu"),
        "attention_bias": (None, False),
        "attn_output_gate": (None, True),
        "output_gate_type": (None, "swish", "silu"),
        "norm_topk_prob": (None, True),
        "mamba_ssm_dtype": (None, *DTYPES),
        "mlp_only_layers": (None, []),
        "decoder_sparse_step": (None, 1),
        "sliding_window": (None,),
    }
    for key, values in wanted.items():
        value = text.row.get(key)
        if value not in values:
            legal = " or ".join(repr(v) for v in values if v is not None) or "no value"
            raise CheckpointError(f"config.json: {key} is {value!r}; supported: {legal}")


def _layers(text: Reader) -> tuple[str, ...]:
    """layer_types, or the pattern that full_attention_interval defines (default 4)."""
    total = text.count("num_hidden_layers", most=MOST_LAYERS)
    kinds = text.row.get("layer_types")
    if kinds is None:
        interval = text.count("full_attention_interval", 4)
        kinds = [LINEAR if (i + 1) % interval else FULL for i in range(total)]
    if not isinstance(kinds, list) or len(kinds) != total or set(kinds) - {LINEAR, FULL}:
        raise CheckpointError(
            f"config.json: layer_types is {kinds!r}; expected {total} entries (num_hidden_layers), "
            f"each {LINEAR!r} or {FULL!r}"
        )
    return tuple(kinds)


def _heads(text: Reader) -> dict[str, int]:
    heads, kv_heads = text.count("num_attention_heads"), text.count("num_key_value_heads")
    key_heads = text.count("linear_num_key_heads", 16)
    value_heads = text.count("linear_num_value_heads", 32)
    for name, all_, group in (
        ("num_attention_heads", heads, kv_heads),
        ("linear_num_value_heads", value_heads, key_heads),
    ):
        if all_ % group:
            raise CheckpointError(
                f"config.json: {name} is {all_}, which {group} key heads do not divide; "
                "each key head must serve the same number of heads"
            )
    return {
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": text.count("head_dim", 256),
        "key_heads": key_heads,
        "value_heads": value_heads,
        "key_dim": text.count("linear_key_head_dim", 128),
        "value_dim": text.count("linear_value_head_dim", 128),
    }


def _vision(row: Json | None) -> VisionConfig | None:
    if not row:
        return None
    vision = Reader(row, "config.json: vision_config")
    return VisionConfig(
        depth=vision.count("depth", 27, most=MOST_LAYERS),
        hidden=vision.count("hidden_size", 1152),
        heads=vision.count("num_heads", 16),
        intermediate=vision.count("intermediate_size", 4304),
        out_hidden=vision.count("out_hidden_size", 3584),
        channels=vision.count("in_channels", 3),
        patch=vision.count("patch_size", 16),
        temporal_patch=vision.count("temporal_patch_size", 2),
        merge=vision.count("spatial_merge_size", 2),
        positions=vision.count("num_position_embeddings", 2304),
        deepstack=len(row.get("deepstack_visual_indexes") or []),
        act=str(row.get("hidden_act", "gelu_pytorch_tanh")),
    )
