"""A checkpoint understood: config, quantisation table and tensors that fit each other.

`open_model` reads a folder; `describe` needs the JSON files alone, and then weights have no
values. Knows no graph.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from spark_engine.errors import CheckpointError
from spark_engine.models.checkpoint.expected_tensors import (
    Expected,
    check_tensors,
    expected_tensors,
    usual,
)
from spark_engine.models.checkpoint.files import Checkpoint, open_checkpoint
from spark_engine.models.checkpoint.layout import HEAD, Layout
from spark_engine.models.checkpoint.quant_table import QuantTable, quant_table
from spark_engine.models.config.model_config import ModelConfig
from spark_engine.models.synthetic import is_synthetic, open_synthetic
from spark_engine.models.weights import recipes
from spark_engine.tensors import TensorSpec

_ROWS = 4096  # rows of a matrix compared at a time


@dataclass(frozen=True)
class Model:
    """What lowering needs to know of a checkpoint.

    Attributes:
        tensors: dtype and shape of each tensor by its name in the file.
        ignored: how many tensors of the file are vision and mtp.
        checkpoint: the open files, None where only the configs are there.
    """

    config: ModelConfig
    table: QuantTable
    layout: Layout
    tensors: Mapping[str, TensorSpec]
    ignored: Mapping[str, int]
    checkpoint: Checkpoint | None

    def has(self, name: str) -> bool:
        """True when the file holds the tensor that we name so (without prefix)."""
        return self.layout.file_name(name) in self.tensors

    def source(self, name: str) -> recipes.Recipe:
        """The recipe that reads a tensor, named without prefix."""
        spec = self.tensors[self.layout.file_name(name)]
        return recipes.source(spec.name, spec.dtype, spec.dims)

    def key_of(self, recipe: recipes.Recipe) -> object:
        """Equal for small recipes of equal value; the recipe itself where nothing is read."""
        if self.checkpoint is None:
            return recipe
        return recipe.evaluate(self.checkpoint).tobytes()

    @property
    def parameters(self) -> int:
        """Weights of the text network as mathematics counts them, scales left out."""
        plain = QuantTable(MappingProxyType({}), self.table.dialect, False)
        layout = Layout(self.layout.prefix, False)
        text = usual(expected_tensors(self.config, plain, layout), "text")
        return sum(int(np.prod(e.shapes[0])) for e in text)


def open_model(path: Path | str) -> Model:
    """Opens a checkpoint folder and checks all of it that headers and configs can tell.

    Raises CheckpointError before any weight is read: see `open_checkpoint`,
    `ModelConfig.from_hf`, `quant_table` and `check_tensors`.
    """
    checkpoint = open_synthetic(path) if is_synthetic(path) else open_checkpoint(path)
    config = ModelConfig.from_hf(checkpoint.config, checkpoint.generation)
    table = quant_table(config, checkpoint.config, checkpoint.hf_quant)
    layout = Layout.detect(checkpoint.tensors)
    expected = expected_tensors(config, table, layout)
    ignored = check_tensors(expected, checkpoint.tensors)
    _check_tied(config, layout, checkpoint)
    found = {n: TensorSpec(n, t.dtype, t.shape) for n, t in checkpoint.tensors.items()}
    return Model(config, table, layout, MappingProxyType(found), ignored, checkpoint)


def describe(config_json: Mapping[str, Any], hf_quant: Mapping[str, Any] | None = None) -> Model:
    """The model that the JSON files stand for, in the layout that exporters use.

    Raises CheckpointError as `open_model` does for what the files alone can tell.
    """
    config = ModelConfig.from_hf(config_json)
    table = quant_table(config, config_json, hf_quant or {})
    layout = Layout.usual(config, table.quantised)
    expected = usual(expected_tensors(config, table, layout))
    parts = [e.part for e in expected]
    ignored = {part: parts.count(part) for part in ("vision", "mtp")}
    found = {e.name: _as_spec(e) for e in expected if e.part == "text"}
    return Model(config, table, layout, MappingProxyType(found), ignored, None)


def _as_spec(expected: Expected) -> TensorSpec:
    return TensorSpec(expected.name, expected.dtypes[0], expected.shapes[0])


def _check_tied(config: ModelConfig, layout: Layout, checkpoint: Checkpoint) -> None:
    """A tied head that is stored as well must be the embedding, byte for byte."""
    head = f"{HEAD}.weight"
    if not config.tied or head not in checkpoint.tensors:
        return
    a, b = checkpoint.read(head), checkpoint.read(layout.file_name("embed_tokens.weight"))
    same = a.dtype == b.dtype and all(
        a[i : i + _ROWS].tobytes() == b[i : i + _ROWS].tobytes() for i in range(0, len(a), _ROWS)
    )
    if not same:
        file = checkpoint.tensors[head].file
        raise CheckpointError(
            f"{file}: tensor {head} differs from embed_tokens.weight, though config.json says "
            "tie_word_embeddings; set it to false if the head is its own"
        )
