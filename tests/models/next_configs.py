"""The config.json of Qwen/Qwen3-Next-80B-A3B-Instruct and of files of it in other formats.

`config(format)`: bf16 and fp8_block as Qwen publishes them; after ModelOpt's exports nvfp4_a4 of
the routed experts alone, nvfp4 (W4A16) of all projections, and fp8 with one scale of a tensor. The
draft head is in the files and not in config.json.
"""

import json
from pathlib import Path
from typing import Any

Json = dict[str, Any]
FORMATS = ("bf16", "fp8", "fp8_block", "nvfp4", "nvfp4_a4")
FULL: Json = json.loads(Path(__file__).with_name("qwen3_next_config.json").read_text())
LAYERS = FULL["num_hidden_layers"]


def config(format: str = "bf16", **changes: Any) -> Json:
    """config.json with the quantisation of one format."""
    made = FULL | changes
    quantised = quantisation(format, made["num_hidden_layers"])
    return made | ({"quantization_config": quantised} if quantised else {})


def write(folder: Path, format: str, **changes: Any) -> Path:
    """A folder for which weights are drawn."""
    (folder / "config.json").write_text(json.dumps(config(format, **changes)))
    (folder / "synthetic.json").write_text(json.dumps({"seed": 1}))
    return folder


def quantisation(format: str, layers: int = LAYERS) -> Json:
    """config.json's quantization_config; empty for bf16."""
    if format == "bf16":
        return {}
    if format == "fp8_block":
        head = [f"mtp.{n}" for n in ("fc", "layers.0.mlp.gate", "layers.0.mlp.shared_expert_gate")]
        kept = ("linear_attn.in_proj_ba", "mlp.gate", "mlp.shared_expert_gate")
        plain = [f"model.layers.{i}.{name}" for i in range(layers) for name in kept]
        block: Json = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
        block |= {"weight_block_size": [128, 128]}
        return block | {"modules_to_not_convert": ["lm_head", *plain, *head]}
    ignored = ["lm_head", "*.in_proj_ba", "*.mlp.gate", "*.shared_expert_gate", "mtp*"]
    if format == "nvfp4_a4":
        ignored += ["*.self_attn*", "*.linear_attn*", "*.shared_expert*"]
    algorithm = {"fp8": "FP8", "nvfp4": "W4A16_NVFP4", "nvfp4_a4": "NVFP4"}[format]
    return {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ignored}
