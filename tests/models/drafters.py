"""Random DFlash2 drafters on disk, as they are published, for the small networks of the tests.

Knows the names and shapes of the published files; knows nothing of the package.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

Array = NDArray[Any]


def drafter_config(target: Mapping[str, Any], **overrides: Any) -> dict[str, Any]:
    """config.json of a drafter of the network with this text config; its block's keys are nested,
    as published."""
    layers = 2
    config = {
        "architectures": ["DFlash2DraftModel"],
        "model_type": "qwen3",
        "hidden_size": target["hidden_size"],
        "vocab_size": target["vocab_size"],
        "num_target_layers": target["num_hidden_layers"],
        "layer_types": ["sliding_attention"] * layers,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 80,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7},
        "partial_rotary_factor": 0.25,  # left behind by the target's: not read
        "sliding_window": 2048,
        "is_causal": False,
        "hidden_act": "silu",
        "attention_bias": False,
        "conv_kernel_size": 2,
        "conv_group_size": 16,
        "selector_rank": 24,
        "selector_top_k": 16,
        "dflash_config": {
            "block_size": 8,
            "mask_token_id": target["vocab_size"] - 3,
            "target_layer_ids": [0, target["num_hidden_layers"] - 2],
        },
    }
    nested = {k: overrides.pop(k) for k in [*overrides] if k in config["dflash_config"]}
    config["dflash_config"] |= nested
    return config | overrides


def write_drafter(path: Path, target: Mapping[str, Any], seed: int = 0, **overrides: Any) -> Path:
    """Writes a folder with random f32 weights; none of its terms is small in its results."""
    config = drafter_config(target, **overrides)
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    rng = np.random.default_rng(seed)
    drawn = {n: a.astype(np.float32) for n, a in _draw(config, rng)}
    save_file(drawn, path / "model.safetensors")
    return path


def _draw(c: Mapping[str, Any], rng: np.random.Generator) -> Iterator[tuple[str, Array]]:
    h, inner, d = c["hidden_size"], c["intermediate_size"], c["head_dim"]
    q, kv = c["num_attention_heads"] * d, c["num_key_value_heads"] * d
    taps, rank = len(c["dflash_config"]["target_layer_ids"]), c["selector_rank"]

    def matrix(rows: int, columns: int, gain: float = 1.0) -> Array:
        return rng.standard_normal((rows, columns)) * gain * columns**-0.5

    yield "fc.weight", matrix(h, taps * h)
    for name in ("hidden_norm", "norm"):
        yield f"{name}.weight", rng.uniform(0.6, 2.0, h)
    for i in range(c["num_hidden_layers"]):
        p = f"layers.{i}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{p}{name}.weight", rng.uniform(0.6, 2.0, h)
        for name in ("q_norm", "k_norm"):
            yield f"{p}self_attn.{name}.weight", rng.uniform(0.8, 1.6, d)
        for name, rows, columns in (("q", q, h), ("k", kv, h), ("v", kv, h), ("o", h, q)):
            yield f"{p}self_attn.{name}_proj.weight", matrix(rows, columns, 1.5)
        for name, rows, columns in (("gate", inner, h), ("up", inner, h), ("down", h, inner)):
            yield f"{p}mlp.{name}_proj.weight", matrix(rows, columns)
        for name in ("attention_conv", "mlp_conv"):
            yield f"{p}{name}.base_kernel", rng.standard_normal((2, 2, h)) * 0.5 + 0.5
            groups = h // c["conv_group_size"]
            yield f"{p}{name}.kernel_projection.weight", matrix(4 * groups, h, 0.4)
    yield "candidate_selector.hidden_projection.weight", matrix(rank, h)
    for name in ("predecessor", "successor"):
        yield (
            f"candidate_selector.{name}_codebook",
            rng.standard_normal((c["vocab_size"], rank)) * 0.8,
        )
