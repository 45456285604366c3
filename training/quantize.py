"""Quantise bf16 weights as NVIDIA's Qwen3.6 files are: experts, shared expert and lm_head NVFP4,
projections FP8.

Knows the number formats and the file's names; numpy only, no torch. The rules are modelopt's:
  NVFP4  weight_scale_2 = amax / 2688; block scale = e4m3(blockamax / (6 weight_scale_2)), 1 for
         a zero block; code = e2m1(w / (scale weight_scale_2)), ties to the even code; two codes
         a byte, the earlier one low.
  FP8    weight_scale = amax / 448; input_scale = calibrated amax / 448;
         code = e4m3(w / weight_scale).
  python -m training.quantize --weights DIR --calibration FILE --out DIR
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from training.shape import (
    DRAFT_PREFIX,
    TINY,
    Shape,
    head_tensors,
    module_table,
    stored_tensors,
    text_config,
)

F32 = NDArray[np.float32]
U8 = NDArray[np.uint8]
Codes = NDArray[Any]  # ml_dtypes' float types are not known to numpy's stubs
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
BF16 = np.dtype(ml_dtypes.bfloat16)
FP4_MAX, FP8_MAX, BLOCK = 6.0, 448.0, 16
FP4_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=np.float32)
FP4_MIDDLES = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], dtype=np.float32)
CHECKPOINT = Path(__file__).parent.parent / "models" / "tiny" / "checkpoint"
STORED = {"BF16": BF16, "F8_E4M3": E4M3, "U8": np.dtype(np.uint8), "F32": np.dtype(np.float32)}


def to_e4m3(x: F32) -> Codes:
    """Saturating cast to e4m3, round to nearest even."""
    return np.clip(x, -FP8_MAX, FP8_MAX).astype(E4M3)


def to_e2m1(x: F32) -> U8:
    """4-bit codes (sign in bit 3) of the nearest values, ties to the even code, saturating."""
    size = np.abs(x)[..., None]
    at = np.arange(len(FP4_MIDDLES))
    passed = np.where(at % 2 == 1, size >= FP4_MIDDLES, size > FP4_MIDDLES)
    codes: U8 = (passed.sum(-1) + 8 * (x < 0)).astype(np.uint8)
    return codes


def quantize_nvfp4(weight: F32, scale_2: np.float32) -> tuple[U8, Codes]:
    """(packed codes [N, K/2], block scales e4m3 [N, K/16]) of a weight [N, K]."""
    rows, columns = weight.shape
    blocks = weight.reshape(rows, columns // BLOCK, BLOCK)
    largest = np.abs(blocks).max(-1)
    wanted = largest / np.float32(FP4_MAX * scale_2)
    wanted = np.where(
        largest == 0, np.float32(1), np.clip(wanted, np.float32(2**-9), np.float32(FP8_MAX))
    )
    scale = to_e4m3(wanted.astype(np.float32))
    codes = to_e2m1(blocks / (scale.astype(np.float32) * scale_2)[..., None]).reshape(rows, columns)
    packed: U8 = codes[:, 0::2] | (codes[:, 1::2] * 16).astype(np.uint8)
    return packed, scale


def dequantize_nvfp4(packed: U8, scale: Codes, scale_2: np.float32) -> F32:
    """The weight [N, K] that the codes encode."""
    codes = np.stack((packed & 15, packed >> 4), -1).reshape(packed.shape[0], -1)
    values = np.where(codes & 8, -FP4_VALUES[codes & 7], FP4_VALUES[codes & 7])
    scaled = values.reshape(*scale.shape, BLOCK) * scale.astype(np.float32)[..., None]
    weight: F32 = (scaled * scale_2).reshape(codes.shape).astype(np.float32)
    return weight


def largest_scale(weights: list[F32], top: float) -> np.float32:
    """amax of all the weights over `top`; 1 over `top` for all-zero weights."""
    largest = max(float(np.abs(weight).max()) for weight in weights)
    return np.float32((largest or 1.0) / top)


def read_file(path: Path) -> dict[str, Codes]:
    """Tensors of one safetensors file: 8 bytes of header length, JSON header, data."""
    raw = path.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    found: dict[str, Codes] = {}
    for name, entry in json.loads(raw[8:start]).items():
        if name != "__metadata__":
            first, last = entry["data_offsets"]
            data = np.frombuffer(raw[start + first : start + last], dtype=STORED[entry["dtype"]])
            found[name] = data.reshape(entry["shape"])
    return found


def write_file(tensors: Mapping[str, Codes], path: Path) -> None:
    """Write a safetensors file, tensors in the order given, header padded to 8 bytes."""
    kinds = {str(dtype): name for name, dtype in STORED.items()}
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, tensor in tensors.items():
        end = at + tensor.nbytes
        header[name] = {
            "dtype": kinds[str(tensor.dtype)],
            "shape": list(tensor.shape),
            "data_offsets": [at, end],
        }
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            stream.write(np.ascontiguousarray(tensor).tobytes())


def read_weights(folder: Path) -> dict[str, Codes]:
    """All tensors of a folder's safetensors files."""
    found: dict[str, Codes] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= read_file(path)
    return found


