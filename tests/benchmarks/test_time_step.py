"""The step timer: its command line, rows and arithmetic, and the protocol on a CPU engine."""

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import time_step
from benchmarks.result_files import RESULTS, read
from benchmarks.steps import lockstep
from benchmarks.steps.launch_parts import Timed, by_part, counts, part_of
from spark_engine.builder.build import build
from spark_engine.builder.plan.options import Options
from spark_engine.interface import Limits
from spark_engine.runtime.engine.request import Event, FinishReason
from tests.models.test_synthetic import folder

ROW = {"model": "m", "npl": 1, "ctx": 4, "gdn_state": "f32", "kv": "bf16", "step_ms": 1.0}


def test_the_recorded_rows_are_whole() -> None:
    """Every model and batch of vLLM's table has a row of ours, with what it is to be read by."""
    rows = read(RESULTS / "decode" / "decode_h200.json")["rows"]
    theirs = read(time_step.VLLM)["rows"]
    ours = {(r["model"], r["npl"]): r for r in rows if r["gdn_state"] == "f32"}
    assert {(r["model"], r["npl"]) for r in theirs} <= set(ours)
    for row in rows:
        assert row["step_ms"] > row["floor_ms"] > 0 and row["commit"] != "unknown"
        assert {"card", "driver", "command", "start_to_ready_s", "prefill_tok_s"} <= set(row)


@pytest.mark.parametrize("name", ["r.json", "r.json.xz"])
def test_rows_replace_those_of_the_same_work(tmp_path: Path, name: str) -> None:
    path = tmp_path / "some" / name
    time_step.save(path, [ROW, ROW | {"npl": 8}])
    others = [{"gdn_state": "bf16"}, {"build": "default"}, {"k": 3}, {"graphs": False}]
    time_step.save(path, [ROW | {"step_ms": 2.0, "k": 0}, *(ROW | other for other in others)])
    rows = read(path)["rows"]
    assert [(r["npl"], r["step_ms"]) for r in rows[:2]] == [(8, 1.0), (1, 2.0)]
    assert len(rows) == 6, "another state, build, round or form is another row"


