"""The prefix cache against a model that looks at every state it keeps, page by page and row by row.

Pages and rows hold tokens here: what was written, or poison once they were free.
"""

import random
from array import array
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_engine.runtime.engine.policy.page_names import page_names
from spark_engine.runtime.engine.policy.prefix_cache import PrefixCache
from spark_engine.runtime.engine.policy.prefix_eviction import HYSTERESIS, TAU, EvictionScore
from spark_engine.runtime.engine.policy.prefix_trie import CachedState, Hit, PageNode
from spark_engine.runtime.engine.pool import Pool
from tests.runtime.engine.invariants import check_cache, check_pool, kept_pages
from tests.runtime.generated import tried

PAGE, PAGE_BYTES, ROW_BYTES = 4, 10, 25


@dataclass
class Running:
    """A sequence: its tokens, the pages it uses, and its deepest node."""

    number: int
    tokens: list[int]
    pages: list[int]
    node: PageNode | None
    pinned: list[CachedState] = field(default_factory=list)


class World:
    """A cache, what its pages and rows hold, and what runs."""

    def __init__(self, pages: int, rows: int, budget: int) -> None:
        self.pages, self.rows = Pool("page", pages), Pool("snapshot", rows)
        self.now = 0.0
        sizes = PAGE, PAGE_BYTES, ROW_BYTES, budget
        self.cache = PrefixCache(self.pages, self.rows, *sizes, clock=lambda: self.now)
        self.held: dict[int, list[int]] = {}  # tokens by page
        self.state: dict[int, tuple[int, ...]] = {}  # tokens by row
        self.running: list[Running] = []
        self._next = 0

    def match(self, tokens: list[int]) -> Hit:
        return self.cache.match(tokens, names_of(tokens), len(tokens) - 1)

    def begin(self, tokens: list[int]) -> Running | None:
        """One that begins with what there is, if its pages are to be had."""
        hit = self.match(tokens)
        self.cache.take(hit)
        tail = [hit.suffix_page] if hit.suffix_page >= 0 else []
        self.pages.share(tail)
        own = -(-len(tokens) // PAGE) - len(hit.nodes)
        if not self.cache.reclaim(own):
            self.pages.give([*hit.pages, *tail])
            if hit.snapshot:
                self.cache.unpin(hit.snapshot)
            self.cache.released(hit.nodes[-1] if hit.nodes else None)
            self.poison()
            return None
        pages = [*hit.pages, *self.pages.take(own)]
        if hit.snapshot:
            assert self.state[hit.snapshot.row] == tuple(tokens[: hit.position])
            if tail:
                kept = hit.position % PAGE
                self.held[pages[len(hit.nodes)]] = self.held[tail[0]][:kept]
            self.pages.give(tail)
            self.cache.unpin(hit.snapshot)
        for position in range(hit.position, len(tokens)):
            page = self.held.setdefault(pages[position // PAGE], [])
            del page[position % PAGE :]
            page.append(tokens[position])
        seq = Running(self._next, tokens, pages, hit.nodes[-1] if hit.nodes else None)
        self._next += 1
        self.running.append(seq)
        self.poison()
        return seq

    def extend(self, seq: Running, length: int) -> None:
        names = names_of(seq.tokens)[: length // PAGE]
        seq.node = self.cache.extend(seq.node, names, seq.pages, seq.number)
        self.poison()

    def save(self, seq: Running, position: int) -> CachedState | None:
        """At a position behind its deepest node, at most a page."""
        assert seq.node is not None
        tail = seq.tokens[seq.node.end : position]
        page = seq.pages[seq.node.end // PAGE] if tail else -1
        state = self.cache.save(seq.node, tail, page, seq.number)
        self.poison()
        if state:
            self.state[state.row] = tuple(seq.tokens[:position])
            seq.pinned.append(state)
        return state

    def unpin(self, seq: Running) -> None:
        while seq.pinned:
            self.cache.unpin(seq.pinned.pop())
        self.poison()

    def end(self, seq: Running) -> None:
        self.unpin(seq)
        self.running.remove(seq)
        self.pages.give(seq.pages)
        self.cache.released(seq.node)
        self.poison()

    def poison(self) -> None:
        for page in self.pages._free:
            self.held[page] = [-1] * PAGE
        for row in self.rows._free:
            self.state[row] = (-1,)

    def check(self) -> None:
        check_cache(self.cache)
        users = [page for seq in self.running for page in seq.pages]
        check_pool(self.pages, users, kept_pages(self.cache))
        for node in self.cache._nodes:
            assert tuple(self.held[node.page]) == beginning(node)[-PAGE:]
            assert node.end == len(beginning(node))
        for state in self.cache._states:
            suffix = [*state.suffix_tokens]
            assert self.state[state.row] == (*beginning(state.node), *suffix)
            assert not suffix or self.held[state.page][: len(suffix)] == suffix
        order = self.cache._order
        known = {n for _, _, n in order._leaves} | order._used_leaves
        for node in self.cache._nodes:
            assert not node.bare or node in known or self.pages.users(node.page)
        for seq in self.running:
            held = [t for page in seq.pages for t in self.held[page]]
            assert held[: len(seq.tokens)] == seq.tokens

    def deepest(self, tokens: list[int]) -> tuple[int, int]:
        """(position, kv_position) of the best hit, found by looking at everything."""
        most = len(tokens) - 1
        states = [
            s.position
            for s in self.cache._states
            if s.position <= most
            and (*beginning(s.node), *s.suffix_tokens) == tuple(tokens[: s.position])
        ]
        nodes = [
            n.end
            for n in self.cache._nodes
            if n.end <= most and beginning(n) == tuple(tokens[: n.end])
        ]
        position = max(states, default=0)
        return position, max([position, *nodes])


def names_of(tokens: list[int]) -> list[bytes]:
    return page_names(array("i", tokens), PAGE)


def beginning(node: PageNode) -> tuple[int, ...]:
    return tuple(array("i", b"".join(reversed([one.name for one in node.path()]))))


def play(world: World, rng: random.Random, steps: int) -> None:
    for _ in range(steps):
        world.now += rng.choice((0, 1, 1, TAU))
        tokens = [rng.randrange(2) for _ in range(rng.choice((3, 4, 5, 9, 16, 21)))]
        if rng.random() < 0.7 and world.running:
            shared = rng.choice(world.running).tokens
            tokens = shared[: rng.randrange(len(shared) + 1)] + tokens[: rng.randrange(1, 9)]
        hit = world.match(tokens)
        assert (hit.position, hit.kv_position) == world.deepest(tokens)
        what, seq = rng.randrange(8), rng.choice(world.running) if world.running else None
        if what < 3 or seq is None:
            world.begin(tokens)
        elif what < 5:
            world.extend(seq, rng.randrange(len(seq.tokens) + 1))
            most = min(len(seq.tokens), seq.node.end + PAGE - 1) if seq.node else 0
            if seq.node and most:
                world.save(seq, max(1, rng.randrange(seq.node.end, most + 1)))
        elif what < 6:
            world.unpin(seq)
        elif what < 7 and rng.random() < 0.2:
            world.cache.forget(seq.node, seq.number)
            world.poison()
        else:
            world.end(seq)
        world.check()


@tried(3)
@given(
    seed=st.integers(0, 2**32),
    pages=st.integers(3, 30),
    rows=st.integers(0, 7),
    budget=st.sampled_from((0, 60, 150, 1 << 20)),
)
def test_what_is_found_is_what_was_written(seed: int, pages: int, rows: int, budget: int) -> None:
    world = World(pages, rows, budget)
    play(world, random.Random(seed), 40)
    while world.running:
        world.end(world.running[0])
        world.check()
    assert world.pages.free + world.pages.spare == pages, "every page can be taken"
    assert world.cache.reclaim(pages) and world.cache.snapshots == len(
        world.cache.root_of(b"").suffix_states
    )
    world.cache.clear()
    world.check()
    assert (world.pages.free, world.rows.free, world.cache.used_bytes) == (pages, rows, 0)


def story(world: World, tokens: list[int], *positions: int) -> Running:
    """One that was computed, with states at these positions; it still runs."""
    seq = world.begin(tokens)
    assert seq
    for position in sorted(positions):
        world.extend(seq, position)
        assert world.save(seq, position)
        world.unpin(seq)
    world.extend(seq, len(tokens))
    return seq


def test_the_least_worth_goes_first() -> None:
    """A state that saves more, one that was used, and one that is newer stay longer."""
    world = World(60, 3, 1 << 20)
    short, long, used = ([n, *range(20)] for n in (101, 102, 103))
    world.end(story(world, short, 4))
    world.end(story(world, long, 16))
    world.end(story(world, used, 4))
    started = world.begin([*used[:4], 99])
    assert started and world.match(used).snapshot.hits == 1  # type: ignore[union-attr]
    world.end(started)
    order = []
    for n in range(2):
        world.now += 2 * HYSTERESIS * TAU
        world.end(story(world, [110 + n, *range(12)], 12))
        left = [t[0] for t in (short, long, used) if world.match(t).position]
        order.append(left)
    assert order == [[102, 103], [102]]
    assert world.cache.counts.evicted_snapshots == 2
    world.now += 100 * TAU
    world.end(story(world, short, 4))
    assert world.match(short).position == 4, "time alone makes the old ones worth less"


def test_a_state_worth_less_than_all_others_is_not_kept() -> None:
    world = World(60, 1, 1 << 20)
    world.end(story(world, [*range(40)], 40))
    seq = story(world, [50, 51, 52, 53, 54])
    world.extend(seq, 4)
    assert world.save(seq, 4) is None and world.match([*range(41)]).position == 40


def test_a_row_that_is_still_to_be_read_is_not_given_to_another() -> None:
    world = World(12, 1, 1 << 20)
    seq = story(world, [*range(9)], 8)
    hit = world.match([*range(10)])
    assert hit.snapshot
    world.cache.take(hit)
    world.now += 100 * TAU
    other = story(world, [*range(50, 60)])
    world.extend(other, 8)
    assert world.save(other, 8) is None and world.match([*range(10)]).position == 8
    world.end(seq), world.end(other)
    world.cache.clear()
    assert world.rows.free == 0, "given up, and still to be read"
    world.cache.unpin(hit.snapshot)
    assert world.rows.free == 1
    world.pages.give(hit.pages)
    assert world.pages.free == 12


def test_pages_that_a_running_sequence_needs_are_given_up() -> None:
    world = World(6, 4, 1 << 20)
    world.end(story(world, [*range(16)], 8, 16))
    assert (world.pages.free, world.pages.spare) == (2, 4)
    kept = world.begin([*range(8), 99])
    assert kept and kept.pages[:2] == [n.page for n in world.match([*range(9)]).nodes]
    assert world.begin([7] * 16) is None, "the two that are used stay"
    seq = world.begin([7] * 12)
    assert seq and world.pages.free == 0 and world.match([*range(17)]).position == 8
    world.check()


def test_giving_up_many_states_looks_at_each_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    world, count, looks = World(620, 600, 1 << 20), 300, 0
    for n in range(count):
        world.now += 1
        world.end(story(world, [n, n + 1, n + 2, n + 3, n, n], 4))
    worth = EvictionScore.of_state

    def counted(worths: EvictionScore, state: CachedState) -> float:
        nonlocal looks
        looks += 1
        return worth(worths, state)

    monkeypatch.setattr(EvictionScore, "of_state", counted)
    assert world.pages.free == 620 - count and world.cache.reclaim(610)
    assert world.cache.snapshots == 10 and looks <= 2 * count
    assert world.match([count - 1, *range(count, count + 9)]).position == 4, "the latest stay"
    world.check()


def test_an_unused_conversation_is_evicted_whole_before_a_used_one() -> None:
    world = World(12, 9, 1 << 20)
    world.end(story(world, [*range(24)], 8, 16, 24))
    world.now += 2 * TAU
    world.end(story(world, [*range(50, 66)], 16))
    assert world.cache.reclaim(8)
    assert world.match([*range(50, 70)]).position == 16 and world.cache.snapshots == 1
    world.check()


def test_a_page_that_is_used_is_not_evicted_for_one_that_is_not() -> None:
    world = World(12, 4, 1 << 20)
    world.end(story(world, [*range(9)], 8))
    hit = world.match([*range(10)])
    running = world.begin([*range(10)])
    world.now += 1
    world.end(story(world, [7] * 9))
    assert running and hit.snapshot and world.pages.spare == 2
    world.cache._drop_state(hit.snapshot)  # now nothing hangs on the older page
    assert world.cache.reclaim(world.pages.free + 2)
    assert world.match([*range(10)]).kv_position == 8 and world.match([7] * 9).kv_position == 0


def test_a_leaf_that_was_being_copied_is_evicted_when_its_turn_comes() -> None:
    world = World(20, 9, 20)
    seq = story(world, [*range(9)])
    world.end(seq)
    world.pages.share([seq.pages[1]])  # a reader holds it while memory is needed
    assert not world.cache._make_space(10, 1e9)
    world.pages.give([seq.pages[1]])
    assert world.cache._make_space(20, 1e9) and not world.cache._nodes
    world.check()


def test_a_page_that_a_state_keeps_too_is_not_replaced_beyond_the_budget() -> None:
    world = World(20, 9, 55)
    first, other = world.begin([*range(9)]), world.begin([9] * 5)
    again = Running(99, [*range(9)], world.pages.take(3), None)  # started before there was a state
    world.held |= {page: [*range(4 * i, min(4 * i + 4, 9))] for i, page in enumerate(again.pages)}
    assert first and other
    world.extend(first, 4)
    assert world.save(first, 6)
    world.extend(first, 8), world.extend(other, 4), world.end(first)
    assert world.cache.used_bytes == 55
    world.running.append(again)
    world.extend(again, 8)
    world.check()


def test_what_one_that_went_wrong_computed_is_dropped() -> None:
    world = World(30, 9, 1 << 20)
    world.end(story(world, [*range(13)], 4))
    wrong = story(world, [*range(13)], 12)
    mine = [*range(4), *range(60, 70)]
    bad = story(world, mine, 8)
    after = story(world, [*mine, 1, 2], 12)
    assert wrong.node and world.match([*mine, 1, 2, 3]).position == 12
    world.cache.forget(wrong.node, wrong.number)
    world.cache.forget(bad.node, bad.number)
    world.check()
    hit = world.match([*range(14)])
    assert (hit.position, hit.kv_position) == (4, 4), "behind that its pages are dropped"
    assert world.match([*mine, 1, 2, 3]).kv_position == 4, "and so is what continues from its pages"
    for seq in (wrong, bad, after):
        world.end(seq)
    world.check()


def test_the_budget_of_bytes_is_for_pages_and_rows() -> None:
    world = World(60, 9, 3 * PAGE_BYTES + ROW_BYTES)
    seq = world.begin([*range(30)])
    assert seq
    world.extend(seq, 12)
    assert world.save(seq, 12) and world.cache.used_bytes == world.cache.budget
    world.extend(seq, 30)
    assert seq.node and seq.node.end == 12, "what cannot be evicted is not taken"
    world.end(seq)
    world.now += 100 * TAU
    world.end(story(world, [*range(50, 60)], 8))
    assert world.match([*range(30)]).position == 0 and world.cache.used_bytes <= world.cache.budget


def test_the_next_of_a_conversation_is_known_by_its_tokens_once_pages_were_made_again() -> None:
    def below(node: PageNode | None, name: bytes) -> PageNode:
        return PageNode(name, node, node.end + 1 if node else 0, -1, -1)

    root = below(None, b"")
    started = below(root, b"a")
    first, again, other = (below(started, name) for name in (b"b", b"b", b"c"))
    state, later = (CachedState(n, n.end, (), -1, 0, 0.0) for n in (started, first))
    assert state.is_followed_by(other), "the first is the next"
    state.next_in_conversation = later
    for node in (first, again, below(again, b"d")):
        assert state.is_followed_by(node)
    for node in (other, started, below(below(root, b"c"), b"b"), below(other, b"b")):
        assert not state.is_followed_by(node)
