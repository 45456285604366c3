"""The tiny model's shape: the numbers of its config.json, and the table of its tensors.

Knows names, shapes and storage types; knows no maths and no library but the standard one.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

PREFIX = "model.language_model."
DRAFT_PREFIX = "mtp."


@dataclass(frozen=True)
class Shape:
    """Sizes of a Qwen3.5 mixture-of-experts language model."""

    vocab: int = 4096
    hidden: int = 256
    layers: int = 8
    heads: int = 2
    kv_heads: int = 1
    head_dim: int = 256
    rotary_dim: int = 64
    rope_theta: float = 1e7
    key_heads: int = 2
    value_heads: int = 4
    linear_dim: int = 128
    conv: int = 4
    experts: int = 12
    top_k: int = 4
    expert_width: int = 128
    shared_width: int = 128
    eps: float = 1e-6
    full_every: int = 4
    positions: int = 4096

    def is_full(self, layer: int) -> bool:
        """Whether the layer is full attention (every fourth) or gated delta-net."""
        return layer % self.full_every == self.full_every - 1

    @property
    def key_width(self) -> int:
        """Columns of q, and of k, in a delta-net layer."""
        return self.key_heads * self.linear_dim

    @property
    def value_width(self) -> int:
        """Columns of v, and of z, in a delta-net layer."""
        return self.value_heads * self.linear_dim


TINY = Shape()


def text_config(shape: Shape, ids: Mapping[str, int], draft_head: bool) -> dict[str, object]:
    """config.json but for the quantisation, with every key NVIDIA's has. `ids`: token -> id."""
    kinds = [
        "full_attention" if shape.is_full(layer) else "linear_attention"
        for layer in range(shape.layers)
    ]
    return {
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_output_gate": True,
        "bos_token_id": None,
        "dtype": "bfloat16",
        "eos_token_id": ids["<|im_end|>"],
        "full_attention_interval": shape.full_every,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "initializer_range": 0.02,
        "layer_types": kinds,
        "linear_conv_kernel_dim": shape.conv,
        "linear_key_head_dim": shape.linear_dim,
        "linear_num_key_heads": shape.key_heads,
        "linear_num_value_heads": shape.value_heads,
        "linear_value_head_dim": shape.linear_dim,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": shape.positions,
        "model_type": "qwen3_5_moe_text",
        "moe_intermediate_size": shape.expert_width,
        "mtp_num_hidden_layers": int(draft_head),
        "mtp_use_dedicated_embeddings": False,
        "num_attention_heads": shape.heads,
        "num_experts": shape.experts,
        "num_experts_per_tok": shape.top_k,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.kv_heads,
        "output_router_logits": False,
        "pad_token_id": ids["<|endoftext|>"],
        "partial_rotary_factor": shape.rotary_dim / shape.head_dim,
        "rms_norm_eps": shape.eps,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
            "partial_rotary_factor": shape.rotary_dim / shape.head_dim,
            "rope_theta": int(shape.rope_theta),
            "rope_type": "default",
        },
        "router_aux_loss_coef": 0.001,
        "shared_expert_intermediate_size": shape.shared_width,
        "tie_word_embeddings": False,
        "use_cache": True,
        "vocab_size": shape.vocab,
    }


def mixer_tensors(shape: Shape, layer: int) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """(name, shape, kind) of a layer's mixer; kind is fp8 or bf16."""
    h = shape.hidden
    if shape.is_full(layer):
        yield "self_attn.q_proj", (2 * shape.heads * shape.head_dim, h), "fp8"
        yield "self_attn.k_proj", (shape.kv_heads * shape.head_dim, h), "fp8"
        yield "self_attn.v_proj", (shape.kv_heads * shape.head_dim, h), "fp8"
        yield "self_attn.o_proj", (h, shape.heads * shape.head_dim), "fp8"
        yield "self_attn.q_norm.weight", (shape.head_dim,), "bf16"
        yield "self_attn.k_norm.weight", (shape.head_dim,), "bf16"
        return
    channels = 2 * shape.key_width + shape.value_width
    yield "linear_attn.in_proj_qkv", (channels, h), "fp8"
    yield "linear_attn.in_proj_z", (shape.value_width, h), "fp8"
    yield "linear_attn.out_proj", (h, shape.value_width), "fp8"
    yield "linear_attn.in_proj_b.weight", (shape.value_heads, h), "bf16"
    yield "linear_attn.in_proj_a.weight", (shape.value_heads, h), "bf16"
    yield "linear_attn.conv1d.weight", (channels, 1, shape.conv), "bf16"
    yield "linear_attn.A_log", (shape.value_heads,), "bf16"
    yield "linear_attn.dt_bias", (shape.value_heads,), "bf16"
    yield "linear_attn.norm.weight", (shape.linear_dim,), "bf16"


