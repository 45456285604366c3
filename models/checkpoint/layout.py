"""The linear modules of a network and how a file spells their names.

Inside the package a module is named without prefix (`layers.0.mlp.gate_proj`, `embed_tokens`,
`lm_head`); files put `model.language_model.` or `model.` before all but `lm_head`. Knows no
dtype and no quantisation.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from spark_engine.errors import CheckpointError
from spark_engine.models.config.model_config import FULL, ModelConfig

HEAD = "lm_head"
PREFIXES = ("model.language_model.", "model.")
SPELLINGS = (*PREFIXES, "language_model.model.", "language_model.")
Shape = tuple[int, ...]
Linears = Iterator[tuple[str, tuple[int, int]]]


@dataclass(frozen=True)
class Layout:
    """What two files of one network may differ in."""

    prefix: str
    fused_experts: bool

    def file_name(self, name: str) -> str:
        """The name in the file of a module or tensor of ours."""
        return name if name.startswith(HEAD) else self.prefix + name

    @classmethod
    def usual(cls, config: ModelConfig, quantised: bool) -> Layout:
        """The layout of published files: quantised ones store every expert by itself."""
        return cls(PREFIXES[0 if config.nested else 1], not quantised)

    @classmethod
    def detect(cls, names: Iterable[str]) -> Layout:
        """Reads the layout off the tensors' names.

        Raises CheckpointError when no token embedding is found under a known prefix.
        """
        known = set(names)
        for prefix in PREFIXES:
            if f"{prefix}embed_tokens.weight" in known:
                fused = any(n.endswith(".mlp.experts.gate_up_proj") for n in known)
                return cls(prefix, fused and _has_fused_text(known, prefix))
        raise CheckpointError(
            f"no embed_tokens.weight under {' or '.join(PREFIXES)}: the files hold no text model, "
            "or name its tensors otherwise; give a checkpoint as transformers saves it"
        )


def _has_fused_text(names: set[str], prefix: str) -> bool:
    """mtp layers are fused in files whose text layers are not."""
    return any(n.startswith(prefix) and n.endswith(".experts.gate_up_proj") for n in names)


def spellings(module: str) -> tuple[str, ...]:
    """Every way a quantisation config may write one of our module names."""
    if module == HEAD:
        return (HEAD, f"language_model.{HEAD}", f"model.{HEAD}")
    return tuple(prefix + module for prefix in SPELLINGS)


def linears(config: ModelConfig) -> Linears:
    """(module, (rows N, columns K)) of every projection, experts one by one, head last."""
    for i, kind in enumerate(config.layers):
        mixer = attention_linears if kind == FULL else gdn_linears
        for name, shape in (*mixer(config), *mlp_linears(config)):
            yield f"layers.{i}.{name}", shape
    if not config.tied:
        yield HEAD, (config.vocab, config.hidden)


def attention_linears(config: ModelConfig) -> Linears:
    """q (with its gate rows), k, v, o of one full-attention layer."""
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    yield "self_attn.q_proj", (2 * q, config.hidden)
    yield "self_attn.k_proj", (kv, config.hidden)
    yield "self_attn.v_proj", (kv, config.hidden)
    yield "self_attn.o_proj", (config.hidden, q)


def gdn_linears(config: ModelConfig) -> Linears:
    """The five projections of one gated-delta-net layer."""
    yield "linear_attn.in_proj_qkv", (config.conv_channels, config.hidden)
    yield "linear_attn.in_proj_z", (config.value_width, config.hidden)
    yield "linear_attn.in_proj_b", (config.value_heads, config.hidden)
    yield "linear_attn.in_proj_a", (config.value_heads, config.hidden)
    yield "linear_attn.out_proj", (config.hidden, config.value_width)


def mlp_linears(config: ModelConfig) -> Linears:
    """The dense MLP, or the shared expert and every routed one. Routers are not among them."""
    if config.moe is None:
        yield from _swiglu("mlp.", config.hidden, config.intermediate or 0)
        return
    yield from _swiglu("mlp.shared_expert.", config.hidden, config.moe.shared_intermediate)
    for e in range(config.moe.experts):
        yield from _swiglu(f"mlp.experts.{e}.", config.hidden, config.moe.intermediate)


def _swiglu(prefix: str, hidden: int, inner: int) -> Linears:
    yield f"{prefix}gate_proj", (inner, hidden)
    yield f"{prefix}up_proj", (inner, hidden)
    yield f"{prefix}down_proj", (hidden, inner)
