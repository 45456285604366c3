"""Rounds of drafts as the benchmark measures them: right as often as asked, along what was said."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spark_engine.builder.build import build
from spark_engine.builder.plan.options import Options
from spark_engine.kernel import H200, TARGETS, Target
from spark_engine.models.open_model import open_model
from spark_engine.runtime.ranks import spawn
from tests.checkpoints import write_checkpoint
from tests.repository import ROOT
from tests.runtime.fake_gpu import FakeGpu
from tests.runtime.ranks.test_rank_processes import AT_LENGTH

sys.path.append(str(ROOT))  # the benchmarks are scripts and not installed

from benchmarks import bench_decode, forced_drafts, kernel_split, lockstep  # noqa: E402
from benchmarks.draft_rounds import AUTO, RoundFloor, Rounds, Trial, measured  # noqa: E402
from benchmarks.floors import Floor  # noqa: E402
from benchmarks.forced_drafts import Forced, Paths, coin  # noqa: E402

HIGH, LOW = (0.9, 0.8, 0.7), (0.3, 0.2)


def test_coins_are_even_and_differ_by_seed_slot_and_position() -> None:
    position = np.arange(20_000)
    coins = [coin(seed, np.full(20_000, slot), position) for seed, slot in ((1, 0), (2, 0), (1, 1))]
    for one in coins:
        assert one.dtype == np.uint32 and abs(one.mean() / 2**32 - 0.5) < 0.01
        assert abs(np.corrcoef(one[1:].astype(float), one[:-1].astype(float))[0, 1]) < 0.03
    for other in coins[1:]:
        assert (coins[0] == other).mean() < 0.001
    assert coin(1, np.asarray([3]), np.asarray([70])) == coin(1, np.asarray([3]), np.asarray([70]))


def test_what_a_round_begins_with_is_overwritten_for_slots_with_a_path() -> None:
    paths = Paths(slots=4, drafts=3, vocab=50)
    paths.clear(5)
    paths.set(0, 10, [7, 8, 9, 11, 12])
    paths.set(2, 17, [0, 0, 0, 49, 48])
    paths.draw((1.0, 0.0), seed=5)
    start = {"positions": np.asarray([11, 11, 20, 0]), "last_tokens": np.full(4, -5, np.int32)}
    states: dict[str, Any] = {**start, "drafts": np.full((4, 3), -5, np.int32)}
    paths.force(states)
    assert states["last_tokens"].tolist() == [8, -5, 49, -5]
    assert states["drafts"].tolist() == [[9, 12, 13], [-5] * 3, [48, -5, -5], [-5] * 3]
    states["positions"][0] = 15  # behind the path
    states["last_tokens"][0] = -5
    paths.force(states)
    assert states["last_tokens"][0] == -5


@pytest.mark.parametrize("target", TARGETS.values(), ids=lambda t: t.name)
def test_the_kernel_compiles(target: Target, tmp_path: Path) -> None:
    nvrtc = pytest.importorskip("spark_engine.builder.native.nvrtc", reason="needs `cuda`")
    job = nvrtc.Job("forced_drafts.cu", (), (forced_drafts.SYMBOL,))
    usage = nvrtc.compile(job, target, tmp_path, forced_drafts.HERE).usage[forced_drafts.SYMBOL]
    assert usage.spills == 0


def _on_device(gpu: Any, run: Callable[[], None]) -> tuple[dict[str, Any], dict[str, Any]]:
    """States that the kernel forced, and those that numpy did; `run` waits for the kernel."""
    paths, rng = Paths(slots=70, drafts=3, vocab=50), np.random.default_rng(0)
    shapes = {"positions": (70,), "last_tokens": (70,), "drafts": (70, 3)}
    states = {name: np.full(shape, -5, np.int32) for name, shape in shapes.items()}
    states["positions"][:] = rng.integers(15, 40, 70)
    addresses = {name: gpu.allocate(array.nbytes) for name, array in states.items()}
    for name, array in states.items():
        gpu.upload(addresses[name], array)
    device = forced_drafts._Device(gpu, 64, paths, addresses)
    paths.clear(16)
    for slot in range(0, 70, 2):
        paths.set(slot, 20, rng.integers(0, 50, 16).tolist())
    paths.draw((0.9, 0.5, 0.2), seed=3)
    device.send(paths)
    device.place(4, 20)
    states["positions"][4] = 20
    device.queue()
    run()
    found = {name: np.empty_like(array) for name, array in states.items()}
    for name, array in found.items():
        gpu.download(array, addresses[name])
    run()
    paths.force(states)
    return found, states


def _same(found: dict[str, Any], wanted: dict[str, Any]) -> bool:
    assert (wanted["drafts"] != -5).sum() > 40, "nothing was forced"
    return all((found[name] == wanted[name]).all() for name in wanted)


def test_what_the_kernel_is_given_is_what_numpy_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("spark_engine.builder.native.nvrtc", reason="needs `cuda`")
    from benchmarks import graphs

    def kernel(gpu: FakeGpu, *args: int) -> None:
        slots, length, most, vocab = args[7:]
        sizes = [(slots,), (slots,), (slots, most), (slots, length), (slots,), (most,), (1,)]
        kinds = [np.int32] * 5 + [np.uint32] * 2
        held = [gpu.view(a, k, d) for a, k, d in zip(args, kinds, sizes, strict=False)]
        paths = Paths(slots, most, vocab)
        paths.path, paths.firsts, paths.shares, paths.seed = held[3:]
        paths.force(dict(zip(("positions", "last_tokens", "drafts"), held, strict=False)))

    monkeypatch.setattr(graphs, "target_here", lambda: H200)
    gpu = FakeGpu({forced_drafts.SYMBOL: kernel})
    assert _same(*_on_device(gpu, gpu.wait))


@pytest.mark.gpu
def test_the_kernel_does_what_numpy_does() -> None:
    device = pytest.importorskip("spark_engine.device.gpu", reason="needs `cuda`")
    if device.architecture() is None:
        pytest.skip("no CUDA device")
    gpu = device.Gpu()
    try:
        assert _same(*_on_device(gpu, gpu.wait))
    finally:
        gpu.close()


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("drafts")
    write_checkpoint(folder / "m", {"mtp_num_hidden_layers": 1})
    options = Options(decode=(1, 4), prefill=(64,), max_context=448, max_seqs=4, drafts=3)
    build(folder / "m", folder / "e", options, lambda text: None)
    return folder


def test_tokens_a_round_follow_the_acceptance(engine: Path) -> None:
    bench = lockstep.Bench(engine / "e", drafts=None)
    forced = Forced(bench.engine)
    for executor in bench.executors.values():
        executor.before = forced.before
    trial = Trial(20, 40, (1, 3), (HIGH, LOW))
    rounds = Rounds(bench.engine, forced, trial)
    prompts = np.random.default_rng(0).integers(0, 512, (3, 20)).tolist()
    floors = RoundFloor(Floor(open_model(engine / "m")), bench.engine)
    plain, *rows = (floors.add(row, 40) for row in rounds.rows(prompts))
    assert (plain["k"], plain["tokens_per_round"]) == (0, 1) and plain["floor_ms"] > 0
    assert [(row["k"], tuple(row["acceptance"])) for row in rows] == [(3, HIGH), (3, LOW)]
    for row, (first, second) in zip(rows, ((0.9, 0.8), (0.3, 0.2)), strict=True):
        third = 0.7 if first == 0.9 else second
        expected = 1 + first * (1 + second * (1 + third))
        assert row["tokens_per_round"] == pytest.approx(expected, abs=0.35)
        assert row["measured"][0] == pytest.approx(first, abs=0.15)
        assert row["rounds_by_k"] == {"3": row["rounds"]}
        assert row["ms_per_token"] == pytest.approx(row["mean_ms"] / row["tokens_per_round"], 0.01)
    parts = [floors.parts(3, 40, k) for k in (0, 1, 2)]
    assert parts[0]["draft"] == 0 and 2 * parts[1]["draft"] == parts[2]["draft"] > 0
    assert parts[0]["sample"] < parts[1]["sample"] and parts[0]["gdn"] == parts[2]["gdn"]
    assert parts[0]["attention"] == parts[2]["attention"]
    bench.engine.check_idle()
    chosen = next(iter(Rounds(bench.engine, forced, Trial(20, 8, (AUTO,), (HIGH,))).rows(prompts)))
    assert chosen["k"] == 0
    bench.engine.close()


def test_another_rank_decodes_the_paths_that_it_is_told() -> None:
    paths = Paths(slots=3, drafts=2, vocab=50)
    paths.clear(4)
    paths.set(1, 10, [7, 8, 9])
    paths.draw((0.5, 1.0), seed=6)
    found = Paths.decode(paths.encode())
    assert (found.drafts, found.vocab, int(found.seed[0])) == (2, 50, 6)
    for name in ("path", "firsts", "shares"):
        np.testing.assert_array_equal(getattr(found, name), getattr(paths, name))


@AT_LENGTH
def test_rounds_of_two_ranks_follow_the_acceptance_too(
    engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Were another rank's drafts not forced, its tokens would part from rank 0's."""
    monkeypatch.setattr(spawn, "MODULE", spawn.MODULE)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    options = Options(decode=(1, 4), prefill=(64,), max_context=448, max_seqs=4, drafts=3, tp=2)
    build(engine / "m", engine / "tp2", options, lambda text: None)
    bench = lockstep.Bench(engine / "tp2", drafts=None)
    forced = Forced(bench.engine)
    for executor in bench.executors.values():
        executor.before = forced.before
    rounds = Rounds(bench.engine, forced, Trial(20, 40, (3,), (HIGH,)))
    prompts = np.random.default_rng(0).integers(0, 512, (3, 20)).tolist()
    _, row = rounds.rows(prompts)
    assert row["tokens_per_round"] == pytest.approx(1 + 0.9 * (1 + 0.8 * 1.7), abs=0.35)
    bench.engine.check_idle()
    bench.engine.close()


