"""Median times of graphs that are recorded on a GPU and replayed.

Knows recordings and events; knows no node.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence

from spark_engine.device.resources import DeviceResources

REPEATS, WARM = 7, 2
FEW, LONG = 3, 0.001  # repeats of a graph that runs for more than LONG seconds, which vary little
SLOWER, APART = 1.15, 1.01  # ratios at which the first turns decide


def medians(graphs: Sequence[Timed], best: float = math.inf, warm: int = WARM) -> list[float]:
    """Median seconds of a replay of each graph; these are replayed in turns. After `warm` turns the
    rest is left out where the answer is known: all graphs take SLOWER times `best`, or of several
    graphs one takes APART times the fastest one's time."""
    last = [graph.seconds() for _ in range(warm) for graph in graphs][-len(graphs) :]
    near = [i for i, seconds in enumerate(last) if seconds <= APART * min(last)]
    decided = min(last) > SLOWER * best or len(near) == 1 < len(graphs)
    if not decided:
        count = FEW if min(last) > LONG else REPEATS
        turns = [[graphs[i].seconds() for i in near] for _ in range(count)]
        for i, found in zip(near, zip(*turns, strict=True), strict=True):
            last[i] = statistics.median(found)
    return last


class Timed:
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
