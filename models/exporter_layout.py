"""The tensors that a checkpoint's JSON files imply, in the layout that exporters use.

`describe` and drawn checkpoints use them in place of a file's own tensors. Opens nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from spark_engine.models.checkpoint.expected_tensors import (
    MTP,
    TEXT,
    Expected,
    expected_tensors,
    usual,
)
from spark_engine.models.checkpoint.layout import Layout
from spark_engine.models.checkpoint.quant_schemes import Declared
from spark_engine.models.checkpoint.quant_table import QuantTable, quant_table
from spark_engine.models.checkpoint.tensor_list import Row
from spark_engine.models.config.model_config import ModelConfig
from spark_engine.models.families.registry import family_of


@dataclass(frozen=True)
class ExporterLayout:
    """The tensors of a configuration as exporters write them.

    Attributes:
        rows: the tensors of the text network and the unused ones.
        expected: all tensors, those of the draft head included.
        draft_note: why there is no draft head, or "".
    """

    rows: tuple[Row, ...]
    table: QuantTable
    layout: Layout
    expected: Mapping[str, Expected]
    draft_note: str

    @property
    def stored(self) -> list[Expected]:
        """The tensors that an exporter writes and a graph may read."""
        return usual(self.expected, TEXT, MTP)


def exporter_layout(config: ModelConfig, declared: tuple[Declared, ...]) -> ExporterLayout:
    """The layout for these JSON files. Raises CheckpointError if they contradict each other."""
    family = family_of(config)
    rows, (drafts, note) = family.tensors(config), family.draft_tensors(config)
    table = quant_table(rows, declared)
    head = quant_table(drafts, declared)
    # quantised experts are stored one by one
    stacked, of_head = (family.stacks_experts and not t.quantised for t in (table, head))
    layout = Layout.usual(config.nested, stacked, of_head, (*rows, *drafts))
    table = table.drafting(head)
    expected = {
        **expected_tensors(rows, config.dtype, table, layout),
        **expected_tensors(drafts, config.dtype, table, layout, MTP),
    }
    return ExporterLayout(rows, table, layout, expected, note)
