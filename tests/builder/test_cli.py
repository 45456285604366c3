"""The command lines: exit codes, messages, JSON."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from spark_engine.builder import cli, inspect
from spark_engine.builder.report import size
from spark_engine.engine_file import open_folder, read_manifest
from spark_engine.errors import GraphError
from tests.checkpoints import write_checkpoint

FEW = ("--decode", "1,2", "--prefill", "64", "--max-context", "64")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cli") / "model"
    return write_checkpoint(path, format="modelopt_mixed", moe=True, split_scales=True).path


def call(*words: object) -> Result:
    return CliRunner().invoke(cli.main, [str(w) for w in words])


def test_a_build_shows_progress_and_a_report(tmp_path: Path, checkpoint: Path) -> None:
    folder = tmp_path / "engine"
    done = call(checkpoint, "-o", folder, *FEW)
    assert done.exit_code == 0, done.stderr
    assert "compiling the buckets" in done.stderr
    manifest = open_folder(folder, "cpu").manifest
    for words in ("norm_quant", "decode_b2.engine", "nvfp4", "fusions refused", "peak memory"):
        assert words in done.stdout
    assert size(manifest.memory.weights) in done.stdout
    assert size(manifest.memory.total) in done.stdout
    again = call(checkpoint, "-o", folder, *FEW)
    assert again.exit_code == 0 and "is up to date" in again.stdout


def test_json_report(tmp_path: Path, checkpoint: Path) -> None:
    done = call(checkpoint, "-o", tmp_path / "engine", *FEW, "--json", "--no-fuse")
    row = json.loads(done.stdout)
    assert row["built"] is True and row["manifest"]["fusions"] == {"decode": {}, "prefill": {}}
    assert row["peak_rss"] > 1 << 20 and set(row["seconds"]) >= {"graph", "compile", "weights"}
    again = call(checkpoint, "-o", tmp_path / "engine", *FEW, "--json", "--no-fuse")
    assert json.loads(again.stdout)["built"] is False


def test_the_default_folder_is_named_after_the_checkpoint(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert call(checkpoint, *FEW).exit_code == 0
    assert read_manifest(tmp_path / "engines" / "model").name == "model"


# Without NVIDIA's compiler that is said first.
NO_F32_PAGES = "bf16 or fp8 pages" if importlib.util.find_spec("cuda") else "spark-engine[cuda]"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--target", "sm_90a", "--kv-dtype", "f32"), NO_F32_PAGES),
        (("--decode", "x"), "--decode x"),
        (("--prefill", "63"), "--prefill 63"),
        (("--kv-dtype", "int3"), "--kv-dtype int3"),
        (("--max-seqs", "0"), "--max-seqs 0"),
    ],
)
def test_a_users_mistake_is_one_line(
    tmp_path: Path, checkpoint: Path, words: tuple[str, ...], message: str
) -> None:
    done = call(checkpoint, "-o", tmp_path / "engine", *words)
    assert done.exit_code == 2
    assert message in done.stderr and "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_no_checkpoint_and_a_foreign_folder(tmp_path: Path, checkpoint: Path) -> None:
    done = call(tmp_path / "none", "-o", tmp_path / "engine")
    assert done.exit_code == 2 and "config.json" in done.stderr
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.jpg").touch()
    done = call(checkpoint, "-o", tmp_path / "photos", *FEW)
    assert done.exit_code == 2 and "not an engine folder" in done.stderr


def test_a_full_disk_is_one_line(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*words: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cli, "build", full)
    done = call(checkpoint, "-o", tmp_path / "engine")
    assert done.exit_code == 2 and "No space left" in done.stderr


@pytest.mark.parametrize("error", [GraphError("cycle"), KeyError("oops")])
def test_our_bug_asks_for_a_report(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*words: object) -> None:
        raise error

    monkeypatch.setattr(cli, "build", fail)
    done = call(checkpoint, "-o", tmp_path / "engine")
    assert done.exit_code == 1 and "please report it" in done.stderr


def test_inspect(tmp_path: Path, checkpoint: Path) -> None:
    folder = tmp_path / "engine"
    assert call(checkpoint, "-o", folder, *FEW).exit_code == 0
    shown = CliRunner().invoke(inspect.main, [str(folder)])
    assert shown.exit_code == 0 and "decode_b1.engine" in shown.stdout and shown.stderr == ""
    row = json.loads(CliRunner().invoke(inspect.main, [str(folder), "--json"]).stdout)
    assert row == {**read_manifest(folder).to_json()}
    missing = CliRunner().invoke(inspect.main, [str(tmp_path / "none")])
    assert missing.exit_code == 2 and "no engine folder" in missing.stderr


@pytest.mark.parametrize(
    ("file", "keep", "words"),
    [("weights.safetensors", -1, "bytes, not"), ("decode_b2.engine", None, "is missing")],
)
def test_inspect_says_what_is_cut(
    tmp_path: Path, checkpoint: Path, file: str, keep: int | None, words: str
) -> None:
    folder = tmp_path / "engine"
    assert call(checkpoint, "-o", folder, *FEW).exit_code == 0
    data = (folder / file).read_bytes()
    (folder / file).unlink()
    if keep is not None:
        (folder / file).write_bytes(data[:keep])
    for more in ((), ("--json",)):
        shown = CliRunner().invoke(inspect.main, [str(folder), *more])
        assert shown.exit_code == 2 and "decode_b1.engine" in shown.stdout
        (line,) = shown.stderr.splitlines()
        assert file in line and words in line and "spark-build" in line


def test_sizes() -> None:
    assert [size(n) for n in (0, 1023, 1024, 3 << 29)] == ["0 B", "1023 B", "1.00 KiB", "1.50 GiB"]
