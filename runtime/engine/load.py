"""Opens an engine folder: verifies it, loads the weights, returns an executor for each bucket.

Knows the table of executors and what must hold before anything is allocated: the folder is
intact, made for this machine, and fits its memory.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from spark_engine.device.buffers import Buffers
from spark_engine.device.host_memory import available_memory
from spark_engine.device.shared_memory import host_budget
from spark_engine.device.startup_lock import startup_lock
from spark_engine.engine_file import (
    EngineFile,
    EngineFolder,
    EngineHeader,
    open_folder,
    read_manifest,
)
from spark_engine.errors import EngineError, OptionError
from spark_engine.interface import DECODE, PREFILL, Limits
from spark_engine.manifest import NATIVE, Bucket, Manifest, StateInfo
from spark_engine.progress import Progress
from spark_engine.runtime.engine.detect import check_memory, foreign, runnable_targets
from spark_engine.runtime.executors.cache_size import GpuMemory, budget, device_rows
from spark_engine.runtime.executors.communicator import Communicator
from spark_engine.runtime.executors.executor import Executor
from spark_engine.runtime.executors.memory import BucketKey, HostStates, States, TableSink
from spark_engine.runtime.executors.ort import OrtExecutor, Sessions
from spark_engine.runtime.executors.trt import TrtExecutor
from spark_engine.runtime.ranks.group import RankGroup
from spark_engine.runtime.ranks.leader import LeadExecutor, LeadStates, LeadTables, Orders
from spark_engine.runtime.ranks.messages import LoadOptions
from spark_engine.runtime.ranks.open_progress import OpenProgress
from spark_engine.runtime.ranks.segments import SegmentsExecutor
from spark_engine.runtime.ranks.spawn import begin_message, gather_ranks
from spark_engine.runtime.ranks.turns import take_turns
from spark_engine.tensors import TensorSpec
from spark_engine.vision import VisionInfo

if TYPE_CHECKING:
    from spark_engine.device.gpu import Gpu
    from spark_engine.runtime.executors.timed import DeviceClock

MIB, GIB = 1 << 20, 1 << 30
TURN_S = 2e-4  # of a thread that computes: one that copies weights asks for Python's lock often
# Of a `.engine` file's header and payload, the folder that holds the weights, and threads.
OpenExecutor: TypeAlias = Callable[[EngineHeader, bytes, Path, int], Executor]
EXECUTORS: Mapping[str, OpenExecutor] = {"ort": OrtExecutor, "trt": TrtExecutor}
HOST_TARGETS = ("cpu",)  # their targets; a GPU's target is known by its driver


@dataclass(frozen=True)
class Loaded:
    """An engine with open executors."""

    limits: Limits
    eos: tuple[int, ...]
    states: tuple[StateInfo, ...]
    tables: tuple[TensorSpec, ...]
    executors: Mapping[BucketKey, Executor]
    folder: EngineFolder | None = None  # None when it came from no folder
    # The states, where the executors have their own; None: the host's.
    device_states: States | None = None
    table_writer: TableSink | None = None  # writes the tables, likewise
    # Opens one more payload over the same weights, states and tables; the caller closes it.
    open_bucket: OpenExecutor | None = None
    # Microseconds of a launch by bucket, as far as they are known.
    costs: Mapping[BucketKey, float] = field(default_factory=dict)
    # Budget of the prefix cache, pages and snapshots together; None: all there are.
    cache_bytes: int | None = None
    invariant: bool = False  # a sequence's bits do not depend on the bucket it runs in
    # Of launches on a device; None where launches are synchronous.
    clock: DeviceClock | None = None
    synchronous: bool = False  # launches run at once, wherever the states are
    group: RankGroup | None = None  # the other ranks, which end with this one
    vision: VisionInfo | None = None  # how images are read; None: they are not

    def buckets(self, family: str) -> tuple[int, ...]:
        """The family's buckets, in rows, ascending; none where the engine has none."""
        return tuple(sorted(rows for name, rows in self.executors if name == family))

    def rows(self, family: str) -> tuple[int, ...]:
        """The family's buckets, ascending. Raises EngineError when it has none."""
        found = self.buckets(family)
        if not found:
            raise EngineError(f"the engine has no {family} bucket; rebuild it with spark-build")
        return found

    def close(self) -> None:
        """Closes every executor, the last of which frees the device's memory, and ends the other
        ranks. These get the message first: each frees memory that others read after they have
        released it."""
        with ExitStack() as last:  # all of it, even where one fails
            if self.group is not None:
                last.callback(self.group.close)
            for executor in reversed([*self.executors.values()]):
                last.callback(executor.close)
            if self.group is not None:
                self.group.leave()


