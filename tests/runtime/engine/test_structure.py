"""`scheduler` and `step` alone write into a `Sequence`: in the source, and in a run."""

import ast
import sys
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from spark_engine.interface import Limits
from spark_engine.runtime.engine.constraint import ConstraintSpec
from spark_engine.runtime.engine.engine import Engine, EngineOptions
from spark_engine.runtime.engine.request import Request, SamplingParams
from spark_engine.runtime.engine.sequence import Sequence
from tests.repository import PACKAGES, ROOT, files
from tests.runtime.engine import automaton
from tests.runtime.fake_executor import VOCAB, build_fake

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


def test_in_a_run_no_other_module_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """With preemption, drafts, a shared prefix, a grammar and a cancelled request."""
    found = set()

    def note(seq: Sequence, name: str, value: Any) -> None:
        found.add(sys._getframe(1).f_code.co_filename)
        object.__setattr__(seq, name, value)

    monkeypatch.setattr(Sequence, "__setattr__", note)
    limits = Limits(4, 340, 40, VOCAB, page_size=16, bias_slots=8, top_logprobs=3, drafts=3)
    limits = replace(limits, snapshots=9)
    options = EngineOptions(depth=1, grammars=automaton.Automaton, swap_bytes=6_000)
    engine = automaton.at_once(Engine(build_fake(limits, (1, 4), (1, 2)), options))
    stem = tuple(i % VOCAB for i in range(150))
    for n in range(9):
        bound = ConstraintSpec(grammar="3,1") if n == 4 else None
        params = SamplingParams(max_tokens=60, ignore_eos=True, seed=n)
        engine.submit(Request((*stem, n), params, priority=n % 2, constraint=bound))
        engine.step()
    engine.cancel(3)
    while not engine.idle:
        engine.step()
    stats = engine.stats()
    assert stats["preempted_swap"] and stats["preempted_recompute"] and stats["prefix_hits"]
    assert stats["rounds_by_k"] and stats["drafts_by_position"]
    own = {Path(name).resolve().relative_to(ROOT).as_posix() for name in found if "<" not in name}
    assert own == WRITERS
