"""Every published layout, as public copies of the files and the exporters' sources have it."""

import re
from collections.abc import Mapping

from tests.published.checkpoint import Declare, Layout
from tests.published.networks import Json

ATTENTION = r"self_attn\.[qkvo]_proj$"
DELTA = r"linear_attn\.(in_proj_qkv|in_proj_z|in_proj_qkvz|out_proj)$"
GATES = r"linear_attn\.in_proj_[ab]$"
MLP = r"mlp\.(shared_expert\.)?(gate|up|down)_proj$"
EXPERTS = r"mlp\.experts\.\d+\.\w+_proj$"
HEAD = r"^lm_head$"
MIXERS = rf"{ATTENTION}|{DELTA}"
FFN = rf"{MLP}|{EXPERTS}"
ROUTERS = r"mlp\.(gate|shared_expert_gate)$"
LINEAR = rf"{MIXERS}|{FFN}"
Schemes = Mapping[str, str]


def plain(schemes: Schemes) -> list[str]:
    """Modules that an exporter lists as not converted: matrices, norms and convolutions."""
    return [m for m, scheme in schemes.items() if not scheme and "embed" not in m]


def _linear(schemes: Schemes) -> list[str]:
    """Those of them that are Linear, which compressed-tensors and ModelOpt list."""
    found = (r"in_proj_\w+|mlp\.gate|_gate|_proj|lm_head|fc|qkv|linear_fc\d|proj|out_proj", r"norm")
    return [m for m in plain(schemes) if re.search(found[0] + "$", m) and found[1] not in m]


# -- FineGrainedFP8 --------------------------------------------------------------------------


def blocks(schemes: Schemes) -> Json:
    config = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
    config |= {"weight_per_tensor": False, "act_per_tensor": False}
    config |= {"weight_block_size": [128, 128], "modules_to_not_convert": plain(schemes)}
    return {"config": config}


# -- ModelOpt ----------------------------------------------------------------------------------

ALGORITHM = {"fp8": "FP8", "nvfp4": "NVFP4", "nvfp4_a16": "W4A16_NVFP4"}
ALGORITHM |= {"fp8_block": "FP8_BLOCK_SCALES", "fp8_pcpt": "FP8_PER_CHANNEL_PER_TOKEN"}
ALGORITHM |= {"fp8_pb": "FP8_PB_WO"}
FLOAT = {"dynamic": False, "num_bits": 8, "type": "float"}
FLOAT4 = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
PRODUCER = {"name": "modelopt", "version": "0.45.0"}


def _layers(schemes: Schemes) -> Json:
    """quantized_layers: one entry for the experts of a layer."""
    rows: Json = {}
    for module, scheme in schemes.items():
        if scheme:
            row = {"quant_algo": ALGORITHM[scheme]}
            row |= {"group_size": 16} if "nvfp4" in scheme else {}
            row |= {"group_size": 128} if scheme == "fp8_block" else {}
            rows[re.sub(r"(\.experts)\..*", r"\1", module)] = row
    return rows


def mixed(kv: str | None, hf: bool = True, layers: bool = True, head: str = "mtp*") -> Declare:
    """MIXED_PRECISION: quantized_layers in both files, the cache's dtype in one of them."""

    def declare(schemes: Schemes) -> Json:
        listed = _layers(schemes)
        ignored = [m for m in _linear(schemes) if "visual" not in m and "mtp" not in m]
        ignored += ["model.visual*", *([head, "mtp.layers.0*"] if head else [])]
        groups: Json = {}
        for algorithm in sorted({row["quant_algo"] for row in listed.values()}):
            named = [n for n, row in listed.items() if row["quant_algo"] == algorithm]
            row = {"weights": FLOAT if "FP8" in algorithm else FLOAT4, "targets": named}
            if algorithm != "W4A16_NVFP4":
                row["input_activations"] = row["weights"]
            groups[f"group_{len(groups)}"] = row
        config: Json = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}
        config |= {"ignore": ignored, "config_groups": groups, "producer": PRODUCER}
        inner = {"quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": kv}
        inner |= {"exclude_modules": ignored, "quantized_layers": listed}
        config |= {"quantized_layers": listed} if layers else {}
        made = {"config": config}
        return made | ({"hf": {"producer": PRODUCER, "quantization": inner}} if hf else {})

    return declare


def by_pattern(schemes: Schemes) -> Json:
    """`mixed` with a wildcard for all layers and for all of a mixer or an MLP."""
    made = mixed("FP8")(schemes)
    for row in (made["config"], made["hf"]["quantization"]):
        named = row["quantized_layers"].items()
        wild = {re.sub(r"layers\.\d+\.(\w+)\.\w+", r"layers.*.\1.*", n): a for n, a in named}
        row["quantized_layers"] = wild
    return made


