"""The rank of a host, and valid values of --hosts."""

import os
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from spark_engine.device.choice import VISIBLE
from spark_engine.errors import CapacityError, EngineError, ExecutorError, OptionError
from spark_engine.runtime.cli import rank_process
from spark_engine.runtime.engine.engine import EngineOptions
from spark_engine.runtime.ranks import hosts, rendezvous, running_clock, spawn
from spark_engine.runtime.ranks.hosts import own_rank
from spark_engine.runtime.ranks.messages import ANSWER, RankFailed
from spark_engine.runtime.ranks.rendezvous import PORT, address_of, split_hosts
from spark_engine.runtime.server.engine_client import engine_folder as assets
from spark_engine.runtime.server.engine_client.supervisor import WATCHDOG_S

ELSEWHERE = "203.0.113.7"  # reserved for documentation


def test_a_host_is_a_name_and_perhaps_a_port() -> None:
    assert split_hosts(None) == ()
    assert split_hosts("a, b:7 ,[::1]:9,fe80::1") == ("a", "b:7", "[::1]:9", "fe80::1")
    found = [address_of(host) for host in ("a", "b:7", "[::1]:9", "[::1]", "fe80::1")]
    assert found == [("a", PORT), ("b", 7), ("::1", 9), ("::1", PORT), ("fe80::1", PORT)]


@pytest.mark.parametrize("text", ["a:", ":7", "a:x", "a:0", "a:65536", "a,,b", "[]:7"])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(OptionError, match="a host is a name or name:port"):
        split_hosts(text)


def test_a_host_knows_its_own_address() -> None:
    assert own_rank((), None) == 0
    assert own_rank((ELSEWHERE, "127.0.0.1"), None) == 1
    assert own_rank(("127.0.0.1:9", ELSEWHERE), None) == 0
    assert own_rank((ELSEWHERE, ELSEWHERE), 1) == 1
    with pytest.raises(OptionError, match="is an address of this host"):
        own_rank((ELSEWHERE, "no.such.host.invalid"), None)
    with pytest.raises(OptionError, match="--rank is 2; --hosts names ranks 0 to 1"):
        own_rank((ELSEWHERE, ELSEWHERE), 2)


def manifest(executor: str, ranks: int, across: bool = False) -> Any:
    memory = SimpleNamespace(total=3 << 30)
    return SimpleNamespace(
        executor=executor, ranks=ranks, name="x", memory=memory, across_hosts=across
    )


def test_an_engine_is_refused_on_fewer_gpus_with_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cuda.bindings")
    from spark_engine.device import gpu as device

    monkeypatch.setattr(device, "count", lambda: 2)
    spawn.check_gpus(manifest("native", 2))
    spawn.check_gpus(manifest("ort", 4))
    words = (
        "built for 4 GPUs, each of which holds 3.00 GiB, and this machine shows 2 "
        r"\(--device .*: show more, .*--tp 2"
    )
    with pytest.raises(CapacityError, match=words) as refusal:
        spawn.check_gpus(manifest("native", 4))
    assert "--hosts" not in str(refusal.value)
    with pytest.raises(CapacityError, match=r"name the hosts of all ranks \(--hosts\), show more"):
        spawn.check_gpus(manifest("native", 4, True))


def test_ranks_on_the_cpu_have_longer_than_those_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """And less than the server's watchdog."""
    given: list[float] = []
    monkeypatch.setattr(spawn, "check_gpus", lambda manifest: None)
    monkeypatch.setattr(spawn, "start_ranks", lambda engine, ranks, limit_s: given.append(limit_s))
    monkeypatch.setattr(spawn, "accept_ranks", lambda hosts, limit_s: given.append(limit_s))
    spawn.gather_ranks(Path("x"), manifest("native", 2))
    spawn.gather_ranks(Path("x"), manifest("ort", 2))
    spawn.gather_ranks(Path("x"), manifest("ort", 2), ("a", "b"))
    assert given == [8.0, 40.0, 40.0]
    assert given[0] < WATCHDOG_S and given[1] < assets.CPU_WATCHDOG_S


