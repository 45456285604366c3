"""Times of launches: the order of marks, and a device's time on the host's clock."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("cuda.bindings", reason="needs the extra `cuda`")

from spark_engine.runtime.executors import timed  # noqa: E402
from spark_engine.runtime.executors.timed import DeviceClock, TimedExecutor  # noqa: E402


class Device:
    """A simulated stream: a queued item takes its seconds; events keep the device's milliseconds.

    The device's clock has another zero, and runs 10 % too fast.
    """

    def __init__(self) -> None:
        self.host = 100.0
        self.free_at = 0.0  # host's seconds at which the stream is empty
        self.made = 0
        self.gpu, self.specs = self, None

    def queue(self, seconds: float) -> None:
        self.free_at = max(self.free_at, self.host) + seconds

    def event(self, timed: bool = False) -> Any:
        assert timed, "the event must be a timed one"
        self.made += 1
        return SimpleNamespace(at=0.0)

    def record(self, event: Any) -> None:
        event.at = max(self.free_at, self.host)

    def wait_for(self, event: Any) -> None:
        self.host = max(self.host, event.at)

    def milliseconds(self, first: Any, last: Any) -> float:
        return (last.at - first.at) * 1100

    def launch(self, buffers: float) -> Callable[[], None]:
        self.queue(buffers)
        end = self.free_at
        return lambda: setattr(self, "host", max(self.host, end))

    def launch_to_sample(self, buffers: float) -> Callable[[], Callable[[], None]]:
        self.queue(buffers)
        return lambda: self.launch(buffers / 2)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()
    clock = SimpleNamespace(perf_counter=lambda: made.host)
    monkeypatch.setattr(timed, "time", clock)
    return made


def test_launches_that_overlap_their_host_have_the_times_of_the_device(device: Device) -> None:
    reported: list[tuple[float, float]] = []
    one: Any = TimedExecutor(device, DeviceClock(device), lambda a, b: reported.append((a, b)))  # type: ignore[arg-type]
    first = one.launch(2.0)
    device.host += 1.5
    second = one.launch(3.0)  # queued after the first, half a second before it ends
    first()
    second()
    assert reported == [pytest.approx((100.0, 102.2)), pytest.approx((102.2, 105.5))]
    device.host = 200.0  # an empty stream: drift is reset
    one.launch(1.0)()
    assert reported[2] == pytest.approx((200.0, 201.1))
    for _ in range(20):
        one.launch(1.0)()
    assert device.made <= 6, "events are used again"


def test_a_launch_in_two_parts_is_timed_from_first_to_last(device: Device) -> None:
    reported: list[tuple[float, float]] = []
    one: Any = TimedExecutor(device, DeviceClock(device), lambda a, b: reported.append((a, b)))  # type: ignore[arg-type]
    rest = one.launch_to_sample(2.0)
    device.host += 5.0  # the device is idle for a part of it
    rest()()
    assert reported == [pytest.approx((100.0, 106.6))]


def test_a_synchronous_launch_ran_while_it_was_called() -> None:
    reported: list[tuple[float, float]] = []
    ran: list[float] = []
    inner: Any = SimpleNamespace(specs=1, launch=lambda b: ran.append(b) or (lambda: None))
    one: Any = TimedExecutor(inner, None, lambda a, b: reported.append((a, b)))
    one.launch_to_sample(4.0)()()
    assert (
        ran == [4.0] and len(reported) == 1 and reported[0][0] <= reported[0][1] and one.specs == 1
    )
