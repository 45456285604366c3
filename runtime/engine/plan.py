"""`StepPlan`: what one step does, from the scheduler to the loop.

Plain values. The scheduler has already updated the sequences; the loop updates the arrays.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from spark_engine.runtime.engine.sequence import Sequence
from spark_engine.runtime.engine.token_constraint_state import MaskDependency
from spark_engine.vision import Image

FROM_STATE = -1  # a start: `positions[slot]`; a token id: as the last round left it in the state


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
    `sources` and `saves` are of prefill alone: the row of the "sequence" states that a tile starts
    from if it is its sequence's first of the launch, and the row that also gets the state after it
    (-1: none). Without them each starts from its slot's. `bound`: the sequences that a mask may
    restrict, or no longer restricts, and the number of the token that each samples, from 0.
    `known`: rows of a round that repeat a token; all but the last of a sequence emit nothing.
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
    known: list[int] = field(default_factory=list)

    @property
    def key(self) -> tuple[str, int]:
        return self.family, self.bucket

    @property
    def live(self) -> int:
        return len(self.seqs)

    @property
    def rows(self) -> tuple[Row, ...]:
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
        counts: slots with a next launch that does not start at 0, and the earlier tokens that
            penalties count: those of the prompt, and those generated.
        admitted: sequences; their table rows are to be written whole.
        grown: sequences that got a page, with the page's index in their list; one row a page.
        batches: at most one of decode or of a round of drafts, and one of prefill.
        preempted: sequences that lost their slot; they hold nothing any more.
        images: to be computed before the batches, each with the first of its rows.
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
    images: list[tuple[Image, int]] = field(default_factory=list)


def round_of(
    family: str,
    bucket: int,
    seqs: list[Sequence],
    starts: list[int],
    counts: list[int],
    bound: Iterable[Sequence],
) -> Batch:
    """A batch of decode or verify rows, already counted as launched; `bound` as in `bound_rows`."""
    rows = enumerate(zip(seqs, starts, strict=True))
    known = [i for i, (seq, start) in rows if 0 <= start < seq.replay_end]
    emits = [True] * len(seqs)
    for i in known:
        emits[i] = seqs[i].launched >= seqs[i].replay_end
    rows_bound = bound_rows(seq for seq in bound if seq.launched >= seq.replay_end)
    return Batch(family, bucket, seqs, starts, counts, emits, bound=rows_bound, known=known)


def bound_rows(seqs: Iterable[Sequence]) -> list[tuple[Sequence, int]]:
    """The launched sequences with a mask to apply or to remove, and the
    number of the token that each samples."""
    rows = []
    for seq in seqs:
        state = seq.constraint
        if state is None:
            continue
        index = seq.launched - seq.prompt_len
        if state.flagged or state.dependency(index) is not MaskDependency.NOTHING:
            rows.append((seq, index))
    return rows