def load(
    path: Path,
    swap_bytes: int = 0,
    threads: int = 0,
    mark: Callable[[str], None] | None = None,
    shown: Progress | None = None,
    cache_bytes: int | None = None,
    graphs: bool = True,
    masks: bool = False,
    least: bool = False,
    comm: Communicator | None = None,
    hosts: Sequence[str] = (),
    host_bytes: int | None = None,
) -> Loaded:
    """Verifies the engine folder `path` and opens every bucket.

    `swap_bytes`: for swap copies, on top of the manifest's plan, at most all states; `threads` per
    executor, 0 for one per core; `mark` is called with the name of each finished stage, `shown`
    shows progress. `cache_bytes`: of the prefix cache, 0 for none; None: what the memory allows.
    Without `graphs` a GPU's launches are queued one by one; with `masks` all of its graphs are
    recorded at the start, also those of steps that wait for masks. `host_bytes`: kept for the host
    where GPU and host share memory; None: the default. With `least` only the least bucket of decode
    and of prefill is opened on a CPU. An engine of several ranks is opened as rank 0, the others
    being processes of this host or of the `hosts` after the first; with `comm` as that rank. Raises
    EngineError when the folder is damaged, newer, or for another machine, and CapacityError, before
    anything is loaded, when it does not fit the free memory or there are fewer GPUs than ranks.
    """
    manifest = read_manifest(path)
    options = LoadOptions(swap_bytes, threads, cache_bytes, graphs, masks, least, host_bytes)
    mark, shown = mark or (lambda stage: None), shown or Progress(None)
    if manifest.ranks == 1 or comm is not None:
        return _load(path, manifest, options, mark, shown, comm)
    with ExitStack() as undo:
        group = gather_ranks(path, manifest, hosts, shown.say)
        undo.callback(group.close)
        orders = Orders(group)
        group.begin(begin_message(path, options), manifest.executor == NATIVE)
        progress = OpenProgress(shown, mark, group.check)
        with orders.explained():
            loaded = _load(path, manifest, options, progress.mark, progress, group.comm)
        undo.callback(loaded.close)
        undo.callback(group.leave)
        group.all_open()
        undo.pop_all()
    return _as_leader(loaded, group, orders)


def _as_leader(loaded: Loaded, group: RankGroup, orders: Orders) -> Loaded:
    """Rank 0's part of an engine, with executors and states that send orders to the others."""
    states, synchronous = loaded.device_states, loaded.device_states is None
    states = HostStates(loaded.states) if states is None else states
    arrays = states.arrays if synchronous else {}
    names = [spec.name for spec in loaded.tables]
    executors = {
        key: LeadExecutor(one, key, orders, names, arrays) for key, one in loaded.executors.items()
    }
    return replace(
        loaded,
        executors=executors,
        device_states=LeadStates(states, orders),
        table_writer=LeadTables(loaded.table_writer, orders),
        open_bucket=None,
        synchronous=synchronous,
        group=group,
    )


