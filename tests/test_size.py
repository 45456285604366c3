"""Lines are spent like money: limits per file, per function and in total."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.house import ROOMS, ROOT, files

# In total: 7,600 lines are kernels (forms for few rows, many and prefill, for two GPUs), 9,900 the
# ops with their references and cases, 5,900 the serving runtime, 4,100 the builder.
FILE, FUNCTION, TOTAL = 400, 80, 36_000
STORIES = "models/tiny/"  # the embedded model's corpus and training, which no engine needs
SOURCES = files(*(f"{room}/*{ext}" for room in ROOMS for ext in (".py", ".cu", ".cuh")))


def _lines(path: Path) -> int:
    return len((ROOT / path).read_text().splitlines())


@pytest.mark.parametrize("path", SOURCES, ids=str)
def test_a_file_fits_in_one_head(path: Path) -> None:
    assert _lines(path) <= FILE, f"{path} has {_lines(path)} lines: it is two files"


@pytest.mark.parametrize("path", [p for p in SOURCES if p.suffix == ".py"], ids=str)
def test_a_function_fits_on_a_screen(path: Path) -> None:
    tree = ast.parse((ROOT / path).read_text())
    functions = (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))
    long = {f.name: n for f in functions if (n := (f.end_lineno or 0) - f.lineno + 1) > FUNCTION}
    assert not long, f"{path}: {long} (lines; the limit is {FUNCTION})"


def test_the_whole_stays_in_budget() -> None:
    counted = [path for path in SOURCES if not path.as_posix().startswith(STORIES)]
    total = sum(map(_lines, counted))
    assert 0 < total <= TOTAL, f"{total} lines: take some out, or argue for more here"
