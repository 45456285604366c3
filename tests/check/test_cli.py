"""The command: missing packages, progress, and what signals leave behind."""

import errno
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from click.testing import CliRunner

from spark_engine.builder.build import build
from spark_engine.builder.plan.options import Options
from spark_engine.check.cli import main
from spark_engine.errors import OptionError
from spark_engine.hints import extra
from tests.checkpoints import write_checkpoint

SMALL = {"num_hidden_layers": 1, "layer_types": ["linear_attention"], "vocab_size": 256}


def test_without_polygraphy_one_line_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in [n for n in sys.modules if n.startswith("spark_engine.check.")]:
        if not name.endswith(".cli"):
            monkeypatch.delitem(sys.modules, name)
    for name in [n for n in sys.modules if n.split(".")[0] == "polygraphy"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "polygraphy", None)  # type: ignore[arg-type]
    result = CliRunner().invoke(main, [str(tmp_path)])
    assert result.exit_code == 2
    assert result.output.splitlines() == [
        f"spark-check: polygraphy is not installed: {extra('check')}"
    ]


@pytest.mark.parametrize("full", ["asked first", "in the midst"])
def test_a_twin_that_does_not_fit_names_tmpdir(
    full: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(tmp_path / "checkpoint", SMALL)
    options = Options(decode=(1,), prefill=(64,), max_context=70, max_seqs=2)
    build(tmp_path / "checkpoint", tmp_path / "engine", options, lambda text: None)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    if full == "asked first":
        monkeypatch.setattr(f"{build.__module__}.check_space", _raise_no_space)
    else:
        monkeypatch.setattr(f"{build.__module__}.seal", _raise_full)
    words = [str(tmp_path / "engine"), "--against", str(tmp_path / "checkpoint")]
    done = CliRunner().invoke(main, words)
    last = done.stderr.splitlines()[-1]
    assert done.exit_code == 2 and "TMPDIR" in last and str(tmp_path) in last
    assert "-o" not in last.split()


def _raise_no_space(destination: Path, need: int) -> None:
    raise OptionError(f"-o {destination}: the engine takes 9 GiB and 1 GiB are free")


def _raise_full(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_leaves_nothing_behind(number: int, code: int, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "checkpoint", SMALL)
    options = Options(decode=(1,), prefill=(64,), max_context=70, max_seqs=2)
    build(tmp_path / "checkpoint", tmp_path / "engine", options, lambda text: None)
    scratch = tmp_path / "tmp"
    scratch.mkdir()
    words = ["-m", "spark_engine.check.cli", "engine", "--against", "checkpoint"]
    child = subprocess.Popen(
        [sys.executable, "-P", *words],
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(scratch)},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stderr is not None
    for line in child.stderr:
        if line.startswith("seal"):  # the first of two twins is whole
            break
    assert any(x.name.startswith("spark-check-") for x in scratch.iterdir()), "no twin was built"
    child.send_signal(number)
    rest = child.stderr.read()
    assert child.wait(300) == code, rest
    assert "Traceback" not in rest
    assert not [x.name for x in scratch.iterdir() if x.name.startswith("spark-")]
