"""The checkpoints that people download, and layouts of weights, made from their published rules.

A layout is SIZE:FORMAT, such as `27b:fp8-block`: any of `SIZES` in any of `FORMATS`. `CHECKPOINTS`
has names on the hub for most. `folder_of` gives the folder of configs that `open_model` takes, and
weights are drawn (`models/synthetic.py`). A file may differ in details that neither change a
weight's size nor its kernels. Knows shapes and rules of quantisation; plans and measures nothing.
"""

import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.result_files import CONFIGS, MODELS, ROOT

Json = dict[str, Any]
Rule = Callable[[int], Json]  # config.json's quantization_config, by the number of layers


def _dense(layers: int, hidden: int, inner: int, heads: int, kv: int, value_heads: int) -> Json:
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "linear_num_value_heads": value_heads,
    }


def _moe(
    layers: int, hidden: int, inner: int, heads: int, value_heads: int, experts: int, top: int
) -> Json:
    return _dense(layers, hidden, inner, heads, 2, value_heads) | {
        "num_experts": experts,
        "num_experts_per_tok": top,
        "moe_intermediate_size": inner,
        "shared_expert_intermediate_size": inner,
    }


_TIED = {"tie_word_embeddings": True}
SIZES: dict[str, Json] = {
    "0.8b": _dense(24, 1024, 3584, 8, 2, 16) | _TIED,
    "2b": _dense(24, 2048, 6144, 8, 2, 16) | _TIED,
    "4b": _dense(32, 2560, 9216, 16, 4, 32) | _TIED,
    "9b": _dense(32, 4096, 12288, 16, 4, 32),
    "27b": _dense(64, 5120, 17408, 24, 4, 48),
    "35b-a3b": _moe(40, 2048, 512, 16, 32, 256, 8),
    "80b-a3b": _moe(48, 2048, 512, 16, 32, 512, 10) | {"vocab_size": 151936},
    "122b-a10b": _moe(48, 3072, 1024, 32, 64, 256, 8),
    "397b-a17b": _moe(60, 4096, 1024, 32, 64, 512, 10),
}
NEXT = "80b-a3b"  # of model type qwen3_next

# ---- rules of quantisation ----------------------------------------------------------------------

_SMALL = r"re:.*(in_proj_[ab]|in_proj_ba|mlp\.gate|shared_expert_gate)$"  # never quantised
_MTP = r"re:mtp\..*"
_FP4 = {"num_bits": 4, "type": "float", "group_size": 16, "strategy": "tensor_group"}
_FP8 = {"num_bits": 8, "type": "float"}
_DYNAMIC = {
    "weights": _FP8 | {"strategy": "channel", "dynamic": False},
    "input_activations": _FP8 | {"strategy": "token", "dynamic": True},
}
_W4A4 = {"weights": _FP4, "input_activations": _FP4 | {"dynamic": "local"}}


def _blocks(layers: int) -> Json:
    skipped = ["lm_head", "mtp.fc"]
    for i in range(layers):
        p = f"model.language_model.layers.{i}."
        mixer = [f"{p}linear_attn.in_proj_{leaf}" for leaf in ("a", "b", "ba")]
        skipped += [*mixer, f"{p}mlp.gate", f"{p}mlp.shared_expert_gate"]
    block = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    return block | {"weight_block_size": [128, 128], "modules_to_not_convert": skipped}


def _modelopt(algorithm: str, **more: Any) -> Json:
    excluded = ["mtp*", "*.in_proj_[ab]", "*.in_proj_ba", "*.mlp.gate", "*.shared_expert_gate"]
    return {
        "quant_method": "modelopt",
        "quant_algo": algorithm,
        "ignore": [*excluded, *more.pop("ignore", ())],
        **more,
    }


def _mixed(mlp: str, **more: Any) -> Rule:
    """Mixers in FP8; MLP or experts, and the head, in a form of NVFP4."""
    fp4 = {"quant_algo": mlp, "group_size": 16}

    def rule(layers: int) -> Json:
        rows: Json = {"lm_head": fp4}
        for i in range(layers):
            mixer = "self_attn" if i % 4 == 3 else "linear_attn"
            rows[f"model.language_model.layers.{i}.{mixer}"] = {"quant_algo": "FP8"}
            rows[f"model.language_model.layers.{i}.mlp"] = fp4
        return _modelopt("MIXED_PRECISION", quantized_layers=rows, **more)

    return rule


