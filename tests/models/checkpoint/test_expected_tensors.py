"""The tensor table against the published checkpoints' counts and bytes, and its complaints."""

import json
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from spark_engine.errors import CheckpointError
from spark_engine.models.checkpoint.expected_tensors import Expected, expected_tensors, usual
from spark_engine.models.checkpoint.layout import Layout
from spark_engine.models.checkpoint.quant_table import declarations, quant_table
from spark_engine.models.families.registry import family_of, read_config
from spark_engine.models.open_model import describe, open_model
from spark_engine.tensors import DType
from tests.checkpoint_files import FORMATS, PLAIN, quantisation_configs
from tests.checkpoints import text_config, write_checkpoint
from tests.models import nvidia_configs
from tests.models.edited_checkpoint import edited


def _table(model: str) -> dict[str, Expected]:
    config_json, hf_quant = nvidia_configs.pair(model)
    return dict(describe(config_json, hf_quant).expected)


@pytest.mark.parametrize("model", nvidia_configs.MODELS)
def test_generated_configs_are_the_published_ones(model: str) -> None:
    folder = nvidia_configs.folder()
    if folder is None:
        pytest.skip("set SPARK_NVIDIA_CONFIGS to the folder of the published files")
    names = (f"nvidia--Qwen3.6-{model}-NVFP4_{k}.json" for k in ("config", "hf_quant_config"))
    real = tuple(json.loads((folder / name).read_text()) for name in names)
    assert nvidia_configs.pair(model) == real


@pytest.mark.parametrize(
    ("model", "total", "mtp", "text_bytes", "gib", "other_bytes"),
    [
        ("27B", 2194, 15, 20_150_569_096, 18.767, (921_460_192, 849_398_784)),
        ("35B-A3B", 124_468, 19, 20_825_156_824, 19.395, (893_142_496, 1_689_281_536)),
    ],
)
def test_published_counts_and_bytes(
    model: str, total: int, mtp: int, text_bytes: int, gib: float, other_bytes: tuple[int, int]
) -> None:
    table = _table(model)
    assert len(usual(table)) == total
    assert len(usual(table, "vision")) == 333
    assert len(usual(table, "mtp")) == mtp
    text = sum(e.nbytes for e in usual(table, "text"))
    assert text == text_bytes
    assert round(text / 2**30, 3) == gib
    others = tuple(sum(e.nbytes for e in usual(table, p)) for p in ("vision", "mtp"))
    assert others == other_bytes


def test_published_shapes() -> None:
    table, p = _table("35B-A3B"), "model.language_model.layers.3."
    assert table[f"{p}mlp.experts.255.gate_proj.weight"].shapes == ((512, 1024),)
    assert table[f"{p}mlp.experts.0.down_proj.weight_scale"].shapes == ((2048, 32),)
    assert table[f"{p}self_attn.q_proj.weight"].shapes == ((8192, 2048),)
    assert table[f"{p}mlp.gate.weight"].shapes == ((256, 2048),)
    assert table["lm_head.weight"].shapes == ((248320, 1024),)