def _load(
    path: Path,
    manifest: Manifest,
    options: LoadOptions,
    mark: Callable[[str], None],
    shown: Progress,
    comm: Communicator | None,
) -> Loaded:
    """One rank's part, or all of an engine of one rank."""
    rank = 0 if comm is None else comm.rank
    if not options.graphs and manifest.executor != NATIVE:
        words = f"{path} is for the {manifest.target}, where nothing is captured: leave it out"
        raise OptionError(f"--no-graphs does nothing: {words}")
    memory = manifest.memory
    contents = f"{memory.weights / GIB:.2f} GiB of weights, {len(manifest.buckets)} buckets"
    shown.say(f"loading {path}: {contents}" + ("" if comm is None else f", rank {rank}"))
    swap_bytes = min(options.swap_bytes, memory.kv + memory.states)
    here = manifest.ranks if comm is not None and comm.here else 1
    if manifest.executor != NATIVE:  # a device's memory is checked when it is opened
        # Rank 0 checks for all ranks of this host; the others start when some have allocated.
        available = host_budget(available_memory(), options.host_bytes)
        check_memory(manifest, swap_bytes, available.usable, available.kept, 1 if rank else here)
    targets = runnable_targets(HOST_TARGETS)
    target = manifest.target if manifest.target in targets else targets[0]
    if why := foreign(manifest.target, targets):
        raise EngineError(f"{path} cannot be run: {why}")
    if manifest.executor == NATIVE and {*targets} <= {*HOST_TARGETS}:
        raise EngineError(
            f"{path} is for the GPU {manifest.target}, and no GPU can be used here: `spark-run "
            "doctor` says why; `spark-build CHECKPOINT --target cpu` builds one that needs none"
        )
    # What a device opens is verified when it is read, and each rank verifies its own weights.
    own, deferred = {manifest.weights_files[rank]}, {*manifest.weights_files}
    native = manifest.executor == NATIVE
    deferred = deferred | {b.file for b in manifest.buckets} if native else deferred - own
    folder = open_folder(path, target, deferred, shown.advance, manifest)
    mark("files")
    if folder.manifest.executor == NATIVE and NATIVE not in EXECUTORS:
        return _load_native(folder, options, mark, shown, comm)
    return _load_host(folder, options, swap_bytes, mark, shown, comm)


def _load_host(
    folder: EngineFolder,
    options: LoadOptions,
    swap_bytes: int,
    mark: Callable[[str], None],
    shown: Progress,
    comm: Communicator | None,
) -> Loaded:
    """An engine on the CPU, opened bucket by bucket. Where a GPU shares the
    memory, no other engine measures and allocates meanwhile (`startup_lock`); a rank does not wait
    for the others there, which would be a deadlock. The states' memory is only allocated when it is
    written, after the turn: so the plan counts, not the free memory measured later."""
    manifest = folder.manifest  # the verified one
    wanted = least_buckets(manifest) if options.least else manifest.buckets
    executors: dict[BucketKey, Executor] = {}
    table: dict[str, Callable[..., Executor]] = {**EXECUTORS}
    if comm is not None:
        table = {"ort": partial(SegmentsExecutor, comm=comm)}
    if "ort" in table:
        table["ort"] = partial(table["ort"], sessions=Sessions())
    with startup_lock(host_budget(None).shared, shown.say):
        available = host_budget(available_memory(), options.host_bytes)
        check_memory(manifest, swap_bytes, available.usable, available.kept)
        shown.say(f"opening {len(wanted)} buckets")
        for bucket in wanted:
            executors[bucket.family, bucket.rows] = _open(folder, bucket, options.threads, table)
            shown.advance(len(executors), len(wanted))
    mark("buckets")
    opener = table[manifest.executor]
    rows = manifest.limits.snapshots
    return _loaded(folder, executors, rows, options.cache_bytes, open_bucket=opener)


def least_buckets(manifest: Manifest) -> tuple[Bucket, ...]:
    by_family = ([b for b in manifest.buckets if b.family == f] for f in (DECODE, PREFILL))
    return tuple(min(found, key=lambda b: b.rows) for found in by_family if found)


