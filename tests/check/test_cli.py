"""The command: missing packages, progress, and what signals leave behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

from spark_engine.builder.build import build
from spark_engine.builder.plan.options import Options
from spark_engine.check.cli import main
from spark_engine.check.progress import bars, lines
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
        "spark-check: polygraphy is not installed: pip install 'spark-engine[check]'"
    ]


def test_a_pipe_hears_every_few_seconds_how_far_it_is() -> None:
    said: list[str] = []
    with lines(said.append, seconds=0.05)("op level, nodes", 9) as step:
        step()
        step()
        deadline = time.monotonic() + 20
        while len(said) < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
    assert said[0] == "op level, nodes: 9"
    assert said[1].startswith("op level, nodes: 2 of 9, ")
    assert said[-1].startswith("op level, nodes: 2 of 9 in ")


def test_a_terminal_sees_a_bar() -> None:
    with open(os.devnull, "w") as nowhere:
        console = Console(file=nowhere, force_terminal=True, width=100, record=True)
        with bars(console)("op level, nodes", 4) as step:
            step()
        shown = console.export_text()
    assert "op level, nodes" in shown and "1/4" in shown


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
        if line.startswith(("model, layer level", "op level")):
            break
    assert any(x.name.startswith("spark-check-") for x in scratch.iterdir()), "no twin was built"
    child.send_signal(number)
    rest = child.stderr.read()
    assert child.wait(60) == code, rest
    assert "Traceback" not in rest
    assert not [x.name for x in scratch.iterdir() if x.name.startswith("spark-")]
