"""What may be in which file: a kernel's operands have names everywhere but in plugins/launch.py.
And no two classes have one name.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.repository import PACKAGES, ROOT, files

LAUNCH = Path("plugins/launch.py")
PLANNERS = [path for path in files("plugins/*.py") if path != LAUNCH]
# Of several classes of plugins/, and of spark_engine/kernel.py: renamed when their files move.
SHARED_NAMES = {"Held", "Launch", "Problem", "Shape"}


def _is_index(node: ast.expr) -> bool:
    """An integer, or one with a sign."""
    inner = node.operand if isinstance(node, ast.UnaryOp) else node
    return isinstance(inner, ast.Constant) and isinstance(inner.value, int)


def positional(text: str) -> list[int]:
    """Lines that take an operand by its position: `specs[0]`, `specs[1:3]`, a `Pointer(...)`."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Subscript) and ast.unparse(node.value).split(".")[-1] == "specs":
            bounds = (node.slice,)
            if isinstance(node.slice, ast.Slice):
                bounds = (node.slice.lower, node.slice.upper)
            if any(bound is not None and _is_index(bound) for bound in bounds):
                found.append(node.lineno)
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == "Pointer":
            found.append(node.lineno)
    return sorted(found)


@pytest.mark.parametrize("path", PLANNERS, ids=str)
def test_operands_are_taken_by_name(path: Path) -> None:
    lines = positional((ROOT / path).read_text())
    assert not lines, f"{path}:{lines}: ask the node by name; {LAUNCH} alone knows positions"


def test_positions_are_seen() -> None:
    text = "a = specs[0]\nb = node.specs[-1]\nc = specs[:2]\nd = Pointer('input', i)\n"
    assert positional(text + "e = specs['x']\nf = dims[0]\ng = specs[i:]\n") == [1, 2, 3, 4]
    assert positional((ROOT / LAUNCH).read_text())


def shared_names(texts: Iterable[str]) -> set[str]:
    """Names, private ones apart, of more than one class."""
    nodes = (node for text in texts for node in ast.walk(ast.parse(text)))
    names = Counter(node.name for node in nodes if isinstance(node, ast.ClassDef))
    return {name for name, count in names.items() if count > 1 and not name.startswith("_")}


def test_no_two_classes_have_one_name() -> None:
    sources = files(*(f"{package}/*.py" for package in PACKAGES))
    found = shared_names((ROOT / path).read_text() for path in sources)
    assert found == SHARED_NAMES, "say in the class's name which of them it is"


def test_two_classes_of_one_name_are_seen() -> None:
    texts = ["class A: pass", "class A:\n  class B: pass\nclass _C: pass", "class _C: pass"]
    assert shared_names(texts) == {"A"}
