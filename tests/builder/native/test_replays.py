"""Medians of replays, and what decides after the first turns: graphs of given times, no GPU."""

import math
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("cuda.bindings", reason="needs the extra `cuda`")

from spark_engine.builder.native.replays import FEW, REPEATS, WARM, Timed, medians  # noqa: E402
from spark_engine.device.resources import DeviceResources  # noqa: E402
from tests.runtime.fake_gpu import NOTHING, FakeGpu  # noqa: E402


class Clocked(FakeGpu):
    """Each graph takes the next of its `seconds`, the last of them from then on; a wait of the
    host takes as long as the longest of them."""

    def __init__(self, seconds: list[list[float]]) -> None:
        super().__init__({})
        self.seconds, self.now, self.at = seconds, 0.0, dict[object, float]()
        self.replayed = [0] * len(seconds)

    def replay(self, graph: Any) -> None:
        index = self._graphs.index(graph)
        mine, turn = self.seconds[index], self.replayed[index]
        begin, _, end = graph
        begin()
        self.now += mine[min(turn, len(mine) - 1)]
        end()
        self.replayed[index] += 1

    def wait(self) -> None:
        super().wait()
        self.now += max(max(mine) for mine in self.seconds)

    def reached(self, event: Any) -> None:
        self.at[event] = self.now

    def milliseconds(self, first: Any, last: Any) -> float:
        return 1e3 * (self.at[last] - self.at[first])


def timed(*seconds: list[float], best: float = math.inf) -> tuple[list[float], list[int]]:
    gpu = Clocked([*seconds])
    resources = DeviceResources(gpu)  # type: ignore[arg-type]
    records: list[Callable[[], None]] = [
        lambda i=i: gpu.recording.append(i)  # type: ignore[misc]
        for i in range(len(seconds))
    ]
    found = medians([Timed(resources, record) for record in records], best)
    resources.close()
    assert gpu.held == {**NOTHING, "contexts": 1}
    return found, gpu.replayed


def test_the_first_turns_do_not_count() -> None:
    found, replayed = timed([9e-4, 1e-4, 1e-4, 2e-4, 3e-4, 2e-4, 9e-4, 2e-4, 1e-4])
    assert found == pytest.approx([2e-4]) and replayed == [WARM + REPEATS]


def test_a_long_graph_is_replayed_a_few_times() -> None:
    assert timed([20e-4])[1] == [WARM + FEW]


@pytest.mark.parametrize(
    ("times", "best", "count"),
    [
        ([1.9e-4, 1.2e-4], 1e-4, WARM),
        ([1.9e-4, 1.1e-4], 1e-4, WARM + REPEATS),
        ([9e-4, 1e-4], 9e-4, WARM + REPEATS),
    ],
)
def test_a_plan_that_is_far_slower_than_another_is_not_measured_well(
    times: list[float], best: float, count: int
) -> None:
    found, replayed = timed(times, best=best)
    assert found == pytest.approx([times[1]]) and replayed == [count]


@pytest.mark.parametrize(
    ("forms", "counts"),
    [
        ((1.03, 1.02), (WARM, WARM, WARM)),
        ((1.03, 1.005), (WARM + REPEATS, WARM, WARM + REPEATS)),
        ((0.98, 0.97), (WARM, WARM, WARM)),
        ((0.98, 0.975), (WARM, WARM + REPEATS, WARM + REPEATS)),
    ],
)
def test_forms_that_differ_are_seen_after_the_first_turns(
    forms: tuple[float, float], counts: tuple[int, ...]
) -> None:
    """Only those near the fastest one are replayed further."""
    times = [1e-4, *(1e-4 * form for form in forms)]
    found, replayed = timed(*([9e-4, seconds] for seconds in times))
    assert found == pytest.approx(times) and replayed == [*counts]