def _experts(layers: int) -> Json:
    plain = ["*self_attn*", "*linear_attn*", "*shared_expert*", "lm_head"]
    return _modelopt("NVFP4", ignore=plain, group_size=16, kv_cache_quant_algo="FP8")


def _compressed(*groups: Json, ignore: tuple[str, ...] = ()) -> Rule:
    def rule(layers: int) -> Json:
        return {
            "quant_method": "compressed-tensors",
            "config_groups": {
                f"group_{i}": {"targets": ["Linear"], **g} for i, g in enumerate(groups)
            },
            "ignore": [_SMALL, _MTP, *ignore],
        }

    return rule


def _int4(whole: bool) -> Rule:
    """GPTQ; `whole`: the head and the shared experts too."""
    skipped = [r"-:.*in_proj_[ab]", r"-:.*mtp.*", r"-:.*mlp\.gate$"]
    skipped += [] if whole else [r"-:.*shared_expert.*"]
    gptq = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}
    return lambda layers: gptq | {"dynamic": dict.fromkeys(skipped, {}), "lm_head": whole}


_KV = {"kv_cache_quant_algo": "FP8"}
_FIRST = r"re:.*layers\.([0-9]|[1-4][0-9]|5[0-5])\.mlp\..*"  # of 64 layers, all but the last eight
FORMATS: dict[str, tuple[str, Rule | None]] = {  # what a table calls it, and its rule
    "bf16": ("bf16", None),
    "fp8-block": ("FP8, blocks of 128 x 128", _blocks),
    "fp8-channel": ("FP8, scales a row and a token", _compressed(_DYNAMIC, ignore=("lm_head",))),
    "nvfp4": ("NVFP4 W4A16 MLP, FP8 mixers", _mixed("W4A16_NVFP4", **_KV)),
    "nvfp4-a4": ("NVFP4 W4A4 MLP, FP8 mixers", _mixed("NVFP4")),
    "nvfp4-a4-token": (
        "NVFP4 W4A4 MLP, FP8 a token",
        _compressed(_W4A4 | {"targets": [_FIRST]}, _DYNAMIC),
    ),
    "nvfp4-experts": ("NVFP4 W4A4 experts", _experts),
    "nvfp4-all": ("NVFP4 W4A4", _compressed(_W4A4, ignore=("re:.*linear_attn.*", "lm_head"))),
    "int4": ("int4, groups of 128", _int4(whole=False)),
    "int4-all": ("int4, groups of 128, and the head", _int4(whole=True)),
}


@dataclass(frozen=True)
class Published:
    """A checkpoint: its name on the hub, and its layout."""

    name: str
    layout: str

    @property
    def weights(self) -> str:
        return FORMATS[self.layout.partition(":")[2]][0]


