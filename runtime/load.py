"""From an engine folder to executors that are ready to run.

Knows the table of executors and what must hold before anything is allocated: the folder is
intact, made for this machine, and fits its memory.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from spark_engine.engine_file import EngineFolder, EngineHeader, open_folder, read_manifest
from spark_engine.errors import CapacityError, EngineError
from spark_engine.interface import Limits
from spark_engine.manifest import Bucket, Manifest, StateInfo
from spark_engine.runtime.detect import available_memory, runnable_targets
from spark_engine.runtime.executor import Executor
from spark_engine.runtime.memory import BucketKey, States
from spark_engine.runtime.ort import OrtExecutor
from spark_engine.tensors import TensorSpec

GIB = 1 << 30


class OpenExecutor(Protocol):
    """Makes an executor from a `.engine` file; `folder` holds the weights."""

    def __call__(
        self, header: EngineHeader, payload: bytes, folder: Path, threads: int
    ) -> Executor: ...


NATIVE = "native"  # one device for all buckets: opened by `load`, where a driver is
EXECUTORS: Mapping[str, OpenExecutor] = {"ort": OrtExecutor}


@dataclass(frozen=True)
class Loaded:
    """An engine whose executors are open.

    `folder` is None when it came from no folder; `store` keeps the states when the executors
    bring their own.
    """

    limits: Limits
    eos: tuple[int, ...]
    states: tuple[StateInfo, ...]
    tables: tuple[TensorSpec, ...]
    executors: Mapping[BucketKey, Executor]
    folder: EngineFolder | None = None
    store: States | None = None

    def rows(self, family: str) -> tuple[int, ...]:
        """The family's buckets, ascending. Raises EngineError when it has none."""
        found = tuple(sorted(rows for name, rows in self.executors if name == family))
        if not found:
            raise EngineError(f"the engine has no {family} bucket; rebuild it with spark-build")
        return found


def load(path: Path, swap_bytes: int = 0, threads: int = 0) -> Loaded:
    """Verifies the engine folder `path` and opens every bucket.

    `swap_bytes` is wanted for snapshots beside what the manifest counts, but no more than all
    states; `threads` per executor, 0 for one per core. Raises EngineError when the folder is
    damaged, newer, or for another machine, and CapacityError, before anything is loaded, when
    it does not fit the free memory.
    """
    manifest = read_manifest(path)
    memory = manifest.memory
    if manifest.executor != NATIVE:  # the device's owner looks at its own memory
        check_capacity(manifest, min(swap_bytes, memory.kv + memory.states), available_memory())
    targets = runnable_targets()
    folder = open_folder(path, manifest.target if manifest.target in targets else targets[0])
    manifest = folder.manifest  # from here on the verified one
    # A device has one owner; onnxruntime opens sessions side by side.
    workers = os.cpu_count() if manifest.executor == "ort" else 1
    with ThreadPoolExecutor(workers) as pool:
        table, store = _executors(folder)
        opened = pool.map(lambda bucket: _open(folder, bucket, threads, table), manifest.buckets)
        executors = {(b.family, b.rows): e for b, e in zip(manifest.buckets, opened, strict=True)}
    limits, eos = manifest.limits, manifest.eos_token_ids
    return Loaded(limits, eos, manifest.states, manifest.tables, executors, folder, store)


def check_capacity(manifest: Manifest, swap_bytes: int, available: int | None) -> None:
    """Raises CapacityError, with the numbers, when the engine needs more than `available`."""
    need = manifest.memory.total + swap_bytes
    if available is not None and need > available:
        m = manifest.memory
        parts = f"weights {m.weights / GIB:.2f}, KV pages {m.kv / GIB:.2f}, states "
        parts += f"{m.states / GIB:.2f}, tables {m.tables / GIB:.2f}, arena {m.arena / GIB:.2f}, "
        raise CapacityError(
            f"engine {manifest.name} needs {need / GIB:.2f} GiB ({parts}swap "
            f"{swap_bytes / GIB:.2f}) and {available / GIB:.2f} GiB are free: stop other "
            "programs, or rebuild with a smaller --max-context or --max-seqs"
        )


def _executors(folder: EngineFolder) -> tuple[Mapping[str, OpenExecutor], States | None]:
    """How this engine's buckets are opened, and who keeps their states (None: the host)."""
    if folder.manifest.executor != NATIVE or NATIVE in EXECUTORS:
        return EXECUTORS, None
    from spark_engine.runtime.native import NativeEngine  # needs the extra `cuda`

    engine = NativeEngine(folder, lambda free: check_capacity(folder.manifest, 0, free))
    return {**EXECUTORS, NATIVE: engine.open}, engine.states


def _open(
    folder: EngineFolder, bucket: Bucket, threads: int, table: Mapping[str, OpenExecutor]
) -> Executor:
    file = folder.engine(bucket)
    header = file.header
    if (header.family, header.rows, header.target) != (
        bucket.family,
        bucket.rows,
        folder.manifest.target,
    ):
        raise EngineError(
            f"{folder.path / bucket.file} holds {header.family} {header.rows} for "
            f"{header.target}, not what the manifest says; rebuild the engine with spark-build"
        )
    if header.executor not in table:
        known = ", ".join((*EXECUTORS, NATIVE))
        raise EngineError(
            f"{folder.path / bucket.file} needs the executor {header.executor!r}; this version "
            f"has {known}: upgrade spark-engine or rebuild the engine"
        )
    return table[header.executor](header, file.payload, folder.path, threads)
