"""Small random checkpoints of model type qwen3_next, each with a twin of type qwen3_5_moe.

Both hold the same weights: the twin's four projections of a delta net are two matrices, and
config.json is flat, as Qwen publishes it. It does not name the draft head, which is in the files.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tests.checkpoint_files import Array, write_shards
from tests.checkpoints import text_config, write_checkpoint
from tests.models.edited_checkpoint import edited
from tests.models.next_configs import FULL, Json

CONFIG: Json = {
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 64,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
    "mtp_num_hidden_layers": 1,
    "rope_parameters": {"rope_theta": 10000000, "partial_rotary_factor": 0.25},
}
# Of each stored matrix the projections that it holds in turns.
FUSED = {"in_proj_qkvz": ("in_proj_qkv", "in_proj_z"), "in_proj_ba": ("in_proj_b", "in_proj_a")}


def write(folder: Path, format: str, **more: Any) -> tuple[Path, Path]:
    """The folders of the twin and of the qwen3_next file."""
    twin, fused = folder / "twin", folder / "next"
    changes = {**CONFIG, **more.pop("config", {})}
    write_checkpoint(twin, changes, format, moe=True, head_experts="split", **more)
    with edited(twin) as tensors:
        for name in tensors:  # a stored matrix has one scale
            for first, second in FUSED.values():
                if f".{second}." in name and tensors[name].shape in ((), (1,)):
                    tensors[name] = tensors[name.replace(second, first)]
    fused.mkdir()
    write_shards(fused, _fused(text_config(True, changes), tensors), 1)
    for file in ("config.json", "hf_quant_config.json"):
        if (twin / file).is_file():
            text = (twin / file).read_text()
            for whole, (first, _) in FUSED.items():
                text = text.replace(f'.{first}"', f'.{whole}"')
            (fused / file).write_text(text)
    config = json.loads((fused / "config.json").read_text())
    kinds = config.pop("layer_types")
    for key in ("mtp_num_hidden_layers", "rope_parameters", "mamba_ssm_dtype"):
        config.pop(key, None)
    same = ("architectures", "model_type", "partial_rotary_factor", "rope_theta", "rope_scaling")
    config |= {key: FULL[key] for key in (*same, "decoder_sparse_step", "mlp_only_layers")}
    config["full_attention_interval"] = kinds.index("full_attention") + 1
    (fused / "config.json").write_text(json.dumps(config))
    return twin, fused


def _fused(c: Json, tensors: Mapping[str, Array]) -> dict[str, Array]:
    """The tensors of the qwen3_next file: rows, and scales of rows or blocks, take turns."""
    heads, out = c["linear_num_key_heads"], dict(tensors)
    key, value = (
        c[f"linear_num_{kind}_heads"] * c[f"linear_{kind}_head_dim"] for kind in ("key", "value")
    )
    for name in tensors:
        for whole, (first, second) in FUSED.items():
            if f".{first}." not in name:
                continue
            one, two = out.pop(name), out.pop(name.replace(first, second))
            if one.shape not in ((), (1,)):
                qk = len(one) * key // (2 * key + value)  # of q, and of k
                parts = (one[:qk], one[qk : 2 * qk], one[2 * qk :]) if "qkv" in first else (one,)
                turns = [p.reshape(heads, -1, *p.shape[1:]) for p in (*parts, two)]
                one = np.concatenate(turns, axis=1).reshape(-1, *one.shape[1:])
            out[name.replace(first, whole)] = one
    return out
