"""Random Hugging Face checkpoints of every format that `models` reads, small enough for tests.

`write_checkpoint` draws float weights with an initialisation that hides no bug (norms off one,
long memories, strong convolutions), quantises them as the exporters do, and writes config.json,
hf_quant_config.json, generation_config.json and (sharded) safetensors. What it returns holds
the float values that the stored weights encode, to feed an oracle. Knows nothing of the package.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests import quantisers
from tests.checkpoint_files import (
    FORMATS,
    MLP,
    PLAIN,
    Array,
    Json,
    scheme_of,
    write_configs,
    write_shards,
)

F32 = NDArray[np.float32]


@dataclass(frozen=True)
class Written:
    """A checkpoint on disk and what it means."""

    path: Path  # the folder
    config: Json  # the text config (flat)
    # f32 value of every weight by its file name as if unquantised (experts in the layout asked
    # for), i.e. a state dict for an oracle.
    values: dict[str, F32]
    # Modelopt-style activation scale by module name (with prefix), for the modules with quantised
    # activations.
    input_scales: dict[str, float]


def text_config(moe: bool, overrides: Mapping[str, Any] | None = None) -> Json:
    """The default small config (hidden 128, 4 layers, vocab 512) with `overrides`."""
    kind = "qwen3_5_moe_text" if moe else "qwen3_5_text"
    config: Json = {
        "model_type": kind,
        "architectures": ["Qwen3_5MoeForCausalLM" if moe else "Qwen3_5ForCausalLM"],
        "vocab_size": 512,
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 4,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 4096,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "eos_token_id": 1,
        "bos_token_id": 1,
        "pad_token_id": None,
        "mamba_ssm_dtype": "float32",
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000000,
            "partial_rotary_factor": 0.25,
            "mrope_section": [3, 3, 2],
            "mrope_interleaved": True,
        },
    }
    if moe:
        config |= {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
        config |= {"num_experts": 8, "num_experts_per_tok": 2}
    else:
        config |= {"intermediate_size": 256}
    config |= dict(overrides or {})
    if config.get("layer_types") is None:
        config["layer_types"] = [
            "full_attention" if i % 4 == 3 else "linear_attention"
            for i in range(config["num_hidden_layers"])
        ]
    return config


def write_checkpoint(
    path: Path,
    config_kwargs: Mapping[str, Any] | None = None,
    format: str = "bf16",
    *,
    moe: bool = False,
    prefix: str = "model.",
    experts: str = "split",
    shards: int = 1,
    seed: int = 0,
    split_scales: bool = False,
    kv_scales: bool | str = False,
    generation: Mapping[str, Any] | None = None,
    head: str = "",
    head_prefix: str = "",
    head_experts: str = "fused",
) -> Written:
    """Writes one random checkpoint into `path` (made if absent).

    Args:
        config_kwargs: overrides of `text_config`.
        format: one of FORMATS.
        prefix: "model." (flat text config) or "model.language_model." (nested config).
        experts: "split" or "fused" (plain formats only).
        split_scales: give q, k, v (and gate and up, qkv and z) different input scales.
        kv_scales: add calibrated k_scale and v_scale tensors, by modelopt's names, or by
            compressed-tensors' with "compressed"; those of v are ten times as large.
        generation: contents of generation_config.json, if any.
        head: the draft head's format, where config_kwargs ask for one; by default it is plain,
            whatever the format of the rest. Its fc is quantised too.
        head_prefix, head_experts: of the draft head likewise.
    """
    if format not in FORMATS or (experts == "fused" and format not in PLAIN):
        raise ValueError(f"cannot write format {format!r} with {experts!r} experts")
    wide = {"moe_intermediate_size": 128, "shared_expert_intermediate_size": 128}
    blocks = wide if moe and format == "fp8_block" else {}  # gate and up must end on a block
    config = text_config(moe, blocks | dict(config_kwargs or {}))
    rng = np.random.default_rng(seed)
    drawn = {_full(n, prefix): w for n, w in _draw(config, rng)}
    stored, values, scales = store(drawn, format, split_scales)
    if experts == "fused":
        stored, values = _fuse(stored, config), _as_f32(_fuse(values, config))
    plain = format if format in PLAIN else "bf16"
    drafts = {head_prefix + n: w for n, w in _draw_head(config, rng)}
    rows, floats, more = store(drafts, head or plain, split_scales)
    if head_experts == "fused":
        rows, floats = _fuse(rows, config), _as_f32(_fuse(floats, config))
    stored, values, scales = stored | rows, values | floats, scales | more
    drawn |= drafts
    if kv_scales:
        stored |= _kv_scales(config, prefix, kv_scales == "compressed")
    path.mkdir(parents=True, exist_ok=True)
    write_configs(path, config, format, prefix, generation, sorted(drawn))
    write_shards(path, stored, shards)
    return Written(path, config, values, scales)


def _draw(c: Json, rng: np.random.Generator) -> Iterator[tuple[str, F32]]:
    """(canonical name, f32 values) of every text tensor, experts split."""

    def normal(std: float, *shape: int) -> F32:
        return (rng.standard_normal(shape) * std).astype(np.float32)

    def uniform(low: float, high: float, *shape: int) -> F32:
        return rng.uniform(low, high, shape).astype(np.float32)

    h = c["hidden_size"]
    yield "embed_tokens.weight", normal(0.5, c["vocab_size"], h)
    for i, kind in enumerate(c["layer_types"]):
        p = f"layers.{i}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{p}{norm}.weight", uniform(-0.1, 0.1, h)
        for name, shape in _mixer_linears(c, kind):
            yield f"{p}{name}.weight", normal(0.15, *shape)
        if kind == "full_attention":
            for norm in ("q_norm", "k_norm"):
                yield f"{p}self_attn.{norm}.weight", uniform(-0.1, 0.1, c["head_dim"])
        else:
            hv = c["linear_num_value_heads"]
            channels = _mixer_linears(c, kind)[0][1][0]
            kernel = c["linear_conv_kernel_dim"]
            yield f"{p}linear_attn.conv1d.weight", normal(0.4, channels, 1, kernel)
            yield f"{p}linear_attn.A_log", uniform(-3, 1, hv)
            yield f"{p}linear_attn.dt_bias", uniform(-5, 0, hv)
            yield f"{p}linear_attn.norm.weight", uniform(0.9, 1.1, c["linear_value_head_dim"])
        for name, shape in _mlp_linears(c):
            yield f"{p}mlp.{name}.weight", normal(0.15, *shape)
    yield "norm.weight", uniform(-0.1, 0.1, h)
    if not c["tie_word_embeddings"]:
        yield "lm_head.weight", normal(0.15, c["vocab_size"], h)


def _draw_head(c: Json, rng: np.random.Generator) -> Iterator[tuple[str, F32]]:
    """(name, f32 values) of the draft head's tensors, experts split; none where it has none."""
    h = c["hidden_size"]

    def normal(*shape: int) -> F32:
        return (rng.standard_normal(shape) * 0.15).astype(np.float32)

    def norm(size: int) -> F32:
        return rng.uniform(-0.3, 0.3, size).astype(np.float32)

    if not c.get("mtp_num_hidden_layers"):
        return
    yield "mtp.fc.weight", normal(h, 2 * h)
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        yield f"mtp.{name}.weight", norm(h)
    p = "mtp.layers.0."
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield f"{p}{name}.weight", norm(h)
    for name in ("q_norm", "k_norm"):
        yield f"{p}self_attn.{name}.weight", norm(c["head_dim"])
    rows = [*_mixer_linears(c, "full_attention")]
    rows += [(f"mlp.{n}", shape) for n, shape in _mlp_linears(c)]
    for name, shape in rows:
        yield f"{p}{name}.weight", normal(*shape)


