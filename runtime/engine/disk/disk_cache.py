"""The prefix cache of earlier processes: copies states and pages to a folder, and back from it.

- What a request that ended leaves is copied: the first state on its path, those that others resumed
  from, its last two, and the pages before them; not what has a file already.
- A request with a longer prefix in the folder than in memory waits until its pages and its state
  are in the prefix cache, LOAD_S at most. Then it is admitted and finds them like any others. What
  cannot be read costs only the hit.
- An engine that starts reads what was used last, as far as memory is free, while no request runs.
- The engine's thread copies STEP bytes at a time between two steps, a state that it reads at once,
  and while requests run for a share of its time; other threads read, write and digest, with AHEAD
  bytes queued for each at most.

Knows nodes, states and their digests; knows no format of a file.
"""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Generator, Iterable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from hashlib import blake2b

import msgspec
import numpy as np

from spark_engine.manifest import PAGE, SEQUENCE, StateInfo
from spark_engine.runtime.engine.disk.cache_folder import (
    NODE,
    CacheFolder,
    page_file,
    state_file,
)
from spark_engine.runtime.engine.policy.prefix_admission import PrefixAdmission
from spark_engine.runtime.engine.policy.prefix_trie import CachedState, PageNode
from spark_engine.runtime.engine.pool import Pool
from spark_engine.runtime.engine.sequence import Sequence as Request
from spark_engine.runtime.executors.memory import PrefixStore, Snapshot
from spark_engine.tensors import Array

DISK_BYTES = 32 << 30  # of the folder, where no option says more or less
STEP, IDLE = 8 << 20, 8  # bytes while requests run, and times as many while none does
ENDED = 256  # requests whose states are still to be copied; of more, those of the first are not
AHEAD = 128 << 20  # bytes
PATH = 16 << 20  # bytes of a state's path in its file, at most
LOAD_S = 30.0  # seconds that a request waits for its prefix
FLUSH_S = 4.0  # seconds of copying and writing at the end
PAUSE = 0.002  # seconds that an engine without other work waits for a thread
LOADING, SAVING = 3, 19  # pauses in times of the copies: a fourth of the time, a twentieth
FIRST = -1  # in place of a request's id: what is read at the start
TAG = 4  # bytes of a node's digest that are the engine's

# Of a state: its salt, the names of its pages, the tokens after them.
_Path = tuple[bytes, list[bytes], bytes]
_Work = Generator[None, None, None]  # each step takes a moment; it may be closed


@dataclass(frozen=True, slots=True)
class _Prefix:
    """Pages by name, their files, and the file of the state that is `suffix` after them, if any."""

    salt: bytes
    names: list[bytes]
    files: list[str]
    suffix: array[int]
    state: str

    @property
    def used(self) -> list[str]:
        """All its files, the first page last."""
        return [*([self.state] if self.state else []), *reversed(self.files)]


