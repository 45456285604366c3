"""Quantisation configs in every dialect, their quirks, and what is refused."""

import copy
from typing import Any

import pytest

from spark_engine.errors import CheckpointError
from spark_engine.models.checkpoint import quant_table as quant_tables
from spark_engine.models.checkpoint.quant_schemes import Dialect, Scheme
from spark_engine.models.checkpoint.quant_table import QuantTable, declarations, quant_table
from spark_engine.models.checkpoint.tensor_list import Row, linears
from spark_engine.models.families.registry import family_of, read_config
from spark_engine.models.open_model import describe
from tests.checkpoint_files import FORMATS, quantisation_configs, scheme_of
from tests.checkpoints import text_config
from tests.models import nvidia_configs

Json = dict[str, Any]
DENSE, MOE = (describe(text_config(moe)).rows for moe in (False, True))
PACKED: Json = {"num_bits": 4, "type": "float", "group_size": 16, "strategy": "tensor_group"}
EIGHT: Json = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}


def _table(row: Json, rows: tuple[Row, ...] = DENSE, hf: Json | None = None) -> QuantTable:
    return quant_table(rows, declarations({"quantization_config": row} if row else {}, hf or {}))


def _compressed(groups: list[Json], **more: Any) -> Json:
    named = {f"group_{i}": g for i, g in enumerate(groups)}
    return {"quant_method": "compressed-tensors", "config_groups": named} | more


def _group(weights: Json, inputs: Json | None, *targets: str) -> Json:
    return {"weights": weights, "input_activations": inputs, "targets": list(targets) or ["Linear"]}


@pytest.mark.parametrize("model", nvidia_configs.MODELS)
@pytest.mark.parametrize("files", ["both", "config", "hf"])
def test_published_tables(model: str, files: str) -> None:
    config_json, hf = nvidia_configs.pair(model)
    config = read_config(config_json)
    rows = family_of(config).tensors(config)
    if files == "hf":
        config_json = {k: v for k, v in config_json.items() if k != "quantization_config"}
    table = quant_table(rows, declarations(config_json, {} if files == "config" else hf))
    mlp = "mlp.experts" if config.moe else "mlp.down_proj"
    assert table["layers.0.linear_attn.in_proj_z"] is Scheme.FP8
    assert table["layers.0.linear_attn.in_proj_a"] is Scheme.PLAIN
    assert table["layers.3.self_attn.k_proj"] is Scheme.FP8
    assert table[f"layers.3.{mlp}"] is Scheme.NVFP4  # not W4A4, whatever group_1 lists
    assert table["lm_head"] is Scheme.NVFP4
    assert table.kv_fp8 == (files != "config" or model == "27B")