def test_the_command_line() -> None:
    places = ["e", "benchmarks/configs/m"]
    plain = time_step.arguments(places)
    assert plain.rows == (1, 8, 32, 64, 128) and not plain.default and plain.split
    built = time_step.arguments([*places, "--build", ""])
    assert built.rows == (1, 8, 32, 64, 65, 96, 128) and built.default
    assert time_step.command(built).endswith("--steps 48 --build ''")
    before = time_step.arguments([*places, "--built-in", "41"])
    assert time_step.command(before) == time_step.command(built)
    drafts = ["--rows", "3", "--drafts", "1,auto", "--acceptance", "0.8,0.5"]
    words = time_step.command(time_step.arguments([*places, *drafts]))
    assert words.endswith("m --rows 3 --ctx 1024 --steps 48 --drafts 1,auto --acceptance 0.8,0.5")


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({}, ""),
        ({"max_context": 195}, "this engine holds 195; give at most 99, .* --max-context 196"),
        ({"max_seqs": 7}, "8 sequences: this engine holds 7; .* --max-seqs 8"),
        ({"pages": 31}, "8 sequences of 196 tokens: .* hold 1984; build with --kv-tokens 2048"),
    ],
)
def test_what_an_engine_does_not_hold_is_named(changed: dict[str, int], words: str) -> None:
    """8 prompts of 100 in launches of 64: the first sequences decode while 12 more launches run."""
    args = time_step.arguments(["e", "c", "--ctx", "100", "--steps", "9", "--rows", "8"])
    args.drafts = ("auto", "2")
    assert lockstep.tokens_made(8, 100, 9, 2, 64) == 13 + 3 * (lockstep.WARM + 9) + lockstep.SPARE
    need = 100 + lockstep.tokens_made(8, 100, 9, 2, 64)
    limits = replace(Limits(8, need, 8 * -(-need // 64), 99), **changed)
    with pytest.raises(SystemExit, match=words) if words else nullcontext():
        time_step.check_limits(limits, 64, args)


def test_a_kept_token_takes_the_round_over_what_is_expected_to_be_kept() -> None:
    row = ROW | {"k": 2, "mean_ms": 3.0}
    (found,) = time_step.rounds_of(row, [(0.5, 0.5, 0.9)])
    assert (found["tokens_per_round"], found["ms_per_token"]) == (1.75, 1.714)
    (plain,) = time_step.rounds_of(row | {"k": 0}, [(0.5,), (0.6,)])
    assert plain["acceptance"] == [] and plain["ms_per_token"] == 3.0
    assert time_step.promised([1.0, 1.2, 1.9], (0.5, 0.4), [1, 2]) == 1
    assert time_step.promised([1.0, 1.6, 1.7], (0.5, 0.4), [1, 2]) == 0
    assert time_step.promised([1.0, 1.2, 1.3], (0.9, 0.9), [1, 2]) == 2


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("step")
    options = Options(
        "cpu", decode=(1, 4), prefill=(64,), verify=((4, 1),), drafts=1, max_context=256, max_seqs=4
    )
    build(folder(path / "m", "bf16", False, head=True), path / "e", options, lambda text: None)
    return path


def test_the_protocol_on_a_small_engine(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lockstep, "IDS", 512)
    bench = lockstep.Bench(engine / "e", traced=True)
    for npl in (1, 3):
        row = bench.run(npl, 100, 6)
        assert (row["npl"], row["bucket"], row["ctx"]) == (npl, 1 if npl == 1 else 4, 100)
        assert 0 < row["host_ms"] <= row["step_ms"] and row["prefill_tok_s"] > 0
        assert 0 < row["distinct_tokens"] <= 1
        assert 0 < row["busy"] <= 1 and row["host_us"] > 0
        assert {"schedule", "launch", "finish"} <= set(row["parts_us"])
        bench.finish()
    counted = bench.engine.stats()
    assert counted["prefilled"] == 4 * 100 and counted["running"] == 0 and bench.ready > 0
    bench.engine.close()


def test_steps_and_rounds_are_kept_with_their_floors(
    engine: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(lockstep, "IDS", 512)
    words = [str(engine / "e"), str(engine / "m"), "--rows", "2", "--ctx", "64", "--steps", "4"]
    words += ["--no-split", "--drafts", "1,2,auto", "--acceptance", "0.9", "--commit", "c"]
    time_step.main([*words, "--out", str(tmp_path / "r.json")])
    rows = json.loads((tmp_path / "r.json").read_text())["rows"]
    assert [row["k"] for row in rows] == [0, 1, "auto"] and rows[2]["chosen"] in (0, 1)
    assert all(row["floor_ms"] > 0 and row["commit"] == "c" for row in rows)
    assert "draft" in rows[1]["floor_parts_ms"] and "draft" not in rows[0]["floor_parts_ms"]
    assert rows[1]["ms_per_token"] == pytest.approx(rows[1]["mean_ms"] / 1.9, rel=1e-3)
    time_step.main([*words[:2], "--rows", "2", "--ctx", "64", "--prefill", "100", "--steps", "4",
                    "--no-split", "--out", str(tmp_path / "p.json")])  # fmt: skip
    found = read(tmp_path / "p.json")["rows"]
    assert [(row["npl"], row["ctx"]) for row in found] == [(2, 64), (1, 100)]
    printed = capsys.readouterr().out
    assert "no bucket verifies 2 drafts of 2 sequences" in printed
    assert "drafts right 0.9" in printed


def test_a_failed_sequence_is_no_measurement() -> None:
    failed = Event(3, finish=FinishReason.ERROR, message="non-finite logits")
    with pytest.raises(RuntimeError, match="request 3: non-finite"):
        lockstep.checked([failed])


def test_launches_belong_to_parts() -> None:
    timed = [Timed("a", "norm_quant", 3.0), Timed("b", "moe_up", 9.0), Timed("c", "moe_down", 5.0)]
    assert by_part(timed, 1.0) == {"moe": 0.012, "norm": 0.002}
    assert counts(timed) == {"moe": 2, "norm": 1}
    symbols = {"nvfp4_linear": "linear-nvfp4", "moe_router": "router", "paged_decode": "attention"}
    symbols |= {"moe_norm": "moe", "moe_combine": "moe"}
    assert {s: part_of(s) for s in symbols} == symbols
    row: dict[str, Any] = {"parts_ms": {"moe": 0.5}, "parts_launches": {"moe": 2}}
    assert time_step.spelled(row) == "moe 0.500 (2 x 250.0)"
