"""Engines with ranks as processes: their tokens, and how they end."""

import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spark_engine.builder.build import build
from spark_engine.builder.plan.options import Options
from spark_engine.errors import EngineError, ExecutorError
from spark_engine.runtime.engine.engine import Engine, EngineOptions
from spark_engine.runtime.engine.load import Loaded, load
from spark_engine.runtime.engine.request import Request, SamplingParams
from spark_engine.runtime.ranks import group
from spark_engine.runtime.ranks.group import RankGroup
from spark_engine.runtime.ranks.spawn import RankSpec, start_rank
from tests.checkpoints import write_checkpoint
from tests.models.drafters import write_drafter
from tests.ports import free_port
from tests.runtime.engine import drive
from tests.runtime.engine.invariants import check_idle
from tests.solo import Solo

TOLERANCE = 2e-5  # relative to the range of the logits
EVERY = "SPARK_EVERY_FORMAT"  # environment variable of `make ranks`
SHALLOW = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
BLOCKS = {"linear_key_head_dim": 128, "linear_value_head_dim": 64, "head_dim": 64}
WIDE = {"num_experts": 4, "moe_intermediate_size": 256, "shared_expert_intermediate_size": 256}
QUARTERS = {"linear_num_key_heads": 4, "linear_num_value_heads": 8, "num_key_value_heads": 1}
OPTIONS = Options(decode=(1,), prefill=(64,), max_context=192, max_seqs=2, kv_dtype="f32")
SERVED = replace(OPTIONS, decode=(2, 4), prefill=(64,), max_seqs=5, kv_tokens=448, drafts=0)
SOON_S = 30.0  # below the time limit of ranks on the CPU
AT_LENGTH = pytest.mark.skipif(EVERY not in os.environ, reason="make ranks runs it")


def make(folder: Path, ranks: int, options: Options = OPTIONS) -> Path:
    path = folder.with_name(f"tp{ranks}")
    build(folder, path, replace(options, tp=ranks), lambda text: None)
    return path


@pytest.mark.parametrize(
    ("format", "moe", "ranks"),
    [
        ("nvfp4", True, 2),
        ("f32", False, 4),
        *[(f, moe, 2) for f in ("bf16", "fp8", "ct_nvfp4", "nvfp4_a4") for moe in (True, False)],
        *[("fp8_block", False, 2), ("modelopt_mixed", False, 2), ("ct_nvfp4_a4", True, 2)],
    ],
)
def test_processes_are_one_rank(format: str, moe: bool, ranks: int, tmp_path: Path) -> None:
    if format != "f32" and EVERY not in os.environ:
        pytest.skip("make ranks runs every format")
    changes: dict[str, Any] = {**SHALLOW, **BLOCKS, **(WIDE if moe else {})}
    changes |= QUARTERS if ranks == 4 else {}
    write_checkpoint(tmp_path / "c", changes, format, moe=moe)
    length = 71 if format in ("f32", "bf16", "nvfp4", "ct_nvfp4") else 7
    ids = [int(i) for i in np.random.default_rng(5).integers(0, 512, length)]
    with closing(load(make(tmp_path / "c", 1), threads=1)) as one:
        truth = np.stack(Solo(one).read(ids).logits)
    with closing(load(make(tmp_path / "c", ranks), threads=1)) as several:
        found = np.stack(Solo(several).read(ids).logits)
        assert several.group is not None
        pids = several.group.pids
        assert sorted(pids) == [*range(1, ranks)]
    share = found.shape[1]  # rank 0 has the logits of its share of the ids
    assert share == truth.shape[1] // ranks
    assert np.abs(found - truth[:, :share]).max() <= TOLERANCE * np.ptp(truth)
    assert gone(pids.values())


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    folder = tmp_path_factory.mktemp("ranks") / "c"
    write_checkpoint(folder, SHALLOW, "bf16", moe=True)
    return {ranks: make(folder, ranks, SERVED) for ranks in (1, 2)}


@pytest.fixture
def engine(engines: dict[int, Path]) -> Iterator[Engine]:
    with closing(Engine.open(engines[2], EngineOptions())) as made:
        yield made
    assert made.loaded.group is not None
    assert gone(made.loaded.group.pids.values())


def pid(engine: Engine) -> int:
    assert engine.loaded.group is not None
    return engine.loaded.group.pids[1]


