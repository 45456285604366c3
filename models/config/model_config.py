"""config.json, converted once at the border into a frozen `ModelConfig`.

Knows the keys and defaults of the supported model types (transformers 5.x,
`configuration_qwen3_5*.py`), and refuses what the network does not compute. Knows no tensor, no
quantisation and no graph.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from spark_engine.errors import CheckpointError
from spark_engine.models.config.json_values import malformed_json
from spark_engine.models.config.rope import Rope, rope_from_hf
from spark_engine.tensors import DType

Json = Mapping[str, Any]

LINEAR, FULL = "linear_attention", "full_attention"
MODEL_TYPES = ("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text")
ARCHITECTURES = (
    "Qwen3_5ForCausalLM",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForCausalLM",
    "Qwen3_5MoeForConditionalGeneration",
)
_DTYPES = {"bfloat16": DType.BF16, "float16": DType.F16, "float32": DType.F32}


@dataclass(frozen=True)
class MoeConfig:
    """The mixture of experts of every layer: one shared expert beside `experts` routed ones."""

    experts: int
    top_k: int
    intermediate: int
    shared_intermediate: int


@dataclass(frozen=True)
class VisionConfig:
    """The sizes that fix the vision tower's tensors; the tower itself is not compiled."""

    depth: int
    hidden: int
    intermediate: int
    out_hidden: int
    channels: int
    patch: int
    temporal_patch: int
    merge: int
    positions: int
    deepstack: int


@dataclass(frozen=True)
class ModelConfig:
    """A text network. Heads and dims are counts of elements; `layers` names each mixer.

    Attributes:
        model_type: "qwen3_5" or "qwen3_5_moe", the row of the network registry.
        nested: the text config lay inside a multimodal one (prefix `model.language_model.`).
        dtype: what the file says its plain tensors are (a hint: the files decide).
        state_dtype: the recurrent state's dtype that the checkpoint asks for.
        eos_token_ids: of generation_config and config together, in that order, no repeats.
    """

    model_type: str
    nested: bool
    layers: tuple[str, ...]
    hidden: int
    vocab: int
    heads: int
    kv_heads: int
    head_dim: int
    rope: Rope
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_kernel: int
    eps: float
    intermediate: int | None
    moe: MoeConfig | None
    tied: bool
    max_position: int
    dtype: DType
    state_dtype: DType
    eos_token_ids: tuple[int, ...]
    mtp_layers: int
    vision: VisionConfig | None

    @property
    def conv_channels(self) -> int:
        """Columns of q, k and v together, which the convolution runs over."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def value_width(self) -> int:
        """Columns of the linear mixer's output: value heads times their size."""
        return self.value_heads * self.value_dim

    @property
    def delta_heads(self) -> dict[str, int]:
        """The sizes of the linear mixer's heads, as its ops have them."""
        sizes = {"key_heads": self.key_heads, "value_heads": self.value_heads}
        return {**sizes, "key_dim": self.key_dim, "value_dim": self.value_dim}

    @classmethod
    def from_hf(cls, config: Json, generation: Json | None = None) -> ModelConfig:
        """Reads config.json (and generation_config.json, for its eos ids).

        Raises CheckpointError naming the key when a value is missing, malformed or unsupported.
        """
        with malformed_json("config.json"):
            return cls._read(config, generation or {})

    @classmethod
    def _read(cls, config: Json, generation: Json) -> ModelConfig:
        _check_kind(config)
        nested = "text_config" in config
        text = Reader(_mapping(config, "text_config") if nested else config, "config.json")
        _check_supported(text)
        moe = _moe(text) if "moe" in str(config["model_type"]) else None
        return cls(
            model_type="qwen3_5" if moe is None else "qwen3_5_moe",
            nested=nested,
            layers=_layers(text),
            hidden=text.count("hidden_size"),
            vocab=text.count("vocab_size"),
            **_heads(text),
            rope=rope_from_hf(text.row),
            conv_kernel=text.count("linear_conv_kernel_dim", 4, least=2),  # it keeps one token less
            eps=text.number("rms_norm_eps", 1e-6),
            intermediate=text.count("intermediate_size") if moe is None else None,
            moe=moe,
            tied=_tied(config, text.row),
            max_position=text.count("max_position_embeddings", 32768),
            dtype=_dtype(config, text.row),
            state_dtype=_DTYPES.get(str(text.row.get("mamba_ssm_dtype")), DType.F32),
            eos_token_ids=_eos(generation, text.row, config),
            mtp_layers=text.count("mtp_num_hidden_layers", 0, least=0),
            vision=_vision(config.get("vision_config")),
        )


