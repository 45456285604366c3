"""Reads prefixes from the folder into the prefix cache, for a moment at each step.

Knows pages, states and their names; knows no format of a file, and no request that waits.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Generator, Iterable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass

import msgspec
import numpy as np

from spark_engine.manifest import PAGE, SEQUENCE, StateInfo
from spark_engine.runtime.engine.disk.cache_folder import CacheFolder, page_file
from spark_engine.runtime.engine.disk.node_names import NodeNames, state_name
from spark_engine.runtime.engine.policy.prefix_admission import PrefixAdmission
from spark_engine.runtime.engine.policy.prefix_trie import PageNode
from spark_engine.runtime.engine.pool import Pool
from spark_engine.runtime.engine.sequence import Sequence as Request
from spark_engine.runtime.executors.memory import PrefixStore, Snapshot
from spark_engine.tensors import Array

STEP, IDLE = 8 << 20, 8  # bytes while requests run, and times as many while none does
AHEAD = 128 << 20  # bytes
PATH = 16 << 20  # bytes of a state's path in its file, at most
PAUSE = 0.002  # seconds that an engine without other work waits for a thread

# Of a state: its salt, the names of its pages, the tokens after them.
Path = tuple[bytes, list[bytes], bytes]
Read = Generator[None, None, bool]  # each step takes a moment; it may be closed


@dataclass(frozen=True, slots=True)
class Prefix:
    """Pages by name, their files, and the file of the state that is `suffix` after them, if any."""

    salt: bytes
    names: list[bytes]
    files: list[str]
    suffix: array[int]
    state: str


class PrefixReader:
    """`running`: requests run, so that nothing waits and steps are short. Counts `read` bytes;
    `held`: pages that are in use until a prefix is read."""

    def __init__(
        self,
        folder: CacheFolder,
        names: NodeNames,
        prefix: PrefixAdmission,
        pages: Pool,
        store: PrefixStore,
        states: Iterable[StateInfo],
    ) -> None:
        self.running = False
        self.read = 0
        self.held: list[int] = []
        self._folder, self._names, self._prefix = folder, names, prefix
        self._pages, self._store = pages, store
        self._infos = {unit: [s for s in states if s.unit == unit] for unit in (PAGE, SEQUENCE)}

    @property
    def step_pages(self) -> int:
        """Pages that are copied at once."""
        return self._pages_of(step_bytes(self.running))

    def find(self, seq: Request) -> Prefix | None:
        """The longest prefix of which the folder has what memory lacks, if it is a page longer than
        the one in memory and fits the free pages."""
        if not self._folder.used:
            return None
        sizes, cache, salt = self._prefix.sizes, self._prefix.cache, seq.request.salt
        size, most, content = sizes.page_size, len(seq.tokens) - 1, seq.content
        names = self._prefix.names_of(seq)[: most // size]
        known, at = len(cache.path(salt, names)) - 1, self._names.root(salt)
        files, found = list[str](), (0, 0, "")
        for index in range(len(names) + 1):
            for length, name in self._folder.states_at(at):
                end = index * size + length
                tail = content[index * size : end]
                if end <= most and name == state_name(at, tail):
                    found = index, length, name
            if index == len(names):
                break
            at = self._names.child(at, names[index])
            if index >= known and not self._folder.readable(page_file(at)):
                break
            files.append(page_file(at))
        count, length, state = found if sizes.snapshot_bytes else (len(files), 0, "")
        start, end = count * size, count * size + length
        hit = cache.match(content, names, most, salt=salt)
        want = Prefix(salt, names[:count], files[:count], content[start:end], state)
        new, held = self._lacks(want)
        free = self._pages.free + self._pages.spare - self._pages.unused(held)
        return want if end - hit.position >= size and new < free else None

    def _lacks(self, want: Prefix) -> tuple[int, list[int]]:
        """Of its pages: how many are not in memory, and those that are."""
        path = self._prefix.cache.path(want.salt, want.names)[1:]
        return len(want.names) - len(path) + bool(want.suffix), [node.page for node in path]

    def first(self, name: str) -> Read:
        """Reads a state that an earlier process used, and its pages; False where something would
        have to be evicted for it."""
        sizes, prefix = self._prefix.sizes, self._prefix
        size = self._state_bytes(int(name.split(".")[1]))
        coming = self._folder.read(name, size, PATH)
        while not wait([coming], PAUSE).done:
            yield
        if (data := coming.result()) is None:
            return True
        salt, names, suffix = msgspec.msgpack.decode(data[size:], type=Path)
        at, files = self._names.root(salt), list[str]()
        for one in names:
            at = self._names.child(at, one)
            files.append(page_file(at))
        tail = array("i", suffix)
        if name != state_name(at, tail):
            return True
        want = Prefix(salt, names, files, tail, name)
        new, _ = self._lacks(want)
        free = prefix.cache.budget - prefix.cache.used_bytes - sizes.snapshot_bytes
        if not prefix.rows.free or new >= self._pages.free or new * sizes.page_bytes > free:
            return False
        yield from self.load(want)
        return True

    def load(self, want: Prefix) -> Read:
        """Reads it into the prefix cache; False where it stopped before the end."""
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
                while left and len(coming) < self._pages_of(AHEAD):
                    coming.append(self._folder.read(*left.popleft()))
                if not self.running:
                    wait([coming[0]], PAUSE)
                got, most = list[memoryview](), self.step_pages
                while coming and coming[0].done() and len(got) < most:
                    if (data := coming.popleft().result()) is None:
                        return False
                    got.append(data)
                    self.read += data.nbytes
                new = got[: len(want.names) - count]
                if new:
                    node = self._take_pages(want, node, count, new)
                    count += len(new)
                    if node is None or node.end != count * sizes.page_size:
                        return False
                if len(got) > len(new):
                    self._take_state(want, node, got[-1])
                if left or coming:
                    yield
            return True
        finally:
            for future in coming:
                future.cancel()
            self._pages.give(self.held)
            self.held = []
            cache.released(node)

    def _take_pages(
        self, want: Prefix, node: PageNode | None, count: int, data: Sequence[memoryview]
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

    def _take_state(self, want: Prefix, node: PageNode | None, data: memoryview) -> None:
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

    def _pages_of(self, size: int) -> int:
        return max(1, size // self._prefix.sizes.page_bytes)

    def _state_bytes(self, length: int) -> int:
        """Of a state so many tokens after its node, without its path."""
        sizes = self._prefix.sizes
        return sizes.snapshot_bytes + bool(length) * sizes.page_bytes


def step_bytes(running: bool) -> int:
    return STEP if running else STEP * IDLE


def _alive(node: PageNode | None) -> bool:
    """True if pages can follow: roots are made again where they are needed."""
    return node is None or node.alive or node.parent is None