@pytest.mark.parametrize("model", nvidia_configs.LARGE)
def test_a_group_of_experts_is_asked_for_once(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """148 or 184 wildcards for 37 or 92 thousand projections."""
    config_json, hf = nvidia_configs.large(model)
    config = read_config(config_json)
    rows, asked, agreed = family_of(config).tensors(config), [], quant_tables._agreed
    monkeypatch.setattr(quant_tables, "_agreed", lambda *a: asked.append(a) or agreed(*a))
    table = quant_table(rows, declarations(config_json, hf))
    assert len(asked) == len(table.modules) < 0.02 * len(list(linears(rows)))
    assert table["layers.7.mlp.experts"] is Scheme.NVFP4_A4
    plain = ("layers.7.mlp.shared_expert.up_proj", "layers.7.self_attn.q_proj", "lm_head")
    assert {table[name] for name in plain} == {Scheme.PLAIN}


@pytest.mark.parametrize(
    "entry", ["*.experts.3.*", "*.experts.?.up_proj", "*.[0-2].gate_proj", "*1.mlp.experts.1*"]
)
def test_wildcards_of_single_experts_are_seen(entry: str) -> None:
    row = {"quant_algo": "NVFP4", "exclude_modules": [entry]}
    with pytest.raises(CheckpointError, match="quantise all experts of a layer alike"):
        _table({}, MOE, row)


@pytest.mark.parametrize("entry", ["*.experts*", "*.experts.*", "model.layers.1.mlp.e*", "*s.1.m*"])
def test_wildcards_of_all_experts_exclude_them(entry: str) -> None:
    table = _table({}, MOE, {"quant_algo": "NVFP4", "exclude_modules": [entry]})
    assert table["layers.1.mlp.experts"] is Scheme.PLAIN


@pytest.mark.parametrize("files", ["both", "groups", "config", "hf"])
def test_qwen38_quantises_the_inputs_of_mlp_and_head(files: str) -> None:
    """Also where config.json's groups are all that says so."""
    config_json, hf = copy.deepcopy(nvidia_configs.w4a4())
    if files == "groups":
        del config_json["quantization_config"]["quantized_layers"]
    if files == "hf":
        del config_json["quantization_config"]
    config = read_config(config_json)
    rows = family_of(config).tensors(config)
    table = quant_table(rows, declarations(config_json, hf if files in ("both", "hf") else {}))
    assert table.summary() == {"fp8": 208, "plain": 96, "nvfp4_a4": 193} and not table.kv_fp8
    assert table["lm_head"] is table["layers.63.mlp.down_proj"] is Scheme.NVFP4_A4
    assert table["layers.0.linear_attn.in_proj_qkv"] is Scheme.FP8


@pytest.mark.parametrize("prefix", ["model.", "model.language_model.", "language_model.model."])
@pytest.mark.parametrize("format", FORMATS)
def test_every_dialect_and_spelling(format: str, prefix: str) -> None:
    names = [linear.module for linear in linears(MOE)]
    spelled = [n if n == "lm_head" else prefix + n for n in names]
    row, hf = quantisation_configs(format, spelled)
    table = _table(row, MOE, hf)
    for name in names:
        key = name.split(".experts.")[0] + ".experts" if ".experts." in name else name
        assert table[key].value == scheme_of(name, format), name


def test_plain() -> None:
    table = _table({})
    assert not table.quantised and not table.kv_fp8
    assert table.summary() == {"plain": 4 * 3 + 3 * 5 + 4 + 1}


def test_wildcards_and_parents_exclude() -> None:
    row = {"quant_method": "modelopt", "quant_algo": "FP8"}
    row["ignore"] = ["*.in_proj_[ab]", "model.layers.1*", "model.layers.2.mlp", "lm_head"]
    table = _table(row)
    assert table["layers.0.linear_attn.in_proj_a"] is Scheme.PLAIN
    assert table["layers.0.linear_attn.in_proj_qkv"] is Scheme.FP8
    assert table["layers.1.mlp.up_proj"] is Scheme.PLAIN
    assert table["layers.2.mlp.up_proj"] is Scheme.PLAIN
    assert table["layers.2.linear_attn.out_proj"] is Scheme.FP8
    assert table["lm_head"] is Scheme.PLAIN


def test_compressed_groups_by_name_pattern_and_class() -> None:
    dynamic = PACKED | {"dynamic": "local"}
    groups = [
        _group(PACKED, dynamic),
        _group(EIGHT, EIGHT, "re:.*self_attn.*"),
        _group(PACKED, None, "model.layers.3.self_attn.q_proj"),
    ]
    kv = {"num_bits": 8, "type": "float", "dynamic": False}
    ignore = ["re:.*lm_head", "model.layers.0.mlp.up_proj"]
    table = _table(_compressed(groups, ignore=ignore, kv_cache_scheme=kv))
    assert table["layers.0.mlp.gate_proj"] is Scheme.NVFP4_A4
    assert table["layers.0.mlp.up_proj"] is Scheme.PLAIN
    assert table["layers.3.self_attn.k_proj"] is Scheme.FP8
    assert table["layers.3.self_attn.q_proj"] is Scheme.NVFP4
    assert table["lm_head"] is Scheme.PLAIN
    assert table.kv_fp8 and table.dialect is Dialect.COMPRESSED


TOKEN = EIGHT | {"strategy": "token", "dynamic": True}
CHANNEL = _group(EIGHT | {"strategy": "channel"}, TOKEN)


@pytest.mark.parametrize("strategy", ["channel", "tensor"])
def test_compressed_fp8_by_token(strategy: str) -> None:
    table = _table(_compressed([_group(EIGHT | {"strategy": strategy}, TOKEN)], ignore=["lm_head"]))
    assert table["layers.0.mlp.up_proj"] is Scheme.FP8_CHANNEL
    assert table["lm_head"] is Scheme.PLAIN


def test_stacked_experts_are_one_module() -> None:
    """What names it counts for all of them, where the file has no others."""
    config = {"quantization_config": _compressed([CHANNEL], ignore=["model.layers.0.mlp.experts"])}
    for stacked in (False, True):
        table = quant_table(MOE, declarations(config, {}), lambda group, stacked=stacked: stacked)
        want = Scheme.PLAIN if stacked else Scheme.FP8_CHANNEL
        assert table["layers.0.mlp.experts"] is want
        assert table["layers.1.mlp.experts"] is Scheme.FP8_CHANNEL


@pytest.mark.parametrize(
    ("entry", "plain"),
    [
        ("layers.0.mlp", {"layers.0.mlp.up_proj"}),
        ("model.layers.0.mlp.up_proj", {"layers.0.mlp.up_proj"}),
        ("up_proj", {"layers.0.mlp.up_proj", "layers.1.mlp.up_proj"}),
        ("layers.1", {"layers.1.mlp.up_proj"}),
        ("up", set()),
    ],
)
def test_modules_not_to_convert(entry: str, plain: set[str]) -> None:
    """A name with all that it holds, from the beginning or at the end of words."""
    row = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    table = _table(row | {"modules_to_not_convert": [entry if "." not in entry else _full(entry)]})
    names = [f"layers.{i}.mlp.up_proj" for i in (0, 1)]
    assert {n for n in names if table[n] is Scheme.PLAIN} == plain
    assert table["layers.0.linear_attn.out_proj"] is Scheme.FP8_BLOCK


def _full(name: str) -> str:
    return name if name.startswith("model.") else f"model.language_model.{name}"


# What else: test_foreign_formats.py.
REFUSED: list[tuple[Json, str]] = [
    ({"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"}, "NVFP4_AWQ"),
    (
        {"quant_method": "modelopt", "quant_algo": "FP8_PB_WO", "group_size": 64},
        "FP8_PB_WO: group_size is 64, not 128",
    ),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32}, "group_size is 32"),
    ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, "neither quantized_layers"),
    (
        {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "INT8"},
        "a KV cache in INT8 is not read .*kv_cache_quant_algo",
    ),
    ({"quant_method": "fp8"}, "weight_block_size None"),
    ({"quant_method": "fp8", "weight_block_size": [64, 64]}, r"\[64, 64\]"),
    (
        {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "static"},
        "activation_scheme 'static'",
    ),
    (_compressed([]), "without config_groups"),
    (_compressed([_group(PACKED | {"group_size": 32}, None)]), "MXFP4"),
    (_compressed([_group(EIGHT, EIGHT | {"dynamic": True})]), "FP8 .tensor. with dynamic float8"),
    (_compressed([_group(EIGHT, EIGHT | {"strategy": "token"})]), "FP8 .tensor. with static"),
    (_compressed([_group(EIGHT, None)]), "FP8 .tensor. with 16-bit"),
    (_compressed([_group(PACKED, None)], sparsity_config={"format": "x"}), "^sparsity .*'x'"),
    (
        _compressed([_group(PACKED, None)], kv_cache_scheme={"num_bits": 4, "type": "float"}),
        "a KV cache in static float4 .*kv_cache_scheme",
    ),
]


