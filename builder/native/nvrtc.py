"""CUDA sources to cubins, by NVRTC. Needs no GPU and no driver.

Knows compiler options and the compiler's report; knows no op. A cubin depends on the source, its
headers, the defines, the target and the compiler alone; their hash is its key in the folder of
compiled kernels.
"""

import hashlib
import io
import json
import multiprocessing
import os
import re
import signal
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from types import ModuleType
from typing import Self

from cuda.bindings import nvrtc
from cuda.core import Program, ProgramOptions

from spark_engine.builder.native.cuda_sources import SOURCES, sources
from spark_engine.errors import InternalError
from spark_engine.kernel import DECLARED, NCCL, Launch, Plan, Target
from spark_engine.progress import Advance, ignore

Defines = tuple[tuple[str, str], ...]
_ENTRY = re.compile(r"Compiling entry function '(\w+)'")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_FUNCTION = re.compile(r"Function properties for (\S+)\s[^\n]*?" + _STACK.pattern)
_USED = re.compile(r"Used (\d+) registers(?:.*?(\d+) bytes smem)?")
_DYNAMIC = re.compile(rb"dynamic shared:\0(.{44})(.{4})", re.DOTALL)  # DynamicShared of ptx.cuh


@dataclass(frozen=True)
class KernelUsage:
    """What one kernel uses: registers of a thread, and bytes; `shared` is its static shared memory.

    `spills`: bytes of spill stores and loads, of the kernel and of each function of its source that
        is not inlined, since ptxas does not report which kernel calls it.
    `dynamic`: bytes of dynamic shared memory that it declares.
    """

    registers: int
    shared: int
    stack: int
    spills: int
    dynamic: int = 0


@dataclass(frozen=True)
class Cubin:
    """A compiled source: the ELF image and each entry's usage by symbol."""

    code: bytes
    usage: Mapping[str, KernelUsage]

    def launched(self, launch: Launch) -> Launch:
        """A launch of this cubin's with the shared memory that its kernel declares.

        Raises InternalError where the plan has less, or where only one of the two has any.
        """
        own = self.usage[launch.symbol].dynamic
        if launch.shared == DECLARED and own:
            return replace(launch, shared=own)
        if own > launch.shared or (own == 0) != (launch.shared == 0):
            raise InternalError(
                f"{launch.symbol} declares {own} bytes of dynamic shared memory and is planned "
                f"with {launch.shared}: correct DYNAMIC_SHARED in its source or its planner"
            )
        return launch


@dataclass(frozen=True)
class Job:
    """One compilation: a file of `plugins/`, its macros, and the kernels that it must have."""

    source: str
    defines: Defines
    symbols: tuple[str, ...]


def jobs_of(plans: Iterable[tuple[str, Plan]]) -> tuple[Job, ...]:
    """The distinct compilations of (source, plan) pairs, in the order of their first use."""
    found: dict[tuple[str, Defines], set[str]] = {}
    for source, plan in plans:
        for launch in plan.launches:
            key = (launch.source or source, launch.defines)
            if launch.source != NCCL:
                found.setdefault(key, set()).add(launch.symbol)
    return tuple(Job(*key, tuple(sorted(symbols))) for key, symbols in found.items())


def compile(job: Job, target: Target, cache: Path | None = None, folder: Path = SOURCES) -> Cubin:
    """The job's cubin for `target`, from the folder `cache` if it is there.

    Raises InternalError, with the compiler's messages, if the source does not compile, lacks one
    of the job's symbols or takes more shared memory than `target` has.
    """
    texts = sources(job.source, folder)
    kept = cache / f"{_key(job, target, texts)}.cubin" if cache else None
    cubin = _recall(kept) if kept else None
    if cubin is None:
        cubin = _compile(job, target, folder, texts[job.source])
        if kept:
            _keep(kept, cubin)
    missing = sorted(set(job.symbols) - set(cubin.usage))
    if missing:
        raise InternalError(f'{_label(job, target)} has no extern "C" kernel {missing}')
    for symbol in job.symbols:
        most = cubin.usage[symbol].shared + cubin.usage[symbol].dynamic
        if most > target.shared_bytes:
            raise InternalError(
                f"{symbol} takes {most} bytes of shared memory, a block has {target.shared_bytes}: "
                f"refuse this node ({_label(job, target)})"
            )
    return cubin


def compile_all(
    jobs: Sequence[Job],
    target: Target,
    cache: Path | None = None,
    workers: int = 1,
    folder: Path = SOURCES,
    advance: Advance = ignore,
) -> dict[Job, Cubin]:
    """`compile` of each job, by `workers` processes; `advance` receives the number done."""
    made: dict[Job, Cubin] = {}
    with Compiler(target, cache, workers, folder) as compiler:
        compiler.start(jobs if workers > 1 and len(jobs) > 1 else ())
        for job in jobs:
            made[job] = compiler(job)
            advance(len(made), len(jobs))
    return made