@pytest.mark.parametrize("prefix", ["", "model.", "model.language_model.", "language_model."])
def test_the_heads_prefix_is_its_own(tmp_path: Path, prefix: str) -> None:
    config = {"mtp_num_hidden_layers": 1}
    write_checkpoint(tmp_path, config, prefix="model.language_model.", head_prefix=prefix)
    model = open_model(tmp_path)
    assert model.has_drafts and model.layout == Layout(
        "model.language_model.", False, prefix, False
    )
    assert model.layout.file_name("mtp.fc.weight") == f"{prefix}mtp.fc.weight"
    assert model.source("mtp.fc.weight").shape == (128, 256)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"mlp.up_proj.weight": None},
            r"^model.layers.0.mlp.up_proj.weight is missing: expected .*\); take",
        ),
        (
            {"linear_attn.A_log": "linear_attn.A_logg", "mlp.up_proj.weight": None},
            r"^model.layers.0.\S* is missing: expected .*, and 2 more tensors do not fit; ",
        ),
        (
            {"mlp.gate_proj.weight": None, "mlp.down_proj.weight": "mlp.gate_proj.weight"},
            r"^\S*gate_proj.weight in model.safetensors is bf16 \[128, 256\]: expected .* 1 more",
        ),
        ({"linear_attn.A_log": "linear_attn.A_logg"}, r"^\S*A_log is missing: .* 1 more"),
    ],
)
def test_missing_unknown_and_misshapen_tensors_are_counted(
    tmp_path: Path, change: dict[str, str | None], words: str
) -> None:
    """Tensors that are renamed, or dropped (None)."""
    write_checkpoint(tmp_path)
    p = "model.layers.0."
    with edited(tmp_path) as tensors:
        for old, new in change.items():
            array = tensors.pop(p + old)
            tensors |= {p + new: array} if new else {}
    with pytest.raises(CheckpointError, match=words) as caught:
        open_model(tmp_path)
    assert "download damaged files again" in str(caught.value) and len(str(caught.value)) <= 300