CHECKPOINTS = tuple(
    Published(*line.split())
    for line in """
Qwen/Qwen3.5-0.8B                         0.8b:bf16
Qwen/Qwen3.5-2B                           2b:bf16
Qwen/Qwen3.5-4B                           4b:bf16
Qwen/Qwen3.5-9B                           9b:bf16
Qwen/Qwen3.8-27B                          27b:bf16
Qwen/Qwen3.8-27B-FP8                      27b:fp8-block
unsloth/Qwen3.8-27B-FP8                   27b:fp8-channel
nvidia/Qwen3.6-27B-NVFP4                  27b:nvfp4
nvidia/Qwen3.8-27B-NVFP4                  27b:nvfp4-a4
unsloth/Qwen3.8-27B-NVFP4                 27b:nvfp4-a4-token
Qwen/Qwen3.5-27B-GPTQ-Int4                27b:int4
Qwen/Qwen3.6-35B-A3B                      35b-a3b:bf16
Qwen/Qwen3.6-35B-A3B-FP8                  35b-a3b:fp8-block
nvidia/Qwen3.6-35B-A3B-NVFP4              35b-a3b:nvfp4
RedHatAI/Qwen3.6-35B-A3B-NVFP4            35b-a3b:nvfp4-all
Qwen/Qwen3.5-35B-A3B-GPTQ-Int4            35b-a3b:int4
Qwen/Qwen3-Next-80B-A3B-Instruct          80b-a3b:bf16
Qwen/Qwen3-Next-80B-A3B-Instruct-FP8      80b-a3b:fp8-block
nvidia/Qwen3-Next-80B-A3B-Instruct-NVFP4  80b-a3b:nvfp4-experts
Qwen/Qwen3-Coder-Next                     80b-a3b:bf16
Qwen/Qwen3-Coder-Next-FP8                 80b-a3b:fp8-block
GadflyII/Qwen3-Coder-Next-NVFP4           80b-a3b:nvfp4-all
Intel/Qwen3-Coder-Next-int4-AutoRound     80b-a3b:int4
Qwen/Qwen3.5-122B-A10B                    122b-a10b:bf16
Qwen/Qwen3.5-122B-A10B-FP8                122b-a10b:fp8-block
nvidia/Qwen3.5-122B-A10B-NVFP4            122b-a10b:nvfp4-experts
Qwen/Qwen3.5-122B-A10B-GPTQ-Int4          122b-a10b:int4
Qwen/Qwen3.5-397B-A17B                    397b-a17b:bf16
Qwen/Qwen3.5-397B-A17B-FP8                397b-a17b:fp8-block
nvidia/Qwen3.5-397B-A17B-NVFP4            397b-a17b:nvfp4-experts
Qwen/Qwen3.5-397B-A17B-GPTQ-Int4          397b-a17b:int4
""".strip().splitlines()
)

# ---- folders ------------------------------------------------------------------------------------


def config_of(layout: str) -> Json:
    name, _, format = layout.partition(":")
    size, (_, rule) = SIZES[name], FORMATS[format]
    base = "qwen36-35b-a3b" if "num_experts" in size else "qwen36-27b"
    config: Json = json.loads((CONFIGS / base / "config.json").read_text())
    text = config["text_config"] | size
    layers = text["num_hidden_layers"]
    text["layer_types"] = (["linear_attention"] * 3 + ["full_attention"]) * (layers // 4)
    config |= {"text_config": text, "tie_word_embeddings": text["tie_word_embeddings"]}
    if name == NEXT:
        config = _next(text)
    if rule is not None:
        config["quantization_config"] = rule(layers)
    return config


def _next(text: Json) -> Json:
    """The flat config.json of model type qwen3_next."""
    gone = ("layer_types", "rope_parameters", "mtp_num_hidden_layers", "model_type")
    flat = {key: value for key, value in text.items() if key not in gone}
    flat |= {"model_type": "qwen3_next", "architectures": ["Qwen3NextForCausalLM"]}
    flat |= {"rope_theta": 10000000, "rope_scaling": None, "partial_rotary_factor": 0.25}
    flat |= {"decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True}
    return flat | {"bos_token_id": 151643, "eos_token_id": 151645, "intermediate_size": 5120}


def folder_of(model: str | Path) -> Path:
    """The folder of configs of a model: a folder by its path, or by its name in benchmarks/configs,
    or a layout: this folder is there until the process ends.

    Raises SystemExit for another name.
    """
    for place in (CONFIGS / model, Path(model)):
        if (place / "config.json").is_file():
            return place
    size, _, format = str(model).partition(":")
    if size not in SIZES or format not in FORMATS:
        raise SystemExit(
            f"{model} is no model: give a folder of configs, {', '.join(MODELS)}, or SIZE:FORMAT; "
            f"sizes are {', '.join(SIZES)}, formats {', '.join(FORMATS)}"
        )
    folder = Path(_scratch().name) / str(model)
    if not folder.is_dir():
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config_of(str(model))))
        (folder / "synthetic.json").write_text('{"seed": 1}')
    return folder


def name_of(folder: Path) -> str:
    """How a command names a folder that `folder_of` gave: its layout, or its path."""
    whole = folder.resolve()
    if ":" in folder.name:
        return folder.name
    return str(whole.relative_to(ROOT) if whole.is_relative_to(ROOT) else whole)


@cache
def _scratch() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="layouts_")
