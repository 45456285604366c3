"""`scheduler` and `step` alone write into a `Sequence`."""

import ast
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

from spark_engine.runtime.engine.sequence import Sequence
from tests.repository import PACKAGES, ROOT, files

FIELDS = {field.name for field in fields(Sequence)}
WRITERS = {f"runtime/engine/{name}.py" for name in ("sequence", "scheduler", "step")}
ENGINE = files("runtime/engine/*.py")
# Methods and functions that change a list or an array; setattr and its like change any object.
CHANGES = {"append", "extend", "insert", "pop", "remove", "clear", "sort", "reverse", "byteswap"}
CHANGES |= {"frombytes", "fromlist", "fromfile", "__setitem__", "__delitem__", "__iadd__"}
PUTS = {"insort", "insort_left", "insort_right", "heappush", "heappop", "heapify", "heapreplace"}
SETS = {"setattr", "delattr", "__setattr__", "__delattr__"}


def _is_field(node: ast.AST, names: set[str] = frozenset()) -> bool:  # type: ignore[assignment]
    """A field of an object that is not `self`, or a name for one."""
    if isinstance(node, ast.Name):
        return node.id in names
    own = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    is_self = own and node.value.id in ("self", "cls")  # type: ignore[attr-defined]
    return isinstance(node, ast.Attribute) and node.attr in FIELDS and not is_self


def _named(function: ast.AST) -> set[str]:
    """Local names of fields: `pages = seq.pages`, also as part of a tuple."""
    found = set()
    for node in ast.walk(function):
        if isinstance(node, ast.NamedExpr) and _is_field(node.value):
            found.add(node.target.id)
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                pairs = [(target, node.value)]
                if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    pairs = list(zip(target.elts, node.value.elts, strict=False))
                found |= {t.id for t, v in pairs if isinstance(t, ast.Name) and _is_field(v)}
    return found


def _writes(tree: ast.Module) -> Iterator[int]:
    """Lines that may write into a sequence: an assignment, augmented assignment or `del` of a field
    or a part of it, a call that changes one, `setattr`; and subclasses of `Sequence`."""
    kinds = (ast.FunctionDef, ast.Lambda, ast.AsyncFunctionDef)
    names = set().union(*(_named(one) for one in ast.walk(tree) if isinstance(one, kinds)))
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            if any(ast.unparse(base).split(".")[-1] == "Sequence" for base in node.bases):
                yield node.lineno
        elif isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
            if _is_field(node):
                yield node.lineno
        elif isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
            if _is_field(node.value, names):
                yield node.lineno
        elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            if node.target.id in names and isinstance(node.op, ast.Add):
                yield node.lineno
        elif isinstance(node, ast.Call) and _call_writes(node, names):
            yield node.lineno


def _call_writes(call: ast.Call, names: set[str]) -> bool:
    called = call.func
    name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
    if name in SETS:
        return not (call.args and isinstance(call.args[0], ast.Name) and call.args[0].id == "self")
    if name in CHANGES and isinstance(called, ast.Attribute):
        return _is_field(called.value, names)
    return name in PUTS and bool(call.args) and _is_field(call.args[0], names)


@pytest.mark.parametrize("path", [p for p in ENGINE if str(p) not in WRITERS], ids=str)
def test_two_modules_write_into_a_sequence(path: Path) -> None:
    assert [*_writes(ast.parse((ROOT / path).read_text()))] == []


def test_the_two_are_found_and_no_other_package_has_sequences() -> None:
    for path in WRITERS - {"runtime/engine/sequence.py"}:
        assert [*_writes(ast.parse((ROOT / path).read_text()))], path
    others = set(files(*(f"{package}/*.py" for package in PACKAGES))) - set(ENGINE)
    wanted = "runtime.engine.sequence", "runtime.engine import sequence"
    assert [p for p in others if any(w in (ROOT / p).read_text() for w in wanted)] == []


@pytest.mark.parametrize(
    "line",
    [
        "seq.launched = 1",
        "other.launched += 1",
        "del plan.admitted[0].snapshots, one.finish",
        "a, one.slot = 1, 2",
        "first, *one.pages = 1, 2",
        "one.node, (b, self.running[0].status) = 1, (2, 3)",
        "one.slot: int = 1",
        "for one.slot in range(3): pass",
        "with a as one.swap_copy: pass",
        "[0 for one.slot in range(3)]",
        "one.pages.append(3)",
        "one.pages[0] = 3",
        "del one.tokens[3:]",
        "one.pages[0] += 3",
        "bisect.insort(one.pages, 3)",
        "setattr(one, name, 3)",
        "object.__setattr__(one, 'slot', 3)",
        "def f(one):\n    pages = one.pages\n    pages.append(3)",
        "def f(one):\n    a, pages = 1, one.pages\n    del pages[1]",
        "def f(one):\n    pages = one.pages\n    pages += [3]",
        "def f(one):\n    (pages := one.pages).append(1)\n    pages[0] = 1",
        "class Own(Sequence):\n    pass",
    ],
)
def test_writes_are_seen(line: str) -> None:
    assert [*_writes(ast.parse(line))]
