"""The list of mutants: `tests/mutants/*.toml`, read and held against the working tree.

Knows the form of an entry (docs/extend/testing.md) and Python's syntax tree; runs nothing.
"""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
TIMEOUT = 90.0  # seconds for all tests of one mutant
_EDIT = {"file", "old", "new"}
_KEYS = {*_EDIT, "edits", "tests", "why", "equivalent", "timeout", "may_hang", "may_abort"}


@dataclass(frozen=True)
class Edit:
    """`old`, which stands in `file` exactly once, becomes `new`."""

    file: str
    old: str
    new: str


@dataclass(frozen=True)
class Mutant:
    """One plausible bug and the tests that should see it.

    Attributes:
        label: the list it stands in and its number there, from 1.
        tests: node ids; a parametrised test is named whole or by one case.
        why: the bug in a sentence.
        equivalent: the argument why no test can see it; empty where one must.
        timeout: seconds for its tests together.
        may_hang: running into `timeout` counts as seen.
        may_abort: so does SIGABRT: an emulated kernel broke a rule of the GPU.
    """

    label: str
    edits: tuple[Edit, ...]
    tests: tuple[str, ...]
    why: str
    equivalent: str = ""
    timeout: float = TIMEOUT
    may_hang: bool = False
    may_abort: bool = False

    @property
    def file(self) -> str:
        """The file it is counted under."""
        return self.edits[0].file


def read(folder: Path = FOLDER) -> list[Mutant]:
    """Every mutant of every list. Raises ValueError for an entry that is not of the form."""
    found = []
    for path in sorted(folder.glob("*.toml")):
        rows = tomllib.loads(path.read_text()).get("mutant", [])
        found += [_mutant(f"{path.stem}:{i}", row) for i, row in enumerate(rows, 1)]
    return found


def _mutant(label: str, row: dict[str, Any]) -> Mutant:
    if unknown := set(row) - _KEYS:
        raise ValueError(f"{label}: keys {sorted(unknown)} are not known")
    edits = row.get("edits") or [{key: row.get(key) for key in _EDIT}]
    whole = all(isinstance(e.get(key), str) for e in edits for key in _EDIT)
    if not (whole and row.get("tests") and row.get("why")) or {"edits", "old"} <= set(row):
        raise ValueError(f"{label}: wanted are file, old, new (or edits of them), tests and why")
    keys = ("equivalent", "timeout", "may_hang", "may_abort")
    rest = {key: row[key] for key in keys if key in row}
    return Mutant(label, tuple(Edit(**e) for e in edits), tuple(row["tests"]), row["why"], **rest)


def mutated(root: Path, mutant: Mutant) -> dict[str, str]:
    """The whole new text of each file it changes. Raises ValueError where `old` is not once."""
    return edited(root, mutant.label, mutant.edits)


def edited(root: Path, label: str, edits: Iterable[Edit]) -> dict[str, str]:
    """The whole new text of each file that these change, one after the other.

    Raises ValueError, which begins with `label`, where `old` does not stand exactly once.
    """
    texts: dict[str, str] = {}
    for edit in edits:
        text = texts.get(edit.file) or (root / edit.file).read_text()
        if (count := text.count(edit.old)) != 1:
            raise ValueError(f"{label}: {edit.file} holds {count} of {edit.old!r}, not one")
        texts[edit.file] = text.replace(edit.old, edit.new)
    return texts


def faults(root: Path, mutant: Mutant) -> Iterator[str]:
    """What is wrong with a mutant in this tree, in sentences."""
    try:
        texts = mutated(root, mutant)
    except (OSError, ValueError) as error:
        yield str(error)
        return
    for file, text in texts.items():
        if text == (root / file).read_text():
            yield f"{mutant.label}: {file} is not changed"
        try:
            ast.parse(text if file.endswith(".py") else "")
        except SyntaxError as error:
            yield f"{mutant.label}: {file} is not Python any more: {error}"
    for test in mutant.tests:
        if not _exists(root, test):
            yield f"{mutant.label}: there is no test {test}"


def _exists(root: Path, test: str) -> bool:
    file, *names = test.partition("[")[0].split("::")
    if not (root / file).is_file():
        return False
    return not names or names[-1] in _functions(root / file)


@cache
def _functions(path: Path) -> frozenset[str]:
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    return frozenset(n.name for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, kinds))
