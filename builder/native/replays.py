"""Median times of graphs that are recorded on a GPU and replayed.

Knows recordings and events; knows no node.
"""

import math
import statistics
from collections.abc import Callable, Sequence

from spark_engine.device.resources import DeviceResources

REPEATS, WARM = 7, 2
FEW, LONG = 3, 0.01  # repeats of a graph that runs for more than LONG seconds, which vary little
SLOWER, APART = 1.3, 1.01  # ratios at which the first turns decide


def medians(
    held: DeviceResources, records: Sequence[Callable[[], None]], best: float | None = None
) -> list[float]:
    """Median seconds of a replay of each graph; these are replayed in turns. After the first turns
    the rest is left out where the answer is known: a graph takes SLOWER times `best`, or the first
    one of several is the fastest by more than turns differ."""
    graphs = [_Timed(held, record) for record in records]
    times = _turns(graphs, WARM)
    last = [found[-1] for found in times]
    if min(last) > SLOWER * (best or math.inf) or min(last[1:], default=0.0) > APART * last[0]:
        return last
    times = _turns(graphs, FEW if min(last) > LONG else REPEATS)
    return [statistics.median(found) for found in times]


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


def _turns(graphs: Sequence[_Timed], count: int) -> list[list[float]]:
    """Seconds of `count` replays of each graph."""
    turns = [[graph.seconds() for graph in graphs] for _ in range(count)]
    return [list(found) for found in zip(*turns, strict=True)]
