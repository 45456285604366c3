"""The network of model type qwen3_5: its blocks, and the names of their tensors.

The only place with these names. The MLP is a parameter, since qwen3_5_moe differs in nothing else.
"""

from collections.abc import Callable

from spark_engine.models.checkpoint.layout import DRAFT, HEAD
from spark_engine.models.checkpoint.tensor_list import (
    Linear,
    Tensor,
    ValueKind,
    by_columns,
    by_rows,
)
from spark_engine.models.config.model_config import FULL, ModelConfig
from spark_engine.models.families.qwen3_5.config import Qwen3_5Config
from spark_engine.models.graph.decoder import Decoder, Layer, Mlp
from spark_engine.models.graph.draft_head import DraftHead
from spark_engine.models.graph.gated_attention import GatedAttention
from spark_engine.models.graph.gated_delta_net import GatedDeltaNet
from spark_engine.models.graph.mlp import Swiglu

MakeMlp = Callable[[ModelConfig, str], Mlp]  # makes the MLP of a name


def dense_mlp(c: ModelConfig, name: str) -> Swiglu:
    return swiglu(name, c.hidden, c.intermediate or 0)


def decoder(c: ModelConfig, mlp: MakeMlp = dense_mlp) -> Decoder:
    """The whole text network."""
    shape, ids = (c.vocab, c.hidden), by_rows((c.vocab, 1))
    return Decoder(
        embedding=Tensor("embed_tokens.weight", shape, ValueKind.EMBEDDING),
        layers=tuple(layer(c, f"layers.{i}", kind, mlp) for i, kind in enumerate(c.layers)),
        norm=_norm("norm", c.hidden),
        head=Tensor(f"{HEAD}.weight", shape, ValueKind.TIED_HEAD, split=ids)
        if c.tied
        else Linear(HEAD, *shape, split=ids),
    )


def draft_head(c: Qwen3_5Config, mlp: MakeMlp = dense_mlp) -> DraftHead | str:
    """The multi-token-prediction head, or the reason why it is absent or unsupported."""
    if c.mtp_layers is None:
        return "neither config.json (mtp_num_hidden_layers) nor the files (mtp.*) have a draft head"
    if c.mtp_layers != 1:
        return (
            f"config.json: mtp_num_hidden_layers is {c.mtp_layers}; a draft head of 1 layer is "
            "compiled, no other"
        )
    if c.mtp_embeddings:
        return (
            "config.json: mtp_use_dedicated_embeddings is true; a draft head is compiled that "
            "shares the network's embedding and head, no other"
        )
    name = DRAFT.removesuffix(".")
    return DraftHead(
        name,
        embedding_norm=_norm(f"{name}.pre_fc_norm_embedding", c.hidden),
        hidden_norm=_norm(f"{name}.pre_fc_norm_hidden", c.hidden),
        fc=Linear(f"{name}.fc", c.hidden, 2 * c.hidden),
        layer=layer(c, f"{name}.layers.0", FULL, mlp),
        norm=_norm(f"{name}.norm", c.hidden),
    )


def layer(c: ModelConfig, name: str, kind: str, mlp: MakeMlp) -> Layer:
    """One layer with a mixer of `kind`."""
    full = kind == FULL
    return Layer(
        mixer_norm=_norm(f"{name}.input_layernorm", c.hidden),
        mixer=_attention(c, f"{name}.self_attn") if full else _delta_net(c, f"{name}.linear_attn"),
        mlp_norm=_norm(f"{name}.post_attention_layernorm", c.hidden),
        mlp=mlp(c, f"{name}.mlp"),
    )


def swiglu(name: str, hidden: int, inner: int, group: str = "") -> Swiglu:
    """A dense MLP, or one expert of a group."""
    return Swiglu(
        name,
        gate=Linear(f"{name}.gate_proj", inner, hidden, group, by_rows((inner, 1))),
        up=Linear(f"{name}.up_proj", inner, hidden, group, by_rows((inner, 1))),
        down=Linear(f"{name}.down_proj", hidden, inner, group, by_columns(inner, 1)),
    )


def _attention(c: ModelConfig, name: str) -> GatedAttention:
    """The scales of an FP8 cache have modelopt's names, compressed-tensors', or vLLM's."""
    q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
    heads = by_rows((c.kv_heads, c.head_dim), shared=True)
    k_scales, v_scales = (
        tuple(
            Tensor(f"{name}.{scale}", (), ValueKind.CACHE_SCALE)
            for scale in (
                f"{side}_proj.output_scale",
                f"{side}_proj.{side}_scale",
                f"attn.{side}_scale",
                f"{side}_scale",
            )
        )
        for side in "kv"
    )
    return GatedAttention(
        name,
        q=Linear(f"{name}.q_proj", 2 * q, c.hidden, split=by_rows((c.heads, 2 * c.head_dim))),
        k=Linear(f"{name}.k_proj", kv, c.hidden, split=heads),
        v=Linear(f"{name}.v_proj", kv, c.hidden, split=heads),
        o=Linear(f"{name}.o_proj", c.hidden, q, split=by_columns(c.heads, c.head_dim)),
        q_norm=_norm(f"{name}.q_norm", c.head_dim),
        k_norm=_norm(f"{name}.k_norm", c.head_dim),
        k_scales=k_scales,
        v_scales=v_scales,
    )


def _delta_net(c: ModelConfig, name: str) -> GatedDeltaNet:
    keys, values = (c.key_heads, c.key_dim), (c.value_heads, c.value_dim)
    channels, heads = by_rows(keys, keys, values), by_rows((c.value_heads, 1))
    conv = (c.conv_channels, 1, c.conv_kernel)
    return GatedDeltaNet(
        name,
        qkv=Linear(f"{name}.in_proj_qkv", c.conv_channels, c.hidden, split=channels),
        z=Linear(f"{name}.in_proj_z", c.value_width, c.hidden, split=by_rows(values)),
        b=Linear(f"{name}.in_proj_b", c.value_heads, c.hidden, split=heads),
        a=Linear(f"{name}.in_proj_a", c.value_heads, c.hidden, split=heads),
        out=Linear(f"{name}.out_proj", c.hidden, c.value_width, split=by_columns(*values)),
        conv=Tensor(f"{name}.conv1d.weight", conv, split=channels),
        log_decay=Tensor(f"{name}.A_log", (c.value_heads,), ValueKind.LOG_DECAY, split=heads),
        decay_bias=Tensor(f"{name}.dt_bias", (c.value_heads,), ValueKind.DECAY_BIAS, split=heads),
        norm=Tensor(f"{name}.norm.weight", (c.value_dim,), ValueKind.NORM),
    )


def _norm(module: str, size: int) -> Tensor:
    return Tensor(f"{module}.weight", (size,), ValueKind.CENTRED_NORM)