class Reader:
    """Typed access to a JSON mapping; every failure names the file, the key and the value."""

    def __init__(self, row: Json, where: str) -> None:
        self.row, self._where = row, where

    def count(self, key: str, default: int | None = None, least: int = 1) -> int:
        """An integer of at least `least`."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            self._fail(key, value, f"expected an integer of at least {least}")
        return int(value)

    def number(self, key: str, default: float | None = None) -> float:
        """A positive float."""
        value = self._get(key, default)
        sound = isinstance(value, int | float) and not isinstance(value, bool)
        if not sound or not 0 < value < math.inf:  # Python reads NaN and Infinity from JSON
            self._fail(key, value, "expected a positive number")
        return float(value)

    def _get(self, key: str, default: float | None) -> Any:
        value = self.row.get(key)
        value = default if value is None else value
        if value is None:
            self._fail(key, None, "the key is required; take config.json from the model's source")
        return value

    def _fail(self, key: str, value: object, remedy: str) -> None:
        raise CheckpointError(f"{self._where}: {key} is {value!r}: {remedy}")


def _mapping(config: Json, key: str) -> Json:
    value = config[key]
    if not isinstance(value, Mapping):
        raise CheckpointError(f"config.json: {key} is {value!r}: expected an object")
    return value


def _check_kind(config: Json) -> None:
    kind, names = config.get("model_type"), config.get("architectures") or []
    supported = f"supported are model types {', '.join(MODEL_TYPES)} with architectures "
    supported += ", ".join(ARCHITECTURES)
    if kind not in MODEL_TYPES:
        raise CheckpointError(f"config.json: model_type is {kind!r}; {supported}")
    if names and not any(name in ARCHITECTURES for name in names):
        raise CheckpointError(f"config.json: architectures is {names!r}; {supported}")
    text = config.get("text_config")
    inner = text.get("model_type", kind) if isinstance(text, Mapping) else kind
    if inner not in MODEL_TYPES or ("moe" in inner) != ("moe" in str(kind)):
        raise CheckpointError(
            f"config.json: text_config.model_type {inner!r} contradicts model_type {kind!r}; "
            f"{supported}"
        )


def _check_supported(text: Reader) -> None:
    """Switches that other models of the family use and this network has no code for."""
    wanted: dict[str, tuple[object, ...]] = {
        "hidden_act": (None, "silu"),
        "attention_bias": (None, False),
        "attn_output_gate": (None, True),
        "output_gate_type": (None, "swish", "silu"),
        "norm_topk_prob": (None, True),
        "mamba_ssm_dtype": (None, *_DTYPES),
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
    """layer_types, or the pattern that full_attention_interval stands for (default 4)."""
    total = text.count("num_hidden_layers")
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


def _moe(text: Reader) -> MoeConfig:
    moe = MoeConfig(
        experts=text.count("num_experts"),
        top_k=text.count("num_experts_per_tok"),
        intermediate=text.count("moe_intermediate_size"),
        shared_intermediate=text.count("shared_expert_intermediate_size"),
    )
    if moe.top_k > moe.experts:
        raise CheckpointError(
            f"config.json: num_experts_per_tok is {moe.top_k}, more than num_experts {moe.experts}"
        )
    return moe


def _tied(config: Json, text: Json) -> bool:
    """The outer config's word counts, as in transformers; absent means not tied."""
    value = config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))
    if not isinstance(value, bool):
        raise CheckpointError(f"config.json: tie_word_embeddings is {value!r}: expected a boolean")
    return value


def _dtype(config: Json, text: Json) -> DType:
    keys = ("dtype", "torch_dtype")
    named = [row.get(k) for row in (text, config) for k in keys if row.get(k) is not None]
    name = str(named[0] if named else "bfloat16").removeprefix("torch.")
    if name not in _DTYPES:
        raise CheckpointError(f"config.json: dtype is {name!r}; supported: {', '.join(_DTYPES)}")
    return _DTYPES[name]


def _eos(*rows: Json) -> tuple[int, ...]:
    """generation_config and config disagree in published checkpoints: both are honoured."""
    ids: list[int] = []
    for row in rows:
        value = row.get("eos_token_id")
        listed = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in listed):
            raise CheckpointError(f"eos_token_id is {value!r}: expected a token id or a list")
        ids += listed
    return tuple(dict.fromkeys(ids))


def _vision(row: Json | None) -> VisionConfig | None:
    if not row:
        return None
    vision = Reader(row, "config.json: vision_config")
    return VisionConfig(
        depth=vision.count("depth", 27),
        hidden=vision.count("hidden_size", 1152),
        intermediate=vision.count("intermediate_size", 4304),
        out_hidden=vision.count("out_hidden_size", 3584),
        channels=vision.count("in_channels", 3),
        patch=vision.count("patch_size", 16),
        temporal_patch=vision.count("temporal_patch_size", 2),
        merge=vision.count("spatial_merge_size", 2),
        positions=vision.count("num_position_embeddings", 2304),
        deepstack=len(row.get("deepstack_visual_indexes") or []),
    )
