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

import msgspec
import numpy as np

from spark_engine.manifest import SEQUENCE, StateInfo
from spark_engine.runtime.engine.disk.cache_folder import HEAD, CacheFolder, blocks, page_file
from spark_engine.runtime.engine.disk.node_names import NodeNames
from spark_engine.runtime.engine.disk.prefix_reader import (
    AHEAD,
    PAUSE,
    Path,
    PrefixReader,
    step_bytes,
)
from spark_engine.runtime.engine.policy.prefix_admission import PrefixAdmission
from spark_engine.runtime.engine.policy.prefix_trie import CachedState, PageNode
from spark_engine.runtime.engine.pool import Pool
from spark_engine.runtime.engine.sequence import Sequence as Request
from spark_engine.runtime.executors.memory import PrefixStore
from spark_engine.tensors import Array

DISK_BYTES = 32 << 30  # of the folder, where no option says more or less
ENDED = 256  # requests that left what is still to be copied; of more, the first are forgotten
LOAD_S = 30.0  # seconds that a request waits for its prefix
FLUSH_S = 4.0  # seconds of copying and writing at the end
LOADING, SAVING = 3, 19  # pauses in times of the copies: a fourth of the time, a twentieth
Work = Generator[None, None, None]  # each step takes a moment; it may be closed
FIRST = -1  # in place of a request's id: what is read at the start


