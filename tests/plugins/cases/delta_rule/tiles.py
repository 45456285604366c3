"""`sources` and `saves` of the cases of a prefill's ops: which rows are read, and which are not.

Knows no op.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from spark_engine.plugins.common.sequence_tiles import continues
from spark_engine.tensors import Array

IGNORED = 1 << 30  # what a tile says that begins from zeros or carries on


@dataclass(frozen=True)
class Tiles:
    """The tiles of one launch."""

    slots: tuple[int, ...]  # of each tile
    starts: tuple[int, ...]  # of each tile
    # Slot -> the state's row that its first tile begins from; of others, the slot.
    sources: Mapping[int, int] = field(default_factory=dict)
    saves: Mapping[int, int] = field(default_factory=dict)  # tile -> the state's row it saves to

    @property
    def origins(self) -> dict[int, int]:
        """Row of the states -> start of what begins from it; a fresh sequence's slot -> 0."""
        slots = np.asarray(self.slots)
        firsts = {r: s for r, s in enumerate(self.slots) if s >= 0 and not continues(slots, r)}
        sources = {r: self.sources.get(s, s) if self.starts[r] else s for r, s in firsts.items()}
        return {source: self.starts[r] for r, source in sources.items()}

    @property
    def unread(self) -> list[int]:
        """Rows that are written only."""
        written = {s for s in self.slots if s >= 0} | set(self.saves.values())
        return sorted(written - {row for row, start in self.origins.items() if start})

    @property
    def operands(self) -> list[Array]:
        """The operands `sources` and `saves`, i32 [rows]."""
        rows = range(len(self.slots))
        started = [
            self.sources.get(s, s) if self._reads(r) else IGNORED
            for r, s in zip(rows, self.slots, strict=True)
        ]
        sources = np.where(np.asarray(self.slots) < 0, -1, started)
        saves = [self.saves.get(r, -1) for r in rows]
        return [sources.astype(np.int32), np.asarray(saves, np.int32)]

    def _reads(self, row: int) -> bool:
        return self.starts[row] > 0 and not continues(np.asarray(self.slots), row)
