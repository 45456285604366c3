"""What sets the tactics of one kernel apart, as fields. Knows no kernel; the rows are in the file
of each architecture."""

from __future__ import annotations

from dataclasses import dataclass

FAN = 8  # parts that are merged at once
ALONE = FAN * FAN  # chunks of a row, at most: a few long rows fill a GPU


@dataclass(frozen=True)
class Chunks:
    """How decode attention cuts a row.

    Attributes:
        tokens: of a chunk, at least.
        warps: of a block, over e4m3 pages.
        most: chunks of a row.
        large: for targets with Hopper's shared memory, or for the others.
        why: what it is for, where no recorded time has it as the best.
        fallback: `paged_attention` has it too, for nodes that no fusion takes.
    """

    tokens: int
    warps: int
    most: int
    large: bool
    why: str = ""
    fallback: bool = False

    @property
    def name(self) -> str:
        """The tactic's: what decides how a row's sums are cut and come together."""
        name = f"chunks_{self.tokens}_{self.warps}"
        return name if self.most == ALONE else f"{self.most}_{name}"

    @property
    def form(self) -> str:
        """What rows of any length have of it."""
        return f"{self.most} chunks, {self.warps} warps"


@dataclass(frozen=True)
class Shared:
    """How attention over a round of drafts cuts a row: as `chunks`; so many queries read one copy
    of its tiles, by a team of as many warps."""

    chunks: Chunks
    queries: int
    why: str = ""
    fallback: bool = False

    @property
    def name(self) -> str:
        """The tactic's."""
        name = f"round_{self.chunks.tokens}_{self.chunks.warps}_by_{self.queries}"
        return name if self.chunks.most == ALONE else f"{self.chunks.most}_{name}"

    @property
    def form(self) -> str:
        """As `Chunks.form`."""
        return f"{self.chunks.form}, {self.queries} queries"


@dataclass(frozen=True)
class HeadBlocks:
    """How a token of the delta rule is cut into blocks.

    Attributes:
        name: the tactic's.
        warps: of a block.
        blocks: of a multiprocessor.
        grouped: a block has all value heads of a key head, else one.
        stages: chunks that each warp has on their way to shared memory; 0: they come through
            registers.
        why, fallback: as in `Chunks`, with `gated_delta_step` for the unfused op.
    """

    name: str
    warps: int
    blocks: int
    grouped: bool = False
    stages: int = 0
    why: str = ""
    fallback: bool = False
