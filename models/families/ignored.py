"""Names and shapes of what is recognised and left for later: vision tower and MTP head.

Knows the tensors of transformers' `Qwen3_5VisionModel` and of the `mtp.*` block of published
checkpoints (always unquantised, experts fused). Nothing here is compiled.
"""

from __future__ import annotations

from collections.abc import Iterator

from spark_engine.models.checkpoint.layout import Shape, attention_linears, mlp_linears
from spark_engine.models.config.model_config import ModelConfig, VisionConfig

Tensors = Iterator[tuple[str, Shape]]


def vision_tensors(config: ModelConfig) -> Tensors:
    """(name, shape) of every tensor of the vision tower; none without a vision_config."""
    v = config.vision
    if v is None:
        return
    p = "model.visual."
    yield f"{p}patch_embed.proj.weight", (v.hidden, v.channels, v.temporal_patch, v.patch, v.patch)
    yield f"{p}patch_embed.proj.bias", (v.hidden,)
    yield f"{p}pos_embed.weight", (v.positions, v.hidden)
    for i in range(v.depth):
        yield from _vision_block(f"{p}blocks.{i}.", v)
    wide = v.hidden * v.merge**2
    for merger, norm in (("merger.", v.hidden), *_deepstack(v, wide)):
        yield from _affine(f"{p}{merger}norm", (norm,))
        yield from _affine(f"{p}{merger}linear_fc1", (wide, wide))
        yield from _affine(f"{p}{merger}linear_fc2", (v.out_hidden, wide))


def _deepstack(v: VisionConfig, wide: int) -> tuple[tuple[str, int], ...]:
    return tuple((f"deepstack_merger_list.{i}.", wide) for i in range(v.deepstack))


def _vision_block(p: str, v: VisionConfig) -> Tensors:
    yield from _affine(f"{p}norm1", (v.hidden,))
    yield from _affine(f"{p}norm2", (v.hidden,))
    yield from _affine(f"{p}attn.qkv", (3 * v.hidden, v.hidden))
    yield from _affine(f"{p}attn.proj", (v.hidden, v.hidden))
    yield from _affine(f"{p}mlp.linear_fc1", (v.intermediate, v.hidden))
    yield from _affine(f"{p}mlp.linear_fc2", (v.hidden, v.intermediate))


def _affine(module: str, shape: Shape) -> Tensors:
    yield f"{module}.weight", shape
    yield f"{module}.bias", shape[:1]


def mtp_tensors(config: ModelConfig) -> Tensors:
    """(name, shape) of every tensor of the multi-token-prediction head, if there is one."""
    if not config.mtp_layers:
        return
    h = config.hidden
    yield "mtp.fc.weight", (h, 2 * h)
    for norm in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        yield f"mtp.{norm}.weight", (h,)
    for i in range(config.mtp_layers):
        yield from _mtp_layer(f"mtp.layers.{i}.", config)


def _mtp_layer(p: str, config: ModelConfig) -> Tensors:
    yield f"{p}input_layernorm.weight", (config.hidden,)
    yield f"{p}post_attention_layernorm.weight", (config.hidden,)
    for name, shape in attention_linears(config):
        yield f"{p}{name}.weight", shape
    yield f"{p}self_attn.q_norm.weight", (config.head_dim,)
    yield f"{p}self_attn.k_norm.weight", (config.head_dim,)
    if config.moe is None:
        for name, shape in mlp_linears(config):
            yield f"{p}{name}.weight", shape
        return
    e, inner, shared = config.moe.experts, config.moe.intermediate, config.moe.shared_intermediate
    yield f"{p}mlp.gate.weight", (e, config.hidden)
    yield f"{p}mlp.shared_expert_gate.weight", (1, config.hidden)
    yield f"{p}mlp.shared_expert.gate_proj.weight", (shared, config.hidden)
    yield f"{p}mlp.shared_expert.up_proj.weight", (shared, config.hidden)
    yield f"{p}mlp.shared_expert.down_proj.weight", (config.hidden, shared)
    yield f"{p}mlp.experts.gate_up_proj", (e, 2 * inner, config.hidden)
    yield f"{p}mlp.experts.down_proj", (e, config.hidden, inner)
