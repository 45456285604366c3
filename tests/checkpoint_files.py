"""The files of a test checkpoint: config.json, quantisation configs, safetensors.

`scheme_of` is the one place that says what each test format does to a module. Knows nothing of
the package and draws no numbers.
"""

import json
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.generic]
Json = dict[str, Any]

PLAIN = {"bf16": np.dtype(ml_dtypes.bfloat16), "fp16": np.dtype(np.float16)}
PLAIN["f32"] = np.dtype(np.float32)
FORMATS = (
    *("bf16", "f32", "fp16", "fp8", "fp8_block", "nvfp4", "nvfp4_a4"),
    *("modelopt_mixed", "ct_nvfp4", "ct_nvfp4_a4", "ct_fp8_channel", "gptq", "awq", "ct_int4"),
)
INT4 = ("gptq", "awq", "ct_int4")  # in groups of 32 with zero points
# Of benchmarks/accuracy/. ct_mlp_a8: the MLP's NVFP4 values rounded to e4m3, inputs FP8 a token;
# ct_mlp_a4: its inputs NVFP4. All else as ct_nvfp4.
STORED = {
    np.dtype(np.float32): "F32",
    np.dtype(np.float16): "F16",
    np.dtype(ml_dtypes.bfloat16): "BF16",
    np.dtype(ml_dtypes.float8_e4m3fn): "F8_E4M3",
    np.dtype(np.uint8): "U8",
    np.dtype(np.int32): "I32",
    np.dtype(np.int64): "I64",
    np.dtype(np.int8): "I8",
    np.dtype(np.uint32): "U32",
    np.dtype(ml_dtypes.float8_e8m0fnu): "F8_E8M0",
}
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj", "in_proj_qkv", "in_proj_z", "out_proj")
MLP = ("gate_proj", "up_proj", "down_proj")


def scheme_of(module: str, format: str) -> str:
    """plain, fp8, fp8_block, fp8_channel, nvfp4, nvfp4_a4, nvfp4_a8, int4_g32 or int4_g128 for one
    module name."""
    leaf = module.rsplit(".", 1)[-1]
    mixer, mlp, head = leaf in (*ATTENTION, "fc"), leaf in MLP, leaf == "lm_head"
    if format in ("fp8", "fp8_block"):
        return format if mixer or mlp else "plain"
    if format in ("nvfp4", "nvfp4_a4"):
        return format if mixer or mlp or (head and format == "nvfp4") else "plain"
    if format == "modelopt_mixed":
        return "fp8" if mixer else "nvfp4" if mlp or head else "plain"
    if format == "ct_fp8_channel":
        return "fp8_channel" if mixer or mlp or head else "plain"
    if format.startswith("ct_mlp_") and mlp:
        return f"nvfp4_{format[-2:]}"
    if format == "ct_nvfp4" or format.startswith("ct_mlp_"):
        return "nvfp4" if mixer or mlp else "plain"
    if format == "ct_int4_g128":
        return "int4_g128" if mixer or mlp else "plain"
    if format in INT4:
        return "int4_g32" if mixer or mlp else "plain"
    if format == "ct_nvfp4_a4":
        return "nvfp4_a4" if (mixer or mlp) and "in_proj" not in leaf else "plain"
    return "plain"


def write_configs(
    path: Path,
    config: Json,
    format: str,
    prefix: str,
    generation: Mapping[str, Any] | None,
    names: list[str],
) -> None:
    """config.json, and hf_quant_config.json and generation_config.json where they apply."""
    top = dict(config)
    if prefix == "model.language_model.":
        kind = config["model_type"].removesuffix("_text")
        arch = "Qwen3_5MoeForConditionalGeneration" if "moe" in kind else None
        text = {k: v for k, v in config.items() if k != "architectures"}
        top = {
            "architectures": [arch or "Qwen3_5ForConditionalGeneration"],
            "model_type": kind,
            "tie_word_embeddings": config["tie_word_embeddings"],
            "text_config": text,
        }
    top["dtype"] = {"f32": "float32", "fp16": "float16"}.get(format, "bfloat16")
    quant, hf_quant = quantisation_configs(format, [n.removesuffix(".weight") for n in names])
    if quant:
        top["quantization_config"] = quant
    files = {"config.json": top, "hf_quant_config.json": hf_quant}
    files["generation_config.json"] = dict(generation or {})
    for file, content in files.items():
        if content:
            (path / file).write_text(json.dumps(content, indent=1))


def quantisation_configs(format: str, modules: list[str]) -> tuple[Json, Json]:
    """(config.json's quantization_config, hf_quant_config.json), {} where absent."""
    if format in PLAIN:
        return {}, {}
    linear = [m for m in modules if _is_linear(m)]
    plain = [m for m in linear if scheme_of(m, format) == "plain"]
    if format == "fp8_block":
        block = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
        return block | {"weight_block_size": [128, 128], "modules_to_not_convert": plain}, {}
    if format.startswith("ct_"):
        return _compressed(format, plain), {}
    if format in INT4:
        return _int4(format, plain), {}
    inner: Json = {"quant_algo": {"fp8": "FP8", "nvfp4_a4": "NVFP4"}.get(format, "W4A16_NVFP4")}
    inner |= {"kv_cache_quant_algo": None, "exclude_modules": plain + ["mtp*"]}
    if format != "fp8":
        inner["group_size"] = 16
    if format == "modelopt_mixed":
        inner |= {"quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": "FP8"}
        inner |= {"exclude_modules": ["mtp*"], "quantized_layers": _quantized_layers(linear)}
    hf = {"producer": {"name": "modelopt", "version": "0.45.0"}, "quantization": inner}
    flat = {"quant_method": "modelopt", "quant_algo": inner["quant_algo"]}
    flat |= {k: inner[k] for k in ("quantized_layers", "group_size") if k in inner}
    return flat | {"ignore": inner["exclude_modules"]}, hf


