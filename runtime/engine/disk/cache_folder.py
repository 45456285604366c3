"""A folder of pages and states that outlives its process: bounded, verified, of one process.

A file's name is the digest of what its content depends on (the engine, the salt, all tokens so
far). It holds MAGIC, a SHA-256 digest of that name and the content, and the content, so a file that
is damaged, cut short or renamed is refused when it is read, and removed. One thread writes: to a
temporary file, which then gets the name. Nothing waits for the disk to have written it: what a
power failure leaves is refused like any damage. The first error of a write ends all writing.

Knows names and bytes; knows no token and no engine.
"""

import contextlib
import fcntl
import logging
import os
import re
import stat
import threading
import time
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path

import numpy as np

from spark_engine.errors import OptionError
from spark_engine.tensors import Bytes

MAGIC = b"sparkkv1"  # the format's version
HEAD = len(MAGIC) + 32
NODE = 24  # bytes of a node's digest
BLOCK = 4096  # bytes: what a file takes is a multiple
READERS = 4  # threads: one digests one to two GB a second
TEMPORARY, LOCK = "writing.tmp", "lock"
_NAME = re.compile(r"([0-9a-f]{48})(?:\.page|\.(\d{1,5})\.[0-9a-f]{32}\.state)")
log = logging.getLogger(__name__)


class BadFile(Exception):
    """A file is not what was written under its name."""


def page_file(node: bytes) -> str:
    """The name of a page's file; `node`: the digest of its path."""
    return f"{node.hex()}.page"


def state_file(node: bytes, length: int, suffix: bytes) -> str:
    """The name of a state's file: `length` tokens after its node, with a digest of 16 bytes."""
    return f"{node.hex()}.{length}.{suffix.hex()}.state"


