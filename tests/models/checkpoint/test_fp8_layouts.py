"""Checkpoints with FP8 by channel and token as ModelOpt may store it."""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from spark_engine.models.checkpoint.quant_schemes import Scheme
from spark_engine.models.checkpoint.tensor_list import linears
from spark_engine.models.open_model import open_model
from spark_engine.models.weights.operands import projection
from spark_engine.models.weights.stored_model import Model
from tests.checkpoint_files import Array, write_shards
from tests.checkpoints import Written, write_checkpoint

Json = dict[str, Any]


def tensors_of(folder: Path) -> dict[str, Array]:
    checkpoint = open_model(folder).checkpoint
    assert checkpoint is not None
    return {name: checkpoint.read(name).copy() for name in checkpoint.tensors}


def declare(folder: Path, quantisation: Json) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = quantisation
    (folder / "config.json").write_text(json.dumps(config))


def values(model: Model, module: str) -> Array:
    """What the operands of a projection mean, without the scale of the input."""
    p = projection(model, module, model.table[module])
    assert model.checkpoint is not None and p.input_scale is None
    weight, scale = (r.evaluate(model.checkpoint) for r in (p.weight, p.scales["weight_scale"]))
    return np.asarray(weight.astype(np.float64) * scale[:, None])


def check(written: Written, model: Model, scheme: Scheme) -> None:
    """Every projection of the scheme has the values that were written."""
    found = [m for m in (x.module for x in linears(model.rows)) if model.table[m] is scheme]
    assert found
    for module in found:
        want = written.values[f"{model.layout.file_name(module)}.weight"]
        np.testing.assert_allclose(values(model, module), want, rtol=1e-6)


@pytest.mark.parametrize("shape", ["column", "row", "scalar"])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_modelopt_by_channel(tmp_path: Path, shape: str, dtype: type) -> None:
    written = write_checkpoint(tmp_path, format="ct_fp8_channel")
    tensors = tensors_of(tmp_path)
    for name in [n for n in tensors if n.endswith("weight_scale")]:
        scale = tensors[name].astype(np.float32).astype(dtype)
        if shape == "scalar":
            scale = np.full((), 0.5, dtype)
            weight = name.removesuffix("_scale")
            written.values[weight] = tensors[weight].astype(np.float32) / 2
        tensors[name] = scale[:, 0] if shape == "row" else scale
    write_shards(tmp_path, tensors, 1)
    algorithm = {"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}
    declare(tmp_path, algorithm | {"exclude_modules": ["*in_proj_a", "*in_proj_b"]})
    check(written, open_model(tmp_path), Scheme.FP8_CHANNEL)
