"""The command lines: exit codes, messages, JSON."""

import gc
import importlib.util
import io
import json
import os
import shutil
import signal
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from spark_engine.builder import cli, inspect
from spark_engine.builder.build import build, no_gpu_note, runs_here
from spark_engine.builder.plan import budget
from spark_engine.builder.plan.options import CPU_MAX_CONTEXT, CPU_MAX_SEQS, TARGETS, Options
from spark_engine.builder.report import render, size
from spark_engine.engine_file import open_folder, read_manifest
from spark_engine.errors import GraphError
from spark_engine.hints import extra
from spark_engine.kernel import CARDS
from spark_engine.models.weights.recipes import Recipe
from spark_engine.runtime.offline.embedded import find_checkpoint
from tests.checkpoints import write_checkpoint

FEW = ("--decode", "1,2", "--prefill", "64", "--max-context", "64", "--no-record")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cli") / "model"
    return write_checkpoint(path, format="modelopt_mixed", moe=True, split_scales=True).path


STAGES = {"open", "hash", "lower", "verify", "rewrite", "emit", "write", "seal"}  # on a CPU


def call(*words: object) -> Result:
    return CliRunner().invoke(cli.main, [str(w) for w in words])


def test_a_build_shows_progress_and_a_report(tmp_path: Path, checkpoint: Path) -> None:
    folder = tmp_path / "engine"
    done = call(checkpoint, "-o", folder, *FEW)
    assert done.exit_code == 0, done.stderr
    assert "emit the buckets" in done.stderr
    manifest = open_folder(folder, "cpu").manifest
    for words in ("norm_quant", "decode_b2.engine", "nvfp4", "fusions refused", "peak memory"):
        assert words in done.stdout
    assert size(manifest.memory.weights) in done.stdout
    assert size(manifest.memory.total) in done.stdout
    assert manifest.card == "" and "card" not in done.stdout
    again = call(checkpoint, "-o", folder, *FEW)
    assert again.exit_code == 0 and "is up to date" in again.stdout


@pytest.mark.parametrize("again", [False, True], ids=["built", "up to date"])
def test_an_engine_for_another_machine_is_not_said_to_run_here(
    again: bool, tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "engine"
    if again:
        call(checkpoint, "-o", folder, *FEW)
    monkeypatch.setattr(cli, "runs_here", lambda target: False)
    done = call(checkpoint, "-o", folder, *FEW)
    last = done.stdout.splitlines()[-1]
    assert last.startswith(f"this machine is not its target: copy {folder} to a machine with cpu")
    assert last.endswith("`spark-run doctor FOLDER` there") and "run it:" not in done.stdout


@pytest.mark.parametrize(
    ("capability", "targets"),
    [
        (None, {"cpu"}),
        ((9, 0), {"cpu", "sm_90a"}),
        ((12, 1), {"cpu", "sm_121a", "rtx"}),
        ((8, 9), {"cpu", "rtx"}),
    ],
)
def test_the_targets_of_this_machine(
    capability: tuple[int, int] | None, targets: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    device = pytest.importorskip("spark_engine.device.gpu", reason="needs the extra `cuda`")
    own = {(9, 0): "sm_90a", (12, 1): "sm_121a"}
    monkeypatch.setattr(device, "capability", lambda: capability)
    monkeypatch.setattr(device, "architecture", lambda: own.get(capability))
    assert {target for target in TARGETS if runs_here(target)} == targets


def test_json_report(tmp_path: Path, checkpoint: Path) -> None:
    done = call(checkpoint, "-o", tmp_path / "engine", *FEW, "--json", "--no-fuse")
    row = json.loads(done.stdout)
    assert row["built"] is True and row["manifest"]["fusions"] == {"decode": {}, "prefill": {}}
    assert row["peak_rss"] > 1 << 20 and set(row["seconds"]) == STAGES
    again = call(checkpoint, "-o", tmp_path / "engine", *FEW, "--json", "--no-fuse")
    assert json.loads(again.stdout)["built"] is False


def test_the_report_says_where_times_are_predicted(tmp_path: Path, checkpoint: Path) -> None:
    assert "us, predicted" in call(checkpoint, "-o", tmp_path / "engine", *FEW).stdout
    timed = replace(read_manifest(tmp_path / "engine"), tactics=({"timed": True},))
    console = Console(file=io.StringIO(), width=200, record=True)
    console.print(render(timed))
    text = console.export_text()
    assert " us " in text and "predicted" not in text


def test_the_default_folder_is_named_after_the_checkpoint(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert call(checkpoint, *FEW).exit_code == 0
    assert read_manifest(tmp_path / "engines" / "model").name == "model"


# Without NVIDIA's compiler that is said first.
NO_F32_PAGES = "bf16 or fp8 pages" if importlib.util.find_spec("cuda") else "cuda-bindings"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--target", "sm_90a", "--kv-dtype", "f32"), NO_F32_PAGES),
        (("--decode", "x"), "--decode x"),
        (("--prefill", "63"), "--prefill 63"),
        (("--target", "CPU"), "did you mean cpu?"),
        (("--card", "h10"), "--card h10 is not known; did you mean h100?"),
        (("--target", "cuda"), "named by its architecture: sm_90a"),
    ],
)
def test_a_users_mistake_is_one_line(
    tmp_path: Path, checkpoint: Path, words: tuple[str, ...], message: str
) -> None:
    done = call(checkpoint, "-o", tmp_path / "engine", *words)
    assert done.exit_code == 2
    assert message in done.stderr and "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_foreign_folder(tmp_path: Path, checkpoint: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.jpg").touch()
    done = call(checkpoint, "-o", tmp_path / "photos", *FEW)
    assert done.exit_code == 2 and "not an engine folder" in done.stderr