def test_ranks_of_a_gpus_engine_are_on_one_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every host gets this error before it waits for rank 0."""
    monkeypatch.setattr(assets, "read_manifest", lambda folder: manifest("native", 2))
    with pytest.raises(OptionError, match="--hosts: .*works on one host only"):
        spawn.gather_ranks(Path("x"), manifest("native", 2), ("a", "b"))
    with pytest.raises(OptionError, match="works on one host only.* --tp 2 --across-hosts"):
        assets.check_ranks(Path("x"), EngineOptions(tp=2, hosts="a,b"))


def test_ranks_that_nccl_connects_are_on_several(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or on one; without the package the error says how to install it, before loading."""
    across, packages = manifest("native", 2, True), {"nccl"}
    monkeypatch.setattr(spawn, "find_spec", lambda name: name in packages or None)
    spawn.check_hosts(("a", "b"), across)
    spawn.check_hosts((), across)
    with pytest.raises(OptionError, match="--hosts names 3"):
        spawn.check_hosts(("a", "b", "c"), across)
    packages.clear()
    for hosts_ in ((), ("a", "b")):
        with pytest.raises(EngineError, match="through NCCL.*install .*nccl4py"):
            spawn.check_hosts(hosts_, across)
    for other in (manifest("native", 2), manifest("native", 1), manifest("ort", 2)):
        spawn.check_hosts((), other)


def test_nccl_gets_the_network_of_the_hosts() -> None:
    """The user's setting has precedence; an address without an interface sets nothing."""
    found: dict[str, str] = {}
    hosts.name_network(found, ELSEWHERE)
    hosts.name_network(found, "no.such.host.invalid")
    assert not found
    hosts.name_network(found, "127.0.0.1:29700")
    assert found == {"NCCL_SOCKET_IFNAME": "=lo"}
    hosts.name_network(given := {"NCCL_SOCKET_IFNAME": "ib0"}, "127.0.0.1")
    assert given == {"NCCL_SOCKET_IFNAME": "ib0"}


