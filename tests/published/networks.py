"""Random networks: their tensors have the names and shapes of transformers' own classes.

Head sizes are those of the published models; widths and layers are small. A draft head, which
transformers leaves out, is a full-attention layer and the tensors that every published head has.
Knows no quantisation and nothing of the package.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
Array = NDArray[np.generic]
Json = dict[str, Any]
BF16 = np.dtype(ml_dtypes.bfloat16)

_ROPE: Json = {
    "rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25,
    "mrope_section": [11, 11, 10], "mrope_interleaved": True,
}  # fmt: skip
_ALL: Json = {
    "vocab_size": 512, "hidden_size": 256, "num_hidden_layers": 2, "full_attention_interval": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 256,
    "linear_num_key_heads": 1, "linear_num_value_heads": 3, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096, "hidden_act": "silu", "attention_bias": False,
    "attention_dropout": 0.0, "initializer_range": 0.02, "use_cache": True, "bos_token_id": 1,
    "eos_token_id": 1, "tie_word_embeddings": False, "dtype": "bfloat16",
}  # fmt: skip
_HYBRID: Json = {
    "layer_types": ["linear_attention", "full_attention"], "rope_parameters": _ROPE,
    "attn_output_gate": True, "mamba_ssm_dtype": "float32", "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
}  # fmt: skip
_SPARSE: Json = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128, "linear_num_value_heads": 2,
    "output_router_logits": False, "router_aux_loss_coef": 0.001,
}  # fmt: skip
# What qwen3_next has in place of _HYBRID: no layer types, rope at the top, no count of heads.
_NEXT: Json = {
    "model_type": "qwen3_next", "architectures": ["Qwen3NextForCausalLM"],
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "decoder_sparse_step": 1,
    "mlp_only_layers": [], "norm_topk_prob": True, "intermediate_size": 5120,
    "partial_rotary_factor": 0.25, "rope_theta": 10000000, "rope_scaling": None,
}  # fmt: skip
_VISION: Json = {
    "depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "patch_size": 16,
    "out_hidden_size": 256, "num_position_embeddings": 4, "spatial_merge_size": 2,
    "temporal_patch_size": 2, "in_channels": 3, "hidden_act": "gelu_pytorch_tanh",
    "deepstack_visual_indexes": [],
}  # fmt: skip
_TOKENS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")


@dataclass(frozen=True)
class Network:
    """`config` is config.json without a quantisation; `values` are bf16 numbers by transformers'
    names, experts fused; `head` likewise by the names of `mtp.*`."""

    config: Json
    values: dict[str, F32]
    head: dict[str, F32]


def config_of(kind: str, text: bool, changes: Json) -> Json:
    """config.json of "dense", "moe" or "next", with `changes` to the text part (None: left
    out), in the wrapper of the vision models or flat."""
    if kind == "next":
        return _ALL | _SPARSE | _NEXT | changes
    moe = kind == "moe"
    name, stem = ("qwen3_5_moe", "Qwen3_5Moe") if moe else ("qwen3_5", "Qwen3_5")
    inner = _ALL | _HYBRID | (_SPARSE if moe else {"intermediate_size": 384})
    inner |= {"model_type": f"{name}_text"} | changes
    inner = {key: value for key, value in inner.items() if value is not None}
    if text:
        return inner | {"architectures": [f"{stem}ForCausalLM"]}
    return {
        "model_type": name,
        "architectures": [f"{stem}ForConditionalGeneration"],
        "text_config": inner,
        "vision_config": _VISION | {"model_type": f"{name}_vision"},
        **{name: 500 + i for i, name in enumerate(_TOKENS)},
        "tie_word_embeddings": bool(inner.get("tie_word_embeddings")),
        "dtype": "bfloat16",
    }


def module_of(config: Json, device: str) -> Any:
    """transformers' model of a config.json, in f32."""
    import torch
    import transformers

    kind = getattr(transformers, config["architectures"][0])
    with torch.device(device):
        return kind._from_config(
            kind.config_class.from_dict(config), dtype=torch.float32, attn_implementation="eager"
        ).eval()


def draw(config: Json, seed: int = 3) -> Network:
    """Numbers that hide no error: norms off one, long memories, strong convolutions."""
    rng = np.random.default_rng(seed)
    shapes = {n: tuple(p.shape) for n, p in module_of(config, "meta").state_dict().items()}
    parts = (config, config.get("text_config", config))
    if any(part.get("tie_word_embeddings") for part in parts):
        shapes.pop("lm_head.weight")
    values = {name: _numbers(name, shape, rng) for name, shape in shapes.items()}
    head = {name: _numbers(name, shape, rng) for name, shape in _head(shapes)}
    return Network(config, values, head)


def _head(shapes: dict[str, tuple[int, ...]]) -> Iterator[tuple[str, tuple[int, ...]]]:
    stem = next(n for n in shapes if n.endswith("layers.1.input_layernorm.weight"))
    stem = stem.removesuffix("input_layernorm.weight")
    (width,) = shapes[f"{stem}input_layernorm.weight"]
    yield "mtp.fc.weight", (width, 2 * width)
    for norm in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        yield f"mtp.{norm}.weight", (width,)
    for name, shape in shapes.items():
        if name.startswith(stem):
            yield name.replace(stem, "mtp.layers.0."), shape


def _numbers(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> F32:
    leaf = name.removesuffix(".weight").rsplit(".", 1)[-1]
    if leaf == "A_log":
        drawn = rng.uniform(-3, 1, shape)
    elif leaf == "dt_bias":
        drawn = rng.uniform(-5, 0, shape)
    elif "norm" in leaf:
        drawn = rng.uniform(-0.1, 0.1, shape) + name.endswith("linear_attn.norm.weight")
    else:
        deviation = {"conv1d": 0.4, "embed_tokens": 0.5}.get(leaf, 0.1)
        drawn = rng.standard_normal(shape) * deviation
    return drawn.astype(BF16).astype(np.float32)
