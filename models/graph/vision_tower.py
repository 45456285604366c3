"""The vision tower: patches of an image, pre-normed blocks of attention and MLP, and a merger.

Knows the order of its nodes; knows no tensor's name. It writes rows of the residual stream into the
state `image_rows`. Every rank of an engine has all of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_graphsurgeon as gs

from spark_engine.interface import image_state
from spark_engine.manifest import IMAGE
from spark_engine.models.checkpoint.tensor_list import Tensor
from spark_engine.models.graph.writer import Writer, state_out
from spark_engine.models.weights import recipes
from spark_engine.tensors import Array, DType, TensorSpec
from spark_engine.vision import COLOURS, IMAGE_ROWS, PATCH_VALUES, ROW_PATCHES, VisionInfo

EPS = 1e-6  # of every LayerNorm; no configuration has it
THETA = 10_000.0  # of the axial rope


@dataclass(frozen=True)
class Affine:
    """A weight [N, K] or [N] and a bias [N]: a projection, or a LayerNorm's factor and offset."""

    weight: Tensor
    bias: Tensor

    def project(
        self, w: Writer, x: gs.Variable, gelu: str = "", residual: Sequence[gs.Variable] = ()
    ) -> gs.Variable:
        """gelu(x · weightᵀ + bias) + residual."""
        operands = [x, w.stored_matrix(self.weight), _wide(w, self.bias), *residual]
        return w.one("linear_bias", operands, f"{self.weight.module}.y", gelu=gelu)

    def normed(self, w: Writer, x: gs.Variable, group: int = 1) -> gs.Variable:
        """LayerNorm of x; rows of `group` patches side by side."""
        operands = [x, _wide(w, self.weight), _wide(w, self.bias)]
        return w.one("layer_norm", operands, f"{self.weight.module}.y", eps=EPS, group=group)


@dataclass(frozen=True)
class Block:
    """u = x + proj(attention(qkv(norm(x)))); u + fc2(gelu(fc1(norm(u))))."""

    norm1: Affine
    qkv: Affine
    proj: Affine
    norm2: Affine
    fc1: Affine
    fc2: Affine

    def write(
        self, w: Writer, x: gs.Variable, rotary: Sequence[gs.Variable], heads: int
    ) -> gs.Variable:
        """The block over x [patches, hidden]; `rotary`: coords, frequencies and live."""
        qkv = self.qkv.project(w, self.norm1.normed(w, x))
        name = f"{self.qkv.weight.module}.mixed"
        mixed = w.one("vision_attention", [qkv, *rotary], name, heads=heads)
        u = self.proj.project(w, mixed, residual=[x])
        inner = self.fc1.project(w, self.norm2.normed(w, u), "tanh")
        return self.fc2.project(w, inner, residual=[u])


@dataclass(frozen=True)
class VisionTower:
    """The network of an image. `heads`: of every block; `positions`: a square table by rows."""

    heads: int
    patch: Affine
    positions: Tensor
    blocks: tuple[Block, ...]
    norm: Affine
    fc1: Affine
    fc2: Affine

    def write(self, w: Writer, info: VisionInfo) -> None:
        """Writes the graph; the steps are inputs already."""
        operands = [
            *(w[name] for name in ("patches", "taps", "tap_weights")),
            w.weight("visual.pixels", recipes.constant(pixel_scaling(info))),
            w.stored_matrix(self.positions),
        ]
        dtype = w.activation
        values, rows = w.op("vision_patches", operands, ["patches.x", "positions"], dtype=dtype)
        x = self._embedded(w, values, rows)
        hidden = self.positions.columns
        quarter = hidden // self.heads // 4
        inv_freq = THETA ** (-np.arange(quarter) / quarter)
        frequencies = w.weight("visual.inv_freq", recipes.constant(inv_freq))
        rotary = [w["coords"], frequencies, w["live"]]
        for block in self.blocks:
            x = block.write(w, x, rotary, self.heads)
        inner = self.fc1.project(w, self.norm.normed(w, x, ROW_PATCHES), "erf")
        made = self.fc2.project(w, inner)
        spec = image_state(w.limits, self.fc2.weight.shape[0], w.precision.activation)
        kept = [made, w["live"], w["first"], w.state(spec, IMAGE)]
        w.one("store_rows", kept, state_out(IMAGE_ROWS), group=ROW_PATCHES)

    def _embedded(self, w: Writer, values: gs.Variable, rows: gs.Variable) -> gs.Variable:
        """The patches' projection with their position rows. A still is its frame several times, so
        that the weights of the frames are added."""
        weight = self.patch.weight
        source, to = w.model.source(weight.name), (weight.shape[0], PATCH_VALUES)
        merged = recipes.transform(source, TensorSpec("", DType.F32, to), _merged_frames)
        matrix = w.weight(weight.name, recipes.cast(merged, w.precision.activation))
        operands = [values, matrix, _wide(w, self.patch.bias), rows]
        return w.one("linear_bias", operands, f"{weight.module}.y")


def pixel_scaling(info: VisionInfo) -> Array:
    """f32 [2, 768]: factor and offset of each value of a patch, colour by colour."""
    mean, std = np.array(info.mean), np.array(info.std)
    both = np.stack([1 / (255 * std), -mean / std]).astype(np.float32)
    return np.repeat(both, PATCH_VALUES // COLOURS, axis=1)


def _merged_frames(weight: Array) -> Array:
    """[H, C, frames, patch, patch] -> f32 [H, C · patch · patch]."""
    return np.asarray(weight.astype(np.float32).sum(2)).reshape(len(weight), -1)


def _wide(w: Writer, tensor: Tensor) -> gs.Variable:
    """f32: a vector of the tower."""
    return w.weight(tensor.name, recipes.cast(w.model.source(tensor.name)))
