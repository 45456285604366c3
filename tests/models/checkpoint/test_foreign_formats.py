"""Files of other programs: the format is in the first eight words, and no refusal is long."""

import copy
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spark_engine.errors import LONGEST, CheckpointError
from spark_engine.hints import INSTEAD
from spark_engine.models.checkpoint.files import open_checkpoint
from spark_engine.models.checkpoint.quant_table import declarations, quant_table
from spark_engine.models.checkpoint.weight_files import INDEX
from spark_engine.models.open_model import describe, open_model, read_description
from tests.checkpoint_files import FORMATS, quantisation_configs
from tests.checkpoints import text_config, write_checkpoint
from tests.models.checkpoint.test_malformed import JUNK, _places, _put
from tests.repository import ROOT

Json = dict[str, Any]
INT8: Json = {"type": "int", "num_bits": 8, "strategy": "channel", "dynamic": False}
MX4: Json = {"type": "float", "num_bits": 4, "group_size": 32, "scale_dtype": "torch.uint8"}
FP8: Json = {"type": "float", "num_bits": 8, "strategy": "tensor"}


def _groups(weights: Json, inputs: Json | None) -> Json:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}


DECLARED: list[tuple[Json, str]] = [
    (
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
        "bitsandbytes",
    ),
    ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "bitsandbytes"),
    ({"quant_method": "mxfp4"}, "MXFP4"),
    ({"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp4"}}}, "MXFP4"),
    ({"quant_method": "quark", "global_quant_config": {"weight": [{"dtype": "int8"}]}}, "quark"),
    ({"quant_method": "hqq", "quant_config": {}}, "HQQ"),
    ({"quant_method": "exl2", "bits": 4.0}, "EXL2"),
    ({"quant_method": "exl3", "bits": 3.05}, "EXL3"),
    ({"quant_method": "torchao", "quant_type": {"default": {}}}, "torchao"),
    ({"quant_method": "aqlm"}, "AQLM"),
    ({"quant_method": "never-heard-of-" + "x" * 5000}, "never-heard-of-"),
    ({"group_size": 64, "bits": 4, "mode": "affine"}, "MLX"),
    ({"quant_method": "gguf"}, "GGUF"),
    (_groups(INT8, INT8 | {"strategy": "token", "dynamic": True}), "int8"),
    (_groups(MX4, MX4 | {"dynamic": True}), "MXFP4"),
    (_groups(MX4 | {"num_bits": 8}, None), "MXFP8"),
    (_groups(MX4 | {"group_size": 16}, FP8), "FP4"),
    *(
        ({"quant_method": "modelopt", "quant_algo": name}, name)
        for name in ("MXFP8", "W4A8_NVFP4_FP8", "W4A8_AWQ", "INT8_SQ", "NVFP4_SVDQUANT")
    ),
]


def _short(error: pytest.ExceptionInfo[CheckpointError], name: str) -> None:
    text = str(error.value)
    assert len(text) <= LONGEST, text
    assert name in " ".join(text.split()[:8]), text
    assert "docs/models.md" in text and "{" not in text


@pytest.mark.parametrize(
    ("row", "name"), DECLARED, ids=[f"{i}-{n}" for i, (_, n) in enumerate(DECLARED)]
)
def test_a_declared_format_is_named_before_any_weight_is_read(
    tmp_path: Path, row: Json, name: str
) -> None:
    """And before any is fetched: the folder has none."""
    key = "quantization" if name == "MLX" else "quantization_config"
    (tmp_path / "config.json").write_text(json.dumps(text_config(False) | {key: row}))
    for read in (open_model, read_description):
        with pytest.raises(CheckpointError) as caught:
            read(tmp_path)
        _short(caught, name)


def test_what_to_take_is_on_the_page() -> None:
    page = (ROOT / "docs/models.md").read_text()
    named = [word.strip(",:;") for word in INSTEAD.split() if word.startswith("nvidia/")]
    assert len(named) == 2 and all(f"`{name}`" in page for name in named)


@pytest.mark.parametrize("config", [True, False])
@pytest.mark.parametrize(
    ("file", "name"),
    [("x.Q4_K_M.gguf", "GGUF"), ("pytorch_model.bin", "PyTorch"), ("weights.npz", "MLX")],
)
def test_files_of_other_programs(tmp_path: Path, file: str, name: str, config: bool) -> None:
    if config:
        (tmp_path / "config.json").write_text(json.dumps(text_config(False)))
    (tmp_path / file).write_bytes(b"GGUF")
    for path in (tmp_path, tmp_path / file, tmp_path / "gone" / file):
        with pytest.raises(CheckpointError) as caught:
            open_model(path)
        _short(caught, name)


@pytest.mark.parametrize(
    ("dtype", "name"), [("I8", "int8"), ("U32", "MLX"), ("F8_E5M2", "FP8 E5M2"), ("F64", "F64")]
)
def test_dtypes_of_other_formats(tmp_path: Path, dtype: str, name: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(text_config(False)))
    row = {
        "dtype": dtype,
        "shape": [8],
        "data_offsets": [0, 8 * {"U32": 4, "F64": 8}.get(dtype, 1)],
    }
    header = json.dumps({"model.layers.0.mlp.up_proj.weight": row}).encode()
    data = len(header).to_bytes(8, "little") + header + bytes(row["data_offsets"][1])
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(CheckpointError) as caught:
        open_model(tmp_path)
    _short(caught, name)


