"""How ranks of several hosts connect, and errors of those that cannot."""

import os
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from functools import partial
from typing import Any

import pytest

from spark_engine.errors import ExecutorError, OptionError
from spark_engine.runtime.ranks import rendezvous
from spark_engine.runtime.ranks.rendezvous import Hello, Ports, accept_ranks, join_ranks
from tests.ports import free_port

SOON_S = 60.0  # ends a test that hangs; far below the wait for operators


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disables the limit for silent peers: a thread of this test may be slow."""
    monkeypatch.setattr(rendezvous, "HELLO_S", SOON_S)


def addresses(count: int) -> list[str]:
    return [f"127.0.0.1:{free_port()}" for _ in range(count)]


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


def refusal(host: str, hello: Hello) -> str:
    """Rank 0's refusal of a rank; rank 0 has started to wait by then."""
    with reach(host) as peer:
        rendezvous._send(peer, hello)
        found = rendezvous._receive(peer, Ports)
    assert found is not None
    return found.refused


@pytest.mark.parametrize("other", ["127.0.0.1", "localhost"])
def test_hosts_that_each_name_themselves_first_at_one_time_both_fail(
    other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither answers while it asks; and they may spell each other's names differently."""
    both = threading.Barrier(2)

    def together(call: Callable[..., Any], *given: Any) -> Any:
        found = call(*given)
        both.wait(SOON_S)
        return found

    for name in ("_listen", "_ask"):
        monkeypatch.setattr(rendezvous, name, partial(together, getattr(rendezvous, name)))
    a, b = addresses(2)
    orders = (a, b), (b, a.replace("127.0.0.1", other))
    for met in at_once(*(partial(accept_ranks, one, connect_s=SOON_S) for one in orders)):
        words = str(met.exception())
        assert isinstance(met.exception(), OptionError)
        assert all(f"--hosts {','.join(one)}" in words for one in orders)
        assert "give the same hosts in the same order everywhere; the first is rank 0" in words


def test_a_list_that_names_rank_0_twice_is_refused() -> None:
    (a,) = addresses(1)
    with pytest.raises(OptionError, match=f"two processes are rank 0 of --hosts {a},{a}: name"):
        accept_ranks((a, a), connect_s=1.0)  # it answers itself


def test_hosts_that_each_name_themselves_first_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise both would wait ten minutes for each other."""
    monkeypatch.setattr(rendezvous, "ASK_S", SOON_S)
    a, b = addresses(2)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(accept_ranks, (a, b), connect_s=SOON_S)
        assert "same order" in refusal(a, Hello(1, 2, hosts=(b, a)))
        with pytest.raises(OptionError, match=f"--hosts {a},{b}.*same order.*the first is rank 0"):
            accept_ranks((b, a), connect_s=SOON_S)
        control, comm = join_ranks((a, b), 1, connect_s=SOON_S)  # the first keeps waiting
        with closing(first.result()), closing(control), closing(comm):
            assert comm.ranks == 2


def test_a_rank_with_another_order_is_refused_and_rank_0_waits_on() -> None:
    a, b, c = addresses(3)
    wrong, right = (a, c, b), (a, b, c)
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(accept_ranks, right, connect_s=SOON_S)
        with pytest.raises(OptionError, match=f"--hosts {a},{c},{b}"):
            join_ranks(wrong, 2, connect_s=SOON_S)
        # Only now: the first listened at b, which is rank 1's address.
        others = [pool.submit(join_ranks, right, rank, connect_s=SOON_S) for rank in (1, 2)]
        with closing(first.result()) as group:
            assert group.comm.ranks == 3
        for other in others:
            control, comm = other.result()
            control.close()
            comm.close()


def test_rank_0_takes_ranks_that_listen_before_it_for_no_other_rank_0(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """At its own address rank 1 waits for rank 2, and receives rank 0's question."""
    hosts, listen, listening = addresses(3), rendezvous._listen, threading.Semaphore(0)

    def counted(*given: Any) -> socket.socket:
        found = listen(*given)
        listening.release()
        return found

    monkeypatch.setattr(rendezvous, "_listen", counted)
    with ThreadPoolExecutor(2) as pool:
        others = [pool.submit(join_ranks, hosts, rank, connect_s=SOON_S) for rank in (1, 2)]
        assert all(listening.acquire(timeout=SOON_S) for _ in others)
        with closing(accept_ranks(hosts, connect_s=SOON_S)) as group:
            assert group.comm.ranks == 3
        for other in others:
            for end in other.result():
                end.close()
    assert "which is not a missing rank" in caplog.text
    assert "two processes are rank 0" not in caplog.text


def test_a_rank_that_connects_again_in_the_second_phase_is_an_error() -> None:
    """Its first connection is closed; the new one must not count as a connection between ranks."""
    a, b = addresses(2)

    def come_twice() -> None:
        hello = Hello(1, 2, 4711, (a, b))
        with reach(a) as once:
            rendezvous._send(once, hello)
            assert rendezvous._receive(once, Ports) is not None
        with reach(a) as again:
            rendezvous._send(again, hello)
            assert again.recv(1) == b""

    met, came = at_once(lambda: accept_ranks((a, b), connect_s=SOON_S), come_twice)
    assert "rank 1 connected again" in str(met.exception())
    came.result()


def test_a_rank_that_leaves_in_the_second_phase_is_awaited_briefly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    a, b = addresses(2)
    assert rendezvous.LINK_S < rendezvous.CONNECT_S
    monkeypatch.setattr(rendezvous, "LINK_S", 0.2)

    def come() -> None:
        with reach(a) as once:
            rendezvous._send(once, Hello(1, 2, 4711, (a, b)))
            assert rendezvous._receive(once, Ports) is not None

    start = time.monotonic()
    met, _ = at_once(lambda: accept_ranks((a, b)), come)  # ten minutes, the wait for operators
    assert "ranks [1] did not connect within 0.2 s" in str(met.exception())
    assert time.monotonic() - start < SOON_S


def _fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_silent_peers_delay_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unidentified peers that send single bytes, nothing, or an invalid message."""
    monkeypatch.setattr(rendezvous, "MOST_UNIDENTIFIED", 8)
    a, b = addresses(2)
    size = rendezvous.MOST_BYTES.to_bytes(4, "little")
    says = [b"", b"\0", size, size + b"x" * 100, b"\xff" * 100, b"GET / HTTP/1.1\r\n\r\n"]
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(accept_ranks, (a, b), connect_s=SOON_S)
        unidentified = [reach(a) for _ in range(5 * len(says))]
        for stranger, said in zip(unidentified, says * 5, strict=True):
            with suppress(OSError):  # beyond the limit the oldest is closed
                stranger.sendall(said)
        start = time.monotonic()
        control, comm = join_ranks((a, b), 1, connect_s=SOON_S)
        with closing(first.result()), closing(control), closing(comm):
            assert comm.ranks == 2 and time.monotonic() - start < SOON_S / 2
        for stranger in unidentified:
            stranger.close()


@pytest.mark.parametrize("limit", ["come", "hello"])
def test_single_bytes_extend_no_limit(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A single byte must not restart the message's limit, or delay rank 0's own limit."""
    a, b = addresses(2)
    monkeypatch.setattr(rendezvous, "HELLO_S", 0.3 if limit == "hello" else SOON_S)
    ended, before = threading.Event(), _fds()

    def drip() -> None:
        with reach(a) as peer:
            peer.sendall(rendezvous.MOST_BYTES.to_bytes(4, "little"))
            with suppress(OSError):
                while not ended.wait(0.02):
                    peer.sendall(b"x")
            if limit == "hello":
                assert not ended.is_set(), "it was closed"

    def wait() -> None:
        try:
            accept_ranks((a, b), connect_s=1.0 if limit == "hello" else 0.3)
        finally:
            ended.set()

    start = time.monotonic()
    met, dripped = at_once(wait, drip)
    assert "ranks [1] did not connect" in str(met.exception())
    dripped.result()
    assert time.monotonic() - start < SOON_S / 2 and _fds() == before


def test_an_invalid_message_is_logged_in_one_short_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    a, b = addresses(2)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(accept_ranks, (a, b), connect_s=0.5)
        words = refusal(a, Hello(0, 9, hosts=("\x1b[31m" * 5000,)))
        assert len(words) < 1000 and "\x1b" not in words
        with pytest.raises(ExecutorError):
            first.result()
    assert all(len(row.getMessage()) < 1000 for row in caplog.records)