def modelopt(algorithm: str, ignored: list[str] | None = None, kv: str | None = None) -> Declare:
    """One algorithm, and what is left out: by default every plain module."""

    def declare(schemes: Schemes) -> Json:
        out = _linear(schemes) if ignored is None else ignored
        weights = FLOAT4 if "NVFP4" in algorithm else FLOAT
        group = {"weights": weights, "input_activations": weights, "targets": ["Linear"]}
        config: Json = {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": out}
        config |= {"config_groups": {"group_0": group}, "producer": PRODUCER}
        config |= {"kv_cache_scheme": FLOAT} if kv else {}
        inner: Json = {"quant_algo": algorithm, "kv_cache_quant_algo": kv, "exclude_modules": out}
        inner |= {"group_size": 16} if "NVFP4" in algorithm else {}
        return {"config": config, "hf": {"producer": PRODUCER, "quantization": inner}}

    return declare


def _wildcards() -> list[str]:
    """nvidia's 122B and 397B: everything but the routed experts, layer by layer."""
    rows = ["lm_head", "model.language_model.layers.0.linear_attn*"]
    for layer in (0, 1):
        stem = f"model.language_model.layers.{layer}.mlp.shared_expert"
        rows += [f"{stem}*", f"{stem}_gate"]
    attention = "model.language_model.layers.1.self_attn*"
    return [*rows, attention, "model.visual*", "mtp.layers.0*", "mtp*"]


# -- compressed-tensors --------------------------------------------------------------------------

_NULLS: Json = {"actorder": None, "block_structure": None, "group_size": None, "scale_dtype": None}
_NULLS |= {"zp_dtype": None, "observer_kwargs": {}}
_FP8 = _NULLS | {"num_bits": 8, "type": "float", "symmetric": True}
_FP8_WEIGHT = _FP8 | {"dynamic": False, "observer": "memoryless_minmax"}
_FP8_TOKEN = _FP8 | {"strategy": "token", "dynamic": True, "observer": None}
_NVFP4 = _FP8_WEIGHT | {"num_bits": 4, "strategy": "tensor_group", "group_size": 16}
_NVFP4 |= {"scale_dtype": "torch.float8_e4m3fn", "zp_dtype": "torch.float8_e4m3fn"}
_INT4 = _FP8_WEIGHT | {"num_bits": 4, "type": "int", "strategy": "group"}
_LOCAL = _NVFP4 | {"dynamic": "local", "observer": "static_minmax"}
_DIM128 = {"strategy": "group", "group_size": 128, "dynamic": True}
# (format, weights, input_activations) by scheme
GROUP: dict[str, tuple[str, Json, Json | None]] = {
    "ct_fp8": (
        "float-quantized",
        _FP8_WEIGHT | {"strategy": "tensor"},
        _FP8_WEIGHT | {"strategy": "tensor"},
    ),
    "fp8_rows": ("float-quantized", _FP8_WEIGHT | {"strategy": "channel"}, _FP8_TOKEN),
    "ct_block": (
        "float-quantized",
        _FP8_WEIGHT | {"strategy": "block", "block_structure": [128, 128]},
        _FP8 | _DIM128,
    ),
    "ct_nvfp4": ("nvfp4-pack-quantized", _NVFP4 | {"actorder": "static"}, _LOCAL),
    "ct_nvfp4_a16": ("nvfp4-pack-quantized", _NVFP4, None),
    "int4_g32": ("pack-quantized", _INT4 | {"group_size": 32, "symmetric": False}, None),
    "int4_g128": ("pack-quantized", _INT4 | {"group_size": 128}, None),
    "int8": ("int-quantized", _FP8_WEIGHT | {"type": "int", "strategy": "channel"}, None),
    "mxfp4": ("mxfp4-pack-quantized", _NVFP4 | {"strategy": "group", "group_size": 32}, None),
}


def compressed(
    *groups: tuple[str, list[str]], ignored: list[str] | None = None, kv: bool = False
) -> Declare:
    """Groups of (scheme, targets) in order; the plain modules are ignored by their names."""

    def declare(schemes: Schemes) -> Json:
        rows: Json = {}
        for i, (scheme, targets) in enumerate(groups):
            form, weights, inputs = GROUP[scheme]
            row = {"format": form, "weights": weights, "input_activations": inputs}
            rows[f"group_{i}"] = row | {"output_activations": None, "targets": targets}
        forms = {row["format"] for row in rows.values()}
        config: Json = {"quant_method": "compressed-tensors", "config_groups": rows}
        config |= {"format": forms.pop() if len(forms) == 1 else "mixed-precision"}
        config |= {"quantization_status": "compressed", "version": "0.17.2", "sparsity_config": {}}
        config |= {"global_compression_ratio": None, "transform_config": {}}
        scheme = _FP8_WEIGHT | {"strategy": "tensor"}
        config["kv_cache_scheme"] = scheme if kv else None
        config["ignore"] = [*_linear(schemes), *(ignored or [])]
        return {"config": config}

    return declare


def linear(scheme: str) -> Declare:
    return compressed((scheme, ["Linear"]))


FP8_TARGETS = [
    r"re:.*self_attn\.(q|k|v|o)_proj$",
    r"re:.*linear_attn\.(in_proj_qkv|in_proj_z|out_proj)$",
    "re:.*lm_head",
]
LAST_MLP = r"re:.*layers\.(1|63)\.mlp\.(gate|up|down)_proj$"
NVFP4_MLP = [r"re:.*mlp\.(gate|up|down)_proj$"]  # the last layer's too: the first group counts
UNSLOTH = {rf"{MIXERS}|{HEAD}|layers\.1\.{MLP}": "fp8_rows", MLP: "ct_nvfp4"}
MIXED = compressed(("fp8_rows", [*FP8_TARGETS, LAST_MLP]), ("ct_nvfp4", NVFP4_MLP), kv=True)
MIXED_EXPERTS = compressed(("fp8_rows", FP8_TARGETS), ("ct_nvfp4", ["re:.*mlp.experts.*"]), kv=True)
INT4_FP8 = compressed(("fp8_rows", ["re:.*attn.*proj.*"]), ("int4_g128", ["re:.*mlp.*"]))
ABLITERATED = compressed(
    ("ct_block", [r"re:.*(self_attn|linear_attn|shared_expert)\..*proj.*"]),
    ("ct_nvfp4", [r"re:.*mlp\.experts\..*"]),
)


def by_names(schemes: Schemes) -> Json:
    kinds = ("fp8_rows", "ct_nvfp4")
    named = [(k, [m for m, scheme in schemes.items() if scheme == k]) for k in kinds]
    return compressed(*named, ignored=["re:^mtp.*"], kv=True)(schemes)


def _with_parents(schemes: Schemes) -> Json:
    """MIXED with a parent of quantised modules among what is ignored, as published."""
    declared = MIXED(schemes)
    declared["config"]["ignore"] += ["model.language_model.layers.0.linear_attn", "re:^mtp.*"]
    return declared


# -- int4 ----------------------------------------------------------------------------------------


def gptq(schemes: Schemes) -> Json:
    """Qwen's own: `dynamic` leaves out by patterns; two names without a sign change nothing."""
    config: Json = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True}
    config |= {"desc_act": False, "lm_head": False, "true_sequential": True}
    config |= {"checkpoint_format": "gptq", "pack_dtype": "int32", "static_groups": False}
    names = ["lm_head", "model.language_model.embed_tokens", "-:.*attn.*", "-:.*shared_expert.*"]
    return {"config": config | {"dynamic": {n: {} for n in [*names, "-:.*mtp.*", "-:.*visual.*"]}}}


