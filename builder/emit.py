"""Writes an engine folder atomically: an interrupted build leaves the previous engine or none.

Knows staging, locking, renaming and the disk space that is needed; does not know what the files
hold. All files are written into `.NAME.staging` next to the destination, flushed to disk, and
renamed at the end.
"""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO

from spark_engine.builder.report import size
from spark_engine.device.shared_memory import HostBudget
from spark_engine.engine_file import MANIFEST, digest_file
from spark_engine.errors import CapacityError, OptionError
from spark_engine.manifest import Manifest, decode_manifest
from spark_engine.weights_file import COPIES, IN_FLIGHT, WeightLayout


@contextmanager
def locked(destination: Path) -> Iterator[None]:
    """Locks the destination for one build; a second build of it waits.

    The operating system releases the lock of a process that ends. Removes first what an interrupted
    build left. Raises OptionError if the destination exists and is no engine, or its folder cannot
    be written.
    """
    check_destination(destination)
    lock = _sibling(destination, "lock")
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        file = _take(lock)
    except OSError as error:
        raise OptionError(
            f"-o {destination}: {destination.parent} cannot be written ({error.strerror}); choose "
            "a folder that you may write"
        ) from error
    with file:
        try:
            _recover(destination)
            yield
        finally:  # while locked, so that a waiting build sees that its lock file is gone
            lock.unlink(missing_ok=True)


@contextmanager
def staging(destination: Path) -> Iterator[Path]:
    """A folder that becomes `destination` if the block succeeds, and is removed if it raises.

    Use it under `locked`.
    """
    folder = _sibling(destination, "staging")
    folder.mkdir()
    try:
        yield folder
        _flush(folder)
        _swap(folder, destination)
    except OSError as error:
        if error.filename is None and error.errno is not None:  # write() names no file
            raise OSError(error.errno, error.strerror, str(destination)) from error
        raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def check_space(destination: Path, need: int) -> None:
    """Raises OptionError, with the numbers, unless `need` bytes are free on the destination's disk.

    The engine that is replaced is kept until the new one is complete, so its bytes do not count.
    """
    disk = os.statvfs(destination.parent)
    free = disk.f_bavail * disk.f_frsize
    if disk.f_blocks and need > free:  # some file systems report only zeros
        raise OptionError(
            f"-o {destination}: the engine takes {size(need)} and {size(free)} are free in "
            f"{destination.parent}; free some space, or choose a folder on another disk"
        )


def weights_in_work(layout: WeightLayout, budget: HostBudget) -> int:
    """Bytes that may be held at once while weights are made: half of the available memory, but at
    least what the largest tensor takes. Raises CapacityError, with the numbers, if that does not
    fit."""
    largest = max(layout.entries.values(), key=lambda entry: entry.spec.nbytes)
    need = COPIES * largest.spec.nbytes
    if budget.usable is None:
        return IN_FLIGHT
    if need > budget.usable:
        kept = (
            f" in addition to {size(budget.kept)} that the machine itself keeps"
            if budget.kept
            else ""
        )
        raise CapacityError(
            f"weight {largest.spec.name} takes {size(need)} while it is made, and "
            f"{size(budget.usable)} of memory are free{kept}: stop other programs (an engine that "
            "runs here first), then build again, or build on a larger machine (--card names this "
            "one)"
        )
    return min(IN_FLIGHT, max(need, budget.usable // 2))


def seal(folder: Path, manifest: Manifest) -> Manifest:
    """Adds the files' digests and writes the manifest, last. EngineError: no runtime reads it."""
    files = {name: digest_file(folder / name) for name in sorted(_names(folder))}
    sealed = replace(manifest, files=files)
    (folder / MANIFEST).write_bytes(sealed.encode())
    decode_manifest(sealed.encode(), "the engine of these options", "give smaller sizes")
    return sealed


def check_destination(destination: Path) -> None:
    """Raises OptionError unless the path is free, an engine folder, or an empty folder."""
    if destination.name in ("", ".."):
        raise OptionError(f"-o {destination}: name a folder inside it")
    if not destination.exists():
        return
    if not destination.is_dir() or (
        any(destination.iterdir()) and not (destination / MANIFEST).is_file()
    ):
        raise OptionError(
            f"-o {destination} exists and is not an engine folder: choose another, or remove it"
        )


def _take(lock: Path) -> IO[str]:
    """The open lock file, locked. Waits for its holder, which removes the file at its end."""
    while True:
        file = lock.open("w")
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            if os.path.samestat(os.fstat(file.fileno()), os.stat(lock)):
                return file
        except FileNotFoundError:  # the holder has removed it
            pass
        except BaseException:
            file.close()
            raise
        file.close()


def _recover(destination: Path) -> None:
    """Removes what an interrupted build left: its staging folder, and the renamed previous
    engine."""
    shutil.rmtree(_sibling(destination, "staging"), ignore_errors=True)
    old = _sibling(destination, "old")
    if old.exists() and not destination.exists():
        os.rename(old, destination)
    shutil.rmtree(old, ignore_errors=True)


def _swap(folder: Path, destination: Path) -> None:
    """Renames the folder to the destination; `_recover` completes an interrupted rename."""
    old = _sibling(destination, "old")
    if destination.exists():
        os.rename(destination, old)
    try:
        os.rename(folder, destination)
    except BaseException:
        if old.exists():
            os.rename(old, destination)
        raise
    _sync(destination.parent)
    shutil.rmtree(old, ignore_errors=True)


def _flush(folder: Path) -> None:
    for path in sorted(folder.rglob("*")):
        _sync(path)
    _sync(folder)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _names(folder: Path) -> list[str]:
    files = (p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())
    return [name for name in files if name != MANIFEST]


def _sibling(destination: Path, what: str) -> Path:
    return destination.with_name(f".{destination.name}.{what}")