def split_experts(weights: Mapping[str, Codes], width: int) -> dict[str, Codes]:
    """Fused expert tensors [E, 2I, H], [E, H, I] -> one gate, up and down for each expert."""
    split: dict[str, Codes] = {}
    for name, tensor in weights.items():
        root, _, leaf = name.rpartition(".")
        if leaf == "gate_up_proj":
            for number, both in enumerate(tensor):
                split[f"{root}.{number}.gate_proj.weight"] = both[:width]
                split[f"{root}.{number}.up_proj.weight"] = both[width:]
        elif leaf == "down_proj":
            for number, one in enumerate(tensor):
                split[f"{root}.{number}.down_proj.weight"] = one
        else:
            split[name] = tensor
    return split


def global_group(module: str) -> list[str]:
    """The modules that share weight_scale_2: gate and up of one expert."""
    root, _, leaf = module.rpartition(".")
    return (
        [f"{root}.gate_proj", f"{root}.up_proj"] if leaf in ("gate_proj", "up_proj") else [module]
    )


def quantize(
    weights: Mapping[str, Codes], largest_input: Mapping[str, float], shape: Shape
) -> dict[str, Codes]:
    """Every tensor of the quantised file. `largest_input`: module -> amax of its input over the
    calibration text.
    """
    plain = split_experts(weights, shape.expert_width)
    stored: dict[str, Codes] = {}

    def wide(module: str) -> F32:
        return plain[f"{module}.weight"].astype(np.float32)

    for name, (_, kind) in module_table(shape).items():
        if kind == "bf16":
            stored[name] = plain[name].astype(BF16)
            continue
        amax = np.float32(largest_input[name])
        if kind == "fp8":
            scale = largest_scale([wide(name)], FP8_MAX)
            stored[f"{name}.weight"] = to_e4m3(wide(name) / scale)
            stored[f"{name}.weight_scale"] = np.array(scale)
            stored[f"{name}.input_scale"] = np.array(amax / np.float32(FP8_MAX))
        else:
            scale = largest_scale(
                [wide(module) for module in global_group(name)], FP4_MAX * FP8_MAX
            )
            stored[f"{name}.weight"], stored[f"{name}.weight_scale"] = quantize_nvfp4(
                wide(name), scale
            )
            stored[f"{name}.weight_scale_2"] = np.array(scale)
            stored[f"{name}.input_scale"] = np.array(amax / np.float32(FP4_MAX * FP8_MAX))
    return stored


def dequantize(stored: Mapping[str, Codes], shape: Shape) -> dict[str, F32]:
    """module or tensor name -> the fp32 weight that the file encodes."""
    plain: dict[str, F32] = {}
    for name, (_, kind) in module_table(shape).items():
        if kind == "bf16":
            plain[name] = stored[name].astype(np.float32)
        elif kind == "fp8":
            plain[name] = stored[f"{name}.weight"].astype(np.float32) * stored[
                f"{name}.weight_scale"
            ].astype(np.float32)
        else:
            scale_2 = np.float32(stored[f"{name}.weight_scale_2"])
            plain[name] = dequantize_nvfp4(
                stored[f"{name}.weight"].astype(np.uint8), stored[f"{name}.weight_scale"], scale_2
            )
    return plain


