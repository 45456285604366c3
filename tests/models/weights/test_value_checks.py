"""Scales and codes that no exporter means: named with tensor, place and value, in every format."""

import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from spark_engine.builder.build import build
from spark_engine.builder.plan.options import Options
from spark_engine.errors import CheckpointError
from spark_engine.interface import Limits, Precision
from spark_engine.models.build_network import build_network
from spark_engine.models.open_model import open_model
from spark_engine.models.weights import value_checks
from spark_engine.tensors import DType
from tests.checkpoints import write_checkpoint
from tests.models.edited_checkpoint import edited

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
FP8_KV = Precision(DType.F32, DType.F8E4M3, DType.F32)
ONE_LAYER = {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
UP, Q = "model.layers.0.mlp.up_proj", "model.layers.0.self_attn.q_proj"
KV = "model.layers.0.self_attn"
WHOLE = [0.0, -1.0, np.nan, np.inf, -np.inf, 1e-40]  # the last: its reciprocal is infinite
PART = [-1.0, np.nan, np.inf]

WHOLES = [
    ("fp8", f"{UP}.weight_scale"),
    ("fp8", f"{UP}.input_scale"),
    ("nvfp4", f"{UP}.weight_scale_2"),
    ("nvfp4_a4", f"{UP}.weight_scale_2"),
    ("nvfp4_a4", f"{UP}.input_scale"),
    ("ct_nvfp4", f"{UP}.weight_global_scale"),
    ("ct_nvfp4_a4", f"{UP}.weight_global_scale"),
    ("ct_nvfp4_a4", f"{UP}.input_global_scale"),
    ("modelopt_mixed", f"{Q}.input_scale"),
    ("modelopt_mixed", f"{KV}.k_proj.k_scale"),
    ("modelopt_mixed", f"{KV}.v_proj.v_scale"),
]


def damaged(path: Path, format: str, name: str, index: tuple[int, ...], value: float) -> Path:
    write_checkpoint(path, ONE_LAYER, format, kv_scales=format == "modelopt_mixed")
    with edited(path) as tensors:
        tensors[name][index if tensors[name].shape else ()] = value
    return path


def read_all(path: Path) -> None:
    """Evaluates every weight of the decode graph."""
    model = open_model(path)
    assert model.checkpoint is not None
    network = build_network(model, "decode", Limits(4, 256, 16, 512), FP8_KV)
    for weight in network.weights.values():
        weight.evaluate(model.checkpoint)


@pytest.mark.parametrize(("format", "name"), WHOLES, ids=lambda x: str(x).rpartition("model.")[2])
def test_the_scale_of_a_whole_is_finite_and_above_zero(
    tmp_path: Path, format: str, name: str
) -> None:
    path = damaged(tmp_path, format, name, (0,), 0.25)
    read_all(path)
    for value in WHOLE:
        with edited(path) as tensors:
            tensors[name][...] = value
        with pytest.raises(CheckpointError) as caught:
            read_all(path)
        place = "[0]" if tensors[name].shape else ""
        said = f"{name}{place} is {float(np.float32(value))}: the scale of a tensor must be"
        assert str(caught.value).startswith(said), value


@pytest.mark.parametrize(
    ("format", "name", "values"),
    [
        ("fp8_block", f"{UP}.weight_scale_inv", PART),
        ("nvfp4", f"{UP}.weight_scale", [-1.0, np.nan, -0.0]),  # kernels keep no sign of e4m3's
        ("ct_nvfp4_a4", f"{UP}.weight_scale", [-1.0, np.nan]),
    ],
)
def test_the_scale_of_a_part_may_be_zero(
    tmp_path: Path, format: str, name: str, values: list[float]
) -> None:
    read_all(damaged(tmp_path, format, name, (1, 0), 0.0))
    for value in values:
        damaged(tmp_path, format, name, (1, 0), value)
        words = f"{name}[1, 0] is {value}: the scale of a part must be finite and 0 or above"
        with pytest.raises(CheckpointError, match=re.escape(words)):
            read_all(tmp_path)


def test_the_scale_of_a_row_may_be_zero(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, ONE_LAYER, "fp8")
    scale = f"{UP}.weight_scale"
    with edited(tmp_path) as tensors:
        tensors[scale] = np.full((256, 1), 0.5, np.float32)
        tensors[scale][3] = 0
    read_all(tmp_path)
    with edited(tmp_path) as tensors:
        tensors[scale][255] = -0.5
    with pytest.raises(CheckpointError, match=re.escape("weight_scale[255, 0] is -0.5: the scale")):
        read_all(tmp_path)


@pytest.mark.parametrize("format", ["fp8", "fp8_block"])
@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_codes_are_numbers(tmp_path: Path, format: str, code: int) -> None:
    value = np.array([code], np.uint8).view(E4M3)[0]
    damaged(tmp_path, format, f"{UP}.weight", (255, 127), value)
    with pytest.raises(CheckpointError, match=re.escape(f"{UP}.weight[255, 127] is nan: an FP8")):
        read_all(tmp_path)


def test_every_other_code_is_legal_and_the_first_bad_one_is_named() -> None:
    wide = np.tile(np.arange(256, dtype=np.uint8), 4096).reshape(-1, 64)  # several stretches
    flat = wide.reshape(-1)
    flat[(flat & 0x7F) == 0x7F] = 0
    value_checks.check_codes("w", wide.view(E4M3))
    for at in (0, 1, value_checks._AT_ONCE - 1, value_checks._AT_ONCE, flat.size - 1):
        flat[at], kept = 0xFF, flat[at]
        place = re.escape(f"w[{at // 64}, {at % 64}] is nan")
        with pytest.raises(CheckpointError, match=place):
            value_checks.check_codes("w", wide.view(E4M3))
        flat[at] = kept
    scales = np.arange(0x7F, dtype=np.uint8)
    value_checks.check_part("s", scales.view(E4M3))
    value_checks.check_whole("s", np.array([1e-37, 3e38], np.float32))


def test_a_build_refuses_and_leaves_nothing(tmp_path: Path) -> None:
    path = damaged(tmp_path / "model", "nvfp4", f"{UP}.weight_scale", (2, 5), np.nan)
    options = Options(decode=(1,), prefill=(64,), max_seqs=1, max_context=64)
    with pytest.raises(CheckpointError, match=re.escape(f"{UP}.weight_scale[2, 5] is nan")):
        build(path, tmp_path / "engine", options, lambda text: None)
    assert [p.name for p in tmp_path.iterdir() if not p.name.startswith(".")] == ["model"]