def module_table(shape: Shape) -> Mapping[str, tuple[tuple[int, ...], str]]:
    """Every stored weight: module (fp8, nvfp4) or tensor (bf16) name -> (shape of the weight,
    kind).
    """
    table: dict[str, tuple[tuple[int, ...], str]] = {}
    table[PREFIX + "embed_tokens.weight"] = (shape.vocab, shape.hidden), "bf16"
    for layer in range(shape.layers):
        root = f"{PREFIX}layers.{layer}."
        table[root + "input_layernorm.weight"] = (shape.hidden,), "bf16"
        table[root + "post_attention_layernorm.weight"] = (shape.hidden,), "bf16"
        for name, size, kind in mixer_tensors(shape, layer):
            table[root + name] = size, kind
        table[root + "mlp.gate.weight"] = (shape.experts, shape.hidden), "bf16"
        table[root + "mlp.shared_expert_gate.weight"] = (1, shape.hidden), "bf16"
        experts = [(f"experts.{e}", shape.expert_width) for e in range(shape.experts)]
        for name, width in [*experts, ("shared_expert", shape.shared_width)]:
            table[f"{root}mlp.{name}.gate_proj"] = (width, shape.hidden), "nvfp4"
            table[f"{root}mlp.{name}.up_proj"] = (width, shape.hidden), "nvfp4"
            table[f"{root}mlp.{name}.down_proj"] = (shape.hidden, width), "nvfp4"
    table[PREFIX + "norm.weight"] = (shape.hidden,), "bf16"
    table["lm_head"] = (shape.vocab, shape.hidden), "nvfp4"
    return MappingProxyType(table)


def stored_tensors(shape: Shape) -> Mapping[str, tuple[tuple[int, ...], str]]:
    """Every tensor of the quantised file: name -> (shape, safetensors dtype), after NVIDIA's 35B
    file.
    """
    stored: dict[str, tuple[tuple[int, ...], str]] = {}
    for name, (size, kind) in module_table(shape).items():
        if kind == "bf16":
            stored[name] = size, "BF16"
            continue
        rows, columns = size
        if kind == "fp8":
            stored[f"{name}.weight"] = size, "F8_E4M3"
            stored[f"{name}.weight_scale"] = (), "F32"
        else:
            stored[f"{name}.weight"] = (rows, columns // 2), "U8"
            stored[f"{name}.weight_scale"] = (rows, columns // 16), "F8_E4M3"
            stored[f"{name}.weight_scale_2"] = (), "F32"
        stored[f"{name}.input_scale"] = (), "F32"
    return MappingProxyType(stored)


def head_tensors(shape: Shape) -> Mapping[str, tuple[tuple[int, ...], str]]:
    """Every tensor of the draft head, as `stored_tensors`: unquantised, experts stacked."""
    h, layer = shape.hidden, f"{DRAFT_PREFIX}layers.0."
    sizes: dict[str, tuple[int, ...]] = {f"{DRAFT_PREFIX}fc.weight": (h, 2 * h)}
    for norm in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        sizes[f"{DRAFT_PREFIX}{norm}.weight"] = (h,)
    for norm in ("input_layernorm", "post_attention_layernorm"):
        sizes[f"{layer}{norm}.weight"] = (h,)
    for name, size, kind in mixer_tensors(shape, shape.full_every - 1):
        sizes[f"{layer}{name}" if kind == "bf16" else f"{layer}{name}.weight"] = size
    sizes[f"{layer}mlp.gate.weight"] = (shape.experts, h)
    sizes[f"{layer}mlp.experts.gate_up_proj"] = (shape.experts, 2 * shape.expert_width, h)
    sizes[f"{layer}mlp.experts.down_proj"] = (shape.experts, h, shape.expert_width)
    sizes[f"{layer}mlp.shared_expert_gate.weight"] = (1, h)
    for leaf in ("gate", "up"):
        sizes[f"{layer}mlp.shared_expert.{leaf}_proj.weight"] = (shape.shared_width, h)
    sizes[f"{layer}mlp.shared_expert.down_proj.weight"] = (h, shape.shared_width)
    return MappingProxyType({name: (size, "BF16") for name, size in sizes.items()})
