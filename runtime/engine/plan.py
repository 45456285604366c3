"""`StepPlan`: what one step does, from the scheduler to the loop.

Plain values; whoever reads them changes the arrays, whoever wrote them has already changed the
sequences.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from spark_engine.runtime.engine.guide import Need
from spark_engine.runtime.engine.sequence import Sequence

FROM_STATE = -1  # a start: `positions[slot]`; a token id: what the last round left there


@dataclass(frozen=True, slots=True)
class Row:
    """`count` tokens of one sequence from position `start`, or from where its last round ended
    (FROM_STATE); `emit`: sample after the last, in a round of drafts after each."""

    seq: Sequence
    start: int
    count: int
    emit: bool


@dataclass(frozen=True, slots=True)
class Batch:
    """One run of the bucket (`family`, `bucket`); live rows first to last, column by column.

    Columns, because a decode step has a hundred rows and a few microseconds for each column.
    `sources` and `saves` are of prefill alone: the row of the "sequence" states that a tile begins
    from if it is its sequence's first of the launch, and that which also gets what is after it (-1:
    none). Without them each begins from its slot's. `bound`: the sequences whose tokens a mask may
    bind, or no longer binds, and the number of the token that each samples, from 0.
    """

    family: str
    bucket: int
    seqs: list[Sequence]
    starts: list[int]
    counts: list[int]
    emits: list[bool]
    sources: list[int] = field(default_factory=list)
    saves: list[int] = field(default_factory=list)
    bound: list[tuple[Sequence, int]] = field(default_factory=list)

    @property
    def live(self) -> int:
        """How many rows carry a sequence."""
        return len(self.seqs)

    @property
    def rows(self) -> tuple[Row, ...]:
        """The live rows one by one."""
        columns = zip(self.seqs, self.starts, self.counts, self.emits, strict=True)
        return tuple(Row(*row) for row in columns)


@dataclass(frozen=True, slots=True)
class Move:
    """A sequence's slot and the pages that hold its tokens, as they were when planned."""

    seq: Sequence
    slot: int
    pages: tuple[int, ...]


@dataclass(slots=True)
class StepPlan:
    """One step: saves, restores, copies of pages, table rows, batches, in this order.

    Attributes:
        step: its number, growing by one.
        saves: snapshots to take before anything is overwritten.
        restores: snapshots to write back.
        page_copies: (from, to) for pages of which a sequence needs its own.
        counts: slots whose next launch does not begin at 0, with what penalties are to know of the
            tokens before that: those of the prompt, and those generated.
        admitted: sequences whose table rows are to be written whole.
        grown: sequences that got a page, with the page's index in their list; one row a page.
        batches: at most one of decode or of a round of drafts, and one of prefill.
        preempted: sequences that lost their slot; they hold nothing any more.
        drain: the next step can only be planned when no launched step is uncollected.
    """

    step: int
    saves: list[Move] = field(default_factory=list)
    restores: list[Move] = field(default_factory=list)
    page_copies: list[tuple[int, int]] = field(default_factory=list)
    counts: list[tuple[int, tuple[int, ...], tuple[int, ...]]] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)
    grown: list[tuple[Sequence, int]] = field(default_factory=list)
    batches: list[Batch] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    drain: bool = False


def bound_rows(seqs: Iterable[Sequence]) -> list[tuple[Sequence, int]]:
    """Of sequences that were launched, those that a mask may bind, or whose mask is to be taken
    away, and the number of the token that each samples."""
    rows = []
    for seq in seqs:
        guide = seq.guide
        if guide is None:
            continue
        index = seq.launched - seq.prompt_len
        if guide.flagged or guide.need(index) is not Need.NOTHING:
            rows.append((seq, index))
    return rows
