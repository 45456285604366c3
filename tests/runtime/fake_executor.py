"""A tiny executor: each answer is a hash of all the states it is given.

It writes what it is fed into pages, slots and `token_counts`, reads all of it back through the page
table, and hashes that with the sampling tables into the next token: a wrong slot, a stale page,
a token dropped or doubled, another image's row or another place changes the answer. Launches and
copies run as late as the contract allows, at a wait; tables alone are read at the launch. Inert
rows scribble on the scratch rows.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from spark_engine import interface
from spark_engine.manifest import IMAGE, PAGE, SEQUENCE, SLOT, StateInfo
from spark_engine.op import Attrs
from spark_engine.plugins.ops.drafts import match_drafts
from spark_engine.runtime.engine.engine import Engine
from spark_engine.runtime.engine.load import Loaded
from spark_engine.runtime.executors.executor import Specs, Wait
from spark_engine.runtime.executors.memory import BucketKey, HostStates, Pairs, Snapshot
from spark_engine.tensors import Array, DType, TensorSpec
from spark_engine.vision import IMAGE_ROWS, ROW_PATCHES, VISION, VisionInfo

VOCAB = 61
EOS = (3, 7)
VISION_INFO = VisionInfo(16, 2, 1024, 16 * 1024, (0.5,) * 3, (0.5,) * 3, VOCAB - 1, 1, 2)
TOWERS = (6, 16)  # rows of the tower's buckets
HEADLESS = 1  # `limits.suffix` of fakes without a draft head
BLOCKS, BOTH = (
    4,
    6,
)  # `limits.top_logprobs` of fakes with a block drafter, in its place or next to it
HEAD_PAGES, BLOCK_PAGES = "mtp.k_pages", "dflash.k_pages"
_WORD = (1 << 64) - 1
_TABLES = ("prompt_lens", "sampling_f", "sampling_i", "bias_ids", "bias_values")
_WEIGHTS = (3, 0x1F123BB5)  # of a token and its position
_POWERS = np.cumprod(np.full(4096, 0x9E3779B97F4A7C15, np.uint64))


def fake_states(limits: interface.Limits) -> tuple[StateInfo, ...]:
    """States of a model with one attention layer and one recurrent layer.

    With drafts the recurrent ones are rings by position, from which a rejected token is never
    read: `conv_state` the latest tokens, `gdn_ring` those behind `gdn_state`, which is that before
    the position in the ring's last record. The head's pages hold the token after each position, a
    block drafter's the token at it.
    """
    rows, pages, drafts = limits.sequence_rows, limits.pages + 1, limits.drafts
    seq = [
        TensorSpec("layers.0.conv_state", DType.I64, (rows, 3 + drafts)),
        TensorSpec("layers.0.gdn_state", DType.I64, (rows, 1)),
    ]
    paged = ["layers.1.k_pages"]
    if drafts:
        seq.append(TensorSpec("layers.0.gdn_ring", DType.I64, (rows, drafts + 2, 2)))
    if drafts and limits.suffix != HEADLESS:
        paged += head_pages(limits)
    kv = [TensorSpec(name, DType.I64, (pages, limits.page_size, 2)) for name in paged]
    kv += [interface.id_state(limits)] if limits.suffix else []
    images = [TensorSpec(IMAGE_ROWS, DType.I64, (limits.image_rows + 1, 1))]
    units = (SLOT, interface.common_states(limits)), (SEQUENCE, seq), (PAGE, kv)
    units += ((IMAGE, images),) if limits.image_rows else ()
    return tuple(StateInfo(spec, unit) for unit, specs in units for spec in specs)


def head_pages(limits: interface.Limits) -> tuple[str, ...]:
    """The pages of the draft head and of a block drafter, of those that there are."""
    both = {BLOCKS: (BLOCK_PAGES,), BOTH: (HEAD_PAGES, BLOCK_PAGES)}
    return both.get(limits.top_logprobs, (HEAD_PAGES,))


@dataclass
class Device:
    """The launches of one engine in their order, not yet run."""

    pending: list[Callable[[], None]] = field(default_factory=list)
    lazy: bool = True
    store: FakeStates | None = None

    def launch(self, work: Callable[[], None]) -> Wait:
        self.pending.append(work)
        wait = lambda: self._run_through(work)  # noqa: E731
        if not self.lazy:
            wait()
        return wait

    def finish(self) -> None:
        while self.pending:
            self.pending.pop(0)()

    def _run_through(self, work: Callable[[], None]) -> None:
        while work in self.pending:
            self.pending.pop(0)()


class FakeStates(HostStates):
    """States that are copied when the launches before have run, like a device's."""

    def __init__(self, states: Iterable[StateInfo], device: Device) -> None:
        super().__init__(states)
        self.device = device
        self.writes = 0  # rows and pages that were copied

    def copy_rows(self, pairs: Pairs) -> None:
        self._check(pairs)
        self.device.launch(partial(super().copy_rows, tuple(pairs)))

    def copy_pages(self, pairs: Pairs) -> None:
        self._check(pairs)
        self.device.launch(partial(super().copy_pages, tuple(pairs)))

    def set_counts(self, slot: int, ids: Iterable[int], generated: Iterable[int] = ()) -> None:
        self.device.launch(partial(super().set_counts, slot, tuple(ids), tuple(generated)))

    def save_prefix(
        self, pages: Iterable[int], names: Collection[str] = (), row: int = 0
    ) -> Snapshot:
        self.device.finish()
        return super().save_prefix(pages, names, row)

    def restore(self, snapshot: Snapshot, slot: int, pages: Iterable[int]) -> None:
        self.device.finish()
        super().restore(snapshot, slot, pages)

    def _check(self, pairs: Pairs) -> None:
        sources, targets = [a for a, _ in pairs], [b for _, b in pairs]
        assert len({*targets}) == len(targets) and not {*targets} & {*sources}, pairs
        self.writes += len(pairs)