def _mixer_linears(c: Json, kind: str) -> list[tuple[str, tuple[int, int]]]:
    h = c["hidden_size"]
    if kind == "full_attention":
        q, kv = (c[k] * c["head_dim"] for k in ("num_attention_heads", "num_key_value_heads"))
        rows = [("q_proj", (2 * q, h)), ("k_proj", (kv, h)), ("v_proj", (kv, h))]
        return [(f"self_attn.{n}", s) for n, s in [*rows, ("o_proj", (h, q))]]
    key = c["linear_num_key_heads"] * c["linear_key_head_dim"]
    hv = c["linear_num_value_heads"]
    value = hv * c["linear_value_head_dim"]
    rows = [("in_proj_qkv", (2 * key + value, h)), ("in_proj_z", (value, h))]
    rows += [("in_proj_b", (hv, h)), ("in_proj_a", (hv, h)), ("out_proj", (h, value))]
    return [(f"linear_attn.{n}", s) for n, s in rows]


def _mlp_linears(c: Json) -> list[tuple[str, tuple[int, int]]]:
    h = c["hidden_size"]

    def swiglu(prefix: str, inner: int) -> list[tuple[str, tuple[int, int]]]:
        shapes = ((inner, h), (inner, h), (h, inner))
        return [(prefix + n, s) for n, s in zip(MLP, shapes, strict=True)]

    if "num_experts" not in c:
        return swiglu("", c["intermediate_size"])
    rows = [("gate", (c["num_experts"], h)), ("shared_expert_gate", (1, h))]
    rows += swiglu("shared_expert.", c["shared_expert_intermediate_size"])
    for e in range(c["num_experts"]):
        rows += swiglu(f"experts.{e}.", c["moe_intermediate_size"])
    return rows


