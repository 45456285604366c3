"""The fields in which tactics of one kernel differ. Each architecture's file has the rows."""

from dataclasses import dataclass

FAN = 8  # parts of one merge
ALONE = FAN * FAN  # chunks of a row, at most: enough for a few long rows to fill a GPU


@dataclass(frozen=True)
class Chunks:
    """The chunks of a row in decode attention, of one token or of a round of drafts."""

    tokens: int  # of a chunk, about
    warps: int  # of a block of one query, over e4m3 pages
    most: int  # chunks of a row, at most
    large: bool  # True for targets with Hopper's shared memory, False for the others
    why: str = ""  # its use, if no recorded time has it as the best
    fallback: bool = False  # `paged_attention` has it too, for nodes that no fusion takes

    @property
    def name(self) -> str:
        """The tactic's name: all that decides the order of a row's sums."""
        name = f"chunks_{self.tokens}_{self.warps}"
        return name if self.most == ALONE else f"{self.most}_{name}"

    @property
    def form(self) -> str:
        """The part of the name that does not depend on a row's length."""
        return f"{self.most} chunks, {self.warps} warps"


@dataclass(frozen=True)
class HeadBlocks:
    """The blocks of a decode step of the delta rule."""

    name: str  # the tactic's name
    warps: int  # of a block
    blocks: int  # of a multiprocessor
    grouped: bool = False  # a block has all value heads of a key head, else one
    stages: int = 0  # chunks of a warp in flight to shared memory; 0: loads go through registers
    # A round's tokens at once, by products of tf32; other bits than token by token. Two value heads
    # of a key head are grouped, which is faster; three are not.
    chunked: bool = False
    # why and fallback: as in `Chunks`, with `gated_delta_step` as the unfused op.
    why: str = ""
    fallback: bool = False


# Decode steps of the delta rule, for every architecture.
HEADS = (
    HeadBlocks("registers", 8, 2),
    HeadBlocks("small registers", 4, 4, fallback=True),
    HeadBlocks("many registers", 16, 1),
    HeadBlocks("grouped", 4, 4, grouped=True, stages=2),
    HeadBlocks("chunk", 4, 4, chunked=True),
)