class FakeExecutor:
    """One bucket. `poison_rate` n makes about every n-th answer non-finite (0: none)."""

    prefill_mark = 0  # of what prefill writes: other bits than those of decode

    def __init__(
        self, limits: interface.Limits, family: str, rows: int, device: Device, poison_rate: int = 0
    ) -> None:
        dims = {"rows": rows, "tokens": rows * interface.tile_of(family)}
        self._limits, self._tile, self._rows = limits, interface.tile_of(family), rows
        self._family, self._drafts = family, interface.drafts_of(family)
        self._by_sequence = [i.spec.name for i in fake_states(limits) if i.unit == SEQUENCE]
        self._device, self._poison_rate = device, poison_rate
        self.specs = Specs(
            tuple(s.bind(dims) for s in interface.steps(family, limits.drafts))
            + interface.tables(limits),
            tuple(info.spec for info in fake_states(limits)),
            tuple(s.bind(dims) for s in interface.outputs(limits, family) if s.name != "logits"),
        )
        self.closed = 0

    def run(self, buffers: Mapping[str, Array]) -> None:
        self.launch(buffers)()

    def launch(self, buffers: Mapping[str, Array]) -> Wait:
        frozen = {spec.name: buffers[spec.name].copy() for spec in interface.tables(self._limits)}
        for spec in self.specs.outputs:
            buffers[spec.name].fill(-99)
        store = self._device.store
        assert store is not None
        return self._device.launch(lambda: self._work({**buffers, **store.arrays, **frozen}))

    def launch_to_sample(self, buffers: Mapping[str, Array]) -> Callable[[], Wait]:
        now = {spec.name: buffers[spec.name].copy() for spec in interface.tables(self._limits)}

        def rest() -> Wait:
            masks = {name: buffers[name] for name in ("allow", "sampling_i")}
            for name, table in masks.items():  # the other columns are no masks'
                assert name == "allow" or (table[:, :3] == now[name][:, :3]).all()
            return self.launch({**buffers, **now, **masks})

        return rest

    def close(self) -> None:
        self.closed += 1

    def _work(self, b: Mapping[str, Array]) -> None:
        for row in range(self._rows):
            if b["slots"][row] < 0:
                assert b["counts"][row] == 0 and ("emit" not in b or b["emit"][row] == 0)
                if self._family == interface.PREFILL:
                    assert b["sources"][row] == b["saves"][row] == -1
                _scribble([b[i.spec.name][-1:] for i in fake_states(self._limits)])
            elif self._family == interface.PREFILL:
                self._begin(b, row)
                self._row(b, row)
                self._keep(b, row)
            else:
                self._row(b, row)

    def _begin(self, b: Mapping[str, Array], row: int) -> None:
        """The state before a tile: zeros, the row of its source, or that of the tile before it."""
        slot, start, source = (int(b[n][row]) for n in ("slots", "starts", "sources"))
        if start == 0:
            for name in ("token_counts", *self._by_sequence):
                b[name][slot] = 0
        elif not (row and b["slots"][row - 1] == slot):
            scratch = self._limits.sequence_rows - 1
            assert source == slot or self._limits.max_seqs <= source < scratch, source
            assert source == slot or source not in b["saves"], "a launch reads what it writes"
            for name in self._by_sequence:
                b[name][slot] = b[name][source]
        else:
            assert start == b["starts"][row - 1] + self._tile, "full tiles, but for the last"

    def _keep(self, b: Mapping[str, Array], row: int) -> None:
        slot, save = int(b["slots"][row]), int(b["saves"][row])
        if save >= 0:
            assert self._limits.max_seqs <= save < self._limits.sequence_rows - 1, save
            assert (b["saves"] == save).sum() == 1
            for name in self._by_sequence:
                b[name][save] = b[name][slot]

    def _row(self, b: Mapping[str, Array], row: int) -> None:
        slot, start, count = (int(b[n][row]) for n in ("slots", "starts", "counts"))
        assert 0 < count <= self._tile and 0 <= slot < self._limits.max_seqs
        ids = [_seen(b, t) for t in b["token_ids"][row * self._tile :][:count].tolist()]
        ids = [int(b["last_tokens"][slot]) if t < 0 else t for t in ids]
        self._write(b, slot, start, ids, _turns(b, row, count))
        if not b["emit"][row]:
            return
        history = self._history(b, slot, start + count)
        recent = b["layers.0.conv_state"][slot].tolist()
        past = Past(
            *self._known(b, slot), history[-1], recent, int(b["layers.0.gdn_state"][slot, 0])
        )
        b["last_tokens"][slot] = self._sample(b, slot, row, past, start + count)

    def _sample(self, b: Mapping[str, Array], slot: int, at: int, past: Past, position: int) -> int:
        """Writes the outputs of one row or token, and returns its token, that at `position`."""
        answer = past.answer()
        token = _allowed(answer, b, slot, position)
        b["next_tokens"][at] = token
        b["ok"][at] = not self._poison_rate or answer % self._poison_rate != 0
        b["logprobs"][at] = -(answer % 1000)
        b["top_ids"][at] = np.arange(self._limits.top_logprobs) + token
        b["top_logprobs"][at] = -np.arange(self._limits.top_logprobs) - answer % 7
        return token

    @property
    def _mark(self) -> int:
        return self.prefill_mark if self._family == interface.PREFILL else 0

    def _write(
        self, b: Mapping[str, Array], slot: int, start: int, ids: list[int], turns: Array
    ) -> None:
        self._append(b, "layers.1.k_pages", slot, start, ids, turns)
        state = int(b["layers.0.gdn_state"][slot, 0])
        for position, token in enumerate(ids, start + self._mark):
            state = _advance(state, token, position)
        b["layers.0.gdn_state"][slot, 0] = state
        recent = [*b["layers.0.conv_state"][slot].tolist(), *ids]
        b["layers.0.conv_state"][slot] = recent[-3:]
        self._count(b, slot, start, ids)

    def _append(
        self, b: Mapping[str, Array], name: str, slot: int, start: int, ids: list[int], turns: Array
    ) -> None:
        at = np.arange(start, start + len(ids))
        b[name][self._places(b, slot, at)] = np.stack([ids, at + turns[: len(ids)] + self._mark], 1)

    def _count(self, b: Mapping[str, Array], slot: int, start: int, ids: list[int]) -> None:
        token_counts, prompt = b["token_counts"][slot], int(b["prompt_lens"][slot])
        token_counts[[t for t in ids[: max(0, prompt - start)] if t < VOCAB]] |= 1
        np.add.at(token_counts, np.asarray(ids[max(0, prompt - start) :], np.intp), 2)

    def _places(self, b: Mapping[str, Array], slot: int, at: Array) -> tuple[Array, Array]:
        pages = b["page_table"][slot][at // self._limits.page_size]
        assert (pages >= 0).all() and (pages < self._limits.pages).all(), pages
        return pages, at % self._limits.page_size

    def _history(self, b: Mapping[str, Array], slot: int, length: int) -> list[int]:
        """A digest of the first 1, 2, … `length` tokens as their pages hold them."""
        history = b["layers.1.k_pages"][self._places(b, slot, np.arange(length))]
        words = history.astype(np.uint64) @ np.array(_WEIGHTS, np.uint64)
        digests: list[int] = np.cumsum(words * _POWERS[:length]).tolist()
        return digests

    def _known(self, b: Mapping[str, Array], slot: int) -> tuple[list[int], Array]:
        """What no token changes, and a copy of the counts. Without penalties those are not read."""
        crcs = [zlib.crc32(np.ascontiguousarray(b[name][slot]).tobytes()) for name in _TABLES]
        counts = b["token_counts"][slot].copy()
        if b["sampling_f"][slot][3:6].tolist() == [1, 0, 0]:
            counts = counts[:0]
        return crcs, counts


class DraftingExecutor(FakeExecutor):
    """One bucket of an engine that drafts; it samples what `FakeExecutor` samples.

    A draft is the token that will be sampled there, but for about every fourth, and for all when
    the head's pages do not hold each token in its place. So are those
    from the text where it matches: what followed there would seldom be sampled again. Ids from
    `listed` on are never drafted.
    """

    listed = VOCAB

    def __init__(
        self, limits: interface.Limits, family: str, rows: int, device: Device, poison_rate: int = 0
    ) -> None:
        super().__init__(limits, family, rows, device, poison_rate)
        self._taps, self._records = 3 + limits.drafts, 1 + limits.drafts
        self._head, self._pages = limits.suffix != HEADLESS, head_pages(limits)
        by_block = interface.drafts_by_block(self._drafts, limits.drafts)
        self._block = limits.top_logprobs == BLOCKS or limits.top_logprobs == BOTH and by_block

    def _row(self, b: Mapping[str, Array], row: int) -> None:
        slot, start, count = (int(b[n][row]) for n in ("slots", "starts", "counts"))
        assert 0 < count <= self._tile and 0 <= slot < self._limits.max_seqs
        given = b["token_ids"][row * self._tile :][:count].tolist()
        turns = _turns(b, row, count)
        if self._family == interface.PREFILL:
            self._prefill(b, slot, row, start, [_seen(b, t) for t in given])
            return
        start = int(b["positions"][slot]) if start < 0 else start
        kept = [int(b["last_tokens"][slot]), *b["drafts"][slot].tolist()]
        ids = [kept[j] if t < 0 else t for j, t in enumerate(given)]
        pasts = self._feed(b, slot, start, ids, 1, turns)
        sampled = []
        for j, past in enumerate(pasts):
            at = row * self._tile + j
            sampled.append(self._sample(b, slot, at, past, start + j + 1))
        accepted = 1
        while accepted < count and ids[accepted] == sampled[accepted - 1]:
            accepted += 1
        if self._drafts:
            b["accepted"][row] = accepted
        self._count(b, slot, start + 1, ids[1:accepted])
        b["last_tokens"][slot] = sampled[accepted - 1]
        b["positions"][slot] = start + accepted
        where = start + accepted, sampled[accepted - 1], pasts[accepted - 1], int(turns[0])
        if self._head:
            for name in self._pages:
                known = ids if name == BLOCK_PAGES else sampled
                self._append(b, name, slot, start, known[:accepted], turns)
            self._draft(b, slot, *where)
        if self._limits.suffix:
            self._store(b, slot, start, ids[:accepted])
            b["matched"][row] = self._match(b, slot, *where)

    def _prefill(
        self, b: Mapping[str, Array], slot: int, row: int, start: int, ids: list[int]
    ) -> None:
        turns = _turns(b, row, len(ids))
        past = self._feed(b, slot, start, ids, len(ids), turns)[-1]
        after = _seen(b, int(b["next_ids"][row]))
        assert (after < 0) == bool(b["emit"][row])
        if after < 0:
            after = self._sample(b, slot, row, past, start + len(ids))
            b["last_tokens"][slot] = after
        if self._head:
            for name in self._pages:
                known = ids if name == BLOCK_PAGES else [*ids[1:], after]
                self._append(b, name, slot, start, known, turns)
        if self._limits.suffix:
            self._store(b, slot, start, ids)

    def _store(self, b: Mapping[str, Array], slot: int, start: int, ids: list[int]) -> None:
        pages, at = self._places(b, slot, np.arange(start, start + len(ids)))
        b[interface.ID_PAGES][pages, 0, at, 0] = [t if t < VOCAB else -1 for t in ids]

    def _match(
        self, b: Mapping[str, Array], slot: int, position: int, token: int, past: Past, turn: int
    ) -> int:
        """Drafts those after `token` if the text matches; the ids of the match."""
        pages, at = self._places(b, slot, np.arange(position))
        fed = b["layers.1.k_pages"][pages, at, 0]
        assert (b[interface.ID_PAGES][pages, 0, at, 0] == np.where(fed < VOCAB, fed, -1)).all()
        states = [b[name] for name in (interface.ID_PAGES, "page_table", "last_tokens", "drafts")]
        rows = [np.array([n], np.int32) for n in (slot, position - 1, 1)]
        attrs: Attrs = {"least": self._limits.suffix, "held": 0}
        (matched,), drafts = match_drafts.OP.reference(attrs, (*states, *rows))
        if matched:
            guesses = self._guesses(b, slot, position, token, past, turn, lambda at: True)
            b["drafts"][slot] = [next(guesses) for _ in range(self._limits.drafts)]
        else:
            held = self._drafts if self._head else 0
            b["drafts"][slot, held:] = drafts[slot, held:]
        return int(matched)

    def _feed(
        self,
        b: Mapping[str, Array],
        slot: int,
        start: int,
        ids: list[int],
        certain: int,
        turns: Array,
    ) -> list[Past]:
        """Writes the tokens and folds the `certain` ones; what each one's answer depends on."""
        self._append(b, "layers.1.k_pages", slot, start, ids, turns)
        digests = self._history(b, slot, start + len(ids))
        ring, conv = b["layers.0.gdn_ring"][slot], b["layers.0.conv_state"][slot]
        state = int(b["layers.0.gdn_state"][slot, 0])
        folded = int(ring[-1, 0])
        assert 0 <= start - folded < self._records, (start, folded)
        for position in range(folded, start):
            state = _advance(state, *ring[position % self._records].tolist())
        recent = [int(conv[q % self._taps]) if q >= 0 else 0 for q in range(start - 3, start)]
        fixed, counts = self._known(b, slot)
        prompt, pasts = int(b["prompt_lens"][slot]), []
        for j, token in enumerate(ids):
            position = start + j
            state = _advance(state, token, position + self._mark)
            recent = [*recent[1:], token]
            if counts.size and token < VOCAB:
                counts = counts.copy()
                counts[token] = counts[token] | 1 if position < prompt else counts[token] + 2
            pasts.append(Past(fixed, counts, digests[position], recent, state))
            conv[position % self._taps] = token
            ring[position % self._records] = token, position
            if j < certain:
                b["layers.0.gdn_state"][slot, 0], ring[-1, 0] = state, position + 1
        self._count(b, slot, start, ids[:certain])
        return pasts

    def _draft(
        self, b: Mapping[str, Array], slot: int, position: int, token: int, past: Past, turn: int
    ) -> None:
        """Drafts those after `token`, which is the one at `position`; `turn` as of its row."""
        if not self._drafts:
            return
        knows = self._head_knows(b, slot, position, token)
        table, size = b["page_table"][slot], self._limits.page_size
        said = [token]

        def steps(at: int) -> bool:
            """The chain reads and writes the position before that of the token it starts from; a
            block writes none."""
            if self._block:
                return knows
            page = self._page(table, at - 1)
            b[HEAD_PAGES][page, (at - 1) % size] = said[-1], at - 1 + turn
            return knows and page >= 0

        guesses = self._guesses(b, slot, position, token, past, turn, interface.steps)
        for i in range(self._drafts):
            said.append(next(guesses))
            b["drafts"][slot, i] = said[-1]

    def _guesses(
        self,
        b: Mapping[str, Array],
        slot: int,
        position: int,
        token: int,
        past: Past,
        turn: int,
        knows: Callable[[int], bool],
    ) -> Iterator[int]:
        """Three of four of what is sampled after `token`, until one is wrong or not known."""
        right, i = True, 0
        while True:
            right = knows(position) and right
            guess = (token * 7 + i) % VOCAB
            if right:
                past = past.feed(token, position, turn)
                answer = past.answer()
                guess = _allowed(answer, b, slot, position + 1)
                right = answer % 4 != 0
                guess = guess if right else (guess + 1) % VOCAB
            if guess >= self.listed:
                right, guess = False, guess % self.listed
            token = guess
            yield token
            position, i = position + 1, i + 1

    def _page(self, table: Array, position: int) -> int:
        index = position // self._limits.page_size
        return int(table[index]) if index < len(table) else -1

    def _head_knows(self, b: Mapping[str, Array], slot: int, length: int, token: int) -> bool:
        """Whether the head's pages pair every position with the token after it, or a block
        drafter's with its own."""
        places = self._places(b, slot, np.arange(length))
        if self._block:
            return bool((b[BLOCK_PAGES][places] == b["layers.1.k_pages"][places]).all())
        tokens, at = b["layers.1.k_pages"][places].T
        after = [*tokens[1:].tolist(), token]
        return bool((b[HEAD_PAGES][places] == np.stack([after, at], 1)).all())


class TowerExecutor:
    """One bucket of the tower: a row is a digest of its patches, of where they are and of how the
    table of positions is read."""

    def __init__(self, limits: interface.Limits, rows: int, device: Device) -> None:
        dims = {"rows": rows, "tokens": rows * ROW_PATCHES}
        state = next(i.spec for i in fake_states(limits) if i.unit == IMAGE)
        self.specs = Specs(tuple(s.bind(dims) for s in interface.steps(VISION)), (state,), ())
        self._device, self.launches = device, 0

    def launch(self, buffers: Mapping[str, Array]) -> Wait:
        self.launches += 1
        store = self._device.store
        assert store is not None
        return self._device.launch(lambda: self._work(buffers, store.arrays[IMAGE_ROWS]))

    def close(self) -> None:
        pass

    def _work(self, b: Mapping[str, Array], rows: Array) -> None:
        first, count = int(b["first"][0]), int(b["live"][0]) // ROW_PATCHES
        assert 0 <= first and first + count < len(rows)
        for i in range(count):
            part = slice(ROW_PATCHES * i, ROW_PATCHES * (i + 1))
            names = ("patches", "coords", "taps", "tap_weights")
            crcs = [zlib.crc32(np.ascontiguousarray(b[n][part]).tobytes()) for n in names]
            rows[first + i] = _mix(crcs) % (1 << 40)
        _scribble([rows[-1:]])


def _seen(b: Mapping[str, Array], token: int) -> int:
    """A token, or for a row of an image what the tower wrote there: none of the vocabulary."""
    return token if token < VOCAB else VOCAB + int(b[IMAGE_ROWS][token - VOCAB, 0])


def _turns(b: Mapping[str, Array], row: int, count: int) -> Array:
    """i64 [count]: a number of the offsets of the row's first tokens; 0 where they are."""
    own = b["rope_offsets"][row].astype(np.int64)
    own = own.reshape(-1, 3)[:count] if own.size > 1 else np.broadcast_to(own, (count, 3))
    return np.asarray(own @ np.array([1, 1009, 100003]))


@dataclass(frozen=True)
class Past:
    """All that the answer after a token depends on."""

    fixed: list[int]
    counts: Array
    digest: int
    recent: list[int]
    state: int

    def answer(self) -> int:
        parts = (self.counts, np.array(self.recent), np.array([self.state]))
        crcs = [zlib.crc32(part.tobytes()) for part in parts]
        return _mix([self.digest, *crcs, *self.fixed])

    def feed(self, token: int, position: int, turn: int) -> Past:
        """With one token more, a generated one."""
        counts = self.counts.copy()
        if counts.size:
            counts[token] += 2
        word = (token * _WEIGHTS[0] + (position + turn) * _WEIGHTS[1]) * int(_POWERS[position])
        state = _advance(self.state, token, position)
        digest = (self.digest + word) & _WORD
        return Past(self.fixed, counts, digest, [*self.recent[1:], token], state)


def build_fake(
    limits: interface.Limits,
    decode: tuple[int, ...],
    prefill: tuple[int, ...],
    *,
    lazy: bool = True,
    poison_rate: int = 0,
    listed: int = VOCAB,
    invariant: bool = False,
) -> Loaded:
    """An engine of fakes that share one device; rounds of drafts have the buckets of decode, and
    draft from so many of the ids. `invariant`: prefill rounds unlike decode."""
    device = Device(lazy=lazy)
    device.store = FakeStates(fake_states(limits), device)
    kind = DraftingExecutor if limits.drafts else FakeExecutor
    keys = [
        (f, n)
        for f in interface.families(limits.drafts)
        for n in (prefill if f == interface.PREFILL else decode)
    ]
    executors: dict[BucketKey, Any] = {k: kind(limits, *k, device, poison_rate) for k in keys}
    for one in executors.values():
        one.listed, one.prefill_mark = listed, invariant << 20
    states, vision = fake_states(limits), VISION_INFO if limits.image_rows else None
    for rows in TOWERS if limits.image_rows else ():
        executors[VISION, rows] = TowerExecutor(limits, rows, device)
    own = (limits, EOS, states, interface.tables(limits), executors)
    return Loaded(*own, device_states=device.store, vision=vision, invariant=invariant)


def poison_free(engine: Engine) -> None:
    """Overwrites every free state and table row with wild values, the states behind every launch
    so far."""
    free, memory, store = free_rows(engine), engine.memory, engine.loaded.device_states
    for table in memory.tables.values():
        wild = np.array(-(1 << 30)).astype(table.dtype)
        table[np.asarray(free[SLOT], np.intp)] = wild

    def poison() -> None:
        for info in engine.loaded.states:
            state = memory.states[info.spec.name]
            state[np.asarray([*free[info.unit], len(state) - 1])] = -(1 << 30)

    assert isinstance(store, FakeStates)
    store.device.launch(poison)


def free_rows(engine: Engine) -> dict[str, list[int]]:
    """Free rows, by unit."""
    scheduler, first = engine.scheduler, engine.loaded.limits.max_seqs
    slots, rows = list(scheduler.slots._free), [first + r for r in scheduler.prefix.rows._free]
    used = [range(*span) for span in scheduler.images._spans.values()]
    images = {*range(scheduler.images.size)}.difference(*used)
    free = {SLOT: slots, PAGE: list(scheduler.pages._free), SEQUENCE: slots + rows}
    return {**free, IMAGE: [*images]}


def _scribble(rows: list[Array]) -> None:
    for row in rows:
        row[...] = -12345


def _mix(parts: list[int]) -> int:
    state = 0x9E3779B97F4A7C15
    for part in parts:
        state = ((state ^ (part & _WORD)) * 0xBF58476D1CE4E5B9) & _WORD
        state ^= state >> 29
    return state


def _advance(state: int, token: int, position: int) -> int:
    return (state * 0x2545F491 + token * 977 + position) & (_WORD >> 1)


def _allowed(answer: int, b: Mapping[str, Array], slot: int, position: int) -> int:
    """The answer's token, moved on past those with a bias of -inf at the position, and in a slot
    with a mask to one that has a bit."""
    ban = np.isneginf(b["bias_values"][slot]) & (b["bias_until"][slot] > position)
    banned = set(b["bias_ids"][slot][ban].tolist())
    ids = np.arange(VOCAB)
    if b["sampling_i"][slot, 3] == 1:
        ids = np.flatnonzero(b["allow"][slot][ids // 32] >> (ids % 32).astype(np.uint32) & 1)
        assert ids.size, "a mask without ids"
        banned = banned if {*ids.tolist()} - banned else set()
    token = int(ids[answer % len(ids)])
    while token in banned or token not in ids:
        token = (token + 1) % VOCAB
    return token
