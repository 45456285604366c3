"""The lists of mutants hold in this tree, a sample of them is killed, and verdicts are right."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.mutants.listing import Edit, Mutant, faults, mutated, read
from tests.mutants.run import Found, judge, table
from tests.repository import ROOT

LEAST = 120
MUTANT = Mutant("here:1", (Edit("a.py", "x > 1", "x >= 1"),), ("t.py::test",), "an edge")


def test_every_mutant_fits_the_sources_and_names_tests() -> None:
    mutants = read()
    assert [fault for mutant in mutants for fault in faults(ROOT, mutant)] == []
    assert len(mutants) >= LEAST
    same = {(mutant.edits, mutant.tests) for mutant in mutants}
    assert len(same) == len(mutants), "two entries are one"


def test_a_sample_is_killed() -> None:
    """Five that are quick; `make mutants` tries all."""
    command = [sys.executable, "-m", "tests.mutants.run", "--sample", "5", "--workers", "2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


@pytest.mark.parametrize(
    ("code", "change", "verdict"),
    [
        (1, {}, "killed"),
        (0, {}, "survived"),
        (2, {}, "broken"),  # it does not import
        (5, {}, "broken"),  # no test ran
        (-9, {}, "broken"),
        (None, {}, "broken"),  # out of time
        (None, {"may_hang": True}, "killed"),
        (-6, {}, "broken"),
        (-6, {"may_abort": True}, "killed"),
        (0, {"equivalent": "nobody can tell"}, "equivalent"),
        (1, {"equivalent": "nobody can tell"}, "broken"),
    ],
)
def test_verdicts(code: int | None, change: dict[str, object], verdict: str) -> None:
    mutant = replace(MUTANT, **change)  # type: ignore[arg-type]
    assert judge(mutant, {"code": code, "seconds": 1.0, "log": ""})[0] == verdict


def test_the_rate_is_of_those_that_could_be_killed() -> None:
    found = Found(verdicts=[(MUTANT, "killed", "")] * 19 + [(MUTANT, "survived", "1.0 s")])
    found.verdicts += [(replace(MUTANT, equivalent="so it is"), "equivalent", "")] * 9
    assert found.rate == 0.95 and found.good
    words = table(found)
    assert "survived: here:1 a.py: an edge (1.0 s)" in words and "so it is" in words
    found.verdicts.append((MUTANT, "survived", ""))
    assert not found.good
    assert not Found(verdicts=[(MUTANT, "killed", ""), (MUTANT, "broken", "")]).good


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
    twice = replace(good, edits=(*good.edits, Edit("a.py", "x > 2", "x > 3")))
    assert mutated(tmp_path, twice) == {"a.py": "if x > 1 or x > 3:\n    pass\n"}


@pytest.mark.parametrize(
    "text",
    [
        'file = "a.py"\nold = "x"\ntests = ["t"]\nwhy = "w"',
        'file = "a.py"\nold = "x"\nnew = "y"\ntests = []\nwhy = "w"',
        'file = "a.py"\nold = "x"\nnew = "y"\ntests = ["t"]',
        'file = "a.py"\nold = "x"\nnew = "y"\ntests = ["t"]\nwhy = "w"\nequivalnet = "e"',
    ],
)
def test_an_entry_of_another_form_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "list.toml").write_text(f"[[mutant]]\n{text}\n")
    with pytest.raises(ValueError, match="list:1: "):
        read(tmp_path)