def store(
    drawn: Mapping[str, F32], format: str, split_scales: bool = False, amax: float = 0.0
) -> tuple[dict[str, Array], dict[str, F32], dict[str, float]]:
    """(stored tensors, the f32 values that they encode, input scales) of f32 tensors. `amax`: of
    all activations; 0: made up."""
    stored: dict[str, Array] = {}
    values: dict[str, F32] = {}
    scales: dict[str, float] = {}
    for name, w in drawn.items():
        module = name.removesuffix(".weight")
        scheme = scheme_of(module, format)
        if scheme == "plain" or not name.endswith(".weight"):
            stored[name] = w.astype(PLAIN.get(format, PLAIN["bf16"]))
            values[name] = stored[name].astype(np.float32)
            continue
        rows, values[name] = _quantise(w, scheme, format, amax or _amax(module, split_scales))
        stored |= {f"{module}.{suffix}": array for suffix, array in rows.items()}
        scales |= {module: _as_input_scale(rows)} if scheme in ("fp8", "nvfp4_a4") else {}
    return stored, values, scales


def _amax(module: str, split_scales: bool) -> float:
    """A fake calibrated activation maximum; equal for modules that read one input."""
    leaf = module.rsplit(".", 1)[-1]
    group = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "in_proj_qkv", "in_proj_z")
    return 6.0 + (0.25 * group.index(leaf) if split_scales and leaf in group else 0.0)


def _quantise(w: F32, scheme: str, format: str, amax: float) -> tuple[dict[str, Array], F32]:
    """({suffix: stored array}, the f32 values that they encode)."""
    if scheme == "fp8":
        q = quantisers.fp8(w)
        rows = {"weight": q.codes, "weight_scale": q.scale, "input_scale": _scalar(amax / 448)}
        return rows, q.values
    if scheme == "fp8_block":
        q = quantisers.fp8_block(w)
        return {"weight": q.codes, "weight_scale_inv": q.scale}, q.values
    if scheme == "fp8_channel":
        q = quantisers.fp8_channel(w)
        return {"weight": q.codes, "weight_scale": q.scale}, q.values
    if scheme == "nvfp4_a8":
        q = quantisers.nvfp4_as_fp8(w)
        return {"weight": q.codes, "weight_scale": q.scale}, q.values
    if scheme == "int4_g128":
        return quantisers.int4_tensors(w, "ct_sym", 128, odd=False)
    if scheme == "int4_g32":
        return quantisers.int4_tensors(w, {"ct_int4": "ct"}.get(format, format))
    compressed = format.startswith("ct_")
    q = quantisers.nvfp4(w, divide=compressed)
    assert q.scale2 is not None
    if not compressed:
        rows = {"weight": q.codes, "weight_scale": q.scale, "weight_scale_2": np.array(q.scale2)}
        return rows | {"input_scale": _scalar(amax / 2688)}, q.values
    rows = {"weight_packed": q.codes, "weight_scale": q.scale}
    rows["weight_global_scale"] = np.array([q.scale2])
    if scheme == "nvfp4_a4":
        rows["input_global_scale"] = np.array([2688 / amax], np.float32)
    return rows, q.values


def _scalar(value: float) -> Array:
    return np.array(value, np.float32)


def _as_input_scale(rows: Mapping[str, Array]) -> float:
    if "input_scale" in rows:
        return float(np.float32(rows["input_scale"]))
    return float(np.float32(1) / np.float32(rows["input_global_scale"][0]))


def _fuse(tensors: Mapping[str, Array], c: Json) -> dict[str, Array]:
    """Per-expert matrices -> experts.gate_up_proj [E, 2I, H] and experts.down_proj [E, H, I]."""
    out = {n: a for n, a in tensors.items() if ".experts." not in n}
    parents = {n.split(".experts.")[0] + ".experts." for n in tensors if ".experts." in n}
    for p in sorted(parents):
        part = {
            k: np.stack([tensors[f"{p}{e}.{k}.weight"] for e in range(c["num_experts"])])
            for k in MLP
        }
        out[f"{p}gate_up_proj"] = np.concatenate([part["gate_proj"], part["up_proj"]], axis=1)
        out[f"{p}down_proj"] = part["down_proj"]
    return out


def _as_f32(tensors: Mapping[str, Array]) -> dict[str, F32]:
    return {n: a.astype(np.float32) for n, a in tensors.items()}


def _kv_scales(c: Json, prefix: str, compressed: bool) -> dict[str, Array]:
    full = [i for i, kind in enumerate(c["layer_types"]) if kind == "full_attention"]
    names = ("k_scale", "v_scale") if compressed else ("k_proj.k_scale", "v_proj.v_scale")
    return {
        f"{prefix}layers.{i}.self_attn.{name}": _scalar(0.01 * (i + 1 + j) * 10**j)
        for j, name in enumerate(names)
        for i in full
    }


def _full(name: str, prefix: str) -> str:
    return name if name.startswith("lm_head") else prefix + name