@pytest.mark.parametrize("name", CARDS)
def test_help_names_every_target_and_card(name: str) -> None:
    text = call("--help").stdout
    assert name in text and CARDS[name].name in text


@pytest.mark.parametrize(
    "words",
    [
        f"up to {budget.MAX_CONTEXT} on a GPU and {CPU_MAX_CONTEXT} on a CPU",
        f"{budget.MAX_SEQS} on a GPU (fewer if their states do not fit), and {CPU_MAX_SEQS} on a",
        "by default 64,256 on a CPU, 64,128,256,512,1024 on a GPU",
        "by default 8 on a GPU or with drafts, else 0",
        "bf16; auto: f16 if the card's memory is slow (GB10), else the checkpoint's, else f32.",
    ],
)
def test_help_says_what_is_taken_by_default(words: str) -> None:
    assert words in " ".join(call("--help").stdout.split())


def test_a_targets_name_is_looked_at_before_any_package(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "spark_engine.builder.native.nvrtc", None)  # no extra `cuda`
    wrong = call(checkpoint, "-o", tmp_path / "engine", "--target", "sm90")
    assert wrong.exit_code == 2 and "did you mean sm_90a?" in wrong.stderr
    assert "cuda-bindings" not in wrong.stderr
    right = call(checkpoint, "-o", tmp_path / "engine", "--target", "sm_90a")
    assert right.exit_code == 2 and "cuda-bindings" in right.stderr
    card = call(checkpoint, "-o", tmp_path / "engine", "--card", "h100")
    assert card.exit_code == 2 and "--target sm_90a needs" in card.stderr


