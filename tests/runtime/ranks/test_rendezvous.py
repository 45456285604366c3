"""How ranks of several hosts come together, and what becomes of those that cannot."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pytest

from spark_engine.errors import ExecutorError, OptionError
from spark_engine.runtime.ranks import rendezvous
from spark_engine.runtime.ranks.rendezvous import Hello, Ports, accept_ranks, join_ranks

SOON_S = 5.0


def addresses(count: int) -> list[str]:
    with_ports = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    found = [f"127.0.0.1:{one.getsockname()[1]}" for one in with_ports]
    for one in with_ports:
        one.close()
    return found


def at_once(*works: Callable[[], Any]) -> list[Future[Any]]:
    with ThreadPoolExecutor(len(works)) as pool:
        return [pool.submit(work) for work in works]


def reach(host: str) -> socket.socket:
    name, port = rendezvous.address_of(host)
    until = time.monotonic() + SOON_S
    while True:
        try:
            return socket.create_connection((name, port), timeout=SOON_S)
        except OSError:
            assert time.monotonic() < until
            time.sleep(0.01)


def test_hosts_that_each_name_themselves_first_are_told() -> None:
    """Both would wait ten minutes for the other."""
    a, b = addresses(2)
    start = time.monotonic()
    first = ThreadPoolExecutor(1)
    waits = first.submit(accept_ranks, (a, b), come_s=2.0)
    reach(a).close()
    with pytest.raises(OptionError, match=f"--hosts {a},{b}.*same order.*the first is rank 0"):
        accept_ranks((b, a), come_s=30.0)
    assert time.monotonic() - start < SOON_S
    assert isinstance(waits.exception(), ExecutorError)  # nobody came to it
    first.shutdown()


def test_a_rank_with_another_order_is_refused_and_rank_0_waits_on() -> None:
    a, b, c = addresses(3)
    wrong, right = (a, c, b), (a, b, c)
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(accept_ranks, right, come_s=SOON_S)
        with pytest.raises(OptionError, match=f"--hosts {a},{c},{b}"):
            join_ranks(wrong, 2, come_s=SOON_S)
        # Only now: it listened at b, which is rank 1's.
        others = [pool.submit(join_ranks, right, rank, come_s=SOON_S) for rank in (1, 2)]
        with closing(first.result()) as group:
            assert group.comm.ranks == 3
        for other in others:
            control, comm = other.result()
            control.close()
            comm.close()


def test_a_rank_that_comes_anew_while_all_are_connected_ends_the_meeting() -> None:
    """Its first connection is dead: the new one was taken for one between ranks."""
    a, b = addresses(2)

    def come_twice() -> None:
        hello = Hello(1, 2, 4711, (a, b))
        with reach(a) as once:
            rendezvous._send(once, hello)
            assert rendezvous._receive(once, Ports) is not None
        with reach(a) as again:
            rendezvous._send(again, hello)
            assert again.recv(1) == b""

    met, came = at_once(lambda: accept_ranks((a, b), come_s=SOON_S), come_twice)
    assert "rank 1 has come anew" in str(met.exception())
    came.result()


def test_a_rank_that_goes_halfway_is_not_waited_for_as_long_as_for_people(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    a, b = addresses(2)
    assert rendezvous.LINK_S < rendezvous.COME_S
    monkeypatch.setattr(rendezvous, "LINK_S", 0.2)

    def come() -> None:
        with reach(a) as once:
            rendezvous._send(once, Hello(1, 2, 4711, (a, b)))
            assert rendezvous._receive(once, Ports) is not None

    start = time.monotonic()
    met, _ = at_once(lambda: accept_ranks((a, b)), come)
    assert "ranks [1] have not come for 0.2 s" in str(met.exception())
    assert time.monotonic() - start < SOON_S
