"""Engines that are started again over one folder: what they resume from changes no token."""

import os
import random
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_engine.errors import CapacityError, OptionError
from spark_engine.interface import Limits
from spark_engine.runtime.engine.disk import cache_folder, disk_cache, prefix_reader
from spark_engine.runtime.engine.disk.cache_folder import NODE, state_file
from spark_engine.runtime.engine.disk.disk_cache import DiskCache
from spark_engine.runtime.engine.engine import Engine, EngineOptions
from spark_engine.runtime.engine.load import Loaded
from spark_engine.runtime.engine.policy import prefix_admission
from spark_engine.runtime.engine.request import Event, FinishReason, Request, SamplingParams
from spark_engine.runtime.executors.memory import States
from tests.runtime.engine.drive import drain, tokens_of
from tests.runtime.engine.invariants import check_engine, check_idle
from tests.runtime.engine.test_traces import Trace, compare_with_solo_runs, forks, pictured, replay
from tests.runtime.fake_executor import VOCAB, build_fake, poison_free
from tests.runtime.generated import tried

LIMITS = Limits(4, 340, 60, VOCAB, page_size=16, bias_slots=8, top_logprobs=3, snapshots=12)
SYSTEM = tuple(i * 11 % VOCAB for i in range(70))


@tried(1 / 8)
@given(
    trace=forks(),
    seed=st.integers(0, 2**32),
    images=st.booleans(),
    files=st.sampled_from((1 << 30, 1 << 30, 100_000)),
)
def test_traces_with_restarts_equal_solo_runs(
    monkeypatch: pytest.MonkeyPatch, trace: Trace, seed: int, images: bool, files: int
) -> None:
    """The same requests again after each restart, with files that are damaged meanwhile, copied a
    page or all at a time; also without a recurrent layer's states kept, and with few files."""
    rng = random.Random(seed)
    monkeypatch.setattr(prefix_admission, "EVERY", 128)
    monkeypatch.setattr(prefix_reader, "STEP", rng.choice((1, 1 << 20)))
    for module in (prefix_reader, disk_cache):
        monkeypatch.setattr(module, "AHEAD", rng.choice((1, 1 << 20)))
    trace = pictured(trace, seed) if images else trace
    with tempfile.TemporaryDirectory() as folder:
        options = replace(trace.options, cache_dir=folder, cache_dir_bytes=files)
        options = replace(options, cache_bytes=trace.options.cache_bytes or None)
        for life in range(3):
            watch, arrived = replay(replace(trace, options=options))
            check_idle(watch.engine)
            watch.engine.close()
            compare_with_solo_runs(trace, watch, arrived)
            found = [*Path(folder).glob("*.*")]
            assert sum(file.stat().st_size for file in found) <= files
            for file in rng.sample(found, len(found) // 8 * life):
                os.truncate(file, rng.randrange(file.stat().st_size))


class Lives:
    """Engines one after another over one folder; all but the first request are the same."""

    def __init__(self, folder: Path, limits: Limits = LIMITS) -> None:
        self.options = EngineOptions(cache_dir=str(folder), depth=1)
        self.limits = limits
        self.engine = self.start()

    def start(self, **options: object) -> Engine:
        loaded = build_fake(self.limits, (1, 2, 4), (1, 2))
        self.engine = Engine(loaded, replace(self.options, **options))  # type: ignore[arg-type]
        return self.engine

    def restart(self, **options: object) -> Engine:
        """It has read what it may before the first request."""
        self.engine.close()
        self.start(**options)
        assert not drain(self.engine)
        check_idle(self.engine)
        return self.engine

    @property
    def disk(self) -> DiskCache:
        assert self.engine._disk is not None
        return self.engine._disk

    def ask(self, request: Request) -> tuple[list[int], int]:
        """Its tokens, and how many of its prompt were not computed."""
        (events,) = drain(self.engine, request).values()
        check_idle(self.engine)
        assert len(events) and [e for e in events if e.finish] == events[-1:]
        return tokens_of(events), events[-1].cached


@pytest.fixture
def lives(tmp_path: Path) -> Iterator[Lives]:
    made = Lives(tmp_path)
    yield made
    made.engine.close()


def request(own: int = 130, salt: bytes = b"", owner: str = "", most: int = 9) -> Request:
    prompt = (*SYSTEM, *(i * own % VOCAB for i in range(own)))
    params = SamplingParams(max_tokens=most, ignore_eos=True, seed=own)
    marks = len(SYSTEM), len(prompt) - 5
    return Request(prompt, params, 0, marks, None, owner, salt)


@pytest.mark.parametrize("drafts", [0, 3])
def test_a_conversation_continues_after_a_restart(tmp_path: Path, drafts: int) -> None:
    """From after its last answer; another chat from the system's message; both as if warm."""
    lives = Lives(tmp_path, replace(LIMITS, drafts=drafts))
    first = request()
    answer, cached = lives.ask(first)
    assert cached == 0
    other = request(61)
    assert lives.ask(other)[1] == 64
    lives.restart()
    assert lives.ask(request(62))[1] == 64
    turn = replace(first, prompt=(*first.prompt, *answer, *range(20)))
    warm = lives.ask(turn)
    lives.engine.clear_cache()
    # also without a restart, when memory has lost it
    assert lives.ask(replace(turn, prompt=(*turn.prompt, 5)))[1] >= warm[1]
    lives.restart()
    assert lives.ask(turn) == warm and warm[1] == len(first.prompt) + len(answer) - 1
    assert lives.engine.stats()["disk_refused"] == 0 and lives.engine.stats()["disk_read"]
    assert lives.ask(other)[1] >= 64
    assert lives.ask(request(77))[1] == 64
    lives.engine.close()
    lives.engine.close()


def test_a_start_reads_what_was_used_last_into_free_memory(lives: Lives) -> None:
    """As much as fits; nothing is evicted for it, and the files keep their order."""
    for own in (130, 131, 132):
        lives.ask(request(own, salt=b"x"))
    lives.disk.folder.flush(10)
    order, used = [*lives.disk.folder._files], lives.engine.scheduler.prefix.cache.used_bytes
    for budget, all_of_them in ((used, True), (used // 2, False)):
        stats = lives.restart(cache_bytes=budget).stats()
        assert [*lives.disk.folder._files] == order
        assert stats["evicted_pages"] == stats["evicted_snapshots"] == 0 < stats["snapshots"]  # type: ignore[operator]
        cache, read = lives.engine.scheduler.prefix.cache, lives.disk.reader.read
        assert (cache.used_bytes == used) == all_of_them
        if not all_of_them:
            assert lives.ask(request(132, salt=b"x"))[1] == 192
            assert lives.disk.reader.read == read


def test_a_request_comes_before_what_a_start_reads(
    lives: Lives, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own prefix is read first; while it runs, no pages are held; then the rest is read."""
    expected = [lives.ask(request(own, salt=bytes([own]))) for own in (130, 131)]
    monkeypatch.setattr(prefix_reader, "STEP", 1)
    monkeypatch.setattr(prefix_reader, "IDLE", 1)
    lives.engine.close()
    engine = lives.start()
    for _ in range(4):
        engine.step()
    assert lives.disk.reader.held and lives.disk._for == disk_cache.FIRST
    engine.submit(request(130, salt=bytes([130])))
    events: list[Event] = []
    while not any(event.finish for event in events):
        events += engine.step()
        check_engine(engine)
    assert (tokens_of(events), events[-1].cached) == (expected[0][0], 192)
    for _ in range(3):
        engine.step()
    assert lives.disk.reader.held and lives.disk._for == disk_cache.FIRST
    engine.submit(request(20))
    while not any(event.finish for event in engine.step()):
        assert not (engine.scheduler.running and lives.disk.reader.held)
    assert not drain(engine)
    read = lives.disk.reader.read
    assert lives.ask(request(131, salt=bytes([131]))) == (expected[1][0], 192)
    assert lives.disk.reader.read == read


def test_prefixes_of_other_salts_and_engines_are_not_found(lives: Lives) -> None:
    """Also where they share an owner; without a salt all share, as in memory."""
    lives.ask(request(salt=b"a", owner="x"))
    lives.ask(request(salt=b"", owner="x"))
    for restart in (lives.restart, lambda: None):
        restart()
        read = lives.disk.reader.read
        assert lives.ask(request(salt=b"b", owner="x"))[1] == 0 and lives.disk.reader.read == read
        lives.engine.clear_cache()
    assert lives.ask(request(salt=b"a", owner="y"))[1] > 0
    assert lives.ask(request(salt=b"", owner="y"))[1] > 0
    lives.limits = replace(LIMITS, snapshots=11)
    lives.restart()
    assert lives.ask(request(salt=b"a", owner="x"))[1] == 0 and lives.disk.reader.read == 0
    assert lives.disk.folder.refused == 0, "the other engine's files are not looked at"


def test_a_prefix_that_is_damaged_costs_only_the_hit(lives: Lives, tmp_path: Path) -> None:
    """Any one file of it, with a restart before or after the damage."""
    expected = lives.ask(request())[0]
    lives.restart()
    files = sorted(p for p in tmp_path.iterdir() if p.suffix in (".page", ".state"))
    refused = 0
    for number, file in enumerate(files):
        lives.engine.clear_cache()
        data = bytearray(file.read_bytes())
        data[number * 41 % len(data)] ^= 1
        file.write_bytes(data)
        if number % 2:
            lives.restart()
        tokens, _ = lives.ask(request())
        assert tokens == expected
        refused += lives.disk.folder.refused > 0
        if not number % 2:
            lives.restart()  # what was refused was written again
        lives.engine.clear_cache()
        lives.disk.folder.flush(10)
        assert lives.ask(request()) == (expected, 192)
    assert refused > len(files) // 2 > 4


def test_what_gave_numbers_that_are_not_finite_is_removed(lives: Lives, tmp_path: Path) -> None:
    lives.ask(request())
    lives.restart()
    lives.engine.submit(request())
    while not lives.engine.scheduler.running:
        lives.engine.step()
    seq = lives.engine.scheduler.running[0]
    assert seq.cached == 192
    lives.engine.scheduler.finish(seq, FinishReason.ERROR, sound=False)
    del lives.engine._live[seq.id]
    drain(lives.engine)
    lives.restart()
    assert lives.ask(request())[1] < 192


def test_what_is_evicted_while_it_is_copied(lives: Lives, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of pages the rest is not written; a state's row stays as it is until it is copied."""
    monkeypatch.setattr(prefix_reader, "STEP", 1)
    monkeypatch.setattr(prefix_reader, "IDLE", 1)
    engine, expected = lives.engine, list[list[int]]()
    rows, folder, cache = engine.scheduler.prefix.rows, lives.disk.folder, lives.disk._prefix.cache
    for own, pages in ((130, 2), (131, 99)):
        engine.submit(request(own, salt=bytes([own])))
        events: list[Event] = []
        while not any(event.finish for event in events):
            events += engine.step()
        expected.append(tokens_of(events))
        while len(folder._files) < pages and not any(state.pins for state in cache._states):
            engine.step()
            folder.flush(10)
        files, pinned = len(folder._files), sum(state.pins for state in cache._states)
        assert pinned == (pages == 99) and files < 99
        engine.clear_cache()
        poison_free(engine)
        assert rows.free == rows.size - pinned
        drain(engine)
        folder.flush(10)
        assert rows.free == rows.size and len(folder._files) == files + pinned
    lives.restart()
    for own, tokens in zip((130, 131), expected, strict=True):
        assert lives.ask(request(own, salt=bytes([own])))[0] == tokens


def test_more_than_the_folder_holds_is_not_written(tmp_path: Path) -> None:
    lives = Lives(tmp_path)
    lives.restart(cache_dir_bytes=4 * cache_folder.BLOCK)
    lives.ask(request())
    lives.disk.folder.flush(10)
    assert lives.disk.folder.used == lives.disk.folder.evicted == 0 == len(lives.disk.folder._files)
    lives.engine.close()


def test_a_state_under_a_name_that_is_not_its_paths_is_not_read(lives: Lives) -> None:
    expected, disk = lives.ask(request()), lives.disk
    disk.folder.flush(10)
    tag, size = disk._names.tag, disk._prefix.sizes.snapshot_bytes
    for number, name in enumerate(disk.folder.states_of(tag)):
        data = disk.folder.read(name, size, 1 << 20).result()
        assert data is not None
        other = state_file(tag + bytes([number] * (NODE - 4)), 0, bytes(16))
        disk.folder.put(other, [np.zeros(size, np.uint8), np.frombuffer(data[size:], np.uint8)])
    lives.restart()
    assert lives.disk.folder.has(other) and lives.ask(request()) == (expected[0], 192)


def test_a_request_waits_a_bounded_time_and_may_be_cancelled(
    lives: Lives, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = lives.ask(request())[0]
    lives.restart(max_waiting=2)
    lives.engine.clear_cache()
    monkeypatch.setattr(lives.disk.folder, "read", lambda *_: Future())  # never done
    monkeypatch.setattr(prefix_reader, "PAUSE", 0)
    first, second = lives.engine.submit(request()), lives.engine.submit(request())
    with pytest.raises(CapacityError, match="2 requests wait already, and the queue holds 2"):
        lives.engine.submit(request())
    assert not any(lives.engine.step() for _ in range(20)) and lives.engine.stats()["waiting"] == 2
    assert lives.engine.cancel(first) and not lives.engine.cancel(first)
    assert [e.finish for e in lives.engine.step()] == [FinishReason.CANCELLED]
    monkeypatch.setattr(disk_cache, "LOAD_S", 0.0)
    assert lives.engine.cancel(second) and len(lives.engine.step()) == 1
    assert lives.ask(request()) == (expected, 0)


def test_others_run_while_a_prefix_is_read_and_while_the_disk_is_slow(
    lives: Lives, monkeypatch: pytest.MonkeyPatch
) -> None:
    lives.ask(request())
    lives.disk.folder.flush(10)
    written = threading.Event()
    inner = cache_folder.write_file
    monkeypatch.setattr(cache_folder, "write_file", lambda *a: (written.wait(10), inner(*a))[1])
    monkeypatch.setattr(prefix_reader, "STEP", 1000)  # a few pages
    monkeypatch.setattr(disk_cache, "AHEAD", 1000)
    engine, ended = lives.engine, 0
    for own in range(20):
        engine.submit(request(100 + own, salt=bytes([own])))
        while not any(e.finish for e in engine.step()):
            pass
        ended += 1
        assert lives.disk.folder.queued < 3000
    assert ended == 20 and lives.disk.busy and not engine.idle
    written.set()
    drain(engine)
    lives.disk.folder.flush(10)
    assert lives.disk.folder.queued == 0


def test_a_full_disk_ends_the_writing_and_nothing_else(
    lives: Lives, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = lives.ask(request())
    lives.restart()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache_folder.os, "replace", full)
    lives.ask(request(90, salt=b"new"))
    assert lives.ask(request()) == (expected[0], 192)
    lives.disk.folder.flush(10)
    lives.ask(request(91, salt=b"new"))
    stats = lives.engine.stats()
    assert stats["disk_budget"] == 0 and stats["disk_read"] and len(caplog.records) == 1


def test_the_end_waits_for_what_is_still_to_be_written(lives: Lives) -> None:
    """`settle`, from another thread, while the engine's thread steps; `close` by itself."""
    engine = lives.engine
    engine.submit(request())
    while not any(e.finish for e in engine.step()):
        pass
    assert lives.disk.busy
    other = threading.Thread(target=engine.settle)
    other.start()
    while other.is_alive():
        engine.step()
    assert not lives.disk.busy and lives.disk.folder.queued == 0
    engine.submit(request(91))
    while not any(e.finish for e in engine.step()):
        pass
    lives.restart()
    assert lives.ask(request())[1] == 192 and lives.ask(request(91))[1] == 128


class Ranks:
    """States of which other processes have a part."""

    def __init__(self, inner: States) -> None:
        for name in States.__annotations__:
            setattr(self, name, getattr(inner, name))


def test_engines_without_a_use_of_it_say_so(tmp_path: Path) -> None:
    loaded = build_fake(LIMITS, (1,), (1,))
    options = EngineOptions(cache_dir=str(tmp_path))
    with pytest.raises(OptionError, match="no prefix cache: leave it out, or give --cache-gib"):
        Engine(loaded, replace(options, cache_bytes=0))
    assert loaded.device_states is not None
    ranks: Loaded = replace(loaded, device_states=Ranks(loaded.device_states))  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="an engine of several ranks keeps no prefix on a disk"):
        Engine(ranks, options)
