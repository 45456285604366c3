"""What a stranger would add stays small: `tests/toys/*.toml` are added to a copy of the tree.

    limit = 6                                        files touched or added, all of them
    run = ["tests/plugins/test_ops.py::test_x[toy]"]  pass in the copy, and not without the toy
    [[add]]  file = "..."  text = '''...'''
    [[edit]] file = "..."  old = '''...'''  new = '''...'''     `old` occurs exactly once

Each is the addition that a section "Add ..." of CONTRIBUTING.md describes.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.mutants.listing import Edit, edited
from tests.mutants.run import Copy
from tests.repository import ROOT

FOLDER = ROOT / "tests/toys"
LIMITS = {"op": 6, "mode": 3, "format": 4, "family": 4, "executor": 5, "architecture": 3}
TIMEOUT = 120.0  # seconds for the tests of one toy


@dataclass(frozen=True)
class Toy:
    """An addition: whole new files by path, edits of others, and the tests that need them."""

    kind: str
    limit: int
    run: tuple[str, ...]
    added: dict[str, str]
    edits: tuple[Edit, ...]

    @staticmethod
    def of(path: Path) -> Toy:
        """The toy of a file. Raises KeyError or TypeError where it is not of the form."""
        data = tomllib.loads(path.read_text())
        added = {row["file"]: row["text"] for row in data.get("add", [])}
        edits = tuple(Edit(**row) for row in data.get("edit", []))
        return Toy(path.stem, data["limit"], tuple(data["run"]), added, edits)

    def texts(self, root: Path) -> dict[str, str]:
        """The whole new text of every file that it touches.

        Raises ValueError where a file to add exists, or an `old` does not occur exactly once.
        """
        if there := [file for file in self.added if (root / file).exists()]:
            raise ValueError(f"{self.kind}: {there} are there already")
        return self.added | edited(root, self.kind, self.edits)


PATHS = sorted(FOLDER.glob("*.toml"))


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Copy]:
    """A copy of the tree that imports itself."""
    copy = Copy(tmp_path_factory.mktemp("toys"))
    yield copy
    copy.close()


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_a_toy_is_added_in_few_files(path: Path, copy: Copy) -> None:
    toy = Toy.of(path)
    assert toy.limit == LIMITS[toy.kind]
    texts = toy.texts(copy.tree)
    assert len(texts) <= toy.limit, f"{sorted(texts)}: more than {toy.limit} files"
    without = copy.run(toy.run, TIMEOUT, first_only=False)
    assert toy.run and "passed" not in without["outcomes"].values(), without["outcomes"]
    with copy.changed(texts):
        answer = copy.run(toy.run, TIMEOUT, first_only=False)
    assert answer["code"] == 0 and "passed" in answer["outcomes"].values(), answer["log"][-4000:]
