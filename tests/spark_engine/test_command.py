"""How commands end: exit codes, one line, signals; and no process sends telemetry."""

import errno
import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from spark_engine import hints, progress
from spark_engine.bench import cli as bench_cli
from spark_engine.builder import cli as build_cli
from spark_engine.builder import inspect
from spark_engine.check import cli as check_cli
from spark_engine.command import command
from spark_engine.errors import CapacityError, EngineError, GraphError
from spark_engine.progress import Progress
from spark_engine.runtime.cli import spark_run as run_cli

COMMANDS = {
    "spark-bench": bench_cli.main,
    "spark-build": build_cli.main,
    "spark-run": run_cli.main,
    "spark-check": check_cli.main,
    "spark-inspect": inspect.main,
}
ENDS: list[tuple[BaseException, int, tuple[str, ...]]] = [
    (EngineError("cut; rebuild"), 2, ("cut; rebuild",)),
    (OSError(errno.ENOSPC, "No space left", "/x/y"), 2, ("/x/y", "No space left", "free some")),
    (PermissionError(errno.EACCES, "Permission denied", "/x"), 2, ("/x", "you may read")),
    (CapacityError("3 GiB are free"), 75, ("3 GiB are free",)),
    (MemoryError("9 GiB"), 75, ("9 GiB", "stop other programs")),
    (GraphError("cycle"), 1, ("GraphError: cycle", "our bug", "SPARK_DEBUG=1")),
    (KeyError("oops"), 1, ("KeyError: 'oops'", "our bug")),
    (KeyboardInterrupt(), 130, ("interrupted",)),
]


@pytest.mark.parametrize(("error", "code", "words"), ENDS, ids=lambda v: type(v).__name__)
def test_an_end_is_a_code_and_one_line(
    error: BaseException, code: int, words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left, command("spark-x"):
        raise error
    (line,) = capsys.readouterr().err.splitlines()
    assert left.value.code == code and line.startswith("spark-x: ")
    assert all(word in line for word in words), line


def test_a_traceback_is_shown_where_it_is_asked_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARK_DEBUG", "1")
    with pytest.raises(SystemExit), command("spark-x"):
        raise KeyError("oops")
    assert "Traceback" in capsys.readouterr().err


def test_sigterm_unwinds_and_exits_with_143() -> None:
    first, cleaned = signal.getsignal(signal.SIGTERM), []
    before = lambda number, frame: None  # noqa: E731
    signal.signal(signal.SIGTERM, before)
    with pytest.raises(SystemExit) as left, command("spark-x"):
        try:
            signal.raise_signal(signal.SIGTERM)
            raise AssertionError("not reached")
        finally:
            signal.raise_signal(signal.SIGTERM)  # a second one does not cut the cleaning
            cleaned.append(1)
    assert left.value.code == 143 and cleaned
    assert signal.signal(signal.SIGTERM, first) is before


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_says_its_version_and_ends_as_the_others(name: str, tmp_path: Path) -> None:
    shown = CliRunner().invoke(COMMANDS[name], ["--version"])
    assert shown.exit_code == 0 and shown.stdout.startswith(f"{name}, version ")
    before = ["serve"] if name == "spark-bench" else []
    words = ["--serve"] if name == "spark-run" else []
    done = CliRunner().invoke(COMMANDS[name], [*before, str(tmp_path / "none"), *words])
    assert done.exit_code == 2, done.output
    assert done.stderr.splitlines()[-1].startswith(f"{name}: ") and str(tmp_path) in done.stderr


EVENTS = """
import {module}
import onnxruntime, onnx.parser, time
head = '<ir_version: 10, opset_import: ["" : 23]>'
text = head + 'g (float[2] x) => (float[2] y) {{ y = Add(x, x) }}'
onnxruntime.InferenceSession(onnx.parser.parse_model(text).SerializeToString())
time.sleep(0.3)
"""


@pytest.mark.parametrize("module", ["sys", "spark_engine"])
def test_onnxruntime_leaves_no_trace_in_the_cache(module: str, tmp_path: Path) -> None:
    """Without us it writes a device id and a database of events (1.31); with us nothing."""
    env = {k: v for k, v in os.environ.items() if k != "ORT_DISABLE_TELEMETRY"}
    env |= {"HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    script = EVENTS.format(module=module)
    subprocess.run([sys.executable, "-c", script], env=env, check=True)
    found = list(tmp_path.rglob("*"))
    if module == "spark_engine":
        assert found == []
    elif not found:
        pytest.skip("this onnxruntime writes nothing by itself")


def test_the_package_switches_off_onnxruntimes_telemetry() -> None:
    script = "import os, sys; import spark_engine; print(os.environ['ORT_DISABLE_TELEMETRY'])"
    script += "; assert 'onnxruntime' not in sys.modules"
    env = {**os.environ, "ORT_DISABLE_TELEMETRY": "0"}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True)
    assert done.stdout == "1\n", done.stderr


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_on_a_terminal_is_one_line_for_each_stage() -> None:
    stream = Terminal()
    with Progress(stream) as shown:
        shown.say("reading")
        for done in (1, 1, 2, 4):
            shown.advance(done, 4)
        shown.say("writing")
    lines = [line.split("\r\x1b[2K")[1:] for line in stream.getvalue().split("\n")]
    steps = ["reading", "reading: 25 %", "reading: 50 %", "reading: 100 %"]
    assert lines == [steps, ["writing"], []]


def test_progress_elsewhere_is_lines_with_time_between(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    stream = io.StringIO()
    with Progress(stream) as shown:
        shown.say("reading")
        for second in range(13):
            now[0] = float(second)
            shown.advance(second, 12)
    assert stream.getvalue().splitlines() == ["reading", "reading: 41 %", "reading: 83 %"]
    Progress(None).say("this is not shown")


def test_a_stage_of_pieces_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    stream = io.StringIO()
    with Progress(stream) as shown, shown.track("op level, nodes", 4) as step:
        for second in (1.0, 7.0, 8.0, 9.5):
            now[0] = second
            step()
    expected = ["op level, nodes", "op level, nodes: 50 %", "op level, nodes: 4 of 4 in 9.5 s"]
    assert stream.getvalue().splitlines() == expected
    with Progress(stream) as shown, pytest.raises(KeyError), shown.track("it", 2):
        raise KeyError
    assert stream.getvalue().splitlines()[3:] == ["it"]


def test_hub_names_and_wrong_folders_are_distinguished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    name = Path("Qwen/Qwen3.6-27B")
    fetch = "hf download Qwen/Qwen3.6-27B --local-dir Qwen3.6-27B"
    assert fetch in hints.no_checkpoint(name)
    assert "spark-build Qwen/Qwen3.6-27B -o engines/Qwen3.6-27B, then" in hints.no_engine(name)
    (tmp_path / "Qwen").mkdir()  # then it is a path with a typing error
    for path in (name, tmp_path / "none", Path("none")):
        assert "Hugging Face" not in hints.no_engine(path) + hints.no_checkpoint(path)
        assert str(path) in hints.no_engine(path)
    assert "did you mean `spark-run ENGINE --serve`?" in hints.no_engine(Path("serve"))
    assert "did you mean doctor?" in hints.no_engine(Path("doctr"))
    (tmp_path / "config.json").touch()
    assert f"spark-build {tmp_path} -o engines/" in hints.no_engine(tmp_path)
    assert "is a file" in hints.no_engine(tmp_path / "config.json")


def test_a_driver_is_seen_by_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hints, "DRIVER", (tmp_path / "a", tmp_path / "b"))
    assert not hints.driver_present()
    (tmp_path / "b").touch()
    assert hints.driver_present()
