"""The dialects of quantisation configs: modelopt, compressed-tensors, quant_method fp8; those of
int4 are in int4_declarations.py.

Each reader converts one JSON object into a `Declared`. Its `scheme` looks up a module by all
spellings of its name. Knows names and patterns only; no tensor and no shape.

Precedence inside a file: an exclusion, then the layer's own entry (its `quant_algo` wins over
what `config_groups` lists), then an entry for a parent such as `….mlp.experts`, then the
file's global algorithm.
"""

from collections.abc import Mapping
from itertools import chain
from typing import Any

from spark_engine.errors import CheckpointError
from spark_engine.hints import INSTEAD
from spark_engine.models.checkpoint import foreign_formats, int4_declarations, name_patterns
from spark_engine.models.checkpoint.quant_schemes import Declared, Dialect, Scheme

Json = Mapping[str, Any]

ALGORITHMS = {
    "FP8": Scheme.FP8,
    "FP8_PER_CHANNEL_PER_TOKEN": Scheme.FP8_CHANNEL,
    # Weights of 128x128 blocks, without scales of inputs: these are quantised by 1x128.
    "FP8_PB_WO": Scheme.FP8_BLOCK,
    "FP8_BLOCK_SCALES": Scheme.FP8_BLOCK,
    "NVFP4": Scheme.NVFP4_A4,
    "W4A16_NVFP4": Scheme.NVFP4,
}
_GROUPS = {Scheme.NVFP4_A4: 16, Scheme.NVFP4: 16, Scheme.FP8_BLOCK: 128}
_INT4 = {
    "gptq": int4_declarations.gptq,
    "awq": int4_declarations.awq,
    "auto-round": int4_declarations.auto_round,
    "auto_round": int4_declarations.auto_round,
    "intel/auto-round": int4_declarations.auto_round,
}
# The methods of configurations without quant_method, by a key that they have.
_BY_KEY = {
    "quant_algo": "modelopt", "config_groups": "compressed-tensors", "zero_point": "awq",
    "desc_act": "gptq", "autoround_version": "auto-round", "sym": "gptq", "damp_percent": "gptq",
}  # fmt: skip
_LINEAR = "Linear"  # the class name that targets of compressed-tensors match


def from_config(row: Json, where: str) -> Declared:
    """config.json's quantization_config, or a file in its place. Raises CheckpointError for an
    unsupported method."""
    inferred = next((name for key, name in _BY_KEY.items() if key in row), "")
    method = str(row.get("quant_method") or inferred).lower()
    if method.startswith("modelopt"):
        return modelopt(row, where)
    if method == "compressed-tensors":
        return _compressed(row, where)
    if method == "fp8":
        return _block(row, where)
    if method in _INT4:
        return _INT4[method](row, where)
    raise foreign_formats.refused(foreign_formats.method(row), where, f"quant_method {method!r}")


def modelopt(row: Json, where: str, groups: Json | None = None) -> Declared:
    """hf_quant_config.json, or the flat copy of it in config.json. `groups`: config_groups of the
    copy, if they are not in `row`."""
    inner = row.get("quantization", row)
    if not isinstance(inner, Mapping):
        raise CheckpointError(f"{where}: quantization is {inner!r}: expected an object")
    algorithm = inner.get("quant_algo")
    patterns = tuple(inner.get("exclude_modules") or inner.get("ignore") or ())
    excluded = name_patterns.wildcards(patterns)
    if algorithm == "MIXED_PRECISION":
        listed = _mixed(inner, where)
        fallback = Scheme.PLAIN
    else:
        listed, fallback = {}, _algorithm(algorithm, inner, where)
        groups = inner.get("config_groups") or groups or {}
        inputs = (g.get("input_activations") for g in groups.values())
        if fallback is Scheme.NVFP4_A4 and groups and not any(inputs):
            fallback = Scheme.NVFP4  # the algorithm's name says W4A4 of both; the groups say it

    patterned = [
        (name_patterns.wildcards([name]), s) for name, s in listed.items() if {*name} & {*"*?["}
    ]

    def scheme(names: tuple[str, ...]) -> Scheme:
        if excluded(names):
            return Scheme.PLAIN
        found = (listed.get(parent) for name in names for parent in name_patterns.parents(name))
        matched = (s for match, s in patterned if match(names))
        return next((s for s in chain(found, matched) if s is not None), fallback)

    by_expert = name_patterns.by_expert((*patterns, *listed))
    return Declared(where, Dialect.MODELOPT, _modelopt_kv(inner, where), scheme, by_expert)


