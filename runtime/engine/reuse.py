"""Prefix reuse: where a prompt resumes, which prefill it waits for, where it leaves snapshots.

Between the scheduler, which knows when, and the prefix cache, which knows what there is. A page can
be shared from the launch that fills it: whatever reads it is launched later, on the same stream.

- States are kept where others may well go on: at a prompt's marks, or else before its last tile; at
  every EVERY tokens; where it parts from what was there or from those that wait; where it ends.
- A request that could go on from one that is still prefilled waits for it, and others pass.
- An engine whose bits are invariant takes over only what prefill made on the grid from position 0;
  others also what was generated, to the token.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable

from spark_engine.runtime.engine.plan import StepPlan
from spark_engine.runtime.engine.pool import Pool
from spark_engine.runtime.engine.prefix_cache import PrefixCache
from spark_engine.runtime.engine.prefix_trie import CachedState, Hit, Lineage, page_names
from spark_engine.runtime.engine.request import FinishReason, Status
from spark_engine.runtime.engine.sequence import Sequence
from spark_engine.runtime.engine.sizes import Sizes
from spark_engine.runtime.engine.waiting import Waiting

EVERY = 4096  # tokens
LOOK = 16  # waiting requests that one which begins is compared with
NO_HIT = Hit(0, (), None, -1, 0)


class Reuse:
    """One engine's. `copies` are the (from, to) rows that `settled` waits for."""

    def __init__(self, sizes: Sizes, pages: Pool) -> None:
        self.sizes = sizes
        self.rows = Pool("snapshot", sizes.snapshots)
        own = sizes.page_size, sizes.page_bytes, sizes.snapshot_bytes, sizes.cache_bytes
        self.cache = PrefixCache(pages, self.rows, *own)
        self.on = sizes.cache_bytes > 0 and (sizes.snapshots > 0 or sizes.snapshot_bytes == 0)
        self.queries = self.hits = self.lost = 0  # tokens
        self.copies: list[tuple[int, int]] = []
        self._pages = pages
        self._last: tuple[tuple[int, int, int], Hit] | None = None
        self._pinned: list[CachedState] = []  # written or read by what is launched next
        self._copied: list[int] = []  # pages that are read by it

    def stats(self) -> dict[str, int]:
        """Tokens of prompts that were looked up, found, and found but for a state; and what there
        is."""
        return {
            "prefix_queries": self.queries,
            "prefix_hits": self.hits,
            "prefix_lost_for_state": self.lost,
            "snapshots": self.cache.snapshots,
            "snapshot_rows": self.rows.size,
            "cache_bytes": self.cache.used_bytes,
            "cache_budget": self.cache.budget,
            "evicted_pages": self.cache.counts.evicted_pages,
            "evicted_snapshots": self.cache.counts.evicted_snapshots,
        }

    def copied_pages(self) -> list[int]:
        """Pages that nobody has in a table and that a planned launch reads."""
        return list(self._copied)

    def settled(self) -> None:
        """All that was planned is launched, and `copies` are made."""
        self.copies = []
        while self._pinned:
            self.cache.unpin(self._pinned.pop())
        self._pages.give(self._copied)
        self._copied = []

    # Who begins where.

    def add(self, seq: Sequence, running: Iterable[Sequence]) -> int:
        """A request came: names its pages, and has a state kept where it parts from one that is
        being prefilled. Tokens of it that would be computed now."""
        if not self.on:
            return len(seq.tokens)
        seq.names = page_names(seq.tokens, self.sizes.page_size, seq.names)
        hit = self._match(seq)
        leader, end = self._leader(seq, hit, running)
        if leader is not None and end not in leader.points:
            insort(leader.points, end)
        return len(seq.tokens) - hit.position

    def _leader(
        self, seq: Sequence, hit: Hit, running: Iterable[Sequence]
    ) -> tuple[Sequence | None, int]:
        """Who is being prefilled and will be where it can go on further than from the hit."""
        found, best = None, hit.position + self.sizes.page_size - 1
        for leader in running:
            if leader.launched < leader.prefill_end and not _outranks(seq, leader):
                end = self._parting(leader, seq)
                if end > max(leader.launched, best):
                    found, best = leader, end
        return found, best

    def waits(self, seq: Sequence) -> bool:
        """Whether it waits for its leader still."""
        leader = seq.leader
        if leader is not None and leader.status is Status.RUNNING:
            if leader.launched < seq.leader_end:
                return True
        seq.leader = None
        return False

    def find(self, seq: Sequence, running: Iterable[Sequence]) -> Hit | None:
        """What it can begin with, or None: it waits for one of those running."""
        if not self.on or seq.status is Status.SWAPPED:
            return NO_HIT
        if len(seq.tokens) > seq.prompt_len:  # it begins again
            seq.names = page_names(seq.tokens, self.sizes.page_size, seq.names)
        hit = self._match(seq)
        seq.leader, seq.leader_end = self._leader(seq, hit, running)
        if seq.leader is None:
            return hit
        seq.held_back = True
        insort(seq.leader.awaited, seq.leader_end)
        if seq.leader_end not in seq.leader.points:
            insort(seq.leader.points, seq.leader_end)
        return None

    def _match(self, seq: Sequence) -> Hit:
        """As long as nothing changed, one that waits for room is not looked up again."""
        known, key = self._last, (seq.id, len(seq.tokens), self.cache.version)
        if known is None or known[0] != key:
            salt, most = seq.request.salt, len(seq.tokens) - 1
            hit = self.cache.match(seq.tokens, seq.names, most, salt=salt)
            self._last = known = key, hit
        return known[1]

    def without_tail(self, seq: Sequence, hit: Hit) -> Hit:
        """The next best hit that lies at a page's end, where no page is copied."""
        if hit.tail_page < 0:
            return hit
        most = hit.position - hit.position % self.sizes.page_size
        return self.cache.match(seq.tokens, seq.names, most, tails=False, salt=seq.request.salt)

    def begin(self, seq: Sequence, hit: Hit, waiting: Waiting, plan: StepPlan) -> list[int]:
        """It runs from the hit on, whose pages these are; its slot is its own already."""
        if not self.on or seq.status is Status.SWAPPED:
            return []
        if seq.last_step < 0:
            seq.cached, seq.lost = hit.position, hit.kv_position - hit.position
        self.cache.take(hit)
        seq.launched = seq.grid = hit.position
        seq.source = seq.origin = hit.snapshot
        seq.node = hit.nodes[-1] if hit.nodes else None
        if hit.position:
            plan.counts.append((seq.slot, *_known(seq, hit.position)))
        if hit.tail_page >= 0:
            self._pages.share([hit.tail_page])
            self._copied.append(hit.tail_page)
        self._find_points(seq, hit, waiting)
        return hit.pages

    def _find_points(self, seq: Sequence, hit: Hit, waiting: Waiting) -> None:
        last, first = seq.prefill_end - 1, seq.grid + self.sizes.tile
        wanted = set(seq.request.marks or (seq.prompt_len - 1,))
        wanted.add(hit.kv_position)
        wanted.update(range(first - first % EVERY + EVERY, last, EVERY))
        wanted.update(self._parting(seq, other) for other in waiting.oldest(LOOK))
        ends = {self._tile_end(seq, min(position, last)) for position in wanted}
        seq.points = sorted(end for end in ends if end >= first)

    def _parting(self, leader: Sequence, seq: Sequence) -> int:
        """The last end of a tile of the leader's from which `seq` can go on."""
        a, b = leader.names, seq.names
        low, high = 0, min(len(a), len(b))
        if high and (a[0] != b[0] or leader.request.salt != seq.request.salt):
            high = 0
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if a[low:middle] == b[low:middle] else (low, middle - 1)
        return self._tile_end(leader, min(low * self.sizes.page_size, len(seq.tokens) - 1))

    def _tile_end(self, seq: Sequence, position: int) -> int:
        return position - (position - seq.grid) % self.sizes.tile

    # What it leaves.

    def tile(self, seq: Sequence, end: int) -> tuple[int, int]:
        """Its tile up to `end` is launched next: the rows of its source and of its save."""
        source, save = seq.slot, -1
        awaited = seq.awaited.count(end)
        if seq.source is not None:
            source = self.sizes.slots + seq.source.row
            self._pinned.append(seq.source)
            seq.source = None
        if self.on:
            if seq.last_step < 0:  # counted once, also where it lost its slot before this
                self.queries += seq.prompt_len
                self.hits += seq.cached
                self.lost += seq.lost
            size = self.sizes.page_size
            names = seq.names[: end // size]
            gain = self._gain(seq, seq.prefill_end)
            salt = seq.request.salt
            seq.node = self.cache.extend(seq.node, names, seq.pages, seq.id, gain, salt)
            while seq.points and seq.points[0] <= end:
                if seq.points.pop(0) == end:
                    save = self._save(seq, end, awaited=awaited)
        while seq.awaited and seq.awaited[0] <= end:
            seq.awaited.pop(0)
        return source, save

    def end(self, seq: Sequence, reason: FinishReason, in_flight: bool, sound: bool) -> None:
        """A running one ends, still with its slot and pages; `in_flight`: a launched step that was
        not read may have taken its slot further. Not `sound`: what it computed, or went on from,
        is wrong. A request that failed otherwise, by its grammar, leaves its prompt to others."""
        self.drop(seq)
        if not self.on:
            return
        if not sound:
            self.cache.forget(seq.node, seq.id, seq.origin, seq.request.salt)
        elif reason is FinishReason.ERROR:
            return
        elif seq.launched >= seq.prefill_end and not self.sizes.invariant:
            self._keep_generated(seq, in_flight)

    def drop(self, seq: Sequence) -> None:
        """It will not read its source any more, it waits for nobody, and nobody for it."""
        if seq.source is not None:
            self.cache.unpin(seq.source)
            seq.source = None
        if seq.leader is not None and seq.leader_end in seq.leader.awaited:
            seq.leader.awaited.remove(seq.leader_end)
        seq.leader, seq.awaited = None, []

    def _keep_generated(self, seq: Sequence, in_flight: bool) -> None:
        settled, size = seq.launched - seq.slack, self.sizes.page_size
        end = min(len(seq.tokens), settled)
        names = page_names(seq.tokens, size, seq.names[: end // size], end)
        gain, salt = self._gain(seq, end), seq.request.salt
        seq.node = self.cache.extend(seq.node, names, seq.pages, seq.id, gain, salt)
        # Drafts behind the end lie in the ring, until a launch on top of them folds them.
        if end == settled or (self.sizes.verify and not in_flight):
            row = self._save(seq, end, answer=True)
            if row >= 0:
                self.copies.append((seq.slot, row))

    def _gain(self, seq: Sequence, end: int) -> tuple[float, float]:
        """Tokens that its state at `end` will save, and how often that is expected."""
        tokens, uses = float(end - seq.grid), 1.0
        if seq.origin is not None:
            tokens, uses = seq.origin.gain_of_next(seq.id, end)
        return tokens, uses + len(seq.awaited)

    def _save(self, seq: Sequence, end: int, answer: bool = False, awaited: int = 0) -> int:
        """The row for its state at `end`, or -1."""
        node, size = seq.node or self.cache.root_of(seq.request.salt), self.sizes.page_size
        if node.end != end - end % size:
            return -1  # there was no room for its pages
        tail = seq.tokens[node.end : end]
        page = seq.pages[end // size] if tail else -1
        before, begun = seq.left, False
        if before is None and seq.origin is not None:  # another answer to a prompt is no next turn
            before, new = seq.origin, seq.prompt_len - seq.origin.position
            begun = not answer or new > self.sizes.tile
        lineage = Lineage(before, begun, answer, awaited)
        state = self.cache.save(node, tail, page, seq.id, lineage)
        if state is None:
            return -1
        seq.left = state
        self._pinned.append(state)
        return self.sizes.slots + state.row


def _outranks(seq: Sequence, other: Sequence) -> bool:
    """Whether it must not wait for the other one."""
    return seq.request.priority > other.request.priority


def _known(seq: Sequence, position: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What penalties are to know of the tokens before: of the prompt, and generated ones."""
    params = seq.request.params
    if params.repetition == 1 and not (params.presence or params.frequency):
        return (), ()
    prompt = min(position, seq.answer_start)
    return tuple(seq.tokens[:prompt]), tuple(seq.tokens[prompt:position])