def gptq_tree(schemes: Schemes) -> Json:
    """GPTQModel's: modules outside its tree of a layer are plain, and not listed."""
    config = gptq(schemes)["config"]
    return {"config": {key: value for key, value in config.items() if key != "dynamic"}}


def with_keys(declare: Declare, **keys: object) -> Declare:
    """A declaration with other keys of quantization_config."""
    return lambda schemes: {"config": declare(schemes)["config"] | keys}


def auto_round(schemes: Schemes) -> Json:
    config: Json = {"quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": True}
    config |= {"data_type": "int", "packing_format": "auto_round:auto_gptq", "iters": 200}
    blocks = "model.layers" if "model.norm" in schemes else "model.language_model.layers"
    config |= {"autoround_version": "0.12.0", "block_name_to_quantize": blocks}
    named = [m for m in _linear(schemes) if "visual" not in m and "shared_expert" not in m]
    extra = {m: {"bits": 16, "data_type": "float"} for m in named if m != "lm_head"}
    extra |= {r".*shared_expert.*": {"bits": 16}, r".*mtp.*": {"bits": 16}}
    return {"config": config | {"extra_config": extra}}


def awq(schemes: Schemes) -> Json:
    """Names in modules_to_not_convert are found anywhere in a module's name."""
    config: Json = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"}
    out = ["linear_attn", "self_attn", "shared_expert", "visual", "mtp", "lm_head"]
    out += ["mlp.gate"] if any(".experts." in m for m in schemes) else []
    return {"config": config | {"zero_point": True, "modules_to_not_convert": out}}