def _load_native(
    folder: EngineFolder,
    options: LoadOptions,
    mark: Callable[[str], None],
    shown: Progress,
    comm: Communicator | None,
) -> Loaded:
    """The engine on the first GPU, opened bucket by bucket while its weights are read. Where the
    host shares the memory, no other engine measures and allocates meanwhile (`startup_lock`)."""
    from spark_engine.runtime.executors.native import NativeEngine  # needs the extra `cuda`

    manifest, threads = folder.manifest, options.threads
    executors: dict[BucketKey, Executor] = {}
    with ExitStack() as turn, _loading(), ExitStack() as undo:

        def rows_in(gpu: Gpu) -> int:
            take_turns(turn, gpu.integrated, shown.say, comm)
            memory = gpu.free_bytes, gpu.total_bytes, gpu.integrated
            available = GpuMemory(*memory, options.host_bytes)
            check_memory(manifest, 0, available.usable, available.kept)
            rows = device_rows(manifest, available, options.cache_bytes)
            # the same on all ranks: what the smallest memory holds
            return rows if comm is None else int(comm.all_gather(np.array([rows])).min())

        engine = NativeEngine(folder, rows_in, mark, options.graphs, options.masks, comm)
        undo.callback(engine.close)
        rows, row = engine.states.snapshot_rows, engine.states.snapshot_bytes
        if rows:
            shown.say(f"prefix cache: {rows} snapshots of {row / MIB:.1f} MiB")
        table = {**EXECUTORS, NATIVE: engine.open}
        with closing(_read_ahead(folder)) as files:
            for bucket, file in files:
                executor = _open(folder, bucket, threads, table, file)
                undo.callback(executor.close)
                executors[bucket.family, bucket.rows] = executor
                mark(f"{bucket.family} {bucket.rows}")
        gc.collect()  # here, where weights are still being read
        engine.wait()
        mark("weights")
        undo.pop_all()
    own = {"device_states": engine.states, "table_writer": engine.tables, "clock": engine.clock}
    return _loaded(folder, executors, rows, options.cache_bytes, open_bucket=engine.open, **own)


def _read_ahead(folder: EngineFolder) -> Generator[tuple[Bucket, EngineFile]]:
    """The buckets with their files; a thread reads and hashes one while the last one is opened."""
    buckets = folder.manifest.buckets
    with ThreadPoolExecutor(1, "files") as pool:
        ahead = pool.submit(folder.engine, buckets[0])
        for bucket, after in zip_longest(buckets, buckets[1:]):
            file = ahead.result()
            if after is not None:
                ahead = pool.submit(folder.engine, after)
            yield bucket, file


@contextmanager
def _loading() -> Iterator[None]:
    """Short turns of Python's threads, and no search for cycles: what is made is permanent."""
    collects, turn = gc.isenabled(), sys.getswitchinterval()
    gc.disable()
    sys.setswitchinterval(TURN_S)
    try:
        yield
    finally:
        sys.setswitchinterval(turn)
        if collects:
            gc.enable()


def _loaded(
    folder: EngineFolder,
    executors: Mapping[BucketKey, Executor],
    rows: int,
    cache_bytes: int | None,
    **own: Any,
) -> Loaded:
    """A `Loaded` by the manifest; `rows`: snapshot rows of the prefix cache."""
    m, cache = folder.manifest, budget(folder.manifest, rows, cache_bytes)
    costs = {(b.family, b.rows): b.cost_us for b in m.buckets}
    own |= {"costs": costs, "cache_bytes": cache, "invariant": m.invariant}
    own["vision"] = m.vision
    return Loaded(m.limits, m.eos_token_ids, m.states, m.tables, executors, folder, **own)


def _open(
    folder: EngineFolder,
    bucket: Bucket,
    threads: int,
    table: Mapping[str, OpenExecutor],
    read: EngineFile | None = None,
) -> Executor:
    file = read or folder.engine(bucket)
    header = file.header
    found = (header.family, header.rows, header.tile, header.target)
    if found != (bucket.family, bucket.rows, bucket.tile, folder.manifest.target):
        raise EngineError(
            f"{folder.path / bucket.file} holds {header.family} {header.rows} for "
            f"{header.target}, not what the manifest says; rebuild the engine with spark-build"
        )
    if header.executor == NATIVE:
        buffers = Buffers.of(header, (t.name for t in folder.manifest.tables))
        needs = buffers.own_bytes, buffers.wide.nbytes
        if needs != (bucket.buffer_bytes, bucket.wide_bytes):
            raise EngineError(
                f"{folder.path / bucket.file} has buffers of {needs} bytes, not the manifest's "
                f"{(bucket.buffer_bytes, bucket.wide_bytes)}; rebuild the engine with spark-build"
            )
    if header.executor not in table:
        known = ", ".join((*EXECUTORS, NATIVE))
        raise EngineError(
            f"{folder.path / bucket.file} needs the executor {header.executor!r}; this version "
            f"has {known}: upgrade spark-engine or rebuild the engine"
        )
    return table[header.executor](header, file.payload, folder.path, threads)
