"""Where a prompt resumes, which running prefill it waits for, where its states are snapshotted.

Between the scheduler, which decides when, and the prefix cache, which stores what there is. A page
can be shared from the launch that fills it: every reader is launched later, on the same stream.
What it knows of a sequence is in a `PrefixUse`, which no other module writes.

- States are kept where others are likely to resume: at a prompt's marks, or else before its last
  tile; at every EVERY tokens; where it differs from cached or waiting prompts; at its end.
- A request that can resume from a running prefill waits for it, and others pass.
- An engine with invariant bits reuses only prefill on the grid from position 0; others also reuse
  generated tokens, to the token.
"""

from bisect import insort
from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

from spark_engine.runtime.engine.policy.page_names import DigestRange, page_names
from spark_engine.runtime.engine.policy.prefix_cache import PrefixCache
from spark_engine.runtime.engine.policy.prefix_trie import CachedState, Hit, Lineage, PageNode
from spark_engine.runtime.engine.policy.waiting import Waiting
from spark_engine.runtime.engine.pool import Pool
from spark_engine.runtime.engine.request import FinishReason, Status
from spark_engine.runtime.engine.sequence import Sequence
from spark_engine.runtime.engine.sizes import EngineSizes

EVERY = 4096  # tokens
WORDS = 4  # tokens of an image that have its whole digest (`Sequence.content`)
LOOK = 16  # waiting requests that a new one is compared with
NO_HIT = Hit(0, (), None, -1, 0)


@dataclass(slots=True, eq=False)
class PrefixUse:
    """One unfinished request's use of the prefix cache."""

    names: list[bytes] = field(default_factory=list)  # of full pages; of the prompt's while it runs
    grid: int = 0  # start of its first tile; its tiles end at multiples of a tile after it
    source: CachedState | None = None  # start of its next tile; None once launched, and at 0
    resumed_from: CachedState | None = None  # None at position 0
    last_snapshot: CachedState | None = None  # the last state of it that was kept
    snapshot_positions: list[int] = field(default_factory=list)  # of states to keep, ascending
    node: PageNode | None = None  # the deepest of its pages
    leader: Sequence | None = None  # the running prefill that it waits for, to resume from it
    leader_end: int = 0  # the position up to which it waits
    yielded: bool = False  # it let others pass for that
    waiter_positions: list[int] = field(default_factory=list)  # ends of waits for it, ascending
    tokens_without_state: int = 0  # found in pages beyond the state that it resumed from

    def keep_state_at(self, position: int) -> None:
        if position not in self.snapshot_positions:
            insort(self.snapshot_positions, position)


