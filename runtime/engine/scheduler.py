"""Decides, for each step, who prefills which tiles, who decodes, who is admitted and who yields.

Knows counts only: slots, pages, bytes, positions. Pure Python without arrays; it never looks at
a token but to know that one was added. The rules:

- Order is priority. Among equals one request has the turn, which shorter ones overtake within a
  bound (`line`); those that ran before, or let others pass, go first. Beyond the bound nobody is
  admitted before the turn, also where it waits for room. How much prefill a step takes next to
  decode is `pacing`'s business.
- A request is admitted when the launch has tiles for it, a slot is free, and pages for all it
  knows plus one decode row.
- Every running sequence that can decode does so in every step, whatever prefill there is: all in
  one round of k drafts, or of none, where a row may have fewer.
- What a round in flight adds is known as bounds: limits and pages are those of the upper one.
- A page that is not there is taken from the last in order, which is swapped out (exact) while
  the byte budget lasts, and otherwise forgets its cache and prefills again later. A waiting
  request of strictly higher priority may do the same to those below it.
  Drafts take a page early where one is free, and are fewer where none is.
- Pages that the prefix cache alone keeps are as good as free, and go first.
- A request that waits to go on from one that is being prefilled lets others pass (`reuse`), but
  keeps its room; one whose grammar is still being made keeps none.
- One whose tokens a mask may bind has rounds without drafts; one that waits for its mask has none.
- So of those that run the first of its priority moves every few steps, the turn passes on after
  a bounded number of tiles, and nothing can go round in circles: a sequence is taken back only for
  one that came before it, or is more urgent.
- Preemption happens only while no launched step is uncollected; what a finished sequence held
  is free again once the last launched step that touches it was collected.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from itertools import groupby

from spark_engine.errors import CapacityError, InternalError
from spark_engine.interface import DECODE, PREFILL, verify_family
from spark_engine.runtime.engine.admission import Admission
from spark_engine.runtime.engine.draft_depth import DraftDepth
from spark_engine.runtime.engine.pacing import BALANCED, Pacing, PrefillPolicy
from spark_engine.runtime.engine.plan import FROM_STATE, Batch, Move, StepPlan, bound_rows
from spark_engine.runtime.engine.pool import Pool
from spark_engine.runtime.engine.prefix_trie import Node
from spark_engine.runtime.engine.request import FinishReason, Status
from spark_engine.runtime.engine.reuse import Reuse
from spark_engine.runtime.engine.sequence import Sequence
from spark_engine.runtime.engine.sizes import Sizes
from spark_engine.runtime.engine.step_costs import StepCosts
from spark_engine.runtime.engine.waiting import Waiting
from spark_engine.runtime.executors.memory import BucketKey


class Scheduler:
    """The queue, the pools, and `schedule`. See the module's rules."""

    def __init__(
        self,
        sizes: Sizes,
        policy: PrefillPolicy = BALANCED,
        costs: Mapping[BucketKey, float] | None = None,
    ) -> None:
        self.sizes = sizes
        known = StepCosts(costs or {})
        self.depth = DraftDepth((sizes.decode, *sizes.verify), known, sizes.slots, sizes.fixed)
        self.pacing = Pacing(policy, sizes.prefill, sizes.tile, known, sizes.decode[0])
        # One decode batch must hold every running sequence.
        self.slots = Pool("slot", min(sizes.slots, sizes.decode[-1]))
        self.pages = Pool("page", sizes.pages)
        self.running: list[Sequence] = []  # most urgent first
        self.waiting = Waiting(sizes.tile)
        self.swap_used = 0  # bytes
        self.frugal = False  # nobody is swapped out
        self.preemptions = {"swap": 0, "recompute": 0}
        self.reuse = Reuse(sizes, self.pages)
        # step, slot, pages, and the deepest node of them
        self._fence: deque[tuple[int, int, list[int], Node | None]] = deque()
        self._next_step = 0
        self._collected = -1
        pools = self.slots, self.pages, self.reuse
        lists = self.running, self.waiting, self._fence
        self._admission = Admission(sizes, *pools, *lists, self._preempt)

    def add(self, seq: Sequence) -> None:
        """Queues a new sequence. Raises CapacityError when the queue is full."""
        fresh = self.waiting.fresh
        if fresh >= self.sizes.max_waiting:
            raise CapacityError(
                f"{fresh} requests wait already, and the queue holds {self.sizes.max_waiting}: "
                "try again later"
            )
        seq.tiles = max(1, -(-self.reuse.add(seq, self.running) // self.sizes.tile))
        seq.arrived = self.pacing.clock
        self.waiting.add(seq)

    def schedule(self, in_flight: int) -> StepPlan:
        """The next step, `in_flight` being the number of launched, uncollected ones."""
        plan = StepPlan(self._next_step)
        self._next_step += 1
        grown = self._grow(plan, in_flight)
        if not plan.drain and not plan.preempted and self.waiting:
            self._admit(plan, in_flight)
        plan.grown = [(s, len(s.pages) - 1) for s in grown if s.status is Status.RUNNING]
        size = self.sizes.page_size
        # `decodable` and its page written out: a property costs more than all of this
        decode = [
            s
            for s in self.running
            if s.prefill_end <= s.launched < s.limit - 1
            and s.launched < len(s.pages) * size
            and not s.paused
        ]
        if decode:
            self._add_round(plan, decode)
        self._add_prefill(plan)
        return plan

    def collected(self, step: int) -> None:
        """Says that the results of `step`, and of all before it, were read."""
        self._collected = step
        while self._fence and self._fence[0][0] <= step:
            _, slot, pages, node = self._fence.popleft()
            self._free(slot, pages, node)

    def finish(self, seq: Sequence, reason: FinishReason, sound: bool = True) -> None:
        """Ends a sequence wherever it is; what it holds returns when nothing can touch it. Unless
        `sound`, what it computed is of no use to others."""
        if seq.status is Status.RUNNING:
            self.running.remove(seq)
        self.waiting.end(seq)
        self._drop_snapshot(seq)
        if seq.slot >= 0:
            in_flight = seq.last_step > self._collected
            self.reuse.end(seq, reason, in_flight, sound)
            if in_flight:
                # Not `last_step`: the fence must ascend, and no later step is launched yet.
                self._fence.append((self._next_step - 1, seq.slot, seq.pages, seq.node))
            else:
                self._free(seq.slot, seq.pages, seq.node)
        else:
            self.reuse.drop(seq)
        seq.slot, seq.pages, seq.node = -1, [], None
        seq.status, seq.finish = Status.FINISHED, reason

    def check(self) -> None:
        """Raises InternalError unless every slot, page, row and swapped byte has its holders."""
        self.slots.check([*(s.slot for s in self.running), *(f[1] for f in self._fence)])
        held = [page for s in self.running for page in s.pages] + self.reuse.copied_pages()
        held += [page for f in self._fence for page in f[2]]
        self.pages.check(held, self.reuse.cache.kept_pages())
        self.reuse.cache.check()
        swapped = sum(s.swap_bytes for s in self.waiting)
        if swapped != self.swap_used:
            raise InternalError(f"snapshots hold {swapped} bytes, accounted {self.swap_used}")
        self.waiting.check()

    # A page for every decode row.

    def _grow(self, plan: StepPlan, in_flight: int) -> list[Sequence]:
        """Takes a page for whoever needs one to decode; returns who got one."""
        size, got = self.sizes.page_size, []
        full = [s for s in self.running if s.launched >= len(s.pages) * size and s.decodable]
        for seq in full:  # making a page may preempt those after it
            if seq.status is Status.RUNNING and self._make_page(seq, plan, in_flight):
                seq.pages += self.pages.take()
                got.append(seq)
        return got

    def _make_page(self, seq: Sequence, plan: StepPlan, in_flight: int) -> bool:
        """Sees to it that a page is free for `seq`; False when it must wait, or had to yield."""
        while not self.reuse.cache.reclaim(1):
            if in_flight:
                plan.drain = True
                return False
            victim = self.running[-1]
            self._preempt(victim, plan)
            if victim is seq:
                return False
        return True

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self.sizes.page_size)

    # Admission and preemption.

    def _admit(self, plan: StepPlan, in_flight: int) -> None:
        live = sum(s.decodable for s in self.running)
        rows = next((b for b in self.sizes.decode if b >= live), 0) if live else 0
        started = [s for s in self.running if s.launched < s.prefill_end]
        tiles = self.pacing.room(started, rows, *self._backlog())
        self._admission.admit(plan, in_flight, tiles)
        for move in plan.restores:
            self.swap_used -= move.seq.swap_bytes
            move.seq.swap_bytes = 0
        for seq in plan.admitted:
            self.depth.forget(seq.slot)

    def _backlog(self) -> tuple[int, float]:
        """How many more prompts could be prefilled, and since when the first of them waits."""
        if not self.waiting.fresh:
            return 0, 0.0
        return min(self.waiting.fresh, self.slots.free), self.waiting.oldest(1)[0].arrived

    def _preempt(self, seq: Sequence, plan: StepPlan) -> None:
        self.running.remove(seq)
        plan.preempted.append(seq)
        held = self._pages_for(seq.launched)
        size = self.sizes.slot_bytes + held * self.sizes.page_bytes
        begun = seq.launched > 0 and seq.source is None  # or its slot holds nothing of it yet
        self.reuse.drop(seq)
        if begun and not self.frugal and self.swap_used + size <= self.sizes.swap_bytes:
            plan.saves.append(Move(seq, seq.slot, tuple(seq.pages[:held])))
            self.swap_used += size
            seq.status, seq.swap_bytes = Status.SWAPPED, size
            self.preemptions["swap"] += 1
        else:
            seq.restart()
            seq.status = Status.WAITING
            self.preemptions["recompute"] += 1
        self._free(seq.slot, seq.pages, seq.node)
        seq.slot, seq.pages, seq.node = -1, [], None
        self.waiting.come_back(seq)

    def drop_snapshots(self) -> None:
        """Those that are swapped out prefill again; their snapshots' memory is free at once."""
        for seq in [s for s in self.waiting.first if s.status is Status.SWAPPED]:
            self.waiting.leave(seq)
            self._drop_snapshot(seq)
            seq.restart()
            seq.status = Status.WAITING
            self.waiting.come_back(seq)

    def _free(self, slot: int, pages: list[int], node: Node | None) -> None:
        self.slots.give([slot])
        self.pages.give(pages)
        self.reuse.cache.released(node)

    def _drop_snapshot(self, seq: Sequence) -> None:
        self.swap_used -= seq.swap_bytes
        seq.swap_bytes, seq.snapshot = 0, None

    # Decode, and rounds of drafts.

    def _add_round(self, plan: StepPlan, seqs: list[Sequence]) -> None:
        """Adds a batch of a row for each, in the smallest bucket of the k chosen for all."""
        guided = [s for s in seqs if s.guide is not None]
        for seq in guided:
            _unbind(seq, len(self.sizes.verify))
        live, step = len(seqs), plan.step
        drafts = self.depth.choose(seqs, self.pacing.bounded and live < len(self.running))
        starts = [FROM_STATE if s.slack else s.launched for s in seqs]
        if drafts:
            family, buckets = verify_family(drafts), self.sizes.verify[drafts - 1]
            counts = self._offer(plan, seqs, drafts)
        else:
            family, buckets, counts = DECODE, self.sizes.decode, [1] * live
            for seq in seqs:
                seq.launched += 1
                seq.held = 0
        for seq in seqs:
            seq.last_step = step
        bucket = next(b for b in buckets if b >= live)
        batch = Batch(family, bucket, seqs, starts, counts, [True] * live)
        plan.batches.append(replace(batch, bound=bound_rows(guided)) if guided else batch)

    def _offer(self, plan: StepPlan, seqs: list[Sequence], drafts: int) -> list[int]:
        """Tokens of each one's row: the certain one and the drafts that it may verify."""
        counts, size, pages = [], self.sizes.page_size, self.pages
        for seq in seqs:
            at, most = seq.launched, seq.limit - 1  # no position at `most` or beyond is fed
            own, room = min(drafts, seq.drafts), len(seq.pages) * size - at
            # The chain that makes the next drafts reads and writes pages behind the row's.
            wanted = -(-min(at + 2 * own, most) // size) - len(seq.pages)
            if wanted > 0 and (pages.free or pages.spare):
                self.reuse.cache.reclaim(wanted)
                for page in pages.take(min(wanted, pages.free)):
                    plan.grown.append((seq, len(seq.pages)))
                    seq.pages.append(page)
                room = len(seq.pages) * size - at
            count = 1 + min(own, seq.held, most - 1 - at, room - 1)
            seq.launched = at + count
            seq.slack += count - 1
            seq.held = drafts
            counts.append(count)
        return counts

    def _add_prefill(self, plan: StepPlan) -> None:
        """Adds a batch of tiles, on each sequence's own grid, as `pacing` orders and bounds them.

        Only a sequence's last tile may be short.
        """
        behind = [s for s in self.running if s.launched < s.prefill_end]
        if not behind:
            return
        tiles = self.pacing.tiles(behind, next(iter(plan.batches), None), *self._backlog())
        batch = Batch(PREFILL, 0, [], [], [], [])
        for priority, group in groupby(behind, key=lambda s: s.request.priority):
            given = self.waiting.line(priority).share([*group], tiles - batch.live)
            for seq, count in given.items():
                self._add_tiles(batch, seq, count, plan.step)
        if not batch.live:
            return
        emitting = (s for s, emit in zip(batch.seqs, batch.emits, strict=True) if emit)
        batch.bound.extend(bound_rows(emitting))
        self.pacing.launched(batch.seqs)
        self.waiting.shares.advance(sum(batch.counts))
        bucket = next(b for b in self.sizes.prefill if b >= batch.live)
        plan.batches.append(replace(batch, bucket=bucket))

    def _add_tiles(self, batch: Batch, seq: Sequence, count: int, step: int) -> None:
        """The next `count` tiles of a sequence."""
        for _ in range(count):
            start, end = seq.launched, min(seq.launched + self.sizes.tile, seq.prefill_end)
            batch.seqs.append(seq)
            batch.starts.append(start)
            batch.counts.append(end - start)
            batch.emits.append(end == seq.prefill_end)
            source, save = self.reuse.tile(seq, end)
            batch.sources.append(source)
            batch.saves.append(save)
            seq.launched, seq.last_step = end, step


def _unbind(seq: Sequence, most: int) -> None:
    """Gives it drafts while nothing may bind a token of its next round, of up to `most` drafts."""
    if seq.guide is not None:
        first = seq.launched + 1 - seq.prompt_len
        seq.drafts = 0 if seq.guide.binds(first, first + most) else seq.guide.drafts
