"""Launches that follow one another outside a graph, with an event between them.

They are queued behind a long fill, so that the host's time is not in theirs. The gap between two
launches is longer than in a graph: their sum is more than a step takes. States advance by one
meaningless step each time: for use at the end of a measurement.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.steps.launch_parts import Timed

if TYPE_CHECKING:
    from spark_engine.device.gpu import Gpu
    from spark_engine.runtime.executors.bucket_graphs import QueuedLaunch
    from spark_engine.runtime.executors.native import NativeExecutor

FILL_BYTES, FILLS = 1 << 30, 64  # about 20 ms of the device's time
PASSES = 5


def time_launches(executor: NativeExecutor, payload: bytes, passes: int = PASSES) -> list[Timed]:
    """Every launch of an open executor; `payload` is its bucket's."""
    queue = executor.launches(payload)
    medians = time_queue(executor.gpu, queue, passes)
    return [Timed(x.node, x.symbol, us) for x, us in zip(queue, medians, strict=True)]


def time_queue(gpu: Gpu, queue: Sequence[QueuedLaunch], passes: int = PASSES) -> list[float]:
    """Median microseconds of each launch, one after the other."""
    filler = gpu.allocate(FILL_BYTES)
    events = [gpu.event(timed=True) for _ in range(len(queue) + 1)]
    times = []
    for _ in range(passes + 1):
        for _ in range(FILLS):
            gpu.fill(filler, 0, FILL_BYTES)
        gpu.record(events[0])
        for launch, event in zip(queue, events[1:], strict=True):
            launch.queue()
            gpu.record(event)
        gpu.wait()
        pairs = zip(events, events[1:], strict=False)
        times.append([gpu.milliseconds(a, b) * 1e3 for a, b in pairs])
    gpu.free(filler)
    medians: list[float] = np.median(np.array(times[1:]), axis=0).tolist()
    return medians
