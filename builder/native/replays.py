"""Median times of graphs that are recorded on a GPU and replayed.

Knows recordings and events; knows no node.
"""

import math
import statistics
from collections.abc import Callable, Sequence

from spark_engine.device.resources import DeviceResources

REPEATS, WARM = 7, 2
FEW, LONG = 3, 0.003  # repeats of a graph that runs for more than LONG seconds, which vary little
FAR, SLOWER, APART = 2.0, 1.15, 1.01  # ratios at which the first turns decide


def medians(
    held: DeviceResources, records: Sequence[Callable[[], None]], best: float = math.inf
) -> list[float]:
    """Median seconds of a replay of each graph; these are replayed in turns. The rest is left out
    where the first turns decide: after one, all graphs take FAR times `best`; after WARM, SLOWER
    times `best`, or of several graphs those that take APART times the fastest one's time."""
    graphs = [_Timed(held, record) for record in records]
    last = list[float]()
    for turn in range(WARM):
        last = [graph.seconds() for graph in graphs]
        if min(last) > (SLOWER if turn else FAR) * best:
            return last
    near = [i for i, seconds in enumerate(last) if seconds <= APART * min(last)]
    if len(near) > 1 or len(graphs) == 1:
        count = FEW if min(last) > LONG else REPEATS
        turns = [[graphs[i].seconds() for i in near] for _ in range(count)]
        for i, found in zip(near, zip(*turns, strict=True), strict=True):
            last[i] = statistics.median(found)
    return last


class _Timed:
    """A graph between two events that are a part of it: however late this process replays it, since
    other threads of the build are busy, no time of the host is between them."""

    def __init__(self, held: DeviceResources, record: Callable[[], None]) -> None:
        first, last = (held.event(timed=True) for _ in range(2))
        self._gpu, self._events = held.gpu, (first, last)

        def between() -> None:
            self._gpu.mark(first)
            record()
            self._gpu.mark(last)

        self._graph = held.graph(between)

    def seconds(self) -> float:
        """Of one replay."""
        self._gpu.replay(self._graph)
        self._gpu.wait()
        return self._gpu.milliseconds(*self._events) / 1e3