def test_unquantised_mlx_is_known_by_its_metadata(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes().replace(b'"format": "pt"}', b'"format":"mlx"}', 1))
    with pytest.raises(CheckpointError) as caught:
        open_model(tmp_path)
    _short(caught, "MLX")


def test_weight_only_files_declared_nvfp4() -> None:
    """The groups say what the algorithm's name does not: inputs are not quantised."""
    rows = describe(text_config(False)).rows
    fp4 = {"type": "float", "num_bits": 4, "group_size": 16}
    for inputs, want in ((None, "nvfp4"), (fp4, "nvfp4_a4")):
        groups = {"group_0": {"targets": ["Linear"], "weights": fp4, "input_activations": inputs}}
        flat = {"quant_method": "modelopt", "quant_algo": "NVFP4", "config_groups": groups}
        hf = {"quantization": {"quant_algo": "NVFP4", "group_size": 16}}
        for hf_quant in ({}, hf, {"quantization": hf["quantization"] | {"config_groups": groups}}):
            table = quant_table(rows, declarations({"quantization_config": flat}, hf_quant))
            assert table["layers.0.mlp.up_proj"] == want
    assert quant_table(rows, declarations({}, hf))["layers.0.mlp.up_proj"] == "nvfp4_a4"


def test_a_draft_head_in_an_unknown_algorithm_is_read_off_its_tensors() -> None:
    rows = describe(text_config(False)).rows
    layers: Json = {"model.layers.3.mlp.up_proj": {"quant_algo": "FP8"}}
    row = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    layers["mtp.layers.0.mlp.experts"] = {"quant_algo": "NEVER_HEARD_OF"}
    declared = declarations({"quantization_config": row}, {})
    assert quant_table(rows, declared)["layers.3.mlp.up_proj"] == "fp8"
    layers["model.layers.3.mlp.down_proj"] = {"quant_algo": "NEVER_HEARD_OF"}
    with pytest.raises(CheckpointError, match="modelopt NEVER_HEARD_OF is not read"):
        declarations({"quantization_config": row}, {})


@pytest.mark.parametrize(
    "entries",
    [["re:(a+)+$"], ["re:(.*)*x"], ["re:" + ".*" * 9], [f"re:layer{i}.*" for i in range(300)]],
    ids=["nested", "stars", "many", "list"],
)
def test_patterns_that_take_for_ever(entries: list[str]) -> None:
    fp4 = {"type": "float", "num_bits": 4, "group_size": 16}
    row = _groups(fp4, None)
    with pytest.raises(CheckpointError, match="would take too long"):
        declarations({"quantization_config": row | {"ignore": entries}}, {})


@pytest.mark.parametrize(
    ("moe", "key", "value"),
    [
        *((moe, "num_hidden_layers", 10**9) for moe in (False, True)),
        *((True, "num_experts", n) for n in (10**9, 1 << 16)),
        *((False, key, 10**12) for key in ("head_dim", "vocab_size", "linear_num_value_heads")),
        *((False, "vision_config", {"depth": n}) for n in (10**9, 10**30)),
    ],
)
def test_sizes_are_bounded(moe: bool, key: str, value: object) -> None:
    with pytest.raises(CheckpointError, match="expected an integer of at least 1 and at most"):
        describe({k: v for k, v in text_config(moe).items() if k != "layer_types"} | {key: value})


HUGE: tuple[Any, ...] = ("x" * 4000, ["y" * 50] * 400, {"k" * 900: {"z": [1] * 900}}, 10**300)


def _spoiled(draw: random.Random, path: Path) -> Callable[[], object]:
    """Opens a checkpoint with one place of its files changed."""
    files = [n for n in ("config.json", "hf_quant_config.json", INDEX) if (path / n).exists()]
    name = draw.choice(files)
    row = [json.loads((path / name).read_text())]
    _put(row, draw.choice(list(_places(row))), copy.deepcopy(draw.choice((*JUNK, *HUGE))))
    saved = (path / name).read_text()
    (path / name).write_text(json.dumps(row[0]))

    def read() -> object:
        try:
            return open_model(path)
        finally:
            (path / name).write_text(saved)

    return read


@pytest.mark.parametrize("format", FORMATS)
def test_no_refusal_is_long(tmp_path: Path, format: str) -> None:
    write_checkpoint(tmp_path, {"num_hidden_layers": 1}, format, moe=format.endswith("4"), shards=2)
    draw, refused = random.Random(format), 0
    for _ in range(60):
        try:
            _spoiled(draw, tmp_path)()
        except CheckpointError as error:
            refused += 1
            assert len(str(error)) <= LONGEST
    assert refused > 5
    open_model(tmp_path)


@pytest.mark.parametrize("format", ["fp8", "fp8_block", "nvfp4_a4", "ct_nvfp4"])
def test_weights_that_were_dequantised_name_the_file_to_remove(tmp_path: Path, format: str) -> None:
    write_checkpoint(tmp_path)
    names = [n.removesuffix(".weight") for n in open_checkpoint(tmp_path).tensors]
    row, hf = quantisation_configs(format, names)
    config = json.loads((tmp_path / "config.json").read_text())
    if hf:
        (tmp_path / "hf_quant_config.json").write_text(json.dumps(hf))
        where = "remove hf_quant_config.json; else"
    else:
        (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": row}))
        where = "remove config.json: quantization_config; else"
    with pytest.raises(CheckpointError, match=where):
        open_model(tmp_path)
