"""The command that installs an extra: the one that works in the environment that asks for it."""

import re
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from spark_engine import hints
from spark_engine.builder.cli import main as build
from spark_engine.hints import FOREIGN
from spark_engine.runtime.cli.spark_run import main as run
from tests.repository import PACKAGES, ROOT, files

PIP, UV = "{python} -m pip install", "uv pip install --python {python}"
BOTH = "{python} -m ensurepip && {python} -m pip install"


@pytest.mark.parametrize(
    ("modules", "uv", "command"),
    [
        (("pip", "ensurepip"), True, PIP),
        (("pip",), False, PIP),
        (("ensurepip",), True, UV),
        ((), True, UV),
        (("ensurepip",), False, BOTH),
        ((), False, UV),
    ],
)
@pytest.mark.parametrize("python", ["/opt/spark/bin/python", "/home/a b/bin/python"])
def test_the_interpreters_own_installer_is_named(
    modules: tuple[str, ...], uv: bool, command: str, python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", python)
    monkeypatch.setattr(hints, "find_spec", lambda name: object() if name in modules else None)
    monkeypatch.setattr(hints, "which", lambda name: "/usr/bin/uv" if uv else None)
    quoted = f"'{python}'" if " " in python else python
    listed = ["click>=8", 'huggingface_hub>=1.0; extra == "hub"', 'x; extra == "hubs"']
    listed += ['spark-engine[hub]; extra == "both"', 'y[z]<2,>=1; extra == "both"']
    monkeypatch.setattr(hints.metadata, "requires", lambda name: listed)
    start = command.format(python=quoted)
    assert hints.extra("hub") == f"{start} 'huggingface_hub>=1.0'"
    assert hints.extra("none") == f"{start} '.[none]'"
    assert hints.extra("both", "hub") == f"{start} 'huggingface_hub>=1.0' 'y[z]<2,>=1'"


def test_no_hint_or_page_names_what_a_stranger_may_register() -> None:
    """`pip install spark-engine` asks the index, unless a path or a URL is with it."""
    named = re.compile(r"pip install (?!.*(?:\./|file:|\.whl)).*\bspark-engine\b")
    paths = [p for p in files(*(f"{package}/*" for package in PACKAGES), "docs/*", "README.md")]
    texts = {p: (ROOT / p).read_text(errors="replace") for p in paths if (ROOT / p).is_file()}
    assert [str(p) for p, text in texts.items() if named.search(text)] == []


def test_it_is_the_environment_that_runs_whatever_is_on_the_path(tmp_path: Path) -> None:
    """With .venv/bin/spark-run another pip is on the path, or none."""
    made = subprocess.run(
        [sys.executable, "-c", "from spark_engine.hints import extra; print(extra('cuda'))"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"PATH": str(tmp_path)},
    )
    assert made.stdout.startswith(f"{sys.executable} -m "), made.stderr


def test_a_package_named_cuda_is_not_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As cuda-pathfinder alone makes one."""
    (tmp_path / "cuda" / "pathfinder").mkdir(parents=True)
    command = [sys.executable, "-c", "from spark_engine import hints; print(hints.cuda_missing())"]
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "cuda" / "__init__.py").touch()  # so that it hides the one that is installed
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout == "No module named 'cuda.bindings'\n", done.stderr


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("qwen3.6:27b", "Qwen/Qwen3.6-27B"),
        ("Qwen3.6:35B-A3B", "Qwen/Qwen3.6-35B-A3B"),
        ("qwen3.6:35b-a3b-q4_K_M", "Qwen/Qwen3.6-35B-A3B"),
        ("qwen3.8:latest", "Qwen/Qwen3.8-27B"),
        ("qwen3.5", "Qwen/Qwen3.5-27B"),
    ],
)
def test_a_name_of_ollamas_is_understood(given: str, meant: str) -> None:
    assert f"`spark-build {meant}`" in hints.no_checkpoint(Path(given))
    assert f"`spark-build {meant}`" in hints.no_engine(Path(given))


def test_other_names_are_not_taken_for_ollamas() -> None:
    for name in ("llama3:8b", "qwen", "my-qwen3.6", "Qwen/Qwen3.6-27B"):
        assert "did you mean" not in hints.no_checkpoint(Path(name))


@pytest.mark.parametrize("command", [run, build], ids=["spark-run", "spark-build"])
def test_another_servers_option_is_explained(command: click.Command) -> None:
    own = {name for row in command.params for name in (*row.opts, *row.secondary_opts)}
    foreign = [name for name in FOREIGN if name not in own]
    for name in foreign:
        for words in ((name, "1"), (f"{name}=1",)):
            done = CliRunner().invoke(command, ["engine", *words])
            said = " ".join(done.output.replace("│", " ").split())
            assert done.exit_code == 2 and FOREIGN[name] in said, said
    done = CliRunner().invoke(command, ["engine", "--nonsense"])
    assert done.exit_code == 2 and "Here:" not in done.output


def test_the_page_about_other_servers_has_the_same_options() -> None:
    page = (ROOT / "docs/start/other_servers.md").read_text()
    rows = [f"| `{name}` | {words} |" for name, words in FOREIGN.items()]
    assert [line for line in page.splitlines() if line.startswith("| `--")] == rows