def _mixed(inner: Json, where: str) -> dict[str, Scheme]:
    """Scheme by the names in quantized_layers, or in config_groups where those are missing."""
    layers = inner.get("quantized_layers")
    if isinstance(layers, Mapping):
        return {
            name: _algorithm(entry.get("quant_algo"), entry, f"{where}: {name}")
            for name, entry in layers.items()
            # The draft head's are read off its tensors, whatever they are called here.
            if "mtp" not in name or str(entry.get("quant_algo")) in ALGORITHMS
        }
    groups = inner.get("config_groups")
    if not isinstance(groups, Mapping):
        raise CheckpointError(
            f"{where}: MIXED_PRECISION lists neither quantized_layers nor config_groups; "
            "take the file from the checkpoint's export"
        )
    return {t: _group_scheme(g, where) for g in groups.values() for t in g.get("targets", ())}


def _algorithm(name: object, entry: Json, where: str) -> Scheme:
    if name is None:  # an export that quantises the cache alone
        return Scheme.PLAIN
    scheme = ALGORITHMS.get(str(name))
    if scheme is None:
        raise foreign_formats.refused(f"modelopt {name}", where, "quant_algo")
    size = entry.get("group_size")
    if size not in (None, _GROUPS.get(scheme, size)):
        raise CheckpointError(
            f"{name}: group_size is {size!r}, not {_GROUPS[scheme]} ({where}); {INSTEAD}"
        )
    return scheme


def _modelopt_kv(inner: Json, where: str) -> bool:
    name = inner.get("kv_cache_quant_algo")
    if name not in (None, "", "FP8"):
        raise CheckpointError(
            f"a KV cache in {name} is not read ({where}: kv_cache_quant_algo); "
            "supported: FP8, or none"
        )
    return name == "FP8" or _kv_scheme(inner.get("kv_cache_scheme"), where)


def _kv_scheme(row: Json | None, where: str) -> bool:
    """The KV scheme of compressed-tensors: static 8-bit float, or none."""
    if not row:
        return False
    if row.get("num_bits") != 8 or row.get("type") != "float" or row.get("dynamic"):
        name = foreign_formats.side(row)
        raise CheckpointError(
            f"a KV cache in {name} is not read ({where}: kv_cache_scheme); "
            "supported: static FP8, or none"
        )
    return True


def _compressed(row: Json, where: str) -> Declared:
    groups = row.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise CheckpointError(f"{where}: compressed-tensors without config_groups; {INSTEAD}")
    if (sparse := (row.get("sparsity_config") or {}).get("format") or "dense") != "dense":
        raise foreign_formats.refused("sparsity", where, f"sparsity_config: format {sparse!r}")
    if "marlin" in (form := str(row.get("format"))) or "24" in form:
        raise foreign_formats.refused(f"{form[:40]} packing", where, f"format {form!r}")
    if turns := (row.get("transform_config") or {}).get("config_groups"):
        value = f"transform_config: {', '.join(turns)}"
        raise foreign_formats.refused("a Hadamard transform", where, value)
    listed = (g.get("targets") or () for g in groups.values())
    entries = [e for some in (*listed, row.get("ignore") or ()) for e in some if e[:3] == "re:"]
    name_patterns.check_patterns(entries, where)
    schemes = [(_targets(g, where), _group_scheme(g, where)) for g in groups.values()]
    ignored = name_patterns.own_names(row.get("ignore") or ())

    def scheme(names: tuple[str, ...]) -> Scheme:
        if ignored(names):
            return Scheme.PLAIN
        # A name is more specific than a pattern, a pattern than a class.
        for level in range(3):
            for targets, found in schemes:
                if targets[level](names):
                    return found
        return Scheme.PLAIN

    orders = {str((g.get("weights") or {}).get("actorder")) for g in groups.values()}
    by_index = not orders <= {"None", "False", "weight", "static"}
    kv_fp8 = _kv_scheme(row.get("kv_cache_scheme"), where)
    return Declared(where, Dialect.COMPRESSED, kv_fp8, scheme, by_index=by_index)