class DiskCache:
    """Between one engine's prefix cache and its folder; the engine's thread calls it.

    `seed`: 32 bytes, what the content of its states depends on besides salts and tokens.
    """

    def __init__(
        self,
        folder: CacheFolder,
        seed: bytes,
        prefix: PrefixAdmission,
        pages: Pool,
        store: PrefixStore,
        states: Sequence[StateInfo],
    ) -> None:
        self.folder = folder
        self.waiting: dict[int, tuple[Request, float]] = {}  # and when its wait ends
        self._names, self._prefix, self._store = NodeNames(seed), prefix, store
        self._recurrent = [info for info in states if info.unit == SEQUENCE]
        self.reader = PrefixReader(folder, self._names, prefix, pages, store, states)
        prefix.ended = deque(maxlen=ENDED)
        prefix.rejected = deque(maxlen=ENDED)
        self._load: Work | None = None
        self._for = FIRST  # the request that it is for
        self._save: Work | None = None
        self._recent = deque(folder.states_of(self._names.tag))
        self._done = self._took = 0.0  # seconds: the end of the last copies, and their time

    @property
    def busy(self) -> bool:
        """True if something is to be copied."""
        return self._saves or bool(self.waiting or self._recent or self._prefix.rejected)

    @property
    def _saves(self) -> bool:
        return bool(self._save or self._prefix.ended)

    def stats(self) -> dict[str, int]:
        folder = self.folder
        return {
            "disk_read": self.reader.read,
            "disk_bytes": folder.used,
            "disk_budget": 0 if folder.failed else folder.most,
            "disk_refused": folder.refused,
            "disk_evicted": folder.evicted,
        }

    def hold(self, seq: Request) -> bool:
        """True if the request is to wait for its prefix: `advance` returns it later."""
        if self.reader.find(seq) is None:
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
        self.reader.running = running
        if running and self._for == FIRST:
            self._end_load()  # its pages are theirs
        if not running or start - self._done >= rest * self._took:
            if not self.waiting and self._saves:
                self._save_some()
            elif self.waiting or not running:
                ready += (seq for seq in self._read_some() if seq not in ready)
            self._done = time.monotonic()
            self._took = self._done - start
        while self._prefix.rejected:
            for node in self._prefix.rejected.pop().node.path():
                at = self._names.digest(node)
                self.folder.discard([page_file(at), *(n for _, n in self.folder.states_at(at))])
        for seq in ready:
            self.drop(seq.id)
        return ready

    def settle(self) -> None:
        """Waits, for FLUSH_S at most, until nothing is left to copy or to write: for another thread
        while the engine's steps."""
        end = time.monotonic() + FLUSH_S
        while self._saves and time.monotonic() < end:
            time.sleep(PAUSE)
        self.folder.flush(max(0.0, end - time.monotonic()))

    def close(self) -> None:
        """Copies what is left, for FLUSH_S at most, and closes the folder. May be called twice."""
        if self.folder.closed:
            return
        end = time.monotonic() + FLUSH_S
        self._end_load()
        self.waiting.clear()
        while self._saves and time.monotonic() < end:
            self.advance(running=False)
        self.folder.flush(max(0.0, end - time.monotonic()))
        self.folder.close()

    def _read_some(self) -> list[Request]:
        """Reads for the first request that waits, or else what was used last, for a moment; returns
        the request if that is the end."""
        seqs = (seq for seq, _ in self.waiting.values())
        seq = min(seqs, key=lambda seq: seq.rank, default=None)
        number = FIRST if seq is None else seq.id
        if self._load is None or self._for != number:
            self._end_load()
            self._for, self._load = number, self._start() if seq is None else self._read(seq)
        if not next(self._load, True):
            return []
        self._end_load()
        return [] if seq is None else [seq]

    def _read(self, seq: Request) -> Work:
        want = self.reader.find(seq)
        if want is not None and (yield from self.reader.load(want)):
            self.folder.touch([*([want.state] if want.state else []), *reversed(want.files)])

    def _start(self) -> Work:
        """Reads what an earlier process used last, until memory is full."""
        while self._recent:
            if not (yield from self.reader.first(self._recent[0])):
                self._recent.clear()
                return
            self._recent.popleft()

    def _end_load(self) -> None:
        if self._load is not None:
            self._load.close()
        self._load = None

    # ---- to the folder

    def _save_some(self) -> None:
        """Queues some pages or a part of a state to be written, unless too much is queued."""
        if self.folder.queued > AHEAD:
            if not self.reader.running:
                self.folder.wait(PAUSE)
            return
        if self._save is None:
            self._save = self._saving(*self._prefix.ended.popleft())
        if self.folder.failed or next(self._save, True):
            self._save.close()
            self._save = None

    def _saving(self, node: PageNode | None, state: CachedState | None) -> Work:
        """Queues what an ended request leaves, a part at each step: the first state on its path,
        those that were resumed from, its last two; or pages."""
        last, kept = node, list[CachedState]()
        if self._prefix.sizes.snapshot_bytes:
            last = None if state is None else state.node
        if last is None or not last.alive:
            return
        path = [*last.path()][::-1]
        if len(path) * blocks(HEAD + self._prefix.sizes.page_bytes) > self.folder.most:
            return  # its pages would evict each other
        if state is not None:
            found = [one for at in path for one in at.states]
            used = (*found[:1], *(one for one in found if one.hits), state.before, state)
            kept = [one for one in dict.fromkeys(used) if one is not None and one.alive]
        new = [at for at in path[1:] if not self.folder.has(self._names.page(at))]
        while new:
            most = self.reader.step_pages
            part, new = new[:most], new[most:]
            if not all(at.alive for at in part):
                return
            arrays = self._store.save_prefix([at.page for at in part]).pages.values()
            for index, at in enumerate(part):
                self._put(self._names.page(at), [state[index] for state in arrays])
            yield
        for one in kept:
            if not self.folder.has(self._names.state(one)):
                yield from self._saving_state(one)
        states = [self._names.state(one) for one in kept if one.alive]
        self.folder.touch([*reversed(states), *(page_file(at.digest) for at in path[:0:-1])])

    def _saving_state(self, state: CachedState) -> Work:
        """Queues its row, the page that it ends in, if any, and its path to be written."""
        if not state.alive:
            return
        name, suffix = self._names.state(state), array("i", state.suffix_tokens)
        path = [at.name for at in state.node.path()][::-1]
        paged = self._store.save_prefix([state.page] if suffix else []).pages.values()
        parts, names, size = list[Array](), list[str](), 0
        state.pins += 1  # its row stays as it is until the end, also where it is evicted
        try:
            for info in self._recurrent:
                names.append(info.spec.name)
                size += info.row_bytes
                if size >= step_bytes(self.reader.running) or info is self._recurrent[-1]:
                    row = self._prefix.sizes.slots + state.row
                    parts += self._store.save_prefix((), names, row).rows.values()
                    names, size = [], 0
                    yield
        finally:
            self._prefix.cache.unpin(state)
        found: Path = (path[0], path[1:], suffix.tobytes())
        place = np.frombuffer(msgspec.msgpack.encode(found), np.uint8)
        self._put(name, [*parts, *(one[0] for one in paged if suffix), place])

    def _put(self, name: str, arrays: Iterable[Array]) -> None:
        self.folder.put(name, [one.reshape(-1).view(np.uint8) for one in arrays])
