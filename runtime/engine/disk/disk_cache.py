"""The prefix cache of earlier processes: copies states and pages to a folder, and back from it.

- What an ended request leaves is copied, as far as it has no file yet: the first state on its path
  (the system message's), those that were resumed from, its last two, and the pages before them.
- A request with a longer prefix in the folder than in memory waits until its pages and its state
  are in the prefix cache, LOAD_S at most. Then it is admitted and finds them like any others. What
  cannot be read costs only the hit.
- The engine's thread copies STEP bytes at a time between two steps, and while requests run for a
  share of its time; other threads read, write and digest, with AHEAD bytes queued for each at most.

Knows nodes, states and their digests; knows no format of a file.
"""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np

from spark_engine.manifest import PAGE, SEQUENCE, StateInfo
from spark_engine.runtime.engine.disk.cache_folder import CacheFolder, page_file, state_file
from spark_engine.runtime.engine.policy.prefix_admission import PrefixAdmission
from spark_engine.runtime.engine.policy.prefix_trie import CachedState, PageNode
from spark_engine.runtime.engine.pool import Pool
from spark_engine.runtime.engine.sequence import Sequence as Request
from spark_engine.runtime.executors.memory import PrefixStore, Snapshot
from spark_engine.tensors import Array

DISK_BYTES = 32 << 30  # of the folder, where no option says more or less
STEP = 32 << 20  # bytes
ENDED = 256  # requests with states that are still to be copied; of more, the first lose theirs
AHEAD = 128 << 20  # bytes
LOAD_S = 30.0  # seconds that a request waits for its prefix
FLUSH_S = 4.0  # seconds of copying and writing at the end
PAUSE = 0.002  # seconds that an engine without other work waits for a thread
LOADING, SAVING = 3, 19  # of the engine's time while others run: a fourth, a twentieth


@dataclass(slots=True, eq=False)
class _Load:
    """A prefix that is being read: its files with their bytes, pages and then the state, if any.

    Attributes:
        names: of all its pages, of which `have` are in the prefix cache, the last at `node`.
        length: tokens of its state after the last page.
        used: the names of all its files, the first page last.
        held: pages that stay in use until the end.
    """

    seq: Request
    names: list[bytes]
    have: int
    node: PageNode | None
    files: list[tuple[str, int]]
    length: int
    used: list[str]
    held: list[int]
    asked: int = 0
    coming: deque[Future[memoryview | None]] = field(default_factory=deque)


