"""Which waiting requests get a slot and pages in a step, and which running ones yield to them.

Reads slots, pages and their holders, by count; takes none of them. `waiting` and its lines give the
next request, `prefix_admission` what it resumes from; the scheduler's rules apply.
"""

from bisect import insort
from collections import Counter, deque
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field

from spark_engine.runtime.engine.policy.line import PrefillLaunch
from spark_engine.runtime.engine.policy.prefix_admission import PrefixAdmission
from spark_engine.runtime.engine.policy.prefix_trie import Hit, PageNode
from spark_engine.runtime.engine.policy.waiting import Waiting
from spark_engine.runtime.engine.pool import Pool
from spark_engine.runtime.engine.request import Status
from spark_engine.runtime.engine.sequence import Sequence
from spark_engine.runtime.engine.sizes import EngineSizes

# A quarter of the slots: of prompts in progress that a launch does not complete; and of requests
# that wait for such a prompt with a slot step. At least LEAST_OPEN, of three slots.
OPEN_SHARE, LEAST_OPEN = 4, 2


@dataclass(frozen=True, slots=True)
class Admit:
    """`seq` is to run from `hit` on, once `victims` are preempted."""

    seq: Sequence
    hit: Hit
    victims: list[Sequence]


@dataclass(slots=True)
class _Step:
    """One step's decisions so far."""

    in_flight: int  # launched, uncollected steps
    # Reserved for requests that wait for a running prefill, as are `page_count` pages.
    slots: int = 0
    page_count: int = 0
    followers: int = 0  # such requests, with or without a reservation
    victims: list[Sequence] = field(default_factory=list)  # sequences that are preempted


class Admission:
    """Admits requests. `running`, `waiting` and `fence` (what is free after a collected step)
    are the scheduler's own. `drain`: in the last step a preemption had to wait for the steps in
    flight."""

    def __init__(
        self,
        sizes: EngineSizes,
        slots: Pool,
        pages: Pool,
        prefix: PrefixAdmission,
        running: list[Sequence],
        waiting: Waiting,
        fence: deque[tuple[int, int, list[int], PageNode | None]],
    ) -> None:
        self._sizes, self._slots, self._pages = sizes, slots, pages
        self._prefix, self._running, self._waiting = prefix, running, waiting
        self._fence = fence
        self.drain = False
        self._open_most = max(1, slots.size // OPEN_SHARE, min(LEAST_OPEN, slots.size - 1))

    def choose(self, in_flight: int, tiles: int) -> Iterator[Admit]:
        """Requests that resume, and those that start prefill in a launch of `tiles` tiles.

        The caller carries out each decision before it takes the next.
        """
        waiting, step, full, self.drain = self._waiting, _Step(in_flight), False, False
        waiting.wake()
        for priority in waiting.priorities():
            for seq in [s for s in waiting.first if s.request.priority == priority]:
                if not (seq.unready or (yield from self._try(seq, step))):
                    return
            line, launch = waiting.line(priority), self._launch(priority, tiles)
            while line and not full:
                launch.last = self._slots.free - step.slots == 1
                new = line.next(launch)
                if new is None:
                    full = True
                elif new.unready:  # its grammar may take seconds, and nothing is reserved for it
                    waiting.put_off(new)
                elif not (yield from self._try(new, step)):
                    return
                elif new.status is Status.RUNNING:
                    insort(launch.remaining, self._prefix.tiles_left(new))

    def _launch(self, priority: int, tiles: int) -> PrefillLaunch:
        """The next prefill launch, as requests of one priority see it."""
        started = [s for s in self._running if s.launched < s.prefill_end]
        above = [s for s in started if s.request.priority >= priority]
        remaining = sorted(map(self._prefix.tiles_left, above))
        started = [s for s in started if s.request.priority == priority]
        return PrefillLaunch(tiles, started, remaining, self._open_most)

    def _try(self, seq: Sequence, step: _Step) -> Generator[Admit, None, bool]:
        """Admits `seq`, or reserves space while it waits for another; False where there is no
        space, and no later request is to have any."""
        hit = None
        if self._prefix.waits_until(seq) is None:
            last = self._running[-1:]  # if any sequence yields to `seq`, this one does
            can_preempt = not step.slots and any(self._yields(s, seq) for s in last)
            if self._slots.free <= step.slots and not can_preempt:
                return False
            hit = self._prefix.find(seq, self._running)
        if hit is None:
            return self._follow(seq, step)
        victims = self._make_space(seq, hit, step)
        if victims is None:
            # the page that is copied may be one too many
            hit = self._prefix.without_suffix(seq, hit)
            victims = self._make_space(seq, hit, step)
            if victims is None:
                return False
        if self._slots.free + len(victims) - step.slots == 1:
            self._waiting.line(seq.request.priority).takes_the_last_slot(seq)
        step.victims += victims
        yield Admit(seq, hit, victims)
        return True

    def _follow(self, seq: Sequence, step: _Step) -> bool:
        """`seq` waits for a running prefill, and others pass; False where too many wait so."""
        step.followers += 1
        if seq not in self._waiting.first:
            if step.followers > self._slots.size:
                self._prefix.unfollow(seq)
                return False
            self._waiting.follow(seq)
        if step.slots < self._open_most:
            step.slots += 1
            shared = (self._prefix.waits_until(seq) or 0) // self._sizes.page_size
            step.page_count += self._need(seq) - shared
        return True

    def _yields(self, victim: Sequence, seq: Sequence) -> bool:
        """True if `victim` may be preempted for `seq`: for one that let others pass, each later
        one; else those of lower priority."""
        if self._prefix.yielded(seq):
            return victim.rank > seq.rank
        return victim.request.priority < seq.request.priority

    def _make_space(self, seq: Sequence, hit: Hit, step: _Step) -> list[Sequence] | None:
        """The sequences to preempt so that `seq` can be admitted now; None: it cannot."""
        # A spare page where others run, or it is preempted at once for their next one.
        need = self._need(seq) + bool(self._running) - len(hit.nodes)
        if seq in step.victims:
            return None
        if self._slots.free > step.slots:
            if self._available(hit) >= need + step.page_count:
                return []
        if step.slots:
            return None
        victims = self._victims(seq, hit, need)
        if victims and step.in_flight:
            self.drain = True
            return None
        return victims or None

    def _available(self, hit: Hit) -> int:
        """Pages that are free, or that the cache alone keeps, without those of the hit."""
        return self._pages.free + self._pages.spare - self._pages.unused(hit.held_pages)

    def _victims(self, seq: Sequence, hit: Hit, need: int) -> list[Sequence]:
        """The fewest sequences that yield, last in order first, for a slot and `need` pages.

        Empty when that would not suffice, or when what the fence releases suffices.
        """
        slots, users = self._slots.free + len(self._fence), self._pages.users
        pages, left = self._available(hit), Counter(page for f in self._fence for page in f[2])
        own = set(hit.held_pages)
        pages += sum(n == users(page) and page not in own for page, n in left.items())
        victims: list[Sequence] = []
        for victim in reversed(self._running):
            if slots and pages >= need:
                return victims
            if not self._yields(victim, seq):
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