def _is_linear(module: str) -> bool:
    leaf = module.rsplit(".", 1)[-1]
    others = ("in_proj_a", "in_proj_b", "gate", "shared_expert_gate", "lm_head", "conv1d", "fc")
    return leaf in (*ATTENTION, *MLP, *others)


def _quantized_layers(modules: list[str]) -> Json:
    """As modelopt lists them: one entry for all experts of a layer."""
    rows: Json = {}
    for module in modules:
        scheme = scheme_of(module, "modelopt_mixed")
        name = module.split(".experts.")[0] + ".experts" if ".experts." in module else module
        if scheme == "fp8":
            rows[name] = {"quant_algo": "FP8"}
        elif scheme == "nvfp4":
            rows[name] = {"quant_algo": "W4A16_NVFP4", "group_size": 16}
    return rows


def _int4(format: str, plain: list[str]) -> Json:
    sizes: Json = {"quant_method": format, "bits": 4, "group_size": 32}
    if format == "gptq":
        excluded = {f"-:^{re.escape(m)}$": {} for m in plain}
        more = {"desc_act": False, "sym": False, "lm_head": False, "checkpoint_format": "gptq"}
        return sizes | more | {"dynamic": {"lm_head": {}, **excluded}}
    leaves = {f"{m.rsplit('.', 1)[-1]}" for m in plain} - {"gate", "lm_head"}
    return sizes | {"version": "gemm", "zero_point": True, "modules_to_not_convert": sorted(leaves)}


def _compressed(format: str, ignore: list[str]) -> Json:
    weights: Json = {"type": "float", "symmetric": True, "dynamic": False}
    inputs: Json | None = None
    packing = "nvfp4-pack-quantized"
    fp8 = weights | {"num_bits": 8, "group_size": None, "strategy": "channel"}
    by_token = fp8 | {"dynamic": True, "strategy": "token"}
    if format == "ct_fp8_channel":
        weights, inputs, packing = fp8, by_token, "float-quantized"
    elif format.startswith("ct_int4"):
        size = 128 if format == "ct_int4_g128" else 32
        weights |= {"num_bits": 4, "type": "int", "group_size": size, "strategy": "group"}
        weights["symmetric"], packing = size == 128, "pack-quantized"
    else:
        weights |= {"num_bits": 4, "group_size": 16, "strategy": "tensor_group"}
        inputs = weights | {"dynamic": "local"} if format == "ct_nvfp4_a4" else None
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}}
    if format.startswith("ct_mlp_"):
        a8, dynamic = format == "ct_mlp_a8", weights | {"dynamic": "local"}
        mlp: Json = {"targets": [r"re:.*\.(gate|up|down)_proj$"]}
        mlp |= {"weights": fp8 if a8 else weights, "input_activations": by_token if a8 else dynamic}
        groups["group_1"] = mlp
    return {
        "quant_method": "compressed-tensors",
        "format": packing,
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": ["re:.*lm_head" if m.endswith("lm_head") else m for m in ignore],
        "kv_cache_scheme": None,
    }


class Drawn(Protocol):
    path: Path
    tensors: Mapping[str, Any]

    def read(self, name: str) -> Array: ...


def write_drawn(checkpoint: Drawn, folder: Path, shards: int) -> None:
    """Writes the drawn tensors, and copies the configs."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in checkpoint.path.glob("*.json"):
        if file.name != "synthetic.json":
            (folder / file.name).write_bytes(file.read_bytes())
    write_shards(folder, {name: checkpoint.read(name) for name in checkpoint.tensors}, shards)


def write_shards(path: Path, tensors: Mapping[str, Array], shards: int) -> None:
    """model.safetensors, or `shards` files and model.safetensors.index.json."""
    if shards == 1:
        write_safetensors(path / "model.safetensors", tensors)
        return
    names = sorted(tensors)
    weight_map: dict[str, str] = {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = names[i::shards]
        write_safetensors(path / file, {n: tensors[n] for n in part})
        weight_map |= dict.fromkeys(part, file)
    total = sum(a.nbytes for a in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def write_safetensors(file: Path, tensors: Mapping[str, Array]) -> None:
    """One safetensors file: 8 bytes header length, JSON header padded to 8, the bytes."""
    header: Json = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, array in tensors.items():
        row = {"dtype": STORED[array.dtype], "shape": list(array.shape)}
        header[name] = row | {"data_offsets": [end, end + array.nbytes]}
        end += array.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for array in tensors.values():
            out.write(np.ascontiguousarray(array).tobytes())