TIED = {"tie_word_embeddings": True}
TWO_SIZES: Json = {"-:.*(attn|mtp|visual).*": {}, r"+:.*gate_proj$": {"group_size": 32}}
POWERS = {LINEAR: "fp8_block_e8m0"}
QUANTISERS = {"fp8_rows": linear("fp8_rows"), "int4_g128": linear("int4_g128"), "fp8_block": blocks}
QUANTISERS |= {"nvfp4": modelopt("NVFP4"), "fp8": modelopt("FP8")}
BLOCKS, ROWS = {LINEAR: "fp8_block"}, {LINEAR: "fp8_rows"}
NVIDIA = {MIXERS: "fp8", rf"{FFN}|{HEAD}": "nvfp4_a16"}
NVIDIA_38 = {MIXERS: "fp8", rf"{MLP}|{HEAD}": "nvfp4"}
MTP_FILE = "model_mtp.safetensors"
LAYOUTS: dict[str, Layout] = {
    "bf16 wrapper, dense": Layout("dense"),
    "bf16 wrapper, fused experts": Layout("moe", fused=True),
    "bf16 text only": Layout("dense", text=True, head=None),
    "bf16 text only, split experts": Layout("moe", text=True, head=None),
    "tied": Layout("dense", changes=TIED),
    "tied in the text part only": Layout("dense", changes=TIED, top={"tie_word_embeddings": None}),
    "tied in the outer part only": Layout("dense", top=TIED),
    "FP8 blocks, dense": Layout("dense", BLOCKS, blocks, head=BLOCKS),
    "FP8 blocks, experts": Layout("moe", BLOCKS, blocks, head=BLOCKS),
    "FP8 blocks, f32 scales": Layout("dense", {LINEAR: "fp8_block_f32"}, blocks),
    "FP8 blocks, E8M0 scales": Layout("dense", POWERS, blocks, head=POWERS),
    "FP8 blocks, E8M0 scales as bytes": Layout(
        "moe", {LINEAR: "fp8_block_bytes"}, blocks, head={LINEAR: "fp8_block_bytes"}
    ),
    **{
        f"routers in {scheme}": Layout("moe", {rf"{EXPERTS}|{ROUTERS}": scheme}, declare, head=head)
        for scheme, declare in QUANTISERS.items()
        for head in [{rf"{EXPERTS}|{ROUTERS}": scheme}]
    },
    "nvidia 3.6 by wildcards": Layout("dense", NVIDIA, by_pattern, kv="one"),
    "nvidia 3.6 dense": Layout("dense", NVIDIA, mixed("FP8"), kv="one"),
    "nvidia 3.6 experts": Layout("moe", NVIDIA, mixed("FP8"), kv="one"),
    "nvidia 3.8": Layout("dense", NVIDIA_38, mixed(None)),
    "nvidia 3.8, config_groups only": Layout(
        "dense", NVIDIA_38, mixed(None, hf=False, layers=False)
    ),
    "nvidia 122B": Layout(
        "moe", {EXPERTS: "nvfp4"}, modelopt("NVFP4", _wildcards(), "FP8"), kv="modelopt"
    ),
    "ModelOpt NVFP4": Layout("dense", {rf"{ATTENTION}|{MLP}": "nvfp4"}, modelopt("NVFP4")),
    "ModelOpt FP8, FP8 cache": Layout(
        "dense", {LINEAR: "fp8"}, modelopt("FP8", kv="FP8"), kv="modelopt"
    ),
    "ModelOpt mtp in blocks": Layout(
        "moe", {EXPERTS: "nvfp4"}, mixed(None, head=""), head={EXPERTS: "fp8_block"}
    ),
    "ModelOpt FP8 per channel": Layout(
        "dense", {LINEAR: "fp8_pcpt"}, modelopt("FP8_PER_CHANNEL_PER_TOKEN")
    ),
    "ModelOpt FP8_PB_WO": Layout(
        "dense", {LINEAR: "fp8_pb"}, modelopt("FP8_PB_WO"), head={LINEAR: "fp8_pb"}
    ),
    "ModelOpt FP8_PB_WO, inverse scales": Layout(
        "dense", BLOCKS, modelopt("FP8_PB_WO"), head=BLOCKS
    ),
    "unsloth 3.8": Layout("dense", UNSLOTH, MIXED, kv="ct"),
    "unsloth 3.8, full names": Layout(
        "dense", UNSLOTH, by_names, kv="ct", head_file=MTP_FILE
    ),
    "unsloth 3.8, parents ignored": Layout(
        "dense", UNSLOTH, _with_parents, kv="ct", head_file=MTP_FILE
    ),
    "unsloth 3.6 experts": Layout(
        "moe", {rf"{MIXERS}|{HEAD}": "fp8_rows", EXPERTS: "ct_nvfp4"}, MIXED_EXPERTS, kv="ct",
    ),
    "FP8 dynamic, dense": Layout("dense", ROWS, linear("fp8_rows")),
    "FP8 dynamic, experts": Layout(
        "moe", {rf"{ATTENTION}|{FFN}": "fp8_rows"}, linear("fp8_rows")
    ),
    "FP8 dynamic, experts fused and plain": Layout(
        "moe", {LINEAR: "fp8_rows"}, linear("fp8_rows"), fused=True
    ),
    "FP8 dynamic, mtp too": Layout("dense", ROWS, linear("fp8_rows"), head=ROWS),
    "CT NVFP4, dense": Layout(
        "dense", {LINEAR: "ct_nvfp4"}, linear("ct_nvfp4"), head={LINEAR: "ct_nvfp4"}
    ),
    "CT NVFP4, experts": Layout(
        "moe", {rf"{ATTENTION}|{FFN}": "ct_nvfp4"}, linear("ct_nvfp4")
    ),
    "CT NVFP4A16": Layout("dense", {LINEAR: "ct_nvfp4_a16"}, linear("ct_nvfp4_a16")),
    "CT all NVFP4": Layout("dense", {rf"{LINEAR}|{GATES}": "ct_nvfp4"}, linear("ct_nvfp4")),
    "abliterated mix": Layout("moe", {EXPERTS: "ct_nvfp4", LINEAR: "ct_block"}, ABLITERATED),
    "CT FP8 static": Layout("dense", {LINEAR: "ct_fp8"}, linear("ct_fp8")),
    "CT FP8 blocks": Layout("dense", {LINEAR: "ct_block"}, linear("ct_block")),
    "GPTQ, experts": Layout("moe", {EXPERTS: "gptq"}, gptq),
    "GPTQ, dense": Layout("dense", {MLP: "gptq"}, gptq),
    "GPTQ, its tree": Layout("dense", {LINEAR: "gptq"}, gptq_tree),
    "int4 and FP8": Layout("dense", {MLP: "int4_g128", MIXERS: "fp8_rows"}, INT4_FP8),
    "qwen3_next FP8 dynamic": Layout("next", {LINEAR: "fp8_rows"}, linear("fp8_rows")),
    "AutoRound, dense": Layout("dense", {LINEAR: "auto_round"}, auto_round),
    "AutoRound, experts": Layout(
        "moe", {rf"{MIXERS}|{EXPERTS}": "auto_round"}, auto_round
    ),
    "AutoRound, zero points": Layout(
        "dense",
        {LINEAR: "gptq_v2"},
        with_keys(auto_round, packing_format="auto_round", group_size=32, sym=False),
    ),
    "GPTQ v2, two sizes of groups": Layout(
        "dense",
        {r"mlp\.gate_proj": "gptq_v2", MLP: "gptq_v2_g128"},
        with_keys(gptq, checkpoint_format="gptq_v2", dynamic=TWO_SIZES, sym=False),
    ),
    "CT int4 g32": Layout("moe", {EXPERTS: "int4_g32"}, linear("int4_g32")),
    "CT int4 g128": Layout("dense", {LINEAR: "int4_g128"}, linear("int4_g128")),
    "AWQ, experts": Layout("moe", {EXPERTS: "awq"}, awq),
    "AWQ, dense": Layout("dense", {MLP: "awq"}, awq),
    "qwen3_next bf16": Layout("next"),
    "qwen3_next FP8": Layout("next", BLOCKS, blocks, head=BLOCKS),
    "qwen3_next NVFP4": Layout(
        "next", {rf"{ATTENTION}|{EXPERTS}": "nvfp4"}, modelopt("NVFP4", kv="FP8"), kv="modelopt"
    ),
    "qwen3_next NVFP4, delta net too": Layout("next", {LINEAR: "nvfp4"}, modelopt("NVFP4")),
    "qwen3_next int4": Layout(
        "next", {rf"{MIXERS}|{EXPERTS}": "auto_round"}, auto_round
    ),
}  # fmt: skip
