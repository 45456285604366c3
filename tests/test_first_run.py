"""The script of a first run over made-up commands: what it runs, how it ends, what it packs."""

from __future__ import annotations

import os
import shlex
import subprocess
import tarfile
from pathlib import Path

import click

from spark_engine.bench import cli as bench
from spark_engine.builder import cli as builder
from spark_engine.builder import inspect
from spark_engine.check import cli as check
from spark_engine.runtime import cli as runtime
from tests.house import ROOT

SCRIPT = ROOT / "scripts" / "first_run_on_a_spark.sh"
COMMANDS: dict[str, click.Command] = {
    "spark-bench": bench.main,
    "spark-build": builder.main,
    "spark-check": check.main,
    "spark-inspect": inspect.main,
    "spark-run": runtime.main,
}
# Notes what it was called with; `doctor` ends as told, and so does the command that should fail.
STUB = """#!/bin/bash
printf '%q ' "$(basename "$0")" "$@" >> "$NOTED"; echo >> "$NOTED"
echo "said by $(basename "$0")"
[ "$1" = doctor ] && exit "$DOCTOR"
case "$(basename "$0") $*" in *$FAILS*) exit 7 ;; esac
exit 0
"""
ALWAYS = ["install", "tests", "cross_build", "cpu_build", "cpu_answer"]
SMALL = ["gpu_tests", "timed_build", "timed_report", "tiny_check", "tiny_answer", "tiny_bench"]
NAMED = ["build", "report", "doctor_of_it", "record", "answer", "bench_1", "bench_8", "bench_32"]


class Ran:
    """How the script ended: its code, the steps' codes, what was called, what was packed."""

    def __init__(
        self, folder: Path, *words: str, doctor: int = 0, fails: str = "-nothing-"
    ) -> None:
        bin_ = folder / "venv" / "bin"
        bin_.mkdir(parents=True)
        for name in ("python", "pytest", *COMMANDS):
            (bin_ / name).write_text(STUB)
            (bin_ / name).chmod(0o755)
        self.out, noted = folder / "first", folder / "noted"
        told = {
            **os.environ, "VENV": str(bin_.parent), "OUT": str(self.out), "NOTED": str(noted),
            "DOCTOR": str(doctor), "FAILS": fails, "SPARK_API_KEY": "not-to-be-sent",
        }  # fmt: skip
        command = [str(SCRIPT), *words]
        self.done = subprocess.run(command, env=told, capture_output=True, text=True, timeout=60)
        rows = (self.out / "steps.tsv").read_text().splitlines()[1:]
        self.steps = {row.split("\t")[0]: int(row.split("\t")[1]) for row in rows}
        self.calls = [shlex.split(line) for line in noted.read_text().splitlines()]
        with tarfile.open(f"{self.out}.tar.gz") as archive:
            files = ((entry.name, archive.extractfile(entry)) for entry in archive)
            self.packed = {Path(name).name: file.read() for name, file in files if file}


def test_without_a_gpu_it_goes_as_far_as_cross_building(tmp_path: Path) -> None:
    ran = Ran(tmp_path, "owner/name", doctor=1)
    assert ran.done.returncode == 3, ran.done.stderr
    assert list(ran.steps) == ALWAYS and set(ran.steps.values()) == {0}
    assert "the rest needs one" in ran.done.stdout
    assert b"said by spark-build" in ran.packed["cross_build.txt"]
    assert b"said by spark-run" in ran.packed["doctor_json.txt"]
    assert not Path(f"{ran.out}.engines").exists()


def test_on_a_spark_it_times_checks_and_measures(tmp_path: Path) -> None:
    ran = Ran(tmp_path, "owner/name")
    assert ran.done.returncode == 0, ran.done.stdout
    assert list(ran.steps) == [*ALWAYS, *SMALL, *NAMED, "doctor_after"]
    assert {f"{step}.txt" for step in ran.steps} <= set(ran.packed)
    assert b"not-to-be-sent" not in b"".join(ran.packed.values())
    for name, *words in ran.calls:
        if name in COMMANDS:  # an option that is no longer there would be seen here
            _parse(COMMANDS[name], words)


def _parse(command: click.Command, words: list[str]) -> None:
    with command.make_context("x", list(words)) as context:
        if isinstance(command, click.Group):
            name, inner, rest = command.resolve_command(context, list(words))
            assert inner is not None
            inner.make_context(name, rest, parent=context)


def test_a_step_that_fails_is_noted_and_the_others_run(tmp_path: Path) -> None:
    ran = Ran(tmp_path, fails="spark-check")
    assert ran.done.returncode == 1
    assert ran.steps == {**dict.fromkeys([*ALWAYS, *SMALL], 0), "tiny_check": 7}
    assert "ended with 7" in ran.done.stdout


def test_a_model_that_cannot_be_built_ends_its_part(tmp_path: Path) -> None:
    ran = Ran(tmp_path, "owner/name", fails="owner/name")
    assert ran.done.returncode == 1 and list(ran.steps) == [*ALWAYS, *SMALL, "build"]


def test_where_nothing_can_be_installed_that_is_sent_back(tmp_path: Path) -> None:
    ran = Ran(tmp_path, fails="pip install")
    assert ran.done.returncode == 1 and ran.steps == {"install": 7}


def test_an_earlier_run_is_not_overwritten(tmp_path: Path) -> None:
    told = {**os.environ, "OUT": str(tmp_path)}
    done = subprocess.run([str(SCRIPT)], env=told, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "move it away" in done.stderr
