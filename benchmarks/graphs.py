"""The times of a graph of what was queued.

Knows no op and allocates nothing: addresses come from the caller.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from spark_engine.device.gpu import Gpu, present
from spark_engine.kernel import Target


def target_here() -> Target:
    """This machine's target. Raises SystemExit without a CUDA device."""
    found = present()
    if found is None:
        raise SystemExit("no CUDA device; run this where one is")
    return found


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