class DiskCache:
    """Between one engine's prefix cache and its folder; the engine's thread calls it.

    `seed`: what the content of its states depends on besides salts and tokens.
    """

    def __init__(
        self,
        folder: CacheFolder,
        seed: bytes,
        prefix: PrefixAdmission,
        pages: Pool,
        store: PrefixStore,
        states: Iterable[StateInfo],
    ) -> None:
        self.folder = folder
        self.waiting: dict[int, tuple[Request, float]] = {}  # and when its wait ends
        self.held: list[int] = []  # pages that are in use until a prefix is read
        self.read = 0  # bytes of prefixes
        self._seed, self._prefix, self._pages, self._store = seed, prefix, pages, store
        self._infos = {unit: [s for s in states if s.unit == unit] for unit in (PAGE, SEQUENCE)}
        prefix.ended = deque(maxlen=ENDED)
        prefix.spoilt = deque(maxlen=ENDED)
        self._load: _Work | None = None
        self._for = FIRST  # whom it is for
        self._save: _Work | None = None
        self._recent = deque(folder.states_of(seed[:TAG]))
        self._running, self._step = False, STEP
        self._done = self._took = 0.0  # seconds: the end of the last copies, and their time

    @property
    def busy(self) -> bool:
        """True if something is to be copied."""
        loads = self.waiting or self._load or self._recent
        return bool(loads or self._save or self._prefix.ended or self._prefix.spoilt)

    def stats(self) -> dict[str, int]:
        folder = self.folder
        return {
            "disk_read": self.read,
            "disk_bytes": folder.used,
            "disk_budget": 0 if folder.failed else folder.most,
            "disk_refused": folder.refused,
            "disk_evicted": folder.evicted,
        }

    def hold(self, seq: Request) -> bool:
        """True if the request is to wait for its prefix: `advance` returns it later."""
        if self._find(seq) is None:
            return False
        self.waiting[seq.id] = seq, time.monotonic() + LOAD_S
        return True

    def drop(self, number: int) -> bool:
        """Ends the wait of a request; False if it does not wait."""
        if self._for == number:
            self._end_load()
        return self.waiting.pop(number, None) is not None

    def advance(self, running: bool) -> list[Request]:
        """Copies for a moment; returns requests that wait no more. Not `running`: there is nothing
        else to do, so it waits PAUSE at most for a thread."""
        start, rest = time.monotonic(), LOADING if self.waiting else SAVING
        ready = [seq for seq, end in self.waiting.values() if end < start]
        self._running, self._step = running, STEP if running else STEP * IDLE
        if running and self._for == FIRST:
            self._end_load()  # its pages are theirs
        if not running or start - self._done >= rest * self._took:
            if not self.waiting and (self._save or self._prefix.ended):
                self._save_some()
            elif self.waiting or not running:
                ready += (seq for seq in self._read_some() if seq not in ready)
            self._done = time.monotonic()
            self._took = self._done - start
        while self._prefix.spoilt:
            for node in self._prefix.spoilt.pop().node.path():
                at = self._digest(node)
                self.folder.discard([page_file(at), *(n for _, n in self.folder.states_at(at))])
        for seq in ready:
            self.drop(seq.id)
        return ready

    def settle(self) -> None:
        """Waits, for FLUSH_S at most, until nothing is left to copy or to write: for another thread
        while the engine's steps."""
        end = time.monotonic() + FLUSH_S
        self._recent.clear()
        while self.busy and time.monotonic() < end:
            time.sleep(PAUSE)
        self.folder.flush(max(0.0, end - time.monotonic()))

    def close(self) -> None:
        """Copies what is left, for FLUSH_S at most, and closes the folder. May be called twice."""
        if self.folder.closed:
            return
        end = time.monotonic() + FLUSH_S
        self._recent.clear()
        self._end_load()
        while self.busy and time.monotonic() < end:
            self.advance(running=False)
        self.folder.flush(max(0.0, end - time.monotonic()))
        self.folder.close()

    # ---- from the folder

    def _find(self, seq: Request) -> _Prefix | None:
        """The longest prefix of which the folder has what memory lacks, if it is a page longer than
        the one in memory and fits the free pages."""
        if not self.folder.used:
            return None
        sizes, cache, salt = self._prefix.sizes, self._prefix.cache, seq.request.salt
        size, most, content = sizes.page_size, len(seq.tokens) - 1, seq.content
        names = self._prefix.names_of(seq)[: most // size]
        known, at = len(cache.path(salt, names)) - 1, self._root(salt)
        files, found = list[str](), (0, 0, "")
        for index in range(len(names) + 1):
            for length, name in self.folder.states_at(at):
                end = index * size + length
                tail = content[index * size : end]
                if end <= most and name == state_file(at, length, _suffix(tail)):
                    found = index, length, name
            if index == len(names):
                break
            at = _child(at, names[index])
            if index >= known and not self.folder.readable(page_file(at)):
                break
            files.append(page_file(at))
        count, length, state = found if sizes.snapshot_bytes else (len(files), 0, "")
        start, end = count * size, count * size + length
        hit = cache.match(content, names, most, salt=salt)
        want = _Prefix(salt, names[:count], files[:count], content[start:end], state)
        new, held = self._lacks(want)
        free = self._pages.free + self._pages.spare - self._pages.unused(held)
        return want if end - hit.position >= size and new < free else None

    def _lacks(self, want: _Prefix) -> tuple[int, list[int]]:
        """Of its pages: how many are not in memory, and those that are."""
        path = self._prefix.cache.path(want.salt, want.names)[1:]
        return len(want.names) - len(path) + bool(want.suffix), [node.page for node in path]

    def _read_some(self) -> list[Request]:
        """Reads for the first request that waits, or else what was used last, for a moment; returns
        the request if that is the end."""
        seqs = (seq for seq, _ in self.waiting.values())
        seq = min(seqs, key=lambda seq: seq.rank, default=None)
        number = FIRST if seq is None else seq.id
        if self._load is None or self._for != number:
            self._end_load()
            self._for = number
            if seq is None:
                self._load = self._first(self._recent.popleft()) if self._recent else None
            elif (want := self._find(seq)) is not None:
                self._load = self._loading(want)
        if self._load is not None and not next(self._load, True):
            return []
        self._end_load()
        return [] if seq is None else [seq]

    def _first(self, name: str) -> _Work:
        """Reads a state that an earlier process used, and its pages, as long as nothing has to be
        evicted for it."""
        sizes, prefix = self._prefix.sizes, self._prefix
        size = self._state_bytes(int(name.split(".")[1]))
        coming = self.folder.read(name, size, PATH)
        while not wait([coming], PAUSE).done:
            yield
        if (data := coming.result()) is None:
            return
        salt, names, suffix = msgspec.msgpack.decode(data[size:], type=_Path)
        at, files = self._root(salt), list[str]()
        for one in names:
            at = _child(at, one)
            files.append(page_file(at))
        tail = array("i", suffix)
        if name != state_file(at, len(tail), _suffix(tail)):
            return
        want = _Prefix(salt, names, files, tail, name)
        new, _ = self._lacks(want)
        room = prefix.cache.budget - prefix.cache.used_bytes - sizes.snapshot_bytes
        if prefix.rows.free and new < self._pages.free and new * sizes.page_bytes <= room:
            yield from self._loading(want)
        else:
            self._recent.clear()

    def _loading(self, want: _Prefix) -> _Work:
        """Reads it into the prefix cache, for a moment at each step."""
        cache, sizes = self._prefix.cache, self._prefix.sizes
        path = cache.path(want.salt, want.names)[1:]
        node, count = path[-1] if path else None, len(path)
        left = deque((name, sizes.page_bytes, 0) for name in want.files[count:])
        if want.state:
            left.append((want.state, self._state_bytes(len(want.suffix)), PATH))
        coming = deque[Future[memoryview | None]]()
        self.held = [one.page for one in path]
        self._pages.share(self.held)
        try:
            while left or coming:
                while left and len(coming) < self._at_once(AHEAD):
                    coming.append(self.folder.read(*left.popleft()))
                if not self._running:
                    wait([coming[0]], PAUSE)
                got, most = list[memoryview](), self._at_once(self._step)
                while coming and coming[0].done() and len(got) < most:
                    if (data := coming.popleft().result()) is None:
                        return
                    got.append(data)
                    self.read += data.nbytes
                new = got[: len(want.names) - count]
                if new:
                    node = self._take_pages(want, node, count, new)
                    count += len(new)
                    if node is None or node.end != count * sizes.page_size:
                        return
                if len(got) > len(new):
                    self._take_state(want, node, got[-1])
                if left or coming:
                    yield
            self.folder.touch(want.used)
        finally:
            for future in coming:
                future.cancel()
            self._pages.give(self.held)
            self.held = []
            cache.released(node)

    def _take_pages(
        self, want: _Prefix, node: PageNode | None, count: int, data: Sequence[memoryview]
    ) -> PageNode | None:
        """Adds pages after the first `count` to the prefix cache; None, or a node before them,
        where that has no space for them."""
        cache, end = self._prefix.cache, count + len(data)
        if not _alive(node) or not cache.reclaim(len(data)):
            return None
        taken = self._pages.take(len(data))
        self.held += taken
        self._store.restore(Snapshot({}, self._arrays(PAGE, data)), 0, taken)
        gain = float(end * self._prefix.sizes.page_size), 1.0
        return cache.extend(node, want.names[:end], [-1] * count + taken, -1, gain, want.salt)

    def _take_state(self, want: _Prefix, node: PageNode | None, data: memoryview) -> None:
        cache, sizes = self._prefix.cache, self._prefix.sizes
        if not _alive(node) or not cache.reclaim(bool(want.suffix)):
            return
        pages = self._pages.take(bool(want.suffix))
        self.held += pages
        at = node or cache.root_of(want.salt)
        state = cache.save(at, want.suffix, pages[0] if pages else -1, -1)
        if state is None:
            return
        rows = {name: a[0] for name, a in self._arrays(SEQUENCE, [data]).items()}
        paged = self._arrays(PAGE, [data[sizes.snapshot_bytes :]] if pages else [])
        self._store.restore(Snapshot(rows, paged), sizes.slots + state.row, pages)
        cache.unpin(state)

    def _end_load(self) -> None:
        if self._load is not None:
            self._load.close()
        self._load = None

    def _arrays(self, unit: str, data: Sequence[memoryview]) -> dict[str, Array]:
        """The states of the unit by name, [len(data), ...]; each of `data` has a row of all."""
        made, at = dict[str, Array](), 0
        for info in self._infos[unit]:
            flat, size = np.empty((len(data), info.row_bytes), np.uint8), info.row_bytes
            for row, one in zip(flat, data, strict=True):
                row[:] = np.frombuffer(one, np.uint8, size, at)
            dims = len(data), *info.spec.dims[1:]
            made[info.spec.name] = flat.view(info.spec.dtype.numpy).reshape(dims)
            at += size
        return made

    # ---- to the folder

    def _save_some(self) -> None:
        """Queues some pages or a part of a state to be written, unless too much is queued."""
        if self.folder.queued > AHEAD:
            if not self._running:
                self.folder.wait(PAUSE)
            return
        if self._save is None:
            self._save = self._saving(*self._prefix.ended.popleft())
        if self.folder.failed or next(self._save, True):
            self._save.close()
            self._save = None

    def _saving(self, node: PageNode | None, state: CachedState | None) -> _Work:
        """Queues what an ended request leaves, a part at each step: the first state on its path,
        those that were resumed from, its last two; or pages."""
        last, kept = node, list[CachedState]()
        if self._prefix.sizes.snapshot_bytes:
            last = None if state is None else state.node
        if last is None or not last.alive:
            return
        path = [*last.path()][::-1]
        if state is not None:
            found = [one for at in path for one in at.states]
            used = (*found[:1], *(one for one in found if one.hits), state.before, state)
            kept = [one for one in dict.fromkeys(used) if one is not None and one.alive]
        new = [at for at in path[1:] if not self.folder.has(page_file(self._digest(at)))]
        while new:
            most = self._at_once(self._step)
            part, new = new[:most], new[most:]
            if not all(at.alive for at in part):
                return
            arrays = self._store.save_prefix([at.page for at in part]).pages.values()
            for index, at in enumerate(part):
                self._put(page_file(self._digest(at)), [state[index] for state in arrays])
            yield
        for one in kept:
            if not self.folder.has(self._name(one)):
                yield from self._saving_state(one)
        states = [self._name(one) for one in kept if one.alive]
        self.folder.touch([*reversed(states), *(page_file(at.digest) for at in path[:0:-1])])

    def _saving_state(self, state: CachedState) -> _Work:
        """Queues its row, the page that it ends in, if any, and its path to be written."""
        if not state.alive:
            return
        name, suffix = self._name(state), array("i", state.suffix_tokens)
        path = [at.name for at in state.node.path()][::-1]
        paged = self._store.save_prefix([state.page] if suffix else []).pages.values()
        parts, names, size = list[Array](), list[str](), 0
        state.pins += 1  # its row stays as it is until the end, also where it is evicted
        try:
            for info in self._infos[SEQUENCE]:
                names.append(info.spec.name)
                size += info.row_bytes
                if size >= self._step or info is self._infos[SEQUENCE][-1]:
                    row = self._prefix.sizes.slots + state.row
                    parts += self._store.save_prefix((), names, row).rows.values()
                    names, size = [], 0
                    yield
        finally:
            self._prefix.cache.unpin(state)
        found: _Path = (path[0], path[1:], suffix.tobytes())
        told = np.frombuffer(msgspec.msgpack.encode(found), np.uint8)
        self._put(name, [*parts, *(one[0] for one in paged if suffix), told])

    def _put(self, name: str, arrays: Iterable[Array]) -> None:
        self.folder.put(name, [one.reshape(-1).view(np.uint8) for one in arrays])

    # ---- names

    def _at_once(self, size: int) -> int:
        """Pages of so many bytes."""
        return max(1, size // self._prefix.sizes.page_bytes)

    def _state_bytes(self, length: int) -> int:
        """Of a state so many tokens after its node, without its path."""
        sizes = self._prefix.sizes
        return sizes.snapshot_bytes + bool(length) * sizes.page_bytes

    def _name(self, state: CachedState) -> str:
        suffix = state.suffix_tokens
        return state_file(self._digest(state.node), len(suffix), _suffix(array("i", suffix)))

    def _digest(self, node: PageNode) -> bytes:
        """Of the engine, the salt, and all pages up to the node's."""
        new = []
        for one in node.path():
            if one.digest:
                break
            new.append(one)
        for one in reversed(new):
            up = one.parent
            one.digest = self._root(one.name) if up is None else _child(up.digest, one.name)
        return node.digest

    def _root(self, salt: bytes) -> bytes:
        return self._seed[:TAG] + blake2b(salt, digest_size=NODE - TAG, key=self._seed).digest()


def _child(parent: bytes, name: bytes) -> bytes:
    return parent[:TAG] + blake2b(parent + name, digest_size=NODE - TAG).digest()


def _suffix(tokens: array[int]) -> bytes:
    return blake2b(tokens.tobytes(), digest_size=16).digest()


def _alive(node: PageNode | None) -> bool:
    """True if pages can follow: roots are made again where they are needed."""
    return node is None or node.alive or node.parent is None