@dataclass(slots=True, eq=False)
class _Save:
    """A prefix that is being written: `left` of its pages, then `state`, if any."""

    node: PageNode
    state: CachedState | None
    left: deque[PageNode]


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
        self.read = 0  # bytes of prefixes
        self._seed, self._prefix, self._pages, self._store = seed, prefix, pages, store
        self._infos = {unit: [s for s in states if s.unit == unit] for unit in (PAGE, SEQUENCE)}
        prefix.ended = deque(maxlen=ENDED)
        prefix.spoilt = deque(maxlen=ENDED)
        self._load: _Load | None = None
        self._saves: deque[_Save] = deque()
        self._done = self._took = 0.0  # seconds: the end of the last copies, and their time

    @property
    def busy(self) -> bool:
        """True if a request waits for it, or something is to be copied."""
        return bool(self.waiting or self._saves or self._prefix.ended or self._prefix.spoilt)

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
        if self._load is not None and self._load.seq.id == number:
            self._end_load(self._load)
        return self.waiting.pop(number, None) is not None

    def advance(self, running: bool) -> list[Request]:
        """Copies for a moment; returns requests that wait no more. Not `running`: there is nothing
        else to do, so it waits PAUSE at most for a thread."""
        start, rest = time.monotonic(), LOADING if self.waiting else SAVING
        ready = [seq for seq, end in self.waiting.values() if end < start]
        if not running or start - self._done >= rest * self._took:
            if self.waiting:
                found = self._read_some(running)
                ready += [] if found is None or found in ready else [found]
            elif (self._prefix.ended or self._saves) and not self._save_some() and not running:
                self.folder.wait(PAUSE)
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
        while self.busy and time.monotonic() < end:
            time.sleep(PAUSE)
        self.folder.flush(max(0.0, end - time.monotonic()))

    def close(self) -> None:
        """Copies what is left, for FLUSH_S at most, and closes the folder. May be called twice."""
        if self.folder.closed:
            return
        end = time.monotonic() + FLUSH_S
        while self.busy and time.monotonic() < end:
            self.advance(running=False)
        self.folder.flush(max(0.0, end - time.monotonic()))
        self.folder.close()

    # ---- from the folder

    def _find(self, seq: Request) -> _Load | None:
        """The longest prefix of which the folder has what memory lacks, if it is a page longer than
        the one in memory and fits the free pages."""
        if not self.folder.used:
            return None
        sizes, cache, salt = self._prefix.sizes, self._prefix.cache, seq.request.salt
        size, most, content = sizes.page_size, len(seq.tokens) - 1, seq.content
        names = self._prefix.names_of(seq)[: most // size]
        path = cache.path(salt, names)[1:]
        nodes, best = [self._root(salt)], (0, 0, "")
        for index in range(len(names) + 1):
            for length, name in self.folder.states_at(nodes[index]):
                end = index * size + length
                tail = content[index * size : end]
                if end <= most and name == state_file(nodes[index], length, _suffix(tail)):
                    best = index, length, name
            if index < len(path):
                nodes.append(self._digest(path[index]))
            elif index < len(names):
                node = _child(nodes[index], names[index])
                if not self.folder.readable(page_file(node)):
                    break
                nodes.append(node)
        if not sizes.snapshot_bytes:
            best = len(nodes) - 1, 0, ""
        count, length, state = best
        have = min(count, len(path))
        held = [node.page for node in path[:have]]
        free = self._pages.free + self._pages.spare - self._pages.unused(held)
        hit = cache.match(content, names, most, salt=salt)
        if count * size + length - hit.position < size or free <= count - have + bool(length):
            return None
        own = [page_file(node) for node in nodes[1 : count + 1]]
        files = [(name, sizes.page_bytes) for name in own[have:]]
        if state:
            files.append((state, sizes.snapshot_bytes + bool(length) * sizes.page_bytes))
        used = [*([state] if state else []), *reversed(own)]
        last = path[have - 1] if have else None
        return _Load(seq, names[:count], have, last, files, length, used, held)

    def _read_some(self, running: bool) -> Request | None:
        """Takes what was read into the prefix cache; returns a request that waits no more."""
        load = self._load
        if load is None:
            seq = min((seq for seq, _ in self.waiting.values()), key=lambda s: s.rank)
            load = self._load = self._find(seq)
            if load is None:
                return seq
            self._pages.share(load.held)
        while load.asked < len(load.files) and len(load.coming) < self._at_once(AHEAD):
            load.coming.append(self.folder.read(*load.files[load.asked]))
            load.asked += 1
        if not running:
            wait([load.coming[0]], PAUSE)
        got, most = list[memoryview](), self._at_once(STEP)
        while load.coming and load.coming[0].done() and len(got) < most:
            data = load.coming.popleft().result()
            if data is None:
                return load.seq
            got.append(data)
        pages = len(load.names) - load.have
        if got[:pages] and not self._take_pages(load, got[:pages]):
            return load.seq
        for data in got[pages:]:
            self._take_state(load, data)
        if load.coming or load.asked < len(load.files):
            return None
        self.read += sum(size for _, size in load.files)
        self.folder.touch(load.used)
        return load.seq

    def _take_pages(self, load: _Load, data: Sequence[memoryview]) -> bool:
        """Adds the next pages to the prefix cache; False where that has no space for them."""
        cache, end = self._prefix.cache, load.have + len(data)
        if not _alive(load.node) or not cache.reclaim(len(data)):
            return False
        taken = self._pages.take(len(data))
        load.held += taken
        self._store.restore(Snapshot({}, self._arrays(PAGE, data)), 0, taken)
        names, pages = load.names[:end], [-1] * load.have + taken
        gain = float(end * self._prefix.sizes.page_size), 1.0
        load.node = cache.extend(load.node, names, pages, -1, gain, load.seq.request.salt)
        load.have = end
        return load.node.end == end * self._prefix.sizes.page_size

    def _take_state(self, load: _Load, data: memoryview) -> None:
        cache, rows = self._prefix.cache, self._prefix.sizes.snapshot_bytes
        if not _alive(load.node) or not cache.reclaim(bool(load.length)):
            return
        pages = self._pages.take(bool(load.length))
        load.held += pages
        node = load.node or cache.root_of(load.seq.request.salt)
        suffix = load.seq.content[node.end : node.end + load.length]
        state = cache.save(node, suffix, pages[0] if pages else -1, -1)
        if state is None:
            return
        row = {name: a[0] for name, a in self._arrays(SEQUENCE, [data[:rows]]).items()}
        paged = self._arrays(PAGE, [data[rows:]] if pages else [])
        self._store.restore(Snapshot(row, paged), self._prefix.sizes.slots + state.row, pages)
        cache.unpin(state)

    def _end_load(self, load: _Load) -> None:
        for future in load.coming:
            future.cancel()
        self._pages.give(load.held)
        self._prefix.cache.released(load.node)
        self._load = None

    def _arrays(self, unit: str, data: Sequence[memoryview]) -> dict[str, Array]:
        """The states of the unit by name, [len(data), ...]; each of `data` has a row of all."""
        made, at = dict[str, Array](), 0
        for info in self._infos[unit]:
            flat = np.empty((len(data), info.row_bytes), np.uint8)
            for row, one in zip(flat, data, strict=True):
                row[:] = np.frombuffer(one[at : at + info.row_bytes], np.uint8)
            dims = len(data), *info.spec.dims[1:]
            made[info.spec.name] = flat.view(info.spec.dtype.numpy).reshape(dims)
            at += info.row_bytes
        return made

    # ---- to the folder

    def _save_some(self) -> bool:
        """Queues some pages or a state to be written; False where it has to wait for that."""
        if self.folder.queued > AHEAD:
            return False
        if not self._saves:
            self._saves += self._left_by(*self._prefix.ended.popleft())
        save = self._saves.popleft() if self._saves else None
        if save is None or self.folder.failed:
            return True
        nodes = [save.left.popleft() for _ in range(min(len(save.left), self._at_once(STEP)))]
        if not all(node.alive for node in nodes):
            return True
        if nodes:
            found = self._store.save_prefix(None, [node.page for node in nodes]).pages.values()
            for index, node in enumerate(nodes):
                self._put(page_file(self._digest(node)), (state[index] for state in found))
            self._saves.appendleft(save)
        elif save.state is None or self._save_state(save.state):
            names = [page_file(self._digest(node)) for node in save.node.path() if node.parent]
            self.folder.touch([*([self._name(save.state)] if save.state else []), *names])
        return True

    def _left_by(self, node: PageNode | None, state: CachedState | None) -> Iterator[_Save]:
        """What an ended request leaves: the first state on its path, those that were resumed from,
        its last two; or pages."""
        kept: list[tuple[PageNode, CachedState | None]] = []
        if not self._prefix.sizes.snapshot_bytes and node is not None and node.alive:
            kept = [(node, None)]
        elif state is not None:
            found = [one for at in reversed([*state.node.path()]) for one in at.states]
            used = [one for one in found if one.hits]
            last = [one for one in (state.before, state) if one is not None]
            kept = [(s.node, s) for s in dict.fromkeys((*found[:1], *used, *last)) if s.alive]
        for end, one in kept:
            path = [at for at in end.path() if at.parent is not None]
            new = [at for at in path[::-1] if not self.folder.has(page_file(self._digest(at)))]
            if new or (one is not None and not self.folder.has(self._name(one))):
                yield _Save(end, one, deque(new))

    def _save_state(self, state: CachedState) -> bool:
        """Queues its row, and the page that it ends in; False where it was evicted."""
        if self.folder.has(self._name(state)) or not state.alive:
            return state.alive
        pages = [state.page] if state.suffix_tokens else []
        found = self._store.save_prefix(self._prefix.sizes.slots + state.row, pages)
        paged = [pages_of[0] for pages_of in found.pages.values()] if pages else []
        self._put(self._name(state), [*found.rows.values(), *paged])
        return True

    def _put(self, name: str, arrays: Iterable[Array]) -> None:
        self.folder.put(name, [one.reshape(-1).view(np.uint8) for one in arrays])

    # ---- names

    def _at_once(self, size: int) -> int:
        """Pages of so many bytes."""
        return max(1, size // self._prefix.sizes.page_bytes)

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
        return blake2b(salt, digest_size=20, key=self._seed).digest()


def _child(parent: bytes, name: bytes) -> bytes:
    return blake2b(parent + name, digest_size=20).digest()


def _suffix(tokens: array[int]) -> bytes:
    return blake2b(tokens.tobytes(), digest_size=16).digest()


def _alive(node: PageNode | None) -> bool:
    """True if pages can follow: roots are made again where they are needed."""
    return node is None or node.alive or node.parent is None
