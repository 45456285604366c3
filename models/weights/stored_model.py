"""A model as its checkpoint stores it: config, tensors, and how each projection is quantised.

The source of the graph. `models/open_model.py` makes it from a folder or from the JSON files alone,
and checks that the parts fit each other. Knows no graph.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from spark_engine.models.checkpoint.expected_tensors import Expected
from spark_engine.models.checkpoint.files import Checkpoint
from spark_engine.models.checkpoint.layout import Layout
from spark_engine.models.checkpoint.quant_schemes import Scheme
from spark_engine.models.checkpoint.quant_table import QuantTable
from spark_engine.models.checkpoint.tensor_list import Linear, Row, ValueKind
from spark_engine.models.config.drafter_config import DrafterConfig
from spark_engine.models.config.model_config import ModelConfig
from spark_engine.models.weights import recipes
from spark_engine.models.weights.shards import Shards
from spark_engine.plugins.formats.numpy_codecs import FP8_BLOCK
from spark_engine.tensors import TensorSpec
from spark_engine.vision import VisionInfo

_BY_ROW = (Scheme.FP8, Scheme.FP8_CHANNEL)  # scales [N], [N, 1] or [1, N]
_COPIES = (ValueKind.STACKED_EXPERTS, ValueKind.TIED_HEAD, ValueKind.CACHE_SCALE)


@dataclass(frozen=True)
class Model:
    """The facts of a checkpoint that lowering needs.

    Attributes:
        rows: the text network's list of tensors.
        expected: the tensors that a file may hold for them, by the name in the file.
        tensors: dtype and shape of each tensor that this file holds, by the name in the file.
        ignored: the number of tensors of each part that a graph without images and drafts leaves
            out: the vision tower, the draft head.
        draft_note: the reason why there is no draft head; "" if there is one.
        vision_note: the reason why there is no vision tower; "" if there is one.
        vision: how images are resized and what tokens they have; None without a tower.
        drafter: a block drafter, if one was opened too; its tensors are among the others.
        checkpoint: the open files; None if only the configs are present.
        generation: generation_config.json; {} where absent.
        shards: how ranks share the tensors; then `config` has the sizes of one rank, and all other
            fields those of the whole model.
    """

    config: ModelConfig
    table: QuantTable
    layout: Layout
    rows: tuple[Row, ...]
    expected: Mapping[str, Expected]
    tensors: Mapping[str, TensorSpec]
    ignored: Mapping[str, int]
    draft_note: str
    checkpoint: Checkpoint | None
    generation: Mapping[str, Any]
    shards: Shards = Shards()
    vision_note: str = "only the configs are known"
    vision: VisionInfo | None = None
    drafter: DrafterConfig | None = None

    @cached_property
    def of_experts(self) -> dict[str, dict[str, recipes.Recipe]]:
        """Operands of experts by their name, once made: the graphs of all families share them."""
        return {}

    @property
    def has_drafts(self) -> bool:
        """True if graphs with drafts can be written."""
        return self.has_head or self.drafter is not None

    @property
    def has_head(self) -> bool:
        """True if there is a draft head."""
        return not self.draft_note

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences about the files: what is missing, or not read."""
        return () if self.checkpoint is None else self.checkpoint.notes

    def has(self, name: str) -> bool:
        """True if the file holds the tensor of this name (without prefix)."""
        return self.layout.file_name(name) in self.tensors

    @property
    def unsplit(self) -> Model:
        """The same model with all tensors whole on every rank."""
        return replace(self, shards=Shards())

    def source(self, name: str) -> recipes.Recipe:
        """The recipe that reads a tensor, named without prefix: rank 0's share of it, and refused
        if it is plain and not finite."""
        share = self.shards.cut(name, self.whole(name))
        known = self.expected.get(self.layout.file_name(name))
        if known is None or known.scheme is not Scheme.PLAIN:
            return share
        return recipes.verified(share, "finite")

    def whole(self, name: str) -> recipes.Recipe:
        """The recipe that reads all of a tensor. Of a slice it reads the rows, and the scales that
        belong to them: of the tensor, of each row, or of blocks of rows."""
        spec = self.tensors[self.layout.file_name(name)]
        recipe = recipes.source(spec.name, spec.dtype, spec.dims)
        if len(recipe.shape) == 4:  # ModelOpt's scales of blocks, [rows, 1, columns, 1]
            recipe = recipes.reshape(recipe, recipe.shape[::2])
        known = self.expected.get(spec.name)
        if known is not None and known.scheme in _BY_ROW and name.endswith("_scale"):
            recipe = recipes.reshape(recipe, [n for n in recipe.shape if n > 1] or (1,))
        stored = self.layout.slices.get(name.rpartition(".")[0])
        if stored is None or recipe.shape in ((), (1,)):
            return recipe
        by_row = recipe.shape[0] == stored.rows
        return recipes.take(recipe, stored.ranges if by_row else stored.blocks(FP8_BLOCK))

    def key_of(self, recipe: recipes.Recipe) -> object:
        """A key that is equal for small recipes of equal value; the recipe itself if no file is
        open."""
        if self.checkpoint is None:
            return recipe
        return recipe.evaluate(self.checkpoint).tobytes()

    @property
    def parameters(self) -> int:
        """Parameters of the text network, without scales."""
        return sum(_elements(row) for row in self.rows)

    def tensors_by_module(self) -> Counter[str]:
        """The number of tensors of the file for each module of the quantisation table."""
        rows = (self.expected[name].row for name in self.tensors if name in self.expected)
        return Counter(r.table_key if isinstance(r, Linear) else r.module for r in rows)


def _elements(row: Row) -> int:
    """Parameters of a row that no other row counts."""
    if isinstance(row, Linear):
        return row.rows * row.columns
    return 0 if row.part != "text" or row.kind in _COPIES else math.prod(row.shape)