def test_drafts_that_were_reached_are_what_a_place_is_measured_by() -> None:
    none: dict[str, Any] = {"drafts_by_position": [0, 0], "accepted_by_position": [0, 0]}
    after = {"drafts_by_position": [10, 10], "accepted_by_position": [8, 4]}
    found = measured({**none, "rounds_by_k": {0: 3}}, {**after, "rounds_by_k": {0: 3, 2: 5}})
    assert found == {"measured": [0.8, 0.5], "rounds_by_k": {"2": 5}}


def test_launches_of_the_draft_head_are_parts_of_their_own() -> None:
    rows = [
        ("logits", "nvfp4_linear", "linear-nvfp4"),
        ("draft.1.logits", "nvfp4_linear", "draft-linear"),
        ("draft.0.token", "draft_token", "draft-token"),
        ("draft.0.mtp.layers.0.self_attn.gated", "paged_decode", "draft-attention"),
        ("mtp.fc.y", "linear", "fill"),
        ("mtp.k_pages.filled", "append_kv", "fill"),
        ("accepted", "accept_drafts", "sample"),
    ]
    for node, symbol, part in rows:
        assert kernel_split.part_of(symbol, node) == part


def test_the_command_of_a_row_says_what_was_asked(tmp_path: Path) -> None:
    words = [
        "e",
        "benchmarks/configs/m",
        "--drafts",
        "2,auto",
        "--rows",
        "1",
        "--acceptance",
        "0.5",
    ]
    args = bench_decode.arguments(words)
    command = bench_decode.command(args)
    assert command.endswith("--npl 1 --ctx 1024 --steps 48 --drafts 2,auto --acceptance 0.5")
    row = {"model": "m", "npl": 1, "ctx": 4, "gdn_state": "f32", "kv": "bf16", "k": 2}
    bench_decode.save(tmp_path / "r.json", [row | {"acceptance": [0.5]}, row | {"acceptance": []}])
    bench_decode.save(tmp_path / "r.json", [row | {"acceptance": [0.5], "round_ms": 1}])
    assert (tmp_path / "r.json").read_text().count("round_ms") == 1


def test_steps_are_of_one_token_unless_drafts_are_asked_for(
    engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lockstep, "IDS", 512)
    bench = lockstep.Bench(engine / "e")
    assert bench.run(3, 20, 6)["npl"] == 3 and bench.engine.stats()["rounds_by_k"] == {}
    bench.finish()
    bench.engine.close()
