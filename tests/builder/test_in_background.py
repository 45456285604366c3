"""Work of a build that runs next to its other stages: its end, its error, and its early end."""

from threading import Event

import pytest

from spark_engine.builder.build import in_background


def test_the_work_runs_during_the_block() -> None:
    started, done = Event(), list[str]()

    def work(stop: Event) -> None:
        started.set()
        done.append("work")

    with in_background(work, now=True) as ended:
        assert started.wait(10)
        ended()
    assert done == ["work"]


def test_a_block_that_fails_ends_the_work_early() -> None:
    seen = list[bool]()
    with (
        pytest.raises(ValueError, match="no tactic"),
        in_background(lambda stop: seen.append(stop.wait(10)), now=True),
    ):
        raise ValueError("no tactic")
    assert seen == [True]


@pytest.mark.parametrize("now", [True, False])
def test_the_error_of_the_work_is_raised_at_its_end(now: bool) -> None:
    def work(stop: Event) -> None:
        raise OSError("no space")

    with pytest.raises(OSError, match="no space"), in_background(work, now) as ended:
        ended()


def test_on_a_shared_memory_the_work_waits_for_the_other_stages() -> None:
    done = list[str]()
    with in_background(lambda stop: done.append("weights"), now=False) as ended:
        done.append("tactics")
        ended()
    assert done == ["tactics", "weights"]
