"""The command that installs an extra: the one that works in the environment that asks for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from spark_engine import hints

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
    want = f"{command.format(python=quoted)} 'spark-engine[hub]'"
    assert hints.extra("hub") == want


def test_it_is_the_environment_that_runs_whatever_stands_on_the_path(tmp_path: Path) -> None:
    """A user who calls .venv/bin/spark-run has another pip on the path, or none."""
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
