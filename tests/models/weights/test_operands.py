"""Operands made of stored tensors have the stored values, in every format."""

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from spark_engine.errors import CheckpointError
from spark_engine.models.checkpoint.quant_schemes import Scheme
from spark_engine.models.checkpoint.tensor_list import Experts
from spark_engine.models.families.registry import family_of
from spark_engine.models.graph.mlp import Mixture
from spark_engine.models.open_model import open_model
from spark_engine.models.weights.operands import _per_row, expert_operands
from spark_engine.models.weights.recipes import Recipe, constant
from spark_engine.models.weights.stored_model import Model
from spark_engine.tensors import Array
from tests.checkpoint_files import FORMATS
from tests.checkpoints import write_checkpoint
from tests.quantisers import e2m1_values

F32 = NDArray[np.float32]


def _read(model: Model, recipe: Recipe) -> Array:
    assert model.checkpoint is not None
    return recipe.evaluate(model.checkpoint)


def _unpacked(codes: Array, scale: Array) -> F32:
    """[..., K/2] bytes and [..., K/16] scales -> f32 [..., K]."""
    wide = np.stack([codes & 15, codes >> 4], -1).reshape(*codes.shape[:-1], -1)
    return e2m1_values(wide) * np.repeat(scale.astype(np.float32), 16, axis=-1)


def _blocks(codes: Array, scale: Array) -> F32:
    wide = np.repeat(np.repeat(scale, 128, -2), 128, -1)
    rows, columns = codes.shape[-2:]
    values: F32 = codes.astype(np.float32) * wide[..., :rows, :columns]
    return values


def _values(scheme: Scheme, operands: list[Array]) -> F32:
    """What weight and scales of a scheme (as W4A16 for NVFP4) mean."""
    if scheme is Scheme.PLAIN:
        return operands[0].astype(np.float32)
    if scheme in (Scheme.FP8, Scheme.FP8_CHANNEL):
        return operands[0].astype(np.float32) * operands[1][..., None]
    if scheme is Scheme.FP8_BLOCK:
        return _blocks(operands[0], operands[1])
    if scheme.group:
        codes = np.stack([operands[0] & 15, operands[0] >> 4], -1)
        groups = codes.reshape(*operands[1].shape[:-1], -1, 32).astype(np.float32)
        scale, zero = operands[1][..., 0::2, None], operands[1][..., 1::2, None]
        values: F32 = ((groups - zero) * scale).reshape(*groups.shape[:-2], -1)
        return values * operands[2][..., None]
    return _unpacked(operands[0], operands[1]) * operands[2][..., None]


def _experts(model: Model, layer: int) -> Experts:
    mlp = family_of(model.config).network(model.config).layers[layer].mlp
    assert isinstance(mlp, Mixture)
    return mlp.experts


@pytest.mark.parametrize("format", FORMATS)
def test_experts(tmp_path: Path, format: str) -> None:
    written = write_checkpoint(tmp_path, format=format, moe=True, split_scales=True)
    model = open_model(tmp_path)
    module = "layers.1.mlp.experts"
    scheme = model.table[module]
    operands_of = expert_operands(model, _experts(model, 1))
    params = {n: _read(model, r) for n, r in operands_of.items()}
    for name, leaves in (("w13", ("gate", "up")), ("w2", ("down",))):
        operands = [v for k, v in params.items() if k.partition("_")[0] == name]
        values = _values(scheme, operands)
        for e in range(8):
            parts = [written.values[f"model.{module}.{e}.{leaf}_proj.weight"] for leaf in leaves]
            np.testing.assert_allclose(values[e], np.concatenate(parts), rtol=1e-6, atol=0)
    if scheme in (Scheme.FP8, Scheme.NVFP4_A4):
        scales = written.input_scales
        up, down = (scales[f"model.{module}.7.{leaf}_proj"] for leaf in ("up", "down"))
        assert params["x_scale"][7] == pytest.approx(up)  # the larger of gate and up
        assert params["h_scale"][7] == pytest.approx(down)


def test_blocks_that_do_not_tile_gate_and_up(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {"moe_intermediate_size": 192}, "fp8_block", moe=True)
    model = open_model(tmp_path)
    with pytest.raises(CheckpointError, match="moe_intermediate_size is 192"):
        expert_operands(model, _experts(model, 0))


@pytest.mark.parametrize("shape", [(), (1,), (3,), (3, 1)])
def test_a_scale_of_the_tensor_or_of_each_row_is_one_of_each_row(shape: tuple[int, ...]) -> None:
    class Nothing:
        def read(self, name: str) -> Array:
            raise AssertionError(name)

    stored = np.arange(1, 1 + int(np.prod(shape)), dtype=np.float32).reshape(shape)
    found = _per_row(constant(stored), 3).evaluate(Nothing())
    assert found.tolist() == (stored.ravel().tolist() if stored.size == 3 else [1, 1, 1])
    assert _per_row(constant(np.ones(shape and (1,))), 1).shape == (1,)
