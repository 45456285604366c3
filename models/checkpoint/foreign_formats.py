"""Names of formats that are not read, and what to take in their place.

A refusal names the format first, then the place and value that declare it. Knows how other programs
declare their formats, and reads no tensor.
"""

from collections.abc import Mapping
from typing import Any

from spark_engine.errors import CheckpointError
from spark_engine.hints import INSTEAD

Json = Mapping[str, Any]
# By dtype of safetensors.
DTYPES = {
    "F4": "packed FP4",
    "F6_E2M3": "FP6",
    "F6_E3M2": "FP6",
    "F8_E5M2": "FP8 E5M2",
    "F8_E8M0": "MXFP4 or MXFP8 (E8M0 scales)",
    "I8": "int8",
    "U32": "32-bit packing (MLX)",
}


def refused(format: str, where: str, value: object) -> CheckpointError:
    """The error for a format that `where` declares by `value`."""
    shown = str(value) if len(str(value)) <= 60 else f"{str(value)[:57]}..."
    return CheckpointError(f"{format} is not read ({where}: {shown}); {INSTEAD}")


def method(row: Json) -> str:
    """The format of a quantization_config by its quant_method, or by its keys without one."""
    name = str(row.get("quant_method") or "").lower()
    if name.startswith("bitsandbytes"):
        kind = row.get("bnb_4bit_quant_type") if row.get("load_in_4bit") else row.get("bits")
        return f"bitsandbytes {kind or ''}".rstrip()
    if name == "quark":
        weight = (row.get("global_quant_config") or {}).get("weight") or {}
        weight = weight[0] if isinstance(weight, list) else weight
        kinds = {"fp4": "MXFP4", "fp6_e2m3": "MXFP6", "fp8_e4m3": "FP8", "int8": "int8"}
        return f"quark {kinds.get(str(weight.get('dtype')), '')}".rstrip()
    if not name and "bits" in row:
        return f"MLX {row['bits']}-bit"
    short = name.upper() if len(name) <= 5 else name[:40]  # HQQ, EXL3, AQLM, MXFP4
    return f"the quantisation {short or 'without a quant_method'}"


def group(weights: Json, inputs: Json | None) -> str:
    """The format of a group of compressed-tensors."""
    if not weights:
        return f"a group without weights, with {side(inputs)} inputs,"
    bits = weights.get("num_bits")
    kind, size = weights.get("type"), weights.get("group_size")
    if kind == "float" and size == 32:
        return f"MXFP{bits}" + (f" with {side(inputs)} inputs" if inputs else "")
    name = f"FP{bits}" if kind == "float" else f"{kind}{bits}"
    of = f"groups of {size}" if isinstance(size, int) and size > 0 else weights.get("strategy")
    return f"{name} ({of}) with {side(inputs)} inputs"


def side(inputs: Json | None) -> str:
    """The format of a group's inputs, or of a KV cache."""
    if not inputs:
        return "16-bit"
    how = "dynamic " if inputs.get("dynamic") else "static "
    return f"{how}{inputs.get('type')}{inputs.get('num_bits')}"
