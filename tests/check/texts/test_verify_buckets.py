"""Rounds of drafts are compared with decode: by a scripted runner, and in whole checks."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spark_engine.builder.build import build
from spark_engine.builder.plan.options import Options
from spark_engine.check.check import LEVELS, run_check
from spark_engine.check.engines.open_engines import build_twin, folder_of, open_engine
from spark_engine.check.engines.prompts import CheckSession, greedy_session, sessions
from spark_engine.check.texts.verify_buckets import Decoded, check_verify_buckets
from spark_engine.check.verdicts.defined_values import ends
from spark_engine.engine_file import read_manifest
from spark_engine.interface import Limits, drafts_of
from spark_engine.progress import Progress
from tests.check.faulty_engines import corrupt
from tests.checkpoints import write_checkpoint

QUIET = Progress(None)
VOCAB = 50
LIMITS = Limits(max_seqs=4, max_context=192, pages=12, vocab=VOCAB, drafts=3)
BUCKETS = [("decode", 4), ("prefill", 4), ("verify_k1", 4), ("verify_k3", 1), ("verify_k3", 4)]
Feed = Any


class Scripted:
    """Says `tokens` at each position, and accepts as the contract says."""

    def __init__(self, session: CheckSession, tokens: dict[int, list[int]]) -> None:
        self.prompts = {text.slot: text.prompt for text in session.texts}
        self.tokens, self.feeds = tokens, list[Feed]()
        self.at: dict[int, int] = {}
        self.last: dict[int, int] = {}
        self.spoil: Callable[[dict[str, Any]], None] | None = None

    def launch(self, feed: Feed) -> dict[str, Any]:
        self.feeds.append(feed)
        rows = len(feed["slots"])
        ids = feed["token_ids"].reshape(rows, -1)
        if ids.shape[1] == 64:
            return {}
        sampled, accepted = [], []
        for row in range(rows):
            slot, start, n = (int(feed[name][row]) for name in ("slots", "starts", "counts"))
            if slot < 0:
                continue
            if start < 0:
                start, first = self.at[slot], self.last[slot]
            else:
                first = int(ids[row, 0])
            fed = [first, *ids[row, 1:n].tolist()]
            place = start - self.prompts[slot]
            mine = [self.tokens[slot][place + 1 + j] for j in range(n)]
            kept = 1
            while kept < n and fed[kept] == mine[kept - 1]:
                kept += 1
            self.at[slot], self.last[slot] = start + kept, mine[kept - 1]
            sampled += mine
            accepted.append(kept)
        shown = {"next_tokens": np.asarray(sampled), "accepted": np.asarray(accepted)}
        if self.spoil is not None:
            self.spoil(shown)
        return shown


def _case() -> tuple[CheckSession, Decoded]:
    session = greedy_session(LIMITS, BUCKETS)
    rng = np.random.default_rng(3)
    tokens = {
        t.slot: rng.integers(0, VOCAB, len(t.ids) - t.prompt + 1).tolist() for t in session.texts
    }
    logits = {s: [np.eye(VOCAB, dtype=np.float32)[i] for i in ids] for s, ids in tokens.items()}
    return session, Decoded(tokens, logits)


VERIFY = [key for key in BUCKETS if drafts_of(key[0])]


def test_what_agrees_passes_and_everything_decoded_is_compared() -> None:
    session, decoded = _case()
    runner: Any = Scripted(session, {s: list(ids) for s, ids in decoded.tokens.items()})
    found = check_verify_buckets(runner, VERIFY, session, decoded, 1e-3, QUIET)
    assert [f.name for f in found] == [f"{family} of {rows} rows" for family, rows in VERIFY]
    wanted = sum(len(ids) - 1 for ids in decoded.tokens.values())
    assert all(f.passed and f.figures["tokens"] == wanted for f in found)
    later = [f for f in runner.feeds if len(f["token_ids"]) != 64 * len(f["slots"])]
    assert any((f["starts"] == -1).any() for f in later), "no round began from the states"
    assert any((f["starts"] > 0).any() for f in later)


@pytest.mark.parametrize("fault", ["token", "accepted", "stale"])
def test_another_token_and_another_count_are_found(fault: str) -> None:
    session, decoded = _case()
    tokens = {s: list(ids) for s, ids in decoded.tokens.items()}
    runner: Any = Scripted(session, tokens)
    launches = 0

    def spoil(shown: dict[str, Any]) -> None:
        nonlocal launches
        launches += 1
        if launches == 2 and fault == "token":
            shown["next_tokens"][1] = (shown["next_tokens"][1] + 1) % VOCAB  # a last one
        if launches == 2 and fault == "accepted":
            shown["accepted"][0] += 1
        if fault == "stale":  # the states are a position behind
            runner.at = {slot: at - 1 for slot, at in runner.at.items()}

    runner.spoil = spoil
    (finding,) = check_verify_buckets(runner, VERIFY[:1], session, decoded, 1e-3, QUIET)
    assert not finding.passed and finding.where.startswith("text in slot ")
    if fault != "stale":
        assert ("accepted for" in finding.where) == (fault == "accepted")


def test_a_near_tie_ends_a_text_without_blame() -> None:
    session, decoded = _case()
    logits = {s: [row.copy() for row in rows] for s, rows in decoded.logits.items()}
    slot = next(iter(logits))
    tokens = {s: list(ids) for s, ids in decoded.tokens.items()}
    other = (tokens[slot][4] + 1) % VOCAB
    logits[slot][4][other] = 1 - 1e-6
    tokens[slot][4] = other
    runner: Any = Scripted(session, tokens)
    found = check_verify_buckets(
        runner, VERIFY, session, Decoded(decoded.tokens, logits), 1e-3, QUIET
    )
    assert all(f.passed and f.figures["near_ties"] >= 1 for f in found)


def test_sessions_verify_in_every_bucket_with_rows_of_all_lengths() -> None:
    plan = [s for s in sessions(LIMITS, BUCKETS) if s.label == "rounds"]
    (session,) = plan
    rounds = [x for x in session.launches if drafts_of(x.family)]
    assert [(x.family, x.rows) for x in rounds] == VERIFY
    at = {text.slot: text.prompt for text in session.texts}
    lengths = set()
    for launch in rounds:
        for slot, start, count in zip(launch.slots, launch.starts, launch.counts, strict=True):
            if slot >= 0:
                assert start == at[int(slot)] and 1 <= count <= 1 + drafts_of(launch.family)
                at[int(slot)] += 1
                lengths.add(int(count))
    assert lengths >= {1, 2, 3, 4}


SMALL = {
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "vocab_size": 256,
    "mtp_num_hidden_layers": 1,
}
OPTIONS = Options("cpu", decode=(1, 2), prefill=(64,), max_context=134, max_seqs=2, drafts=2)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("drafting")
    write_checkpoint(folder / "m", SMALL)
    build(folder / "m", folder / "drafting", OPTIONS, lambda text: None)
    plain = replace(OPTIONS, drafts=0)
    build(folder / "m", folder / "plain", plain, lambda text: None)
    return folder


def test_a_sequence_ends_behind_what_was_accepted() -> None:
    launch = {name: np.array(row) for name, row in {"starts": [5, 9], "counts": [3, 1]}.items()}
    assert ends(launch).tolist() == [8, 10], "every token of a launch without drafts"
    assert ends(launch | {"accepted": np.array([2, 1])}).tolist() == [7, 10]


def test_an_engine_that_drafts_is_held_to_its_references(built: Path) -> None:
    report = run_check(built / "drafting", None, LEVELS, QUIET)
    assert report.passed, report.first
    by_name = {level.name: level for level in report.levels}
    families = {f.name.split()[0] for f in by_name["op"].findings}
    assert families == {"decode", "prefill", "verify_k2"}
    shown = {f.name for f in by_name["model"].findings}
    assert {"accepted", "drafts", "positions", "mtp.k_pages", "mtp.v_pages"} <= shown
    assert "layers.0.gdn_ring" not in shown and "layers.0.conv_state" in shown
    assert [f.kind for f in by_name["text"].findings[1:]] == ["rounds of drafts"] * 2


def test_an_engine_that_drafts_agrees_with_one_that_does_not(built: Path) -> None:
    for pair in (("drafting", "plain"), ("plain", "drafting")):
        engine, other = (built / name for name in pair)
        assert run_check(engine, other, ("model", "text"), QUIET).passed


def test_a_fault_of_the_draft_head_is_named(built: Path, tmp_path: Path) -> None:
    bad = corrupt(built / "drafting", "mtp.fc.weight", tmp_path / "bad", lambda data: data[::-1])
    report = run_check(bad, built / "m", ("op", "text"), QUIET)
    assert {line.split(":")[0] for line in report.headlines} == {"mtp.fc"}
    assert report.levels[-1].passed, "no token depends on it"


def test_a_twin_drafts_as_the_engine_does(built: Path, tmp_path: Path) -> None:
    ids = tuple(range(3, 40))
    build(built / "m", tmp_path / "e", replace(OPTIONS, draft_vocab=ids), lambda text: None)
    engine = open_engine(tmp_path / "e")
    twin = build_twin(built / "m", engine, tmp_path / "twin", lambda text: None, fuse=False)
    assert read_manifest(twin).limits == replace(engine.limits, snapshots=0)  # they are not read
    found = [folder_of(e).weights()["mtp.shortlist"] for e in (engine, open_engine(twin))]
    assert found[0].tolist() == found[1].tolist() and set(ids) <= set(found[0].tolist())
    keys = [{(b.family, b.rows) for b in read_manifest(p).buckets} for p in (tmp_path / "e", twin)]
    assert keys[0] == keys[1]


def test_a_native_engine_that_drafts_is_taken_apart(
    built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU of numpy: the places of states during a round, and what a round reads."""
    pytest.importorskip("cuda.core", reason="needs the extra `cuda`")
    from tests.check.fake_native import build_fake, open_fake

    options = replace(OPTIONS, target="sm_90a", decode=(2,), verify=((2, 2),), timing=False)
    fake = build_fake(built / "m", tmp_path / "e", options, monkeypatch)
    open_fake(fake, monkeypatch)
    report = run_check(tmp_path / "e", built / "m", ("op", "layer", "text"), QUIET)
    assert report.passed, report.first
    nodes = {name for found in fake.nodes.values() for name in found}
    assert {f.name.split(maxsplit=1)[1] for f in report.levels[0].findings} == nodes
    assert report.levels[-1].findings[-1].name == "verify_k2 of 2 rows"
