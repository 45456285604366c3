"""The lists of mutants fit this tree, some of them are killed, and verdicts are right."""

import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.mutants.listing import Edit, Mutant, edited, faults, read
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


def test_some_are_killed() -> None:
    """Two that are quick; `make mutants` tries all."""
    pattern = "ops/sampling/philox.py|engine/pool.py"
    command = [sys.executable, "-m", "tests.mutants.run", "--workers", "1", "--only", pattern]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert done.stdout.endswith("\n2 killed\n")


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


def test_what_is_wrong_with_an_entry_is_said(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("if x > 1 or x > 1:\n    pass\n")
    (tmp_path / "t.py").write_text("class Case:\n    def test(self): ...\n")
    assert "holds 2 of 'x > 1', not one" in "".join(faults(tmp_path, MUTANT))
    cut = replace(MUTANT, edits=(Edit("a.py", "or x > 1:", "or x >"),))
    assert "not Python any more" in "".join(faults(tmp_path, cut))
    good = replace(MUTANT, edits=(Edit("a.py", "or x > 1:", "or x > 2:"),))
    assert list(faults(tmp_path, good)) == []
    lost = replace(good, tests=("t.py::Case::test[1]", "t.py::gone", "u.py"))
    assert [f.split()[-1] for f in faults(tmp_path, lost)] == ["t.py::gone", "u.py"]
    twice = (*good.edits, Edit("a.py", "x > 2", "x > 3"))
    assert edited(tmp_path, "two", twice) == {"a.py": "if x > 1 or x > 3:\n    pass\n"}


@pytest.mark.parametrize(
    "text",
    [
        'file = "a.py"\nold = "x"\ntests = ["t"]\nwhy = "w"',
        'file = "a.py"\nold = "x"\nnew = "y"\ntests = []\nwhy = "w"',
        'file = "a.py"\nold = "x"\nnew = "y"\ntests = ["t"]',
        'file = "a.py"\nold = "x"\nnew = "y"\ntests = ["t"]\nwhy = "w"\ntimeuot = 9.0',
    ],
)
def test_an_entry_of_another_form_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "list.toml").write_text(f"[[mutant]]\n{text}\n")
    with pytest.raises(ValueError, match="list:1: "):
        read(tmp_path)