def gone(pids: Any, within_s: float = 30.0) -> bool:
    until = time.monotonic() + within_s
    while left := [p for p in pids if alive(p)]:
        if time.monotonic() > until:
            print("left", left)
            return False
        time.sleep(0.02)
    return True


def alive(number: int) -> bool:
    try:
        text = Path(f"/proc/{number}/stat").read_text()
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] != "Z"


def requests() -> list[Request]:
    """Some have a common beginning; together they need more pages than there are."""
    stem = [i * 7 % 500 for i in range(70)]
    params = SamplingParams(max_tokens=60, ignore_eos=True, temperature=0)
    prompts = [[*stem, *range(n, 2 * n)] for n in (3, 30)] + [[n] * (20 + n) for n in range(9)]
    return [Request(tuple(p), replace(params, seed=i)) for i, p in enumerate(prompts)]


def drain(engine: Engine, asked: list[Request]) -> dict[int, list[int | None]]:
    return {n: [e.token for e in events] for n, events in drive.drain(engine, *asked).items()}


def test_a_rank_that_hangs_while_it_opens_its_part_is_named(
    engines: dict[int, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is stopped when it is asked to open, before its first report."""
    begin, pids = RankGroup.begin, list[int]()

    def stop_and_begin(self: RankGroup, *given: Any) -> None:
        pids.extend(self.pids.values())
        for number in pids:
            os.kill(number, signal.SIGSTOP)
        begin(self, *given)

    monkeypatch.setattr(RankGroup, "begin", stop_and_begin)
    monkeypatch.setattr(group, "QUIET_S", 1.0)
    with pytest.raises(ExecutorError, match=r"rank 1 \('its process starts'\) .*, and hangs"):
        load(engines[2], threads=1)
    assert pids and gone(pids)


def test_a_load_that_swaps_and_shares_says_what_one_rank_says(
    engine: Engine, engines: dict[int, Path]
) -> None:
    asked = requests()
    found = [drain(engine, asked[:1]), drain(engine, asked)]
    stats = engine.stats()
    assert stats["preempted_swap"] and stats["prefix_hits"]
    check_idle(engine)
    with closing(Engine.open(engines[1], EngineOptions())) as alone:
        assert found == [drain(alone, asked[:1]), drain(alone, asked)]


@AT_LENGTH
@pytest.mark.parametrize("vocab", [None, "full", 64], ids=["head", "block drafter", "its list"])
def test_rounds_of_drafts_say_what_steps_say(tmp_path: Path, vocab: int | str | None) -> None:
    """A drafter is whole on every rank, and its candidates are of all ranks' logits: what it leaves
    drafted is what one rank drafts."""
    written = write_checkpoint(tmp_path / "c", {**SHALLOW, "mtp_num_hidden_layers": 1}, "f32")
    options = replace(SERVED, drafts=2, verify=((2, 2), (4, 2)), max_seqs=4)
    if vocab is not None:
        drafter = write_drafter(tmp_path / "d", written.config, target_layer_ids=[0])
        options = replace(options, drafter=str(drafter), draft_vocab=vocab)
    asked, said, drafted = requests(), [], []
    for ranks, drafts in ((2, 0), (2, 2), *([(1, 2)] if vocab else [])):
        path, how = (
            tmp_path / f"tp{ranks}",
            EngineOptions(drafts=drafts, fixed_drafts=True, depth=0),
        )
        if not path.exists():
            make(tmp_path / "c", ranks, options)
        with closing(Engine.open(path, how)) as engine:
            said.append(drain(engine, asked))
            rounds = engine.stats()["rounds_by_k"]
            drafted.append(engine.memory.store.save(0, [0]).rows["drafts"].tolist())
            check_idle(engine)
    assert said[0] == said[1] and rounds[2]  # type: ignore[index]
    assert not vocab or (drafted[1] == drafted[2] and any(drafted[1]))


def until_it_falls(engine: Engine) -> str:
    start_ = time.monotonic()
    with pytest.raises(ExecutorError) as error:
        drain(engine, requests())
    assert time.monotonic() - start_ < SOON_S
    return str(error.value)


def until_noticed(engine: Engine, within_s: float = 60.0) -> None:
    """Returns when rank 0 knows that a rank has failed; no step runs meanwhile."""
    until = time.monotonic() + within_s
    with pytest.raises(ExecutorError, match="rank 1 is gone"):
        while time.monotonic() < until:
            engine.check()
            time.sleep(0.01)


@pytest.mark.parametrize("depth", [0, 1])
def test_a_rank_that_dies_between_two_known_steps_ends_the_next(
    depth: int, engines: dict[int, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group, "ERROR_WAIT_S", SOON_S)
    with closing(Engine.open(engines[2], EngineOptions(depth=depth))) as engine:
        for one in requests():
            engine.submit(one)
        for _ in range(3):
            engine.step()
        os.kill(pid(engine), signal.SIGKILL)
        until_noticed(engine)
        with pytest.raises(ExecutorError, match="rank 1 is gone: .* ended with code -9"):
            engine.step()


def test_a_rank_that_dies_ends_the_step_at_once_and_is_named(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of a step, between two calls of its layers."""
    monkeypatch.setattr(group, "ERROR_WAIT_S", SOON_S)
    assert engine.loaded.group is not None
    links: Any = engine.loaded.group.comm
    calls, exchange = itertools.count(), links.exchange

    def dying(*given: Any) -> Any:
        if next(calls) == 6:
            os.kill(pid(engine), signal.SIGKILL)
        return exchange(*given)

    monkeypatch.setattr(links, "exchange", dying)
    assert until_it_falls(engine) == f"rank 1 is gone: its process {pid(engine)} ended with code -9"


@AT_LENGTH
def test_a_rank_that_dies_without_requests_is_noticed(engine: Engine) -> None:
    os.kill(pid(engine), signal.SIGKILL)
    assert gone([pid(engine)])
    assert "rank 1 is gone" in until_it_falls(engine)


def test_a_rank_that_hangs_is_named_and_ended(engine: Engine) -> None:
    assert engine.loaded.group is not None
    engine.loaded.group.comm.limit_s = 0.3
    os.kill(pid(engine), signal.SIGSTOP)
    assert "rank 1 did not reach all_reduce" in until_it_falls(engine)


@AT_LENGTH
def test_a_rank_that_is_late_is_waited_for(engine: Engine, engines: dict[int, Path]) -> None:
    os.kill(pid(engine), signal.SIGSTOP)
    threading.Timer(0.4, os.kill, (pid(engine), signal.SIGCONT)).start()
    said = drain(engine, requests()[:2])
    assert all(len(tokens) == 60 for tokens in said.values())


def test_no_rank_outlives_rank_0(engines: dict[int, Path]) -> None:
    text = (
        "import sys, time; from pathlib import Path\n"
        "from spark_engine.runtime.engine.load import load\n"
        "loaded = load(Path(sys.argv[1]), threads=1, least=True)\n"
        "print(loaded.group.pids[1], flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", text, str(engines[2])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        other = int(process.stdout.readline())
        assert alive(other)
        os.kill(other, signal.SIGSTOP)  # the stopped process need not run for that
        process.kill()
    assert gone([other])


def over_sockets(path: Path, other: Path, use: Callable[[Loaded], None]) -> int:
    """An engine; its rank 1 connects over TCP; yields the exit code of its process."""
    hosts = (f"127.0.0.1:{free_port()}", "127.0.0.1")
    process = start_rank(RankSpec(str(other), 1, 2, hosts=hosts, parent=os.getpid()))
    try:
        with closing(load(path, threads=1, hosts=hosts)) as loaded:
            use(loaded)
        return process.wait(SOON_S)
    finally:
        process.kill()
        process.wait()


def test_hosts_say_what_one_host_says(engines: dict[int, Path]) -> None:
    asked = requests()[:3]

    def use(loaded: Loaded) -> None:
        found.append(drain(Engine(loaded, EngineOptions()), asked))

    found: list[object] = []
    assert over_sockets(engines[2], engines[2], use) == 0
    with closing(Engine.open(engines[1], EngineOptions())) as alone:
        assert found == [drain(alone, asked)]


@AT_LENGTH
def test_a_host_with_another_engine_is_refused(engines: dict[int, Path]) -> None:
    with pytest.raises(EngineError, match=r"rank 1: .*has another manifest.json than rank 0"):
        over_sockets(engines[2], engines[1], lambda loaded: None)