class PrefixAdmission:
    """Decides where prompts resume. `copies`: (from, to) rows to copy before `release_pins`."""

    def __init__(self, sizes: EngineSizes, pages: Pool) -> None:
        self.sizes = sizes
        self.rows = Pool("snapshot", sizes.snapshots)
        own = sizes.page_size, sizes.page_bytes, sizes.snapshot_bytes, sizes.cache_bytes
        self.cache = PrefixCache(pages, self.rows, *own)
        self.on = sizes.cache_bytes > 0 and (sizes.snapshots > 0 or sizes.snapshot_bytes == 0)
        self.queries = self.hits = self.lost = 0  # tokens
        self.copies: list[tuple[int, int]] = []
        self.copied: list[int] = []  # pages in no table that a planned launch reads
        # What ended requests left, and resumed from where that was wrong: for copies on a disk.
        self.ended: deque[tuple[PageNode | None, CachedState | None]] = deque(maxlen=0)
        self.rejected: deque[CachedState] = deque(maxlen=0)
        self._uses: dict[int, PrefixUse] = {}  # by sequence id
        self._pages = pages
        self._last: tuple[tuple[int, int, int], Hit] | None = None
        self._pinned: list[CachedState] = []  # written or read by what is launched next

    def stats(self) -> dict[str, int]:
        """Tokens of prompts: looked up, found, found without a state to resume from; and sizes."""
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

    def release_pins(self) -> None:
        """All that was planned is launched, and `copies` are made."""
        self.copies = []
        while self._pinned:
            self.cache.unpin(self._pinned.pop())
        self._pages.give(self.copied)
        self.copied = []

    def add(self, seq: Sequence, running: Iterable[Sequence]) -> int:
        """Names a new request's pages, and has a state kept where it parts from a running prefill.
        Returns how many of its tokens would be computed now."""
        use = self._uses[seq.id] = PrefixUse()
        if not self.on:
            return len(seq.tokens)
        use.names = self.names_of(seq)
        hit = self._match(seq, use)
        leader, end = self._leader(seq, hit, running)
        if leader is not None:
            self._uses[leader.id].keep_state_at(end)
        return len(seq.tokens) - hit.position

    def _leader(
        self, seq: Sequence, hit: Hit, running: Iterable[Sequence]
    ) -> tuple[Sequence | None, int]:
        """The running prefill that will reach a position to resume from deeper than the hit, and
        that position."""
        found, best = None, hit.position + self.sizes.page_size - 1
        for leader in running:
            if leader.prefilling and leader.request.priority >= seq.request.priority:
                end = self._divergence(leader, seq)
                if end > max(leader.launched, best):
                    found, best = leader, end
        return found, best

    def waits_until(self, seq: Sequence) -> int | None:
        """The position up to which its leader is still to be launched; None: it does not wait."""
        use = self._uses[seq.id]
        if use.leader is not None and use.leader.status is Status.RUNNING:
            if use.leader.launched < use.leader_end:
                return use.leader_end
        use.leader = None
        return None

    def yielded(self, seq: Sequence) -> bool:
        """True if the request let others pass while it waited for a leader."""
        return self._uses[seq.id].yielded

    def tiles_left(self, seq: Sequence) -> int:
        """Tiles of its prefill that are not launched; where others wait, up to the first wait."""
        end = next(iter(self._uses[seq.id].waiter_positions), seq.prefill_end)
        return -(-(end - seq.launched) // self.sizes.tile)

    def find(self, seq: Sequence, running: Iterable[Sequence]) -> Hit | None:
        """The hit from which the request resumes; None: it waits for a prefill (`waits_until`)."""
        if not self.on or seq.status is Status.SWAPPED:
            return NO_HIT
        use = self._uses[seq.id]
        if seq.prefill_end > seq.prompt_len:  # it was preempted
            use.names = self.names_of(seq, use.names)
        hit = self._match(seq, use)
        use.leader, use.leader_end = self._leader(seq, hit, running)
        if use.leader is None:
            return hit
        use.yielded = True
        ahead = self._uses[use.leader.id]
        insort(ahead.waiter_positions, use.leader_end)
        ahead.keep_state_at(use.leader_end)
        return None

    def _match(self, seq: Sequence, use: PrefixUse) -> Hit:
        """The cache's best hit; looked up again only where something changed."""
        known, key = self._last, (seq.id, seq.prefill_end, self.cache.version)
        if known is None or known[0] != key:
            salt, most = seq.request.salt, seq.prefill_end - 1
            hit = self.cache.match(seq.content, use.names, most, salt=salt)
            self._last = known = key, hit
        return known[1]

    def without_suffix(self, seq: Sequence, hit: Hit) -> Hit:
        """The next best hit that ends at a page's end, where no page is copied."""
        if hit.suffix_page < 0:
            return hit
        most, names = hit.position - hit.position % self.sizes.page_size, self._uses[seq.id].names
        return self.cache.match(seq.content, names, most, suffixes=False, salt=seq.request.salt)

    def start(self, seq: Sequence, hit: Hit, waiting: Waiting) -> list[int]:
        """Uses the hit for `seq`, which has its slot and runs from `hit.position` on; returns the
        pages that it shares, none for one that was swapped out."""
        if not self.on or seq.status is Status.SWAPPED:
            return []
        use = self._uses[seq.id]
        if seq.last_step < 0:
            use.tokens_without_state = hit.kv_position - hit.position
        self.cache.take(hit)
        use.grid = hit.position
        use.source = use.resumed_from = hit.snapshot
        use.node = hit.nodes[-1] if hit.nodes else None
        if hit.suffix_page >= 0:
            self._pages.share([hit.suffix_page])
            self.copied.append(hit.suffix_page)
        use.snapshot_positions = self._snapshot_positions(seq, hit, waiting)
        return hit.pages

    def _snapshot_positions(self, seq: Sequence, hit: Hit, waiting: Waiting) -> list[int]:
        last, first = seq.prefill_end - 1, hit.position + self.sizes.tile
        wanted = set(seq.request.marks or (seq.prompt_len - 1,))
        wanted.add(hit.kv_position)
        wanted.update(range(first - first % EVERY + EVERY, last, EVERY))
        wanted.update(self._divergence(seq, other) for other in waiting.oldest(LOOK))
        ends = {self._tile_end(hit.position, min(position, last)) for position in wanted}
        return sorted(end for end in ends if end >= first)

    def _divergence(self, leader: Sequence, seq: Sequence) -> int:
        """The last end of a tile of the leader's from which `seq` can resume."""
        ahead = self._uses[leader.id]
        a, b = ahead.names, self._uses[seq.id].names
        low, high = 0, min(len(a), len(b))
        if high and (a[0] != b[0] or leader.request.salt != seq.request.salt):
            high = 0
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if a[low:middle] == b[low:middle] else (low, middle - 1)
        position = min(low * self.sizes.page_size, seq.prefill_end - 1)
        return self._tile_end(ahead.grid, position)

    def _tile_end(self, grid: int, position: int) -> int:
        return position - (position - grid) % self.sizes.tile

    def tile(self, seq: Sequence, end: int) -> tuple[int, int]:
        """Rows of the source and the save of the request's next tile, which ends at `end`."""
        if not self.on:
            return seq.slot, -1
        use, size, source, save = self._uses[seq.id], self.sizes.page_size, seq.slot, -1
        waiters = use.waiter_positions.count(end)
        if use.source is not None:
            source = self.sizes.slots + use.source.row
            self._pinned.append(use.source)
            use.source = None
        if seq.last_step < 0:  # counted once, also where it lost its slot before this
            self.queries += seq.prompt_len
            self.hits += seq.cached
            self.lost += use.tokens_without_state
        self._extend(seq, use, use.names[: end // size], seq.prefill_end)
        while use.snapshot_positions and use.snapshot_positions[0] <= end:
            if use.snapshot_positions.pop(0) == end:
                save = self._save(seq, use, end, waiters=waiters)
        while use.waiter_positions and use.waiter_positions[0] <= end:
            use.waiter_positions.pop(0)
        return source, save

    def reads_snapshot(self, seq: Sequence) -> bool:
        """True if the next tile starts from a cached state, not from the slot's."""
        return self._uses[seq.id].source is not None

    def end(
        self, seq: Sequence, reason: FinishReason, in_flight: bool, sound: bool
    ) -> PageNode | None:
        """Ends a request that still has its slot and pages, if any; returns its deepest node.

        `in_flight`: a launched step that was not read may have taken its slot further. Not `sound`:
        its tokens and what it resumed from are wrong. A request that failed otherwise, by its
        grammar, leaves its prompt to others.
        """
        self.drop(seq)
        use = self._uses.pop(seq.id)
        if seq.slot < 0 or not self.on:
            return None
        if not sound:
            self.cache.forget(use.node, seq.id, use.resumed_from, seq.request.salt)
            self.rejected.extend([use.resumed_from] if use.resumed_from else [])
        elif reason is not FinishReason.ERROR and not seq.prefilling:
            if not self.sizes.invariant:
                self._keep_generated(seq, use, in_flight)
            self.ended.append((use.node, use.last_snapshot or use.resumed_from))
        return use.node

    def drop(self, seq: Sequence) -> None:
        """Releases the request's source; it waits for no leader, and no request waits for it."""
        use = self._uses[seq.id]
        if use.source is not None:
            self.cache.unpin(use.source)
            use.source = None
        ahead = None if use.leader is None else self._uses.get(use.leader.id)
        if ahead is not None and use.leader_end in ahead.waiter_positions:
            ahead.waiter_positions.remove(use.leader_end)
        use.leader, use.waiter_positions = None, []

    def unfollow(self, seq: Sequence) -> None:
        self.drop(seq)
        self._uses[seq.id].yielded = False

    def swap_out(self, seq: Sequence) -> PageNode | None:
        """The request loses its pages and resumes from a copy; returns their last node."""
        use = self._uses[seq.id]
        node, use.node = use.node, None
        return node

    def restart(self, seq: Sequence) -> None:
        use = self._uses[seq.id]
        use.grid, use.snapshot_positions = 0, []
        use.node = use.last_snapshot = None

    def _keep_generated(self, seq: Sequence, use: PrefixUse, in_flight: bool) -> None:
        certain, size = seq.launched - seq.unverified, self.sizes.page_size
        end = min(len(seq.tokens), certain)
        names = self.names_of(seq, use.names[: end // size], end)
        self._extend(seq, use, names, end)
        # Drafts after the end are in the ring, until a launch on top of them folds them.
        if end == certain or (self.sizes.verify and not in_flight):
            row = self._save(seq, use, end, answer=True)
            if row >= 0:
                self.copies.append((seq.slot, row))

    def names_of(
        self, seq: Sequence, known: Items[bytes] = (), end: int | None = None
    ) -> list[bytes]:
        """Of its full pages; those that show an image have its digest."""
        digests = [DigestRange(i.start, i.end, i.digest) for i in seq.request.images]
        return page_names(seq.content, self.sizes.page_size, known, end, digests)

    def _extend(self, seq: Sequence, use: PrefixUse, names: list[bytes], end: int) -> None:
        """Adds its pages of these names to the trie. Their worth is that of its state at `end`:
        the tokens that this will save, and how often that is expected."""
        tokens, uses = float(end - use.grid), 1.0
        if use.resumed_from is not None:
            tokens, uses = use.resumed_from.gain_of_next(seq.id, end)
        gain, salt = (tokens, uses + len(use.waiter_positions)), seq.request.salt
        use.node = self.cache.extend(use.node, names, seq.pages, seq.id, gain, salt)

    def _save(
        self, seq: Sequence, use: PrefixUse, end: int, answer: bool = False, waiters: int = 0
    ) -> int:
        """The row for its state at `end`, or -1."""
        node, size = use.node or self.cache.root_of(seq.request.salt), self.sizes.page_size
        if node.end != end - end % size:
            return -1  # the budget did not suffice for its pages
        if any(0 < min(i.end, end) - max(i.start, node.end) < WORDS for i in seq.request.images):
            return -1  # too little of an image to know it by
        suffix = seq.content[node.end : end]
        page = seq.pages[end // size] if suffix else -1
        before, resumed = use.last_snapshot, False
        if before is None and use.resumed_from is not None:
            before, new = use.resumed_from, seq.prompt_len - use.resumed_from.position
            resumed = not answer or new > self.sizes.tile  # else another answer to one prompt
        lineage = Lineage(before, resumed, answer, waiters)
        state = self.cache.save(node, suffix, page, seq.id, lineage)
        if state is None:
            return -1
        use.last_snapshot = state
        self._pinned.append(state)
        return self.sizes.slots + state.row
