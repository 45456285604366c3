"""The lists of mutants fit this tree, one of them is killed, and verdicts are right."""

import signal
import subprocess
import sys
from dataclasses import replace

import pytest

from tests.mutants.listing import Edit, Mutant, faults, read
from tests.mutants.run import judge
from tests.repository import ROOT, files

MOST = 320  # a new one replaces one of the same hazard
MUTANT = Mutant("here:1", (Edit("a.py", "x > 1", "x >= 1"),), ("t.py::test",), "an edge")


def test_every_mutant_fits_the_sources_and_names_tests() -> None:
    mutants = read()
    assert [fault for mutant in mutants for fault in faults(ROOT, mutant)] == []
    assert len(mutants) <= MOST
    same = {(mutant.edits, mutant.tests) for mutant in mutants}
    assert len(same) == len(mutants), "two entries are one"
    assert len(files("tests/mutants/*.toml")) <= 15


def test_one_is_killed() -> None:
    """A quick one; `make mutants` tries all."""
    pattern = "engine/pool.py"
    command = [sys.executable, "-m", "tests.mutants.run", "--workers", "1", "--only", pattern]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert done.stdout.endswith("\n1 killed\n")


@pytest.mark.parametrize(
    ("code", "may_crash", "verdict"),
    [
        (1, False, "killed"),
        (0, False, "survived"),
        (0, True, "survived"),
        (2, False, "broken"),  # it does not import
        (5, True, "broken"),  # no test ran
        (-signal.SIGKILL, True, "broken"),
        (None, False, "broken"),  # a timeout
        (None, True, "killed"),
        (-signal.SIGABRT, False, "broken"),
        (-signal.SIGABRT, True, "killed"),
    ],
)
def test_verdicts(code: int | None, may_crash: bool, verdict: str) -> None:
    assert judge(replace(MUTANT, may_crash=may_crash), {"code": code}) == verdict
