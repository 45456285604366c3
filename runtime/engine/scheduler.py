"""Decides for each step which sequences prefill which tiles, decode, are admitted, and yield.

Knows counts only: slots, pages, bytes, positions. Pure Python without arrays; reads no token.

- Order is priority. Among equals one request has the turn, which shorter ones overtake within a
  bound (`line`); those that ran before, or let others pass, precede. Beyond the bound no request is
  admitted before the turn, also where the turn waits for space. `pacing` decides how much prefill a
  step takes next to decode.
- A request is admitted when the launch has tiles for it, a slot is free, and pages for all known
  tokens plus one decode row.
- Every running sequence that can decode does so in every step, whatever prefill there is: all in
  one round of k drafts, or of none, where a row may have fewer.
- What a round in flight adds is known as bounds: limits and pages are those of the upper one.
- A missing page is taken from the last in order, which is swapped out (exact) while the byte budget
  lasts, and otherwise prefills again later; in an engine with invariant bits its prompt alone does,
  and decode rows repeat what it had sampled. A waiting request of strictly higher priority may do
  the same to those below it. Drafts take only free pages, and are fewer where none is.
- Pages that only the prefix cache keeps count as free, and are taken first.
- A request that waits to resume from a running prefill lets others pass (`prefix_admission`), but
  its space stays reserved; none is reserved while a grammar is compiled.
- A sequence that a mask may restrict has rounds without drafts; one that waits for its mask has no
  round.
- So the first running sequence of a priority advances every few steps, the turn passes after a
  bounded number of tiles, and preemption is only for an earlier or a more urgent sequence.
- A tile over images waits until the rows of one tile are computed, between two steps, in prefill's
  time, if need be alone. A tile that a step has no time for is the next one's first.
- Preemption happens only while no launched step is uncollected. What a finished sequence held is
  free once the last launched step that touches it was collected.
"""

from bisect import insort
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import groupby

from spark_engine.errors import CapacityError
from spark_engine.interface import DECODE, PREFILL, verify_family
from spark_engine.runtime.engine.plan import FROM_STATE, Batch, Move, StepPlan, bound_rows, round_of
from spark_engine.runtime.engine.policy.admission import Admission
from spark_engine.runtime.engine.policy.draft_depth import DraftDepth
from spark_engine.runtime.engine.policy.image_rows import ImageRows
from spark_engine.runtime.engine.policy.pacing import BALANCED, Pacing, PrefillPolicy
from spark_engine.runtime.engine.policy.prefix_admission import PrefixAdmission
from spark_engine.runtime.engine.policy.prefix_trie import Hit, PageNode
from spark_engine.runtime.engine.policy.step_costs import StepCosts
from spark_engine.runtime.engine.policy.waiting import Waiting, rank_of
from spark_engine.runtime.engine.pool import Pool
from spark_engine.runtime.engine.request import FinishReason, Status
from spark_engine.runtime.engine.sequence import Sequence
from spark_engine.runtime.engine.sizes import EngineSizes
from spark_engine.runtime.executors.memory import BucketKey


