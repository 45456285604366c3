"""The list of mutants: reads `tests/mutants/*.toml` and checks it against the working tree.

Knows the form of an entry (docs/extend/testing.md) and Python's syntax tree; runs nothing.
"""

import ast
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Edit:
    """`old`, which occurs in `file` exactly once, becomes `new`."""

    file: str
    old: str
    new: str


@dataclass(frozen=True)
class Mutant:
    """One plausible bug and the tests that must fail with it."""

    label: str  # the name of its list and its number there, from 1
    edits: tuple[Edit, ...]
    tests: tuple[str, ...]  # node ids; a parametrised test is named whole or by one case
    why: str  # the bug in a sentence
    timeout: float = 90.0  # seconds for its tests together
    may_crash: bool = False  # a timeout or SIGABRT counts as a failed test

    @property
    def file(self) -> str:
        return self.edits[0].file


def read(folder: Path = FOLDER) -> list[Mutant]:
    """Every mutant of every list. Raises ValueError for an entry of another form."""
    found = []
    for path in sorted(folder.glob("*.toml")):
        rows = tomllib.loads(path.read_text())["mutant"]
        found += [_mutant(f"{path.stem}:{i}", row) for i, row in enumerate(rows, 1)]
    return found


def _mutant(label: str, row: dict[str, Any]) -> Mutant:
    try:
        edits = row.pop("edits", None) or [{key: row.pop(key) for key in ("file", "old", "new")}]
        tests = tuple(row.pop("tests"))
        mutant = Mutant(label, tuple(Edit(**edit) for edit in edits), tests, **row)
    except (KeyError, TypeError) as error:
        raise ValueError(f"{label}: {error}: docs/extend/testing.md has the form") from error
    if not tests:
        raise ValueError(f"{label}: names no test")
    return mutant


def edited(root: Path, label: str, edits: Iterable[Edit]) -> dict[str, str]:
    """The whole new text of each file that these change, one after the other.

    Raises ValueError, which begins with `label`, where `old` does not occur exactly once.
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
        for file, text in edited(root, mutant.label, mutant.edits).items():
            if text == (root / file).read_text():
                yield f"{mutant.label}: {file} is not changed"
            ast.parse(text if file.endswith(".py") else "")
    except (OSError, ValueError) as error:
        yield str(error)
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