def _targets(
    group: Json, where: str
) -> tuple[name_patterns.Match, name_patterns.Match, name_patterns.Match]:
    """Matchers by exact name, by `re:` pattern and by class."""
    targets = group.get("targets")
    if not isinstance(targets, list) or not targets:
        raise CheckpointError(f"{where}: a group has targets {targets!r}; expected names")
    patterns = [t for t in targets if t.startswith("re:")]
    exact = [t for t in targets if not t.startswith("re:") and t != _LINEAR]
    everything = _LINEAR in targets
    return name_patterns.own_names(exact), name_patterns.own_names(patterns), lambda _: everything


def _group_scheme(group: Json, where: str) -> Scheme:
    """The scheme that a group's weights and input_activations describe."""
    weights, inputs = group.get("weights") or {}, group.get("input_activations")
    if group.get("output_activations"):
        raise foreign_formats.refused("output quantisation", where, "output_activations")
    kind = (weights.get("type"), weights.get("num_bits"))
    if kind[0] == "int":
        return int4_declarations.compressed(weights, inputs, where)
    if kind == ("float", 4) and weights.get("group_size") == 16:
        if inputs is None:
            return Scheme.NVFP4
        rounded = tuple(map(inputs.get, ("type", "num_bits", "group_size")))
        if rounded == ("float", 4, 16):
            return Scheme.NVFP4_A4
    if kind == ("float", 8) and inputs is not None:
        bits = (inputs.get("type"), inputs.get("num_bits")) == ("float", 8)
        by_row, strategy = (
            weights.get("strategy") in (None, "tensor", "channel"),
            inputs.get("strategy"),
        )
        if bits and by_row and strategy in (None, "tensor") and not inputs.get("dynamic"):
            return Scheme.FP8
        if bits and by_row and strategy == "token" and inputs.get("dynamic"):
            return Scheme.FP8_CHANNEL
        if bits and weights.get("strategy") == "block" and inputs.get("dynamic"):
            _check_block(weights.get("block_structure"), where)
            return Scheme.FP8_BLOCK
    raise foreign_formats.refused(foreign_formats.group(weights, inputs), where, "config_groups")


def _block(row: Json, where: str) -> Declared:
    """quant_method fp8 of transformers: 128x128 blocks, dynamic input scales."""
    _check_block(row.get("weight_block_size"), where)
    if row.get("activation_scheme", "dynamic") != "dynamic":
        value = f"activation_scheme {row['activation_scheme']!r}"
        raise foreign_formats.refused("FP8 in blocks with static inputs", where, value)
    skipped = name_patterns.beginnings_or_ends(row.get("modules_to_not_convert") or ("lm_head",))

    def scheme(names: tuple[str, ...]) -> Scheme:
        return Scheme.PLAIN if skipped(names) else Scheme.FP8_BLOCK

    return Declared(where, Dialect.BLOCK, False, scheme)


def _check_block(block: object, where: str) -> None:
    if block != [128, 128]:
        name = f"FP8 in blocks of {block}" if block else "FP8 without blocks"
        raise foreign_formats.refused(name[:40], where, f"weight_block_size {block!r}")
