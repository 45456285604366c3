"""The checkpoints that people download, as folders of configs, made from their published rules.

`CHECKPOINTS` names them; `write` makes a folder that `open_model` takes, with drawn weights
(`models/synthetic.py`). A file may differ in details that neither change a weight's size nor its
kernels. Knows shapes and rules of quantisation; plans and measures nothing.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.result_files import CONFIGS

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
    "0.8B": _dense(24, 1024, 3584, 8, 2, 16) | _TIED,
    "2B": _dense(24, 2048, 6144, 8, 2, 16) | _TIED,
    "4B": _dense(32, 2560, 9216, 16, 4, 32) | _TIED,
    "9B": _dense(32, 4096, 12288, 16, 4, 32),
    "27B": _dense(64, 5120, 17408, 24, 4, 48),
    "35B-A3B": _moe(40, 2048, 512, 16, 32, 256, 8),
    "80B-A3B": _moe(48, 2048, 512, 16, 32, 512, 10) | {"vocab_size": 151936},
    "122B-A10B": _moe(48, 3072, 1024, 32, 64, 256, 8),
    "397B-A17B": _moe(60, 4096, 1024, 32, 64, 512, 10),
}
NEXT = "80B-A3B"  # of model type qwen3_next

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


def _int4(layers: int) -> Json:
    """GPTQ: experts alone of a mixture, else every large projection."""
    skipped = (r"-:.*in_proj_[ab]", r"-:.*mtp.*", r"-:.*mlp\.gate$", r"-:.*shared_expert.*")
    gptq = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}
    return gptq | {"dynamic": dict.fromkeys(skipped, {}), "lm_head": False}


_KV = {"kv_cache_quant_algo": "FP8"}
_FIRST = r"re:.*layers\.([0-9]|[1-4][0-9]|5[0-5])\.mlp\..*"  # of 64 layers, all but the last eight
FORMATS: dict[str, Rule | None] = {
    "bf16": None,
    "FP8, blocks of 128 x 128": _blocks,
    "FP8, scales a row and a token": _compressed(_DYNAMIC, ignore=("lm_head",)),
    "NVFP4 W4A16 MLP, FP8 mixers": _mixed("W4A16_NVFP4", **_KV),
    "NVFP4 W4A4 MLP, FP8 mixers": _mixed("NVFP4"),
    "NVFP4 W4A4 MLP, FP8 a token": _compressed(_W4A4 | {"targets": [_FIRST]}, _DYNAMIC),
    "NVFP4 W4A4 experts": _experts,
    "NVFP4 W4A4": _compressed(_W4A4, ignore=("re:.*linear_attn.*", "lm_head")),
    "int4, groups of 128": _int4,
}


@dataclass(frozen=True)
class Published:
    """A checkpoint: its name on the hub, and its rows of `SIZES` and `FORMATS`."""

    name: str
    size: str
    format: str


def _names(text: str) -> tuple[Published, ...]:
    rows = (line.split(maxsplit=2) for line in text.strip().splitlines())
    return tuple(Published(name, size, format) for name, size, format in rows)


CHECKPOINTS = _names("""
Qwen/Qwen3.5-0.8B                       0.8B       bf16
Qwen/Qwen3.5-2B                         2B         bf16
Qwen/Qwen3.5-4B                         4B         bf16
Qwen/Qwen3.5-9B                         9B         bf16
Qwen/Qwen3.8-27B                        27B        bf16
Qwen/Qwen3.8-27B-FP8                    27B        FP8, blocks of 128 x 128
unsloth/Qwen3.8-27B-FP8                 27B        FP8, scales a row and a token
nvidia/Qwen3.6-27B-NVFP4                27B        NVFP4 W4A16 MLP, FP8 mixers
nvidia/Qwen3.8-27B-NVFP4                27B        NVFP4 W4A4 MLP, FP8 mixers
unsloth/Qwen3.8-27B-NVFP4               27B        NVFP4 W4A4 MLP, FP8 a token
Qwen/Qwen3.5-27B-GPTQ-Int4              27B        int4, groups of 128
Qwen/Qwen3.6-35B-A3B                    35B-A3B    bf16
Qwen/Qwen3.6-35B-A3B-FP8                35B-A3B    FP8, blocks of 128 x 128
nvidia/Qwen3.6-35B-A3B-NVFP4            35B-A3B    NVFP4 W4A16 MLP, FP8 mixers
RedHatAI/Qwen3.6-35B-A3B-NVFP4          35B-A3B    NVFP4 W4A4
Qwen/Qwen3.5-35B-A3B-GPTQ-Int4          35B-A3B    int4, groups of 128
Qwen/Qwen3-Next-80B-A3B-Instruct        80B-A3B    bf16
Qwen/Qwen3-Next-80B-A3B-Instruct-FP8    80B-A3B    FP8, blocks of 128 x 128
nvidia/Qwen3-Next-80B-A3B-Instruct-NVFP4 80B-A3B   NVFP4 W4A4 experts
Qwen/Qwen3-Coder-Next                   80B-A3B    bf16
Qwen/Qwen3-Coder-Next-FP8               80B-A3B    FP8, blocks of 128 x 128
GadflyII/Qwen3-Coder-Next-NVFP4         80B-A3B    NVFP4 W4A4
Intel/Qwen3-Coder-Next-int4-AutoRound   80B-A3B    int4, groups of 128
Qwen/Qwen3.5-122B-A10B                  122B-A10B  bf16
Qwen/Qwen3.5-122B-A10B-FP8              122B-A10B  FP8, blocks of 128 x 128
nvidia/Qwen3.5-122B-A10B-NVFP4          122B-A10B  NVFP4 W4A4 experts
Qwen/Qwen3.5-122B-A10B-GPTQ-Int4        122B-A10B  int4, groups of 128
Qwen/Qwen3.5-397B-A17B                  397B-A17B  bf16
Qwen/Qwen3.5-397B-A17B-FP8              397B-A17B  FP8, blocks of 128 x 128
nvidia/Qwen3.5-397B-A17B-NVFP4          397B-A17B  NVFP4 W4A4 experts
Qwen/Qwen3.5-397B-A17B-GPTQ-Int4        397B-A17B  int4, groups of 128
""")

# ---- folders ------------------------------------------------------------------------------------


def config_of(row: Published) -> Json:
    """Its config.json."""
    size, rule = SIZES[row.size], FORMATS[row.format]
    base = "qwen36-35b-a3b" if "num_experts" in size else "qwen36-27b"
    config: Json = json.loads((CONFIGS / base / "config.json").read_text())
    text = config["text_config"] | size
    layers = text["num_hidden_layers"]
    text["layer_types"] = (["linear_attention"] * 3 + ["full_attention"]) * (layers // 4)
    config |= {"text_config": text, "tie_word_embeddings": text["tie_word_embeddings"]}
    if row.size == NEXT:
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


def write(row: Published, folder: Path) -> Path:
    """A folder of its configs, which `open_model` takes."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_of(row)))
    (folder / "synthetic.json").write_text('{"seed": 1}')
    return folder