@pytest.mark.parametrize(
    ("given", "here", "installed", "words"),
    [
        ("auto", True, False, extra("cuda")),
        ("auto", True, True, "cannot be used"),
        ("auto", False, False, None),
        ("cpu", True, False, None),
    ],
)
def test_a_gpu_that_is_not_used_is_spoken_of(
    given: str, here: bool, installed: bool, words: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = sys.modules[build.__module__]
    monkeypatch.setattr(module, "driver_present", lambda: here)
    monkeypatch.setattr(module, "cuda_missing", lambda: "" if installed else "No module")
    notes = no_gpu_note(given, "cpu")
    assert len(notes) == (words is not None) and all(str(words) in note for note in notes)
    assert no_gpu_note("auto", "sm_90a") == ()


def test_a_checkpoint_without_tokenizer_warns_and_one_not_fetched_is_refused(
    tmp_path: Path, checkpoint: Path
) -> None:
    done = call(checkpoint, "-o", tmp_path / "engine", *FEW)
    assert done.exit_code == 0 and "note: " in done.stdout
    assert "for a chat" not in done.stdout and "--prompt-ids" in done.stdout
    assert f"warning: {checkpoint} has no tokenizer.json" in done.stderr
    other = tmp_path / "model"
    shutil.copytree(checkpoint, other)
    for name in ("tokenizer.json", "chat_template.jinja"):
        shutil.copy(find_checkpoint() / name, other)
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
    for name in ("tokenizer.json", "model.safetensors", "config.json"):
        kept = (other / name).read_bytes() if (other / name).exists() else b"{}"
        (other / name).write_bytes(pointer)
        done = call(other, "-o", tmp_path / "lfs", *FEW)
        assert done.exit_code == 2 and f"`git lfs pull` in {other}" in done.stderr, name
        assert name in done.stderr.splitlines()[-1] and not (tmp_path / "lfs").exists()
        (other / name).write_bytes(kept)
    done = call(other, "-o", tmp_path / "engine", *FEW)
    assert done.exit_code == 0 and "warning" not in done.stderr


def test_too_little_space_is_known_before_a_byte_is_written(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = os.statvfs(tmp_path)
    short = os.statvfs_result((*disk[:4], 3 * 2**20 // disk.f_frsize, *disk[5:]))
    monkeypatch.setattr(os, "statvfs", lambda path: short)
    done = call(checkpoint, "-o", tmp_path / "engine", *FEW)
    last = done.stderr.splitlines()[-1]
    assert done.exit_code == 2 and f"-o {tmp_path / 'engine'}" in last, last
    assert "MiB and 3.00 MiB are free" in last
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_leaves_nothing_and_says_so(
    tmp_path: Path,
    checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: signal.Signals,
    code: int,
) -> None:
    """It comes while weights are made, several at a time, and the rest of them is left."""
    made, evaluate = [], Recipe.evaluate

    def slowly(recipe: Recipe, checkpoint: object) -> object:
        if threading.current_thread() is not threading.main_thread():
            made.append(recipe)
            if len(made) == 3:
                os.kill(os.getpid(), number)
            time.sleep(0.002 if len(made) < 3 else 0.05)  # the main thread is to hear of it
        return evaluate(recipe, checkpoint)  # type: ignore[arg-type]

    monkeypatch.setattr(Recipe, "evaluate", slowly)
    before = signal.getsignal(signal.SIGTERM)
    gc.disable()  # Python drops what a handler raises within a callback of gc; hypothesis has one
    try:
        done = call(checkpoint, "-o", tmp_path / "engine", *FEW)
    finally:
        gc.enable()
    assert done.exit_code == code, done.output
    assert list(tmp_path.iterdir()) == [] and len(made) < 150  # of 910
    assert signal.getsignal(signal.SIGTERM) is before


def test_weights_and_hashing_are_shown_in_percent(tmp_path: Path, checkpoint: Path) -> None:
    seen: dict[str, list[tuple[int, int]]] = {}
    stages: list[str] = []
    options = Options(target="cpu", decode=(1,), prefill=(64,), max_context=64)

    def advance(done: int, total: int) -> None:
        seen.setdefault(stages[-1].split()[0], []).append((done, total))

    build(checkpoint, tmp_path / "engine", options, stages.append, advance)
    weights = read_manifest(tmp_path / "engine").memory.weights
    assert set(seen) == {"hash", "emit", "write"}
    assert weights * 0.9 < seen["write"][-1][0] <= weights == seen["write"][-1][1]


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
