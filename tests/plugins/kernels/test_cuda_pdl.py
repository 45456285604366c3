"""What every CUDA source keeps to, since its launches overlap those before and after (PDL).

A kernel waits before it touches what any earlier launch writes, and lets the next begin only after
that: then what two launches before wrote may be loaded early, and L1 holds nothing older than the
previous launch. Operands are read coherently: a `const … __restrict__` parameter becomes a
non-coherent load, which may be moved before the wait and promises nothing about what changes while
the kernel is already there. A kernel triggers the next before its wait with EARLY or LATE alone,
which builder/native/early.py gives where the next reads nothing recent before its wait.
"""

import re
from pathlib import Path

from tests.repository import ROOT, files

SOURCES = files("plugins/**/*.cu", "plugins/**/*.cuh")
WAIT, LET = "wait_for_previous()", "launch_dependents()"
ASKED_FOR = re.compile(r"if \(EARLY\) launch_dependents\(\);|#if LATE\n.*?#else\n", re.DOTALL)
COHERENT = re.compile(r"const\s[^(),;]*\*\s*__restrict__")


def _code(path: Path) -> str:
    """The source without comments, and with both halves where a kernel does them together."""
    code = re.sub(r"//[^\n]*", "", (ROOT / path).read_text())
    return code.replace("wait_then_launch_dependents()", f"{WAIT}, {LET}")


def _functions(code: str) -> list[str]:
    """Bodies that begin at the left margin and end with a brace there."""
    return re.findall(r"^[^\s#}/].*?\{\n(.*?)^\}", code, re.MULTILINE | re.DOTALL)


def test_the_next_begins_after_the_wait() -> None:
    for path in SOURCES:
        for body in _functions(ASKED_FOR.sub("", _code(path))):
            if LET in body:
                assert WAIT in body and body.index(WAIT) < body.index(LET), f"{path}: {body}"


def test_operands_are_read_coherently() -> None:
    assert [str(path) for path in SOURCES if COHERENT.search(_code(path))] == []


def test_every_entry_waits() -> None:
    """Directly or in a header; `pdl` is what all of our launches ask for."""
    waiting = {p.name for p in SOURCES if WAIT in _code(p)}
    for path in SOURCES:
        code = _code(path)
        if 'extern "C"' in code and path.name not in waiting:
            included = set(re.findall(r'#include "(?:\w+/)*(\w+\.cuh)"', code))
            assert included & waiting, path
