"""Kernels of a plan, loaded and queued, and the times of a graph of what was queued.

Knows no op and allocates nothing: addresses come from the caller.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from spark_engine.builder.native import nvrtc
from spark_engine.device.gpu import Function, Gpu, present
from spark_engine.kernel import Launch, Plan, Pointer, Target

Places = Mapping[str, Sequence[int]]  # addresses by kind: input, output, scratch


def target_here() -> Target:
    """This machine's target. Raises SystemExit without a CUDA device."""
    found = present()
    if found is None:
        raise SystemExit("no CUDA device; run this where one is")
    return found


def load(gpu: Gpu, source: str, plan: Plan, target: Target, cache: Path) -> dict[str, Function]:
    """The plan's kernels by symbol, which its launches must not share between sources or macros."""
    functions: dict[str, Function] = {}
    for job in nvrtc.jobs_of([(source, plan)]):
        code = nvrtc.compile(job, target, cache).code
        functions |= gpu.load(code, job.symbols, max(n.shared for n in plan.launches))
    return functions


def queue(
    gpu: Gpu, launches: Sequence[Launch], functions: Mapping[str, Function], places: Places
) -> None:
    """Queues the launches over these addresses."""
    for launch in launches:
        args = [places[a.kind][a.index] if isinstance(a, Pointer) else a.value for a in launch.args]
        gpu.launch(functions[launch.symbol], launch, args)


def mean_seconds(gpu: Gpu, queued: Callable[[], None], rounds: int) -> float:
    """Of one replay among `rounds` in a row, after one that is not counted."""
    with _graph(gpu, queued) as graph:
        gpu.replay(graph)
        first, last = gpu.event(timed=True), gpu.event(timed=True)
        gpu.record(first)
        for _ in range(rounds):
            gpu.replay(graph)
        gpu.record(last)
        gpu.wait_for(last)
        return gpu.milliseconds(first, last) * 1e-3 / rounds


def each_seconds(gpu: Gpu, queued: Callable[[], None], rounds: int) -> list[float]:
    """Of every one of `rounds` replays, each waited for."""
    found = []
    with _graph(gpu, queued) as graph:
        first, last = gpu.event(timed=True), gpu.event(timed=True)
        for _ in range(rounds):
            gpu.record(first)
            gpu.replay(graph)
            gpu.record(last)
            gpu.wait_for(last)
            found.append(gpu.milliseconds(first, last) * 1e-3)
    return found


@contextmanager
def _graph(gpu: Gpu, queued: Callable[[], None]) -> Iterator[Any]:
    gpu.begin_capture()
    queued()
    graph = gpu.end_capture()
    yield graph
    gpu.destroy_graph(graph)
