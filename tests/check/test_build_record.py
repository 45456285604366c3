"""The build record: buckets generate the tokens of the loop, and a change is found."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from spark_engine.builder import record_process
from spark_engine.builder.plan.options import Options
from spark_engine.builder.record_process import recorded
from spark_engine.check import build_record as module
from spark_engine.check.build_record import GENERATED, SHORT, greedy, main, name_of
from spark_engine.engine_file import MANIFEST, read_manifest
from spark_engine.interface import Limits
from spark_engine.manifest import Greedy
from spark_engine.runtime.engine.engine import Engine
from spark_engine.runtime.engine.load import Loaded, load
from spark_engine.runtime.engine.request import Request, SamplingParams
from spark_engine.runtime.executors.executor import Wait
from spark_engine.tensors import Array
from tests.runtime.fake_executor import VOCAB, FakeExecutor, build_fake
from tests.runtime.random_engines import load_random

LIMITS = Limits(max_seqs=6, max_context=256, pages=20, vocab=VOCAB)
BUCKETS = (1, 4, 6), (1, 2, 8)
SMALL = Options(decode=(1,), prefill=(64, 128), max_context=128, max_seqs=3, kv_tokens=64 * 6)


def _said(loaded: Loaded) -> dict[str, dict[int, list[int]]]:
    run = module._GreedyRun(loaded)
    return {name_of(key): run.generate(*key) for key in sorted(loaded.executors)}


def _by_the_loop(limits: Limits, prompt: Sequence[int]) -> list[int]:
    """What an engine of the same model answers; what ends a request is not asked for."""
    engine = Engine(build_fake(limits, (1,), (8,)))
    params = SamplingParams(temperature=0, max_tokens=GENERATED, seed=0, ignore_eos=True)
    engine.submit(Request(tuple(prompt), params))
    events = []
    while not engine.idle:
        events += engine.step()
    return [event.token for event in events if event.token is not None]


def _prompt(slot: int, length: int) -> list[int]:
    return [(slot * 104_729 + at * 7_919 + 13) % VOCAB for at in range(length)]


@pytest.mark.parametrize("drafts", [0, 3])
def test_buckets_say_what_the_loop_says(drafts: int) -> None:
    limits = replace(LIMITS, drafts=drafts)
    said = _said(build_fake(limits, *BUCKETS))
    verify = [f"verify_b{n}_k{k}" for n in BUCKETS[0] for k in range(1, drafts + 1)]
    names = ["decode_b1", "decode_b4", "decode_b6", "prefill_t64", "prefill_t128", "prefill_t512"]
    assert sorted(said) == sorted(names + verify)
    fed = {slot: _by_the_loop(limits, _prompt(slot, SHORT)) for slot in range(6)}
    for name in (n for n in said if not n.startswith("prefill")):
        rows = int(name.split("_")[1][1:])
        assert said[name] == {slot: fed[slot] for slot in range(rows)}, name
    for name, lengths in (("prefill_t64", [64]), ("prefill_t512", [128, 117, 106, 95])):
        wanted = {s: _by_the_loop(limits, _prompt(s, n)) for s, n in enumerate(lengths)}
        assert said[name] == wanted, name


def test_a_record_names_the_machine_and_sums_the_tokens() -> None:
    loaded = build_fake(LIMITS, *BUCKETS)
    record, said = greedy(loaded), _said(loaded)
    assert "onnxruntime" in record.machine and greedy(loaded) == record
    flat = [token for slot in range(4) for token in said["decode_b4"][slot]]
    assert len(flat) == 4 * GENERATED
    data = np.array(flat, "<i4").tobytes()
    assert record.md5["decode_b4"] == hashlib.md5(data).hexdigest()


class Wrong(FakeExecutor):
    """Says another token after the third position."""

    def launch(self, buffers: Mapping[str, Array]) -> Wait:
        wait = super().launch(buffers)

        def changed() -> None:
            wait()
            buffers["next_tokens"][buffers["starts"] == SHORT + 3] += 1

        return changed


def test_another_token_in_one_bucket_is_another_sum() -> None:
    loaded = build_fake(LIMITS, *BUCKETS, lazy=False)
    sound, key = greedy(loaded).md5, ("decode", 4)
    wrong = Wrong(LIMITS, *key, loaded.executors[key]._device)  # type: ignore[attr-defined]
    other = greedy(replace(loaded, executors={**loaded.executors, key: wrong})).md5
    found = {name for name in sound if sound[name] != other[name]}
    assert found == {"decode_b4"}


@pytest.mark.parametrize("pages", [1, 3])
def test_few_pages_and_a_short_context(pages: int) -> None:
    said = _said(build_fake(replace(LIMITS, pages=pages), *BUCKETS))
    assert [len(said[f"decode_b{n}"]) for n in BUCKETS[0]] == [1, min(4, pages), min(6, pages)]
    short = _said(build_fake(replace(LIMITS, max_context=GENERATED + 1), *BUCKETS))
    assert set(map(len, short.values())) == {0}, "no text fits"


def test_a_token_that_is_not_finite_is_no_token() -> None:
    said = _said(build_fake(LIMITS, *BUCKETS, poison_rate=2))
    tokens = [token for texts in said.values() for text in texts.values() for token in text]
    assert -1 in tokens and max(tokens) < VOCAB


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("real")
    load_random(folder, "f32", moe=False, options=SMALL).close()
    return folder / "engine"


def test_of_a_real_engine(engine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Slot 0's text is the same in every bucket; the command prints the record."""
    assert main([str(engine)]) == 0
    shown = json.loads(capsys.readouterr().out)
    with closing(load(engine, threads=1)) as loaded:
        said, record = _said(loaded), greedy(loaded)
    assert said["decode_b1"][0] == said["decode_b3"][0] and len(said["decode_b3"]) == 3
    assert len(set(record.md5.values())) == 4
    assert shown == asdict(record)


def test_an_engine_of_another_machine_is_not_opened(
    engine: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "runnable_targets", lambda hosts: ("sm_90a",))
    monkeypatch.setattr(module, "load", None)
    assert main([str(engine)]) == 0
    assert json.loads(capsys.readouterr().out) == asdict(Greedy())


def test_a_build_keeps_the_record_of_its_engine(engine: Path) -> None:
    manifest = read_manifest(engine)
    assert manifest.greedy == Greedy()
    kept, notes = recorded(engine, manifest)
    assert notes == () and sorted(kept.greedy.md5) == sorted(
        b.file.removesuffix(".engine") for b in manifest.buckets
    )
    assert read_manifest(engine) == kept
    assert kept == replace(manifest, greedy=kept.greedy)


def test_an_engine_that_cannot_run_is_built_without_a_record(
    engine: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    manifest, before = read_manifest(engine), (engine / MANIFEST).read_bytes()
    kept, (note,) = recorded(tmp_path, manifest)
    assert kept is manifest and "running it failed" in note and "manifest.json" in note
    assert "Error" not in note, "the words, without the class that said them"
    done = SimpleNamespace(stdout='{"machine": "", "md5": {}}', stderr="", returncode=0)
    monkeypatch.setattr(record_process.subprocess, "run", lambda *_, **__: done)
    kept, (note,) = recorded(engine, manifest)
    assert kept is manifest and "its target is not this machine's" in note
    assert (engine / MANIFEST).read_bytes() == before
