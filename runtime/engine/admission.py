"""Who gets a slot and pages in a step, and who yields them. The scheduler's rules hold here.

Knows slots, pages and who holds them, by count. Which request is next is said by `waiting` and its
lines, what it can begin with by `reuse`; who leaves is the scheduler's business.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

from spark_engine.runtime.engine.line import Launch, tiles_left
from spark_engine.runtime.engine.plan import Move, StepPlan
from spark_engine.runtime.engine.pool import Pool
from spark_engine.runtime.engine.prefix_trie import Hit, Node
from spark_engine.runtime.engine.request import Status
from spark_engine.runtime.engine.reuse import Reuse
from spark_engine.runtime.engine.sequence import Sequence
from spark_engine.runtime.engine.sizes import Sizes
from spark_engine.runtime.engine.waiting import Waiting, rank_of

# A quarter of the slots: of prompts under way that a launch does not complete; and of those that
# have room kept for them while they wait to go on from such a one. At least LEAST_OPEN, of three.
OPEN_SHARE, LEAST_OPEN = 4, 2


@dataclass(slots=True)
class _Kept:
    """Slots and pages for those before that wait to go on from one that is prefilled, as far as
    room is kept for them, and how many they are."""

    slots: int = 0
    pages: int = 0
    followers: int = 0


class Admission:
    """One scheduler's. `running` and `waiting` are its own, as is `fence`: what is free once a step
    was collected; `preempt` takes from one what it holds."""

    def __init__(
        self,
        sizes: Sizes,
        slots: Pool,
        pages: Pool,
        reuse: Reuse,
        running: list[Sequence],
        waiting: Waiting,
        fence: deque[tuple[int, int, list[int], Node | None]],
        preempt: Callable[[Sequence, StepPlan], None],
    ) -> None:
        self._sizes, self._slots, self._pages = sizes, slots, pages
        self._reuse, self._running, self._waiting = reuse, running, waiting
        self._fence, self._preempt = fence, preempt
        self._open_most = max(1, slots.size // OPEN_SHARE, min(LEAST_OPEN, slots.size - 1))

    def admit(self, plan: StepPlan, in_flight: int, tiles: int) -> None:
        """Admits those that go on, and those whose prefill begins in a launch of so many tiles."""
        waiting, kept, full = self._waiting, _Kept(), False
        waiting.wake()
        for priority in waiting.priorities():
            for seq in [s for s in waiting.first if s.request.priority == priority]:
                if not (seq.unready or self._try(seq, kept, plan, in_flight)):
                    return
            line, launch = waiting.line(priority), self._launch(priority, tiles)
            while line and not full:
                launch.last = self._slots.free - kept.slots == 1
                new = line.next(launch)
                if new is None:
                    full = True
                elif new.unready:  # its grammar may take seconds, and nothing is kept for it
                    waiting.put_off(new)
                elif not self._try(new, kept, plan, in_flight):
                    return
                elif new.status is Status.RUNNING:
                    insort(launch.lefts, tiles_left(new, self._sizes.tile))

    def _launch(self, priority: int, tiles: int) -> Launch:
        """What is known of the next one, for those of a priority."""
        started = [s for s in self._running if s.launched < s.prefill_end]
        lefts = [tiles_left(s, self._sizes.tile) for s in started if s.request.priority >= priority]
        started = [s for s in started if s.request.priority == priority]
        return Launch(tiles, started, sorted(lefts), self._open_most)

    def _try(self, seq: Sequence, kept: _Kept, plan: StepPlan, in_flight: int) -> bool:
        """Admits it, or keeps room for it while it waits to go on from another; False where there
        is no room, and nobody behind it is to have any."""
        hit = None
        if not self._reuse.waits(seq):
            if self._slots.free <= kept.slots and (kept.slots or not self._yield_to(seq)):
                return False
            hit = self._reuse.find(seq, self._running)
        if hit is None:
            return self._follow(seq, kept)
        if not self._make_room(seq, hit, kept, plan, in_flight):
            # the page that is copied may be one too many
            hit = self._reuse.without_tail(seq, hit)
            if not self._make_room(seq, hit, kept, plan, in_flight):
                return False
        if self._slots.free - kept.slots == 1:
            self._waiting.line(seq.request.priority).takes_the_last_slot(seq)
        self._take(seq, hit, plan)
        return True

    def _follow(self, seq: Sequence, kept: _Kept) -> bool:
        """It waits to go on from one that runs, and others pass; False where too many do."""
        kept.followers += 1
        if seq not in self._waiting.first:
            if kept.followers > self._slots.size:
                self._reuse.drop(seq)
                seq.held_back = False
                return False
            self._waiting.follow(seq)
        if kept.slots < self._open_most:
            kept.slots += 1
            kept.pages += self._need(seq) - seq.leader_end // self._sizes.page_size
        return True

    def _take(self, seq: Sequence, hit: Hit, plan: StepPlan) -> None:
        """A slot, and pages: those of the hit and its own. Those that yielded are behind it."""
        self._waiting.leave(seq)
        seq.slot = self._slots.take()[0]
        shared = self._reuse.begin(seq, hit, self._waiting, plan)
        own = self._need(seq) - len(shared)
        self._reuse.cache.reclaim(own)
        seq.pages = shared + self._pages.take(own)
        if hit.tail_page >= 0:
            plan.page_copies.append((hit.tail_page, seq.pages[len(shared)]))
        if seq.status is Status.SWAPPED:
            pages = -(-seq.launched // self._sizes.page_size)
            plan.restores.append(Move(seq, seq.slot, tuple(seq.pages[:pages])))
        elif seq.last_step < 0:
            self._waiting.charge(seq, seq.prefill_end - seq.launched)
        seq.status = Status.RUNNING
        insort(self._running, seq, key=rank_of)
        plan.admitted.append(seq)

    def _yield_to(self, seq: Sequence) -> bool:
        """Whether anyone who runs might have to yield to it."""
        return any(_yields(victim, seq) for victim in self._running[-1:])

    def _make_room(
        self, seq: Sequence, hit: Hit, kept: _Kept, plan: StepPlan, in_flight: int
    ) -> bool:
        """Whether `seq` can be admitted now, after preempting those below it if that helps."""
        # A spare page where others run, or it is preempted at once for their next one.
        need = self._need(seq) + bool(self._running) - len(hit.nodes)
        if seq in plan.preempted:
            return False
        if self._slots.free > kept.slots and self._available(hit) >= need + kept.pages:
            return True
        if kept.slots:
            return False
        victims = self._victims(seq, hit, need)
        if not victims:
            return False
        if in_flight:
            plan.drain = True
            return False
        for victim in victims:
            self._preempt(victim, plan)
        return True

    def _available(self, hit: Hit) -> int:
        """Pages that are free, or that nobody uses, without those of the hit."""
        return self._pages.free + self._pages.spare - self._pages.unused(hit.held_pages)

    def _victims(self, seq: Sequence, hit: Hit, need: int) -> list[Sequence]:
        """The fewest of lower priority, last in order first, whose leaving makes room.

        Empty when it would not, or when what is behind the fence suffices.
        """
        slots, users = self._slots.free + len(self._fence), self._pages.users
        pages, left = self._available(hit), Counter(page for f in self._fence for page in f[2])
        own = set(hit.held_pages)
        pages += sum(n == users(page) and page not in own for page, n in left.items())
        victims: list[Sequence] = []
        for victim in reversed(self._running):
            if slots and pages >= need:
                return victims
            if not _yields(victim, seq):
                return []
            victims.append(victim)
            slots += 1
            for page in victim.pages:
                left[page] += 1
                pages += left[page] == users(page) and page not in own
        alone = self._need(seq) - len(hit.nodes)
        return victims if slots and pages >= alone else []

    def _need(self, seq: Sequence) -> int:
        return -(-seq.admission_len // self._sizes.page_size)


def _yields(victim: Sequence, seq: Sequence) -> bool:
    """To one that let others pass, all those yield that came later."""
    if seq.held_back:
        return victim.rank > seq.rank
    return victim.request.priority < seq.request.priority
