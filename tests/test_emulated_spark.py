"""The script that follows README's path for a Spark in an emulated system: what it types, how it
refuses. The emulation itself takes hours and is no part of the tests."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.repository import ROOT

SCRIPT = ROOT / "scripts" / "emulated_spark.sh"
NEEDS_GPU_OR_HUB = ("spark-build nvidia/", "spark-run doctor engines/27b", "spark-check", "--serve")


def _path() -> list[str]:
    """The commands of README's path, without what they are for."""
    text = (ROOT / "README.md").read_text().split("## On a DGX Spark")[1]
    block = re.findall(r"```\n(.*?)```", text, re.DOTALL)[0]
    return [re.split(r" {3,}", line)[0].strip() for line in block.splitlines()]


def _run(*words: str, path: str | None = None) -> subprocess.CompletedProcess[str]:
    told = {**os.environ, **({"PATH": path} if path else {})}
    command = ["/bin/bash", str(SCRIPT), *words]
    return subprocess.run(command, env=told, capture_output=True, text=True, timeout=200)


def test_it_types_what_readme_says_in_that_order() -> None:
    said = re.findall(r"""said (['"])(.*?)\1(?= |$)""", SCRIPT.read_text(), re.MULTILINE)
    typed = [command.removeprefix("sudo ") for _, command in said]
    wanted = [part for line in _path() for part in line.split(" && ")]
    wanted = [part for part in wanted if not any(word in part for word in NEEDS_GPU_OR_HUB)]
    assert wanted[0] == "sudo apt install git python3-venv" and "python3-venv" in typed[0]
    alike = [w for w in wanted[1:] if not w.startswith(("git clone", "cd ", ". "))]
    assert len(alike) == 3  # the environment, the package, the doctor
    assert [t for t in typed if t in alike] == alike


def test_the_shell_can_read_it() -> None:
    subprocess.run(["bash", "-n", str(SCRIPT)], check=True, timeout=200)


def test_without_a_folder_nothing_begins() -> None:
    done = _run()
    assert done.returncode == 2 and "name a folder" in done.stderr


@pytest.mark.skipif(os.getuid() != 0, reason="root is asked for first")
def test_what_is_missing_is_named_before_anything_is_made(tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("bash", "dirname", "id", "mkdir"):
        found = subprocess.run(["which", name], capture_output=True, text=True, check=True)
        (tools / name).symlink_to(found.stdout.strip())
    done = _run(str(tmp_path / "system"), path=str(tools))
    assert done.returncode == 2 and "apt-get install debootstrap" in done.stderr
    assert not (tmp_path / "system").exists()


def test_only_root_may(tmp_path: Path) -> None:
    if os.getuid() == 0:
        tools = tmp_path / "bin"
        tools.mkdir()
        (tools / "id").write_text("#!/bin/sh\necho 1000\n")
        (tools / "id").chmod(0o755)
        done = _run(str(tmp_path / "system"), path=f"{tools}:{os.environ['PATH']}")
    else:
        done = _run(str(tmp_path / "system"))
    assert done.returncode == 2 and "need root" in done.stderr
    assert not (tmp_path / "system").exists()


def test_an_earlier_clone_becomes_what_head_is(tmp_path: Path) -> None:
    fetch = re.findall(r"said '(git fetch .*?)'", SCRIPT.read_text())
    assert len(fetch) == 1
    source, who = tmp_path / "source", "-c user.name=a -c user.email=a@b"
    bundle = f"git -C {source} bundle create -q {tmp_path}/spark.bundle HEAD"
    commit = f"git -C {source} add f && git -C {source} {who} commit -qm x && {bundle}"
    for command in (
        f"git init -q {source} && echo 1 > {source}/f && {commit}",
        f"git clone -q spark.bundle spark && echo changed > spark/f && echo 2 > {source}/f",
        commit,
        f"cd spark && {fetch[0]}",
    ):
        subprocess.run(["bash", "-c", command], cwd=tmp_path, check=True, timeout=200)
    assert (tmp_path / "spark" / "f").read_text() == "2\n"
