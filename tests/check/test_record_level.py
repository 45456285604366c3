"""`spark-check --level record`: an engine generates the tokens of its build."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from spark_engine.builder.build import build
from spark_engine.builder.plan.options import Options
from spark_engine.check.cli import main
from spark_engine.engine_file import MANIFEST, read_manifest
from spark_engine.manifest import Greedy
from tests.checkpoints import write_checkpoint

SMALL = {"num_hidden_layers": 1, "layer_types": ["linear_attention"], "vocab_size": 256}
OPTIONS = Options(target="cpu", decode=(1,), prefill=(64,), max_context=70, max_seqs=2)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An engine that was run at its build."""
    folder = tmp_path_factory.mktemp("recorded")
    checkpoint = write_checkpoint(folder / "checkpoint", SMALL).path
    report = build(checkpoint, folder / "engine", OPTIONS, lambda text: None, record=True)
    assert not [note for note in report.notes if note.startswith("no record")]
    assert report.manifest == read_manifest(folder / "engine")
    return folder / "engine"


def _check(engine: Path, *words: str) -> Result:
    return CliRunner().invoke(main, [str(engine), *words])


def _with(engine: Path, folder: Path, record: Greedy) -> Path:
    """A copy with another record in its manifest."""
    shutil.copytree(engine, folder)
    manifest = replace(read_manifest(folder), greedy=record)
    (folder / MANIFEST).write_bytes(manifest.encode())
    return folder


def test_an_engine_says_what_it_said(built: Path) -> None:
    record = read_manifest(built).greedy
    assert sorted(record.md5) == ["decode_b1", "decode_b2", "prefill_t64"]
    done = _check(built, "--level", "record", "--json")
    assert done.exit_code == 0, done.stderr
    (level,) = json.loads(done.stdout)["levels"]
    assert (level["name"], level["launches"]) == ("record", 3)
    assert {f["name"]: f["passed"] for f in level["findings"]} == dict.fromkeys(record.md5, True)


def test_a_default_build_for_a_cpu_runs_its_least_buckets(built: Path, tmp_path: Path) -> None:
    checkpoint, folder = built.parent / "checkpoint", tmp_path / "engine"
    build(checkpoint, folder, OPTIONS, lambda text: None, record=None)
    whole, least = read_manifest(built).greedy, read_manifest(folder).greedy
    assert least == Greedy(whole.machine, {n: whole.md5[n] for n in ("decode_b1", "prefill_t64")})
    done = _check(folder, "--level", "record", "--json")
    assert done.exit_code == 0 and json.loads(done.stdout)["levels"][0]["launches"] == 2


def test_other_tokens_are_reported_with_the_bucket(built: Path, tmp_path: Path) -> None:
    record = read_manifest(built).greedy
    wrong = Greedy(record.machine, {**record.md5, "decode_b2": "0" * 32})
    done = _check(_with(built, tmp_path / "engine", wrong), "--level", "record", "--json")
    assert done.exit_code == 3
    row = json.loads(done.stdout)
    assert row["first_divergence"] == "decode_b2"
    failed = [f for f in row["levels"][0]["findings"] if not f["passed"]]
    assert [(f["reason"], f["where"]) for f in failed] == [
        ("other tokens than when it was built", record.md5["decode_b2"])
    ]


@pytest.mark.parametrize("kind", ["another machine", "no record"])
def test_what_cannot_be_held_is_said(built: Path, tmp_path: Path, kind: str) -> None:
    record = read_manifest(built).greedy
    other = Greedy("NVIDIA H200", record.md5) if kind == "another machine" else Greedy()
    engine = _with(built, tmp_path / "engine", other)
    words = "the record was made on NVIDIA H200, and this is"
    words = words if other.md5 else "the build did not run this engine"
    alone = _check(engine, "--level", "record")
    assert alone.exit_code == 2 and f"{engine}: {words}" in alone.stderr
    assert ("opening" in alone.stderr) == (kind == "another machine"), "said before it is loaded"
    whole = _check(engine)
    assert whole.exit_code == 0 and f"without the record level: {words}" in whole.stderr