def test_a_tensor_of_no_network_is_named(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    with edited(tmp_path) as tensors:
        tensors["model.layers.0.hyper.weight"] = tensors["model.norm.weight"]
    words = "model.layers.0.hyper.weight in model.safetensors is not a tensor of this network"
    with pytest.raises(CheckpointError, match=words):
        open_model(tmp_path)


def test_tensors_that_no_text_needs_are_left_out(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    names = ("model.layers.3.self_attn.rotary_emb.inv_freq", "score.weight", "v_head.summary.bias")
    with edited(tmp_path) as tensors:
        some = tensors["model.norm.weight"]
        tensors |= dict.fromkeys((*names, "audio_tower.conv1.weight"), some)
    assert dict(open_model(tmp_path).ignored) == {"vision": 0, "mtp": 0, "other": 4}


def test_a_head_that_is_missing_and_not_tied(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    with edited(tmp_path) as tensors:
        del tensors["lm_head.weight"]
    with pytest.raises(CheckpointError, match="lm_head.weight is missing, and .*tie_word_embed"):
        open_model(tmp_path)


@pytest.mark.parametrize(
    ("format", "leaf", "dtype"),
    [
        ("bf16", "mlp.up_proj.weight", DType.I32),
        ("bf16", "linear_attn.A_log", DType.I64),
        ("fp8", "mlp.up_proj.weight", DType.U8),
        ("fp8", "mlp.up_proj.weight", DType.BF16),
        ("fp8", "mlp.up_proj.weight_scale", DType.I32),
        ("nvfp4", "mlp.up_proj.weight", DType.F8E4M3),
        ("nvfp4", "mlp.up_proj.weight_scale", DType.U8),
        ("nvfp4", "mlp.up_proj.weight_scale_2", DType.U8),
    ],
)
def test_a_dtype_that_no_scheme_has_is_named(
    tmp_path: Path, format: str, leaf: str, dtype: DType
) -> None:
    write_checkpoint(tmp_path, format=format)
    name = f"model.layers.0.{leaf}"
    with edited(tmp_path) as tensors:
        shape = list(tensors[name].shape)
        tensors[name] = np.zeros(shape, dtype.numpy)
    words = f"{name} in model.safetensors is {dtype} {shape}: expected "
    with pytest.raises(CheckpointError, match=re.escape(words)) as caught:
        open_model(tmp_path)
    assert "more tensors" not in str(caught.value)


def _table_of(format: str, **config: int) -> Mapping[str, Expected]:
    """The tensors of a small dense checkpoint of these sizes."""
    config_json = text_config(False, config)
    row, hf = quantisation_configs(format, [])
    config_json |= {"quantization_config": row} if row else {}
    return describe(config_json, hf).expected


def test_scales_of_ragged_matrices() -> None:
    """A last block may be short."""
    found = _table_of("fp8_block", intermediate_size=200)
    scale = found["model.layers.0.mlp.gate_proj.weight_scale_inv"]
    assert scale.shapes == ((2, 1),)
    assert found["model.layers.0.mlp.down_proj.weight_scale_inv"].shapes == ((1, 2),)
    scale = _table_of("fp8", intermediate_size=200)["model.layers.0.mlp.gate_proj.weight_scale"]
    assert scale.shapes == ((), (1,), (1, 1), (200, 1), (200,), (1, 200))


def test_columns_that_do_not_split_into_groups() -> None:
    with pytest.raises(CheckpointError, match="down_proj: 200 columns do not split"):
        _table_of("nvfp4", intermediate_size=200)


@pytest.mark.parametrize("format", sorted(set(FORMATS) - set(PLAIN)))
def test_a_table_that_is_not_the_files_is_refused(tmp_path: Path, format: str) -> None:
    """The config says plain and the file is quantised; and vice versa."""
    write_checkpoint(tmp_path / "a", format=format)
    write_checkpoint(tmp_path / "b", format="bf16")
    for name in ("config.json", "hf_quant_config.json"):
        files = [tmp_path / "a" / name, tmp_path / "b" / name]
        texts = [f.read_text() if f.exists() else "{}" for f in files]
        for file, text in zip(files, reversed(texts), strict=True):
            file.write_text(text)
    words = "weights are quantised, but config.json has no quantization_config for them: take"
    with pytest.raises(CheckpointError, match=words):
        open_model(tmp_path / "a")
    words = "is declared, but all weights are plain: .*, remove (hf_quant_)?config.json"
    with pytest.raises(CheckpointError, match=words) as caught:
        open_model(tmp_path / "b")
    flat = format in ("fp8_block", "gptq", "awq") or format.startswith("ct_")
    where = "remove config.json: quantization_config;" if flat else "remove hf_quant_config.json"
    assert where in str(caught.value)


@pytest.mark.parametrize("moe", [False, True])
def test_vision_and_mtp_are_counted_and_left(tmp_path: Path, moe: bool) -> None:
    """Stacked experts of an mtp layer do not make those of the text layers stacked."""
    write_checkpoint(tmp_path, prefix="model.language_model.", moe=moe)
    names = ("mtp.norm.weight", "mtp.layers.0.mlp.experts.gate_up_proj")
    with edited(tmp_path) as tensors:
        some = tensors["model.language_model.norm.weight"]
        tensors |= dict.fromkeys((*names, "model.visual.blocks.0.norm1.weight"), some)
    model = open_model(tmp_path)
    assert dict(model.ignored) == {"vision": 1, "mtp": 2}
    assert not model.layout.fused_experts


def test_published_unquantised_and_compressed_counts() -> None:
    """27B as published in bf16 (851 text tensors), and as compressed-tensors W4A4 (2,111)."""
    config_json, _ = nvidia_configs.pair("27B")
    del config_json["quantization_config"]
    config = read_config(config_json)
    rows = family_of(config).tensors(config)
    plain = quant_table(rows, declarations(config_json, {}))
    layout = Layout("model.language_model.", False)
    assert len(usual(expected_tensors(rows, config.dtype, plain, layout), "text")) == 851
    fp4 = {"num_bits": 4, "type": "float", "group_size": 16, "strategy": "tensor_group"}
    group = {"targets": ["Linear"], "weights": fp4, "input_activations": fp4 | {"dynamic": "local"}}
    config_json["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*linear_attn.in_proj_.*", "re:model.visual.*", "re:mtp.*"],
    }
    packed = describe(config_json).expected
    assert len(usual(packed)) == 2111
    assert round(sum(e.nbytes for e in usual(packed, "text")) / 2**30, 2) == 22.92
    assert round(sum(e.nbytes for e in usual(packed)) / 2**30, 2) == 24.57