def layer_algorithms(shape: Shape) -> dict[str, dict[str, object]]:
    """quantized_layers: module -> algorithm; the experts of a layer are one entry, as in NVIDIA's
    35B file.
    """
    layers: dict[str, dict[str, object]] = {}
    for name, (_, kind) in module_table(shape).items():
        module = name.split(".experts.")[0] + ".experts" if ".experts." in name else name
        if kind == "fp8":
            layers[module] = {"quant_algo": "FP8"}
        elif kind == "nvfp4":
            layers[module] = {"quant_algo": "W4A16_NVFP4", "group_size": BLOCK}
    return layers


def quantization_files(shape: Shape) -> tuple[dict[str, object], dict[str, object]]:
    """(hf_quant_config.json, config.json's quantization_config)."""
    layers = layer_algorithms(shape)
    producer = {"name": "spark", "version": "1"}
    ignored = ["mtp*", "model.visual*"]
    fp8 = [name for name, entry in layers.items() if entry["quant_algo"] == "FP8"]
    eight = {"num_bits": 8, "type": "float", "dynamic": False}
    groups: dict[str, object] = {
        "group_0": {"input_activations": eight, "weights": eight, "targets": fp8},
        "group_1": {
            "weights": {"num_bits": 4, "type": "float", "dynamic": False, "group_size": BLOCK},
            "targets": [name for name in layers if name not in fp8],
        },
    }
    quantization: dict[str, object] = {
        "quant_algo": "MIXED_PRECISION",
        "kv_cache_quant_algo": "FP8",
        "exclude_modules": ignored,
        "quantized_layers": layers,
    }
    inner: dict[str, object] = {
        "config_groups": groups,
        "ignore": ignored,
        "quant_algo": "MIXED_PRECISION",
        "quant_method": "modelopt",
        "producer": producer,
        "quantized_layers": layers,
    }
    return {"producer": producer, "quantization": quantization}, inner


def write_checkpoint(stored: Mapping[str, Codes], shape: Shape, out: Path) -> None:
    """model.safetensors, config.json, hf_quant_config.json and generation_config.json; with the
    draft head if its tensors are there.
    """
    draft_head = any(name.startswith(DRAFT_PREFIX) for name in stored)
    expected = {**stored_tensors(shape), **(head_tensors(shape) if draft_head else {})}
    if wrong := set(stored) ^ set(expected) or {
        name for name in expected if tuple(stored[name].shape) != expected[name][0]
    }:
        raise ValueError(f"these tensors are not as the table says: {sorted(wrong)[:5]}")
    # Wide types first, so that every tensor is aligned to its element size.
    ordered = dict(sorted(stored.items(), key=lambda item: -item[1].dtype.itemsize))
    write_file(ordered, out / "model.safetensors")
    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    ids = {token: tokenizer.get_vocab()[token] for token in ("<|im_end|>", "<|endoftext|>")}
    outer, inner = quantization_files(shape)
    generation = {
        "do_sample": True,
        "eos_token_id": [ids["<|im_end|>"], ids["<|endoftext|>"]],
        "pad_token_id": ids["<|endoftext|>"],
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.9,
    }
    files = {
        "config.json": {**text_config(shape, ids, draft_head), "quantization_config": inner},
        "hf_quant_config.json": outer,
        "generation_config.json": generation,
    }
    for name, content in files.items():
        (out / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--weights", type=Path, required=True, help="folder of bf16 safetensors")
    parser.add_argument(
        "--calibration", type=Path, required=True, help="JSON: module -> amax of its input"
    )
    parser.add_argument("--out", type=Path, default=CHECKPOINT)
    arguments = parser.parse_args()
    largest = json.loads(arguments.calibration.read_text(encoding="utf-8"))
    stored = quantize(read_weights(arguments.weights), largest, TINY)
    write_checkpoint(stored, TINY, arguments.out)
    size = sum(path.stat().st_size for path in arguments.out.iterdir())
    print(f"{len(stored)} tensors, {size:,} bytes in {arguments.out}")


if __name__ == "__main__":
    main()
