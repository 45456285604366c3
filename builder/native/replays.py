"""Median times of graphs that are recorded on a GPU and replayed.

Knows recordings and events; knows no node.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from itertools import pairwise

from spark_engine.device.gpu import Event, Gpu, Graph
from spark_engine.device.resources import DeviceResources

REPEATS, WARM = 7, 2
FEW, LONG = 3, 0.01  # repeats of a graph that runs for more than LONG seconds, which vary little
SLOWER, APART = 1.3, 1.01  # ratios at which the first turns decide


def medians(
    held: DeviceResources, records: Sequence[Callable[[], None]], best: float | None = None
) -> list[float]:
    """Median seconds of a replay of each graph; these are replayed in turns, all of which are
    queued at once, so that no time of the host is in them. After the first turns the rest is left
    out where the answer is known: a graph takes SLOWER times `best`, or the first one of several is
    the fastest by more than turns differ."""
    graphs = [held.graph(record) for record in records]
    marks = [held.event(timed=True) for _ in range(REPEATS * len(graphs) + 1)]
    times = _turns(held.gpu, graphs, marks, WARM)
    last = [found[-1] for found in times]
    if min(last) > SLOWER * (best or math.inf) or min(last[1:], default=0.0) > APART * last[0]:
        return last
    times = _turns(held.gpu, graphs, marks, FEW if min(last) > LONG else REPEATS)
    return [statistics.median(found) for found in times]


def _turns(
    gpu: Gpu, graphs: Sequence[Graph], marks: Sequence[Event], count: int
) -> list[list[float]]:
    """Seconds of `count` replays of each graph."""
    used = iter(marks)
    gpu.record(next(used))
    for graph in [*graphs] * count:
        gpu.replay(graph)
        gpu.record(next(used))
    reached = marks[: count * len(graphs) + 1]
    gpu.wait_for(reached[-1])
    found = [gpu.milliseconds(*pair) / 1e3 for pair in pairwise(reached)]
    return [found[i :: len(graphs)] for i in range(len(graphs))]