@pytest.mark.parametrize("rank", [0, 1])
def test_a_name_that_is_ones_own_address_only_is_refused(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Debian's /etc/hosts names a host 127.0.1.1 on itself."""
    addresses = {"a": "127.0.1.1", "b": "192.0.2.7", "::1": "::1", "127.0.0.1": "127.0.0.1"}

    def look_up(name: str, port: int, type: int) -> list[Any]:
        return [(0, type, 0, "", (addresses[name], port))]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    names = ("a:7", "b") if rank == 0 else ("b:7", "a")
    words = "a is 127.0.1.1 on this host .*/etc/hosts.* give an address that they reach"
    with pytest.raises(OptionError, match=words):
        rendezvous.join_ranks(names, 1, 0.1) if rank else rendezvous.accept_ranks(names, 0.1, 0.1)
    rendezvous.check_reached(names, 1 - rank)
    rendezvous.check_reached(("a:7", "127.0.0.1", "[::1]"), rank)


def test_a_rank_listens_at_the_port_that_its_host_was_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Or at any."""
    asked: list[tuple[str, int]] = []

    def listen(host: str, port: int) -> Any:
        asked.append((host, port))
        raise OptionError("far enough")

    monkeypatch.setattr(rendezvous, "_listen", listen)
    for names in (("127.0.0.1:7", "127.0.0.1:9"), ("127.0.0.1:7", "127.0.0.1")):
        with pytest.raises(OptionError, match="far enough"):
            rendezvous.join_ranks(names, 1, 0.1)
    assert asked == [("127.0.0.1", 9), ("127.0.0.1", 0)]


def test_tp_is_what_the_engine_was_built_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assets, "read_manifest", lambda folder: manifest("ort", 2))
    options = EngineOptions(tp=2, hosts="a,b")
    assets.check_ranks(Path("x"), options)
    with pytest.raises(OptionError, match="--tp is 4, and x was built for 2 ranks"):
        assets.check_ranks(Path("x"), replace(options, tp=4))
    with pytest.raises(OptionError, match="--hosts names 3, and the engine was built for 2"):
        assets.check_ranks(Path("x"), replace(options, hosts="a,b,c"))


@pytest.mark.parametrize(
    ("error", "code"), [(CapacityError("x"), 1), (OptionError("x"), 2), (ExecutorError("x"), 1)]
)
def test_a_passing_error_is_reported_and_tried_again(error: Exception, code: int) -> None:
    answers: list[bytes] = []
    receiver = cast(Any, SimpleNamespace(answer=answers.append))
    assert rank_process._report_failure(receiver, error) == code
    (answer,) = map(ANSWER.decode, answers)
    assert isinstance(answer, RankFailed)
    assert answer.passing == isinstance(error, CapacityError)


def test_a_signal_while_a_rank_is_being_started_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    process = SimpleNamespace(kill=lambda: done.append("kill"), wait=lambda: done.append("wait"))

    def start_rank(spec: object) -> Any:
        signal.raise_signal(signal.SIGTERM)
        return process

    monkeypatch.setattr(hosts, "start_rank", start_rank)
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        assert hosts.serve_rank(Path("x"), ("a", "b"), 1, lambda text: None) == 0
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)
    assert done == ["kill", "wait"]


def test_a_rank_without_progress_is_ended_and_started_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It would never see that rank 0 has gone, and rank 0 would wait for it."""
    done: list[str] = []
    ends: list[int] = []

    def start_rank(spec: spawn.RankSpec) -> Any:
        ends.append(os.dup(spec.beat))  # as a process has it
        if len(ends) == 2:  # the second start runs, and ends with an error to fix
            os.write(ends[1], b".")
            os.close(ends[1])
        return SimpleNamespace(kill=lambda: done.append("kill"), wait=lambda: len(ends))

    monkeypatch.setattr(hosts, "start_rank", start_rank)
    monkeypatch.setattr(hosts, "PAUSE_S", 0.0)
    monkeypatch.setattr(hosts, "STILL_S", 0.6)
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        assert hosts.serve_rank(Path("x"), ("a", "b"), 1, done.append) == 2
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)
        os.close(ends[0])
    assert done == [
        "rank 1 of 2 waits for a",
        "rank 1 made no progress for 0.6 s and is killed",
        "kill",
        "rank 1 ended with code 1 and waits again",
    ]


def test_a_host_hears_that_its_rank_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long, and however long it was stopped itself."""
    clock = SimpleNamespace(ahead=0.0)
    clock.monotonic = lambda: time.monotonic() + clock.ahead
    monkeypatch.setattr(running_clock, "time", clock)
    monkeypatch.setattr(hosts, "STILL_S", 8.0)
    monkeypatch.setattr(rank_process, "BEAT_S", 0.01)
    beats, beat = os.pipe()
    with ThreadPoolExecutor(2) as pool:
        ended = pool.submit(hosts._ended, beats)
        for number in range(12):  # each stop counts as a second
            clock.ahead += 1000.0
            time.sleep(0.3 if number < 2 else 0.05)
            os.write(beat, b".")
            time.sleep(0.05)
        assert not ended.done()
        os.close(beat)
        assert ended.result()
        os.close(beats)
        beats, beat = os.pipe()
        beating = pool.submit(rank_process._beat, beat)
        assert b"".join(os.read(beats, 1) for _ in range(3)) == b"..."
        os.close(beats)  # the waiting process has ended
        assert beating.result(5) is None
    os.close(beat)


@pytest.mark.parametrize(
    ("given", "rank", "shown"),
    [(None, 1, "1,2,0"), ("4, 6,7", 2, "7,4,6"), ("GPU-a,GPU-b", 0, "GPU-a,GPU-b")],
)
def test_a_ranks_own_gpu_is_the_first_that_it_sees(
    given: str | None, rank: int, shown: str
) -> None:
    environment = {} if given is None else {VISIBLE: given}
    rank_process._show_own_first(environment, rank, 3)
    assert environment == {VISIBLE: shown}