@pytest.mark.parametrize(("row", "words"), REFUSED, ids=[w for _, w in REFUSED])
def test_unsupported_is_named(row: Json, words: str) -> None:
    with pytest.raises(CheckpointError, match=words) as caught:
        _table(row)
    text = str(caught.value)
    assert "quantization_config" in text
    remedies = ("docs/models.md", "supported", "groups of 1", "give a dense", "export")
    assert any(w in text for w in remedies) and len(text) <= 300


@pytest.mark.parametrize("key", ["exclude_modules", "ignore"])
def test_excluded_and_listed_is_plain(key: str) -> None:
    names = ("self_attn.q_proj", "self_attn.k_proj", "mlp.down_proj")
    layers = {f"model.layers.3.{n}": {"quant_algo": "FP8"} for n in names}
    row = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    row[key] = ["model.layers.3.self_attn.q_proj", "*.down_proj"]
    table = _table(row)
    assert table["layers.3.self_attn.k_proj"] is Scheme.FP8
    assert table["layers.3.self_attn.q_proj"] is Scheme.PLAIN
    assert table["layers.3.mlp.down_proj"] is Scheme.PLAIN


def test_files_that_contradict_each_other() -> None:
    _, hf = quantisation_configs("fp8", ["model.layers.0.mlp.up_proj"])
    row, _ = quantisation_configs("nvfp4", ["model.layers.0.mlp.up_proj"])
    with pytest.raises(CheckpointError, match="is fp8 in hf_quant_config.json but nvfp4 in config"):
        _table(row, hf=hf)


@pytest.mark.parametrize("where", ["config", "hf"])
def test_either_file_may_ask_for_an_fp8_cache(where: str) -> None:
    row, hf = quantisation_configs("fp8", [])
    assert not _table(row, hf=hf).kv_fp8
    if where == "hf":
        hf = {**hf, "quantization": {**hf["quantization"], "kv_cache_quant_algo": "FP8"}}
    else:
        row = {**row, "kv_cache_quant_algo": "FP8"}
    assert _table(row, hf=hf).kv_fp8


def test_experts_in_two_quantised_formats() -> None:
    layers = {
        f"model.layers.1.mlp.experts.{e}.{p}_proj": {"quant_algo": "FP8"}
        for e in range(8)
        for p in ("gate", "up", "down")
    }
    layers["model.layers.1.mlp.experts.3.up_proj"] = {"quant_algo": "W4A16_NVFP4"}
    row = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    with pytest.raises(CheckpointError, match=r"experts.3.up_proj is nvfp4, but other .* are fp8"):
        _table(row, MOE)


def test_experts_that_differ() -> None:
    row = {"quant_method": "modelopt", "quant_algo": "FP8"}
    row["ignore"] = ["model.layers.1.mlp.experts.3.up_proj"]
    with pytest.raises(
        CheckpointError, match=r"layers.1.mlp.experts.3.up_proj is plain, but other"
    ):
        _table(row, MOE)