class Compiler:
    """Runs `compile` of jobs in `workers` processes while the caller does other work. A context
    manager: its end cancels the jobs that no process has started."""

    def __init__(
        self, target: Target, cache: Path | None, workers: int, folder: Path = SOURCES
    ) -> None:
        self._how, self._workers = (target, cache, folder), workers
        self._pool: ProcessPoolExecutor | None = None
        self._running: dict[tuple[str, Defines], Future[Cubin]] = {}
        self._seen: set[tuple[str, Defines]] = set()
        self._sources = lru_cache(None)(partial(sources, folder=folder))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def start(self, jobs: Iterable[Job]) -> None:
        """Starts those that are not in the folder of compiled kernels."""
        target, folder, _ = self._how
        for job in jobs:
            key = job.source, job.defines
            if key in self._seen:
                continue
            self._seen.add(key)
            kept = folder and folder / f"{_key(job, target, self._sources(job.source))}.cubin"
            if not (kept and kept.exists()):
                self._pool = self._pool or _processes(self._workers)
                with _no_main():
                    self._running[key] = self._pool.submit(compile, job, *self._how)

    def __call__(self, job: Job) -> Cubin:
        """`compile` of the job; waits for it where it was started."""
        running = self._running.get((job.source, job.defines))
        return compile(job, *self._how) if running is None else running.result()


@contextmanager
def _no_main() -> Iterator[None]:
    """A process that starts meanwhile imports no main module: a script that builds, without a guard
    for its name, would run in each of them again, and wait for the build that waits for it."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _processes(workers: int) -> ProcessPoolExecutor:
    """Workers ignore Ctrl-C: the parent handles it."""
    spawn = multiprocessing.get_context("spawn")
    ignored = (signal.SIGINT, signal.SIG_IGN)
    return ProcessPoolExecutor(workers, spawn, signal.signal, ignored)


def compiler_version() -> str:
    """NVRTC's version, as "13.0"."""
    result, major, minor = nvrtc.nvrtcVersion()
    if int(result) != 0:
        raise InternalError(f"NVRTC gives no version: {result}")
    return f"{major}.{minor}"


def _options(job: Job, target: Target, folder: Path) -> ProgramOptions:
    return ProgramOptions(
        name=job.source,
        std="c++17",
        arch=target.name,
        define_macro=list(job.defines) or None,
        include_path=str(folder),
        ptxas_options=["-v"],
        no_cache=True,  # a result from NVRTC's cache has no report of ptxas
    )


def _compile(job: Job, target: Target, folder: Path, text: str) -> Cubin:
    log = io.StringIO()
    try:
        program = Program(text, "c++", _options(job, target, folder))
        code = bytes(program.compile("cubin", logs=log).code)
    except Exception as error:  # cuda.core's class for NVRTC's errors is not public
        raise InternalError(
            f"{_label(job, target)} does not compile: {error}\n{log.getvalue()}"
        ) from error
    names = ((m[1].rstrip(b"\0").decode(), m[2]) for m in _DYNAMIC.finditer(code))
    dynamic = {name: int.from_bytes(size, "little") for name, size in names}
    usage = _usage(log.getvalue())
    return Cubin(code, {k: replace(v, dynamic=dynamic.get(k, 0)) for k, v in usage})


def _usage(log: str) -> Iterator[tuple[str, KernelUsage]]:
    names = list(_ENTRY.finditer(log))
    if not names:
        raise InternalError(f"ptxas reports no kernel: {log!r}")
    ends = [m.start() for m in names[1:]] + [len(log)]
    kernels = {name[1] for name in names}
    called = [m for m in _FUNCTION.finditer(log) if m[1] not in kernels]
    theirs = sum(int(m[3]) + int(m[4]) for m in called)
    for name, end in zip(names, ends, strict=True):
        part = log[name.end() : end]
        stack, used = _STACK.search(part), _USED.search(part)
        if stack is None or used is None:
            raise InternalError(f"ptxas reports no usage of {name[1]}:\n{log}")
        spills = int(stack[2]) + int(stack[3]) + theirs
        yield name[1], KernelUsage(int(used[1]), int(used[2] or 0), int(stack[1]), spills)


def _key(job: Job, target: Target, texts: Mapping[str, str]) -> str:
    parts = [compiler_version(), target.name, job.source, job.defines, sorted(texts.items())]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _recall(path: Path) -> Cubin | None:
    """The cached cubin; None if it is missing or damaged."""
    try:
        head, code = path.read_bytes().split(b"\n", 1)
        report = json.loads(head)
        if report["sha256"] != hashlib.sha256(code).hexdigest():
            return None
        return Cubin(code, {k: KernelUsage(**v) for k, v in report["usage"].items()})
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _keep(path: Path, cubin: Cubin) -> None:
    """Writes whole files only: several processes may share the folder."""
    usage = {k: asdict(v) for k, v in cubin.usage.items()}
    head = {"sha256": hashlib.sha256(cubin.code).hexdigest(), "usage": usage}
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(json.dumps(head).encode() + b"\n" + cubin.code)
    os.replace(file.name, path)


def _label(job: Job, target: Target) -> str:
    macros = " ".join(f"-D{name}={value}" for name, value in job.defines)
    return f"{job.source} {macros} for {target.name}".replace("  ", " ")
