"""Input scales of experts that no calibration has met: taken from others, counted, or refused."""

import re
from pathlib import Path

import numpy as np
import pytest

from spark_engine.errors import CheckpointError
from spark_engine.interface import Limits, Precision
from spark_engine.models.build_network import build_network
from spark_engine.models.open_model import open_model
from spark_engine.models.weights.borrowed_scales import borrowed_note
from spark_engine.tensors import Array, DType
from tests.checkpoint_files import write_shards
from tests.checkpoints import write_checkpoint
from tests.models.edited_checkpoint import edited

WIDE = Precision(DType.F32, DType.F32, DType.F32)
SMALL = {"num_hidden_layers": 1, "layer_types": ["full_attention"], "num_experts": 4}
STATIC = {"fp8": "input_scale", "nvfp4_a4": "input_scale", "ct_nvfp4_a4": "input_global_scale"}
DEAD = [None, 0.0, 1e-40, np.inf]  # None: the tensor is missing
EXPERTS = "model.layers.0.mlp.experts"


def _tensors(path: Path, format: str) -> dict[str, Array]:
    """A checkpoint in which expert e's scale is that of expert 0 times 1 + e."""
    write_checkpoint(path, SMALL, format, moe=True)
    with edited(path) as tensors:
        for name in (n for n in tensors if ".experts." in n and n.endswith(STATIC[format])):
            times = np.float32(1 + int(name.split(".experts.")[1].split(".")[0]))
            tensors[name] = tensors[name] / times if "global" in name else tensors[name] * times
    return tensors


def _put(tensors: dict[str, Array], name: str, value: float | None) -> None:
    if value is None:
        del tensors[name]
    else:
        tensors[name] = np.full(tensors[name].shape, value, np.float32)


def _scales(path: Path) -> tuple[list[float], list[float], tuple[str, ...]]:
    """x_scale and h_scale of the layer, in units of expert 0's, and the note."""
    model = open_model(path)
    assert model.checkpoint is not None
    network = build_network(model, "decode", Limits(1, 64, 4, 512), WIDE)
    kept = {n.rpartition(".")[2]: w for n, w in network.weights.items() if ".experts." in n}
    x, h = (kept[name].evaluate(model.checkpoint) for name in ("x_scale", "h_scale"))
    note = borrowed_note((w.recipe for w in network.weights.values()), model.checkpoint)
    assert x.dtype == h.dtype == np.float32
    return (x / x[0]).tolist(), (h / h[0]).tolist(), note


@pytest.mark.parametrize("dead", DEAD, ids=str)
@pytest.mark.parametrize("format", STATIC)
def test_an_expert_that_calibration_has_not_met(
    tmp_path: Path, format: str, dead: float | None
) -> None:
    tensors = _tensors(tmp_path, format)
    assert _scales(tmp_path) == ([1, 2, 3, 4], [1, 2, 3, 4], ())
    for name in ("gate_proj", "up_proj", "down_proj"):
        _put(tensors, f"{EXPERTS}.2.{name}.{STATIC[format]}", dead)
    write_shards(tmp_path, tensors, 1)
    x, h, note = _scales(tmp_path)
    assert x == h == [1, 2, 4, 4]
    assert len(note) == 1 and note[0].startswith("2 of 8 input scales of experts are missing, 0,")
    assert note[0].endswith("layers.0.mlp.experts.2.gate_proj, layers.0.mlp.experts.2.down_proj")


@pytest.mark.parametrize("format", STATIC)
def test_gate_and_up_read_one_input(tmp_path: Path, format: str) -> None:
    """If one of them has a scale, it is that of both."""
    tensors = _tensors(tmp_path, format)
    _put(tensors, f"{EXPERTS}.1.gate_proj.{STATIC[format]}", None)
    _put(tensors, f"{EXPERTS}.2.up_proj.{STATIC[format]}", 0.0)
    write_shards(tmp_path, tensors, 1)
    assert _scales(tmp_path) == ([1, 2, 3, 4], [1, 2, 3, 4], ())


@pytest.mark.parametrize("dead", DEAD, ids=str)
@pytest.mark.parametrize("format", STATIC)
def test_a_layer_without_any_scale_is_refused(
    tmp_path: Path, format: str, dead: float | None
) -> None:
    tensors = _tensors(tmp_path, format)
    for e in range(4):
        _put(tensors, f"{EXPERTS}.{e}.down_proj.{STATIC[format]}", dead)
    write_shards(tmp_path, tensors, 1)
    words = "layers.0.mlp.experts.*.down_proj: no expert of this layer has an input scale"
    with pytest.raises(CheckpointError, match=re.escape(words)):
        _scales(tmp_path)


@pytest.mark.parametrize("value", [-1.0, np.nan, -np.inf], ids=str)
def test_damage_is_still_refused(tmp_path: Path, value: float) -> None:
    """A negative number or NaN is no missing calibration; and weight scales are never borrowed."""
    tensors = _tensors(tmp_path, "nvfp4_a4")
    _put(tensors, f"{EXPERTS}.2.up_proj.input_scale", value)
    write_shards(tmp_path, tensors, 1)
    words = f"{EXPERTS}.2.up_proj.input_scale is {value}: the scale of an input must be 0 or above"
    with pytest.raises(CheckpointError, match=re.escape(words)):
        _scales(tmp_path)


def test_other_scales_are_never_borrowed(tmp_path: Path) -> None:
    tensors = _tensors(tmp_path, "nvfp4_a4")
    for module in (f"{EXPERTS}.2.up_proj", "model.layers.0.mlp.shared_expert.up_proj"):
        for suffix in ("weight_scale_2", "input_scale"):
            if ".experts." in module and suffix == "input_scale":
                continue
            missing = {n: a for n, a in tensors.items() if n != f"{module}.{suffix}"}
            write_shards(tmp_path, missing, 1)
            with pytest.raises(CheckpointError, match=re.escape(f"{module}.{suffix} is missing")):
                open_model(tmp_path)


def test_a_draft_heads_expert_may_lack_its_scale(tmp_path: Path) -> None:
    config = SMALL | {"mtp_num_hidden_layers": 1}
    write_checkpoint(tmp_path, config, "nvfp4_a4", moe=True, head="nvfp4_a4", head_experts="split")
    with edited(tmp_path) as tensors:
        for e in (0, 3):
            del tensors[f"mtp.layers.0.mlp.experts.{e}.up_proj.input_scale"]
    model = open_model(tmp_path)
    assert model.has_drafts and model.table["mtp.layers.0.mlp.experts"] == "nvfp4_a4"