class Scheduler:
    """The queue, the pools, and `schedule`. See the module's rules."""

    def __init__(
        self,
        sizes: EngineSizes,
        policy: PrefillPolicy = BALANCED,
        costs: Mapping[BucketKey, float] | None = None,
    ) -> None:
        self.sizes = sizes
        known = StepCosts(costs or {})
        buckets, how = (sizes.decode, *sizes.verify), (sizes.fixed, sizes.makers)
        self.depth = DraftDepth(buckets, known, sizes.slots, *how)
        self.pacing = Pacing(policy, sizes.prefill, sizes.tile, known, sizes.decode[0])
        # One decode batch must hold every running sequence.
        self.slots = Pool("slot", min(sizes.slots, sizes.decode[-1]))
        self.pages = Pool("page", sizes.pages)
        self.prefix = PrefixAdmission(sizes, self.pages)
        self.images = ImageRows(sizes.image_rows)
        self._postponed: Sequence | None = None  # the last step had no time for its image
        self.running: list[Sequence] = []  # most urgent first
        self.waiting = Waiting(sizes.tile, self.prefix.tiles_left)
        self.swap_used = 0  # bytes
        self.no_swap = False  # no sequence is swapped out
        self.preemptions = {"swap": 0, "recompute": 0}
        # step, slot, pages, and the deepest node of them
        self._fence: deque[tuple[int, int, list[int], PageNode | None]] = deque()
        self._next_step, self._collected = 0, -1
        pools = self.slots, self.pages, self.prefix
        self._admission = Admission(sizes, *pools, self.running, self.waiting, self._fence)

    def check_queue(self, coming: int = 0) -> None:
        """Raises CapacityError when the queue is full; `coming` more requests will join it."""
        if (fresh := self.waiting.fresh + coming) >= self.sizes.max_waiting:
            words = f"the queue holds {self.sizes.max_waiting}: try again later"
            raise CapacityError(f"{fresh} requests wait already, and {words}")

    def add(self, seq: Sequence) -> None:
        """Queues a new sequence. Raises CapacityError when the queue is full."""
        self.check_queue()
        seq.tiles = max(1, -(-self.prefix.add(seq, self.running) // self.sizes.tile))
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
            and (s.constraint is None or not s.constraint.paused)
        ]
        if decode:
            self._add_round(plan, decode)
        self._add_prefill(plan)
        return plan

    def finish(self, seq: Sequence, reason: FinishReason, sound: bool = True) -> None:
        """Ends a sequence, waiting or running; what it holds is free when no launched step can
        touch it. Not `sound`: its results must not be reused."""
        if seq.status is Status.RUNNING:
            self.running.remove(seq)
        self.waiting.end(seq)
        self._drop_swap_copy(seq)
        in_flight = seq.last_step > self._collected
        node = self.prefix.end(seq, reason, in_flight, sound)
        if seq.slot >= 0 and in_flight:
            # Not `last_step`: the fence must ascend, and no later step is launched yet.
            self._fence.append((self._next_step - 1, seq.slot, seq.pages, node))
        elif seq.slot >= 0:
            self._free(seq.slot, seq.pages, node)
        seq.slot, seq.pages = -1, []
        seq.status, seq.finish = Status.FINISHED, reason

    def collected(self, step: int) -> None:
        """The results of `step`, and of all before it, were read."""
        self._collected = step
        while self._fence and self._fence[0][0] <= step:
            _, slot, pages, node = self._fence.popleft()
            self._free(slot, pages, node)

    def keep_ended(self, copy_rows: Callable[[list[tuple[int, int]]], None]) -> None:
        """All that was planned is launched: copies the states that ended sequences leave to the
        prefix cache, as (from, to) rows."""
        if self.prefix.copies:
            copy_rows(self.prefix.copies)
        self.prefix.release_pins()

    def stats(self) -> dict[str, int]:
        """Figures by name; tokens, pages and preemptions since the start."""
        return {
            "running": len(self.running),
            "waiting": len(self.waiting) - self.waiting.swapped,
            "swapped": self.waiting.swapped,
            "free_pages": self.pages.free + self.pages.spare,  # those the cache alone keeps
            "free_slots": self.slots.free,
            "pages": self.pages.size,
            "slots": self.slots.size,
            "swap_bytes": self.swap_used,
            "preempted_swap": self.preemptions["swap"],
            "preempted_recompute": self.preemptions["recompute"],
            **self.prefix.stats(),
        }

    def clear_cache(self) -> None:
        """Empties the prefix cache; pages in use are free when they no longer are."""
        self.prefix.cache.clear()

    def save_memory(self, short: bool) -> None:
        """While the host's memory is `short` no sequence is swapped out; those that are, prefill
        again, and the prefix cache is emptied."""
        self.no_swap = short
        if not short:
            return
        self.clear_cache()
        for seq in [s for s in self.waiting.first if s.status is Status.SWAPPED]:
            self.waiting.leave(seq)
            self._drop_swap_copy(seq)
            self._restart(seq)
            self.waiting.come_back(seq)

    def _grow(self, plan: StepPlan, in_flight: int) -> list[Sequence]:
        """Takes a page for each sequence that needs one to decode; returns those that got one."""
        size, got = self.sizes.page_size, []
        full = [s for s in self.running if s.launched >= len(s.pages) * size and s.decodable]
        for seq in full:  # making a page may preempt those after it
            if seq.status is Status.RUNNING and self._make_page(seq, plan, in_flight):
                seq.pages += self.pages.take()
                got.append(seq)
        return got

    def _make_page(self, seq: Sequence, plan: StepPlan, in_flight: int) -> bool:
        """Frees a page for `seq`; False when it must wait, or was preempted."""
        while not self.prefix.cache.reclaim(1):
            if in_flight:
                plan.drain = True
                return False
            victim = self.running[-1]
            self._preempt(victim, plan)
            if victim is seq:
                return False
        return True

    def _admit(self, plan: StepPlan, in_flight: int) -> None:
        live = sum(s.decodable for s in self.running)
        rows = next((b for b in self.sizes.decode if b >= live), 0) if live else 0
        started = [s for s in self.running if s.launched < s.prefill_end]
        tiles = self.pacing.most_tiles(started, rows, *self._backlog())
        for one in self._admission.choose(in_flight, tiles):
            for victim in one.victims:
                self._preempt(victim, plan)
            self._start(one.seq, one.hit, plan)
        plan.drain = self._admission.drain
        for move in plan.restores:
            self.swap_used -= move.seq.swap_bytes
            move.seq.swap_bytes = 0
        for seq in plan.admitted:
            self.depth.forget(seq.slot)

    def _backlog(self) -> tuple[int, float]:
        """The number of waiting prompts to prefill, and the arrival time of the first."""
        if not self.waiting.fresh:
            return 0, 0.0
        return min(self.waiting.fresh, self.slots.free), self.waiting.oldest(1)[0].arrived

    def _start(self, seq: Sequence, hit: Hit, plan: StepPlan) -> None:
        """Gives a waiting sequence a slot, and pages: those of the hit and new ones."""
        self.waiting.leave(seq)
        seq.slot = self.slots.take()[0]
        shared = self.prefix.start(seq, hit, self.waiting)
        if hit.position:
            plan.counts.append((seq.slot, *seq.counted(hit.position)))
        swapped = seq.status is Status.SWAPPED
        if not swapped:
            seq.launched = hit.position
            if seq.last_step < 0:
                seq.cached = hit.position
                seq.tag = self.waiting.charge(seq, seq.prefill_end - seq.launched)
        own = -(-seq.admission_len // self.sizes.page_size) - len(shared)
        self.prefix.cache.reclaim(own)
        seq.pages = shared + self.pages.take(own)
        if hit.suffix_page >= 0:
            plan.page_copies.append((hit.suffix_page, seq.pages[len(shared)]))
        if swapped:
            held = -(-seq.launched // self.sizes.page_size)
            plan.restores.append(Move(seq, seq.slot, tuple(seq.pages[:held])))
        seq.status = Status.RUNNING
        insort(self.running, seq, key=rank_of)
        plan.admitted.append(seq)

    def _preempt(self, seq: Sequence, plan: StepPlan) -> None:
        self.running.remove(seq)
        plan.preempted.append(seq)
        held = -(-seq.launched // self.sizes.page_size)
        size = self.sizes.slot_bytes + held * self.sizes.page_bytes
        stateful, node = seq.launched > 0 and not self.prefix.reads_snapshot(seq), None
        self.prefix.drop(seq)
        if stateful and not self.no_swap and self.swap_used + size <= self.sizes.swap_bytes:
            plan.saves.append(Move(seq, seq.slot, tuple(seq.pages[:held])))
            self.swap_used += size
            seq.status, seq.swap_bytes = Status.SWAPPED, size
            self.preemptions["swap"] += 1
            node = self.prefix.swap_out(seq)
        else:
            self._restart(seq)
            self.preemptions["recompute"] += 1
        self._free(seq.slot, seq.pages, node)
        seq.slot, seq.pages = -1, []
        self.waiting.come_back(seq)

    def _restart(self, seq: Sequence) -> None:
        seq.restart(same_bits=self.sizes.invariant)
        self.prefix.restart(seq)
        seq.status = Status.WAITING

    def _free(self, slot: int, pages: list[int], node: PageNode | None) -> None:
        self.slots.give([slot])
        self.pages.give(pages)
        self.prefix.cache.released(node)

    def _drop_swap_copy(self, seq: Sequence) -> None:
        self.swap_used -= seq.swap_bytes
        seq.swap_bytes, seq.swap_copy = 0, None

    def _add_round(self, plan: StepPlan, seqs: list[Sequence]) -> None:
        """Adds a batch of a row for each, in the smallest bucket of the k chosen for all."""
        restricted = [(s, s.constraint) for s in seqs if s.constraint is not None]
        for seq, state in restricted:
            seq.drafts = state.drafts_from(seq.launched + 1 - seq.prompt_len, self.depth.most)
        live, step = len(seqs), plan.step
        drafts = self.depth.choose(seqs, self.pacing.bounded and live < len(self.running))
        starts = [FROM_STATE if s.unverified else s.launched for s in seqs]
        if drafts:
            family, buckets = verify_family(drafts), self.sizes.verify[drafts - 1]
            counts = self._offer(plan, seqs, drafts)
        else:
            family, buckets, counts = DECODE, self.sizes.decode, [1] * live
            for seq in seqs:
                seq.launched += 1
                seq.held_drafts = 0
        for seq in seqs:
            seq.last_step = step
        bucket = next(b for b in buckets if b >= live)
        bound = (seq for seq, _ in restricted)
        plan.batches.append(round_of(family, bucket, seqs, starts, counts, bound))

    def _offer(self, plan: StepPlan, seqs: list[Sequence], drafts: int) -> list[int]:
        """Tokens of each one's row: the certain one and the drafts that it may verify."""
        counts, size, pages = [], self.sizes.page_size, self.pages
        for seq in seqs:
            at, most = seq.launched, seq.limit - 1  # no position at `most` or beyond is fed
            own = min(drafts, seq.drafts) if at >= seq.replay_end else 0
            space = len(seq.pages) * size - at
            # The chain that makes the next drafts reads and writes pages after the row's.
            wanted = -(-min(at + 2 * own, most) // size) - len(seq.pages)
            if wanted > 0 and (pages.free or pages.spare):
                self.prefix.cache.reclaim(wanted)
                for page in pages.take(min(wanted, pages.free)):
                    plan.grown.append((seq, len(seq.pages)))
                    seq.pages.append(page)
                space = len(seq.pages) * size - at
            count = 1 + min(own, self.depth.held(seq), most - 1 - at, space - 1)
            seq.launched = at + count
            seq.unverified += count - 1
            seq.held_drafts = 0 if self.sizes.headless else drafts
            counts.append(count)
        return counts

    def _add_prefill(self, plan: StepPlan) -> None:
        """Adds a batch of tiles, on each sequence's own grid; `pacing` bounds it, `line` shares it.

        Only a sequence's last tile may be short.
        """
        started = [s for s in self.running if s.launched < s.prefill_end]
        if not started:
            self._postponed = None
            return
        for seq in [s for s in started if s.since is None]:
            seq.since = self.pacing.starts_waiting(seq)
        tiles = self.pacing.tiles(started, next(iter(plan.batches), None), *self._backlog())
        if not tiles:
            return
        batch, shown = Batch(PREFILL, 0, [], [], [], []), set[bytes]()
        first, self._postponed = self._postponed, None
        if first in started and first.request.priority == started[0].request.priority:
            self._add_tiles(batch, first, 1, plan, shown)
            started = [s for s in started if s.launched < s.prefill_end]
        for priority, group in groupby(started, key=lambda s: s.request.priority):
            given = self.waiting.line(priority).share([*group], tiles - batch.live)
            for seq, count in given.items():
                self._add_tiles(batch, seq, count, plan, shown)
        if not batch.live:
            return
        emitting = (s for s, emit in zip(batch.seqs, batch.emits, strict=True) if emit)
        batch.bound.extend(bound_rows(emitting))
        self.pacing.forget_prefilled()
        self.waiting.shares.advance(sum(batch.counts))
        bucket = next(b for b in self.sizes.prefill if b >= batch.live)
        plan.batches.append(replace(batch, bucket=bucket))

    def _add_tiles(
        self, batch: Batch, seq: Sequence, count: int, plan: StepPlan, shown: set[bytes]
    ) -> None:
        for _ in range(count):
            start, end = seq.launched, min(seq.launched + self.sizes.tile, seq.prefill_end)
            seen = plan.images or seq.request.images
            if seen and not self._show(seq, start, end, plan, batch.live, shown):
                return
            batch.seqs.append(seq)
            batch.starts.append(start)
            batch.counts.append(end - start)
            batch.emits.append(end >= max(seq.prefill_end, seq.replay_end))
            source, save = self.prefix.tile(seq, end)
            batch.sources.append(source)
            batch.saves.append(save)
            seq.launched, seq.last_step, seq.since = end, plan.step, None

    def _show(
        self, seq: Sequence, start: int, end: int, plan: StepPlan, live: int, shown: set[bytes]
    ) -> bool:
        """Has the images of a tile, and of the token after it, in the pool; adds those to compute
        to the plan. False: not in this step, of `live` tiles so far that read digests `shown`."""
        images = [i for i in seq.request.images if i.start <= end and i.end > start]
        missing = self.images.missing(images)
        towers = [i.tokens for i in missing] + [i.tokens for i, _ in plan.images]
        fits = not towers or self.pacing.fits(live + 1, towers)
        if plan.images and missing or (plan.images or live) and not fits:
            self._postponed = self._postponed or (seq if missing else None)
            return False
        if (new := self.images.place(images, shown)) is None:
            return False
        plan.images += [(image, self.images.first(image)) for image in new]
        shown.update(image.digest for image in images)
        if fits or not self.pacing.bounded:
            return True
        self._postponed = seq  # the tower takes this step's time, the tile is the next one's
        return False
