"""The config files of nvidia/Qwen3.6-27B-NVFP4 and -35B-A3B-NVFP4, generated from their rules.

Sizes are in nvidia_configs.json. `pair(model)` gives (config.json, hf_quant_config.json).
`folder()` is the folder of the published ones; where it exists, a test compares the generated ones
with them. `large(model)` gives those of nvidia/Qwen3.5-122B-A10B-NVFP4 and -397B-A17B-NVFP4: W4A4
experts, all else plain by wildcards.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.repository import ROOT

Json = dict[str, Any]
MODELS = ("27B", "35B-A3B")
_PARTS: Json = json.loads(Path(__file__).with_suffix(".json").read_text())
_VISION, _TEXT, _TOP, _MOE = (_PARTS[name] for name in ("vision", "text", "top", "35B-A3B"))
LARGE = ("122B-A10B", "397B-A17B")


def large(model: str) -> tuple[Json, Json]:
    """(config.json, hf_quant_config.json) of "122B-A10B" or "397B-A17B"."""
    text = _TEXT | _MOE | _PARTS["large"] | _PARTS[model]
    layers = text["num_hidden_layers"]
    text["layer_types"] = (["linear_attention"] * 3 + ["full_attention"]) * (layers // 4)
    config = _TOP | {"model_type": "qwen3_5_moe", "text_config": text}
    excluded = ["lm_head", "model.visual*", "mtp*", "model.language_model.embed_tokens*"]
    for i in range(layers):
        mixer = "self_attn" if i % 4 == 3 else "linear_attn"
        p = f"model.language_model.layers.{i}"
        excluded += [f"{p}.{mixer}*", f"{p}.mlp.gate*", f"{p}.mlp.shared_expert*"]
    inner = {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16}
    return config, {"quantization": inner | {"exclude_modules": excluded}}


def pair(model: str) -> tuple[Json, Json]:
    """(config.json, hf_quant_config.json) of "27B" or "35B-A3B"."""
    moe = model != "27B"
    text = _TEXT | _PARTS[model]
    layers = text["num_hidden_layers"]
    text["layer_types"] = (["linear_attention"] * 3 + ["full_attention"]) * (layers // 4)
    kind = text["model_type"].removesuffix("_text")
    quantised = quantized_layers(layers, moe)
    excluded = ["mtp.layers.0*", "mtp*"] if moe else ["mtp*", "mtp.layers.0*"]
    config = _TOP | {
        "architectures": ["Qwen3_5MoeForConditionalGeneration" if moe else _DENSE_CLASS],
        "model_type": kind,
        "text_config": text,
        "transformers_version": "5.7.0.dev0" if moe else "5.7.0",
        "vision_config": _VISION
        | {"model_type": f"{kind}_vision", "out_hidden_size": text["hidden_size"]},
        "quantization_config": _flat(quantised, excluded, moe),
    }
    if not moe:
        config["language_model_only"] = False
    inner = {"quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": "FP8"}
    inner |= {"quantized_layers": quantised, "exclude_modules": excluded}
    producer = {"name": "modelopt", "version": "0.44.0" if moe else "0.45.0"}
    return config, {"producer": producer, "quantization": inner}


def w4a4() -> tuple[Json, Json]:
    """Those of nvidia/Qwen3.8-27B-NVFP4 and RadixArk's, by their published recipe.

    The 3.6's shapes; MLPs and head quantise their inputs to NVFP4 too, and the KV cache is plain.
    """
    config, hf = pair("27B")
    flat, inner = config["quantization_config"], hf["quantization"]
    for row in (r for r in inner["quantized_layers"].values() if r["quant_algo"] != "FP8"):
        row["quant_algo"] = "NVFP4"  # of `flat` too: one object
    group = flat["config_groups"]["group_1"]
    group["input_activations"] = group["weights"]
    del flat["kv_cache_scheme"], inner["kv_cache_quant_algo"]
    return config, hf


_DENSE_CLASS = "Qwen3_5ForConditionalGeneration"


def quantized_layers(layers: int, moe: bool) -> Json:
    """Projections of the mixers in FP8; MLPs, experts and head in NVFP4 with plain inputs."""
    nvfp4 = {"quant_algo": "W4A16_NVFP4", "group_size": 16}
    shared = [f"shared_expert.{n}_proj" for n in ("gate", "up", "down")]
    mlp = ["experts", *shared] if moe else [f"{n}_proj" for n in ("gate", "up", "down")]
    rows: Json = {"lm_head": dict(nvfp4)}
    for i in range(layers):
        attention = [f"self_attn.{n}_proj" for n in "qkvo"]
        delta = [f"linear_attn.{n}" for n in ("in_proj_qkv", "in_proj_z", "out_proj")]
        p = f"model.language_model.layers.{i}."
        rows |= {p + n: {"quant_algo": "FP8"} for n in (attention if i % 4 == 3 else delta)}
        rows |= {f"{p}mlp.{n}": dict(nvfp4) for n in mlp}
    return rows


def _flat(quantised: Mapping[str, Json], excluded: list[str], moe: bool) -> Json:
    """config.json's copy, with the quirks of each file."""
    fp8 = {"dynamic": False, "num_bits": 8, "type": "float"}
    fp4 = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}

    def targets(algorithm: str) -> list[str]:
        return sorted(n for n, row in quantised.items() if row["quant_algo"] == algorithm)

    groups: Json = {
        "group_0": {"input_activations": fp8, "weights": fp8, "targets": targets("FP8")},
        "group_1": {"weights": fp4, "targets": targets("W4A16_NVFP4")},
    }
    flat: Json = {"quant_algo": "MIXED_PRECISION", "quant_method": "modelopt", "ignore": excluded}
    flat |= {"quantized_layers": quantised, "config_groups": groups}
    flat["producer"] = {"name": "modelopt", "version": "0.37.0" if moe else "0.45.0"}
    if moe:
        groups["group_1"]["input_activations"] = fp4
    else:
        flat["kv_cache_scheme"] = fp8
    return flat


def folder() -> Path | None:
    """The folder of the published files on this machine, or None."""
    named = os.environ.get("SPARK_NVIDIA_CONFIGS")
    path = Path(named) if named else ROOT.parent / "shared" / "configs"
    return path if path.is_dir() else None
