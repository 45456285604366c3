"""Two engines on the same two hosts take their turns there in one order, and both open."""

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from spark_engine.errors import CapacityError
from spark_engine.runtime.executors.communicator import Communicator
from spark_engine.runtime.ranks import turns
from tests.runtime.ranks.test_communicator import meeting, together

HOSTS = ("a", "b")
FIRST_S, STUCK_S = 0.2, 5.0


@pytest.mark.parametrize("order", [HOSTS, HOSTS[::-1]], ids=str)
def test_two_engines_led_from_either_host_both_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: tuple[str, str]
) -> None:
    """On arrival, each engine's rank 0 would be first on its own host, which the other's rank 1
    needs."""
    locks, here = {host: threading.Lock() for host in HOSTS}, threading.local()
    taken: list[str] = []

    @contextmanager
    def turn(shared: bool, say: object) -> Iterator[None]:
        if here.rank:
            time.sleep(FIRST_S)
        if not locks[here.host].acquire(timeout=STUCK_S):
            raise CapacityError("another program has been taking memory")
        taken.append(here.host)
        try:
            yield
        finally:
            locks[here.host].release()

    monkeypatch.setattr(turns, "startup_lock", turn)
    for host in HOSTS:
        (tmp_path / host).write_text(host)

    def engine(names: tuple[str, str]) -> None:
        def rank(comm: Communicator) -> None:
            here.host, here.rank = names[comm.rank], comm.rank
            with ExitStack() as held:
                turns.take_turns(held, True, print, comm, tmp_path / here.host)
                assert locks[here.host].locked()
                comm.barrier()  # as the plan waits for all ranks

        together(meeting("tcp", 2, 2 * STUCK_S), rank)

    failed: list[BaseException] = []

    def run(names: tuple[str, str]) -> None:
        try:
            engine(names)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(names,)) for names in (order, order[::-1])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed and sorted(taken) == ["a", "a", "b", "b"]


def test_ranks_of_one_host_take_one_turn_and_others_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = [0]

    @contextmanager
    def turn(shared: bool, say: object) -> Iterator[None]:
        count[0] += shared
        yield

    monkeypatch.setattr(turns, "startup_lock", turn)
    for shared, wanted in ((True, 1), (False, 0)):
        count[0] = 0
        with ExitStack() as held:
            together(
                meeting("shared", 2),
                lambda comm: turns.take_turns(held, shared, print, comm, tmp_path),  # noqa: B023
            )
        assert count == [wanted]
    with ExitStack() as held:
        turns.take_turns(held, True, print, None)
    assert count == [1]