class CacheFolder:
    """The files of at most `most` bytes in `path`, the least recently used being removed first.

    The engine's thread calls all methods but `flush`, which any may call. Counts since the start:
    `refused` and `evicted` files; `used`: bytes now.
    """

    def __init__(self, path: Path, most: int) -> None:
        """Raises OptionError for a folder that cannot be used, or that another process uses."""
        self.path, self.most = path, most
        self.used = self.refused = self.evicted = self.queued = 0
        self.failed = ""  # the error that ended all writing
        self._files: OrderedDict[str, int] = OrderedDict()  # bytes, least recently used first
        self._states: defaultdict[str, set[tuple[int, str]]] = defaultdict(set)  # by node
        self._coming: set[str] = set()  # to be written
        self._changed = threading.Condition()  # guards the fields above
        self.closed = False
        try:
            self._lock = self._open()
            for _, name, size in sorted(files_in(path)):
                self._add(name, size)
            self._evict_for(0)
        except OSError as error:
            words = "name a folder that this user may write, or leave it out"
            raise OptionError(f"--cache-dir {path}: {error.strerror}: {words}") from error
        self._writer = ThreadPoolExecutor(1, "cache-write")
        self._readers = ThreadPoolExecutor(READERS, "cache-read")

    def has(self, name: str) -> bool:
        """True if the file is there, or is to be written."""
        return name in self._files or name in self._coming

    def readable(self, name: str) -> bool:
        return name in self._files

    def states_at(self, node: bytes) -> list[tuple[int, str]]:
        """Of the states at a node: tokens after it, and the file."""
        with self._changed:
            return sorted(self._states.get(node.hex(), ()))

    def put(self, name: str, parts: Sequence[Bytes]) -> None:
        """Queues a file to be written; `parts` must not change any more."""
        size = HEAD + sum(part.nbytes for part in parts)
        with self._changed:
            self.queued += size
            self._coming.add(name)
        self._writer.submit(self._write, name, parts, size)

    def states_of(self, tag: bytes) -> list[str]:
        """The files of states at nodes that start with the tag, the last used first."""
        return [name for name in reversed(self._files) if re.match(f"{tag.hex()}.*state$", name)]

    def read(self, name: str, size: int, more: int) -> Future[memoryview | None]:
        """The content, of `size` bytes and at most so many more; None if it was refused."""
        return self._readers.submit(self._read, name, size, more)

    def touch(self, names: Iterable[str]) -> None:
        """These were used just now, the last of them last."""
        self._writer.submit(self._touch, [*names])

    def discard(self, names: Iterable[str]) -> None:
        self._writer.submit(self._discard, [*names])

    def wait(self, seconds: float) -> None:
        """Returns after the next change, or after so many seconds."""
        with self._changed:
            self._changed.wait(seconds)

    def flush(self, seconds: float) -> None:
        """Waits until what is queued is written, `seconds` at most."""
        with contextlib.suppress(TimeoutError, RuntimeError):  # it may be closed
            self._writer.submit(int).result(seconds)

    def close(self) -> None:
        """Drops what is not written."""
        self.closed = True
        for pool in (self._readers, self._writer):
            pool.shutdown(cancel_futures=True)
        os.close(self._lock)

    def _open(self) -> int:
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_owner(self.path)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        lock = os.open(self.path / LOCK, flags, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            words = "another engine uses it: give each its own folder"
            raise OptionError(f"--cache-dir {self.path}: {words}") from None
        (self.path / TEMPORARY).unlink(missing_ok=True)  # of a process that was killed
        return lock

    def _add(self, name: str, size: int) -> None:
        self._forget(name)
        self._files[name] = blocks(size)
        self.used += blocks(size)
        match = _NAME.fullmatch(name)
        if match and match[2]:
            self._states[match[1]].add((int(match[2]), name))

    def _forget(self, name: str) -> None:
        self.used -= self._files.pop(name, 0)
        match = _NAME.fullmatch(name)
        if match and (states := self._states.get(match[1])):
            states.discard((int(match[2] or 0), name))
            if not states:
                del self._states[match[1]]

    def _evict_for(self, size: int) -> None:
        while True:
            with self._changed:
                if not self._files or self.used + blocks(size) <= self.most:
                    return
                name = next(iter(self._files))
                self._forget(name)
                self.evicted += 1
            (self.path / name).unlink(missing_ok=True)

    def _write(self, name: str, parts: Sequence[Bytes], size: int) -> None:
        try:
            if not self.failed and blocks(size) <= self.most:
                self._evict_for(size)
                write_file(self.path, name, parts)
                with self._changed:
                    self._add(name, size)
        except OSError as error:
            self.failed = f"{self.path}: {error.strerror}"
            log.warning("the prefix cache on disk takes nothing more: %s", self.failed)
            with contextlib.suppress(OSError):
                (self.path / TEMPORARY).unlink(missing_ok=True)
        finally:
            with self._changed:
                self.queued -= size
                self._coming.discard(name)
                self._changed.notify_all()

    def _read(self, name: str, size: int, more: int) -> memoryview | None:
        try:
            return read_file(self.path / name, size, more)
        except (OSError, BadFile):
            self.refused += 1
            self._discard([name])
            return None

    def _discard(self, names: Iterable[str]) -> None:
        for name in names:
            with self._changed:
                self._forget(name)
            with contextlib.suppress(OSError):
                (self.path / name).unlink()

    def _touch(self, names: Sequence[str]) -> None:
        now = time.time_ns()
        for index, name in enumerate(names):
            with self._changed:
                if name not in self._files:
                    continue
                self._files.move_to_end(name)
            with contextlib.suppress(OSError):
                os.utime(self.path / name, ns=(now + index, now + index))


def check_owner(path: Path) -> None:
    """Raises OptionError for a folder that is another user's, or that others may write in, and
    OSError where there is none."""
    found = path.stat()
    if found.st_uid != os.geteuid() or found.st_mode & 0o022:
        words = "other users may write in it: name a folder of this user, with chmod 700"
        raise OptionError(f"--cache-dir {path}: {words}")


def files_in(path: Path) -> Iterator[tuple[int, str, int]]:
    """When each file of a cache was used last, in ns; its name and bytes. Others' names are
    ignored. Raises OSError."""
    with os.scandir(path) as entries:
        for entry in entries:
            if _NAME.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                about = entry.stat(follow_symlinks=False)
                yield about.st_mtime_ns, entry.name, about.st_size


def write_file(folder: Path, name: str, parts: Iterable[Bytes]) -> None:
    """Writes a file whole, or leaves the one before. Raises OSError."""
    pieces = [part.data for part in parts]
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(folder / TEMPORARY, flags, 0o600), "wb") as file:
        file.write(MAGIC + _digest(name, pieces))
        for piece in pieces:
            file.write(piece)
    os.replace(folder / TEMPORARY, folder / name)


def read_file(path: Path, size: int, more: int = 0) -> memoryview:
    """The content, of `size` bytes and at most so many more. Raises BadFile or OSError."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # it waits for no pipe
    with open(os.open(path, flags), "rb") as file:
        about = os.fstat(file.fileno())
        fits = 0 <= about.st_size - HEAD - size <= more
        if not (stat.S_ISREG(about.st_mode) and fits):
            raise BadFile
        data = np.empty(about.st_size, np.uint8).data  # not zeroed first
        if file.readinto(data) != len(data):
            raise BadFile
    content = data[HEAD:]
    if data[:HEAD] != MAGIC + _digest(path.name, [content]):
        raise BadFile
    return content


def _digest(name: str, pieces: Iterable[memoryview]) -> bytes:
    found = sha256(MAGIC + name.encode())
    for piece in pieces:
        found.update(piece)
    return found.digest()


def blocks(size: int) -> int:
    """Bytes on the disk of a file of so many."""
    return -(-size // BLOCK) * BLOCK
