"""What a row of the rehearsal was measured of, as a digest: rows of other sources are not current.

Knows our sources and the plans of tactics; measures nothing. A digest rather changes too often than
not: a comment in a kernel changes it, since nothing tells comments from code.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from spark_engine.builder.native import nvrtc
from spark_engine.builder.native.cuda_sources import SOURCES, sources

ROOT = Path(__file__).parents[2]
# What engines, their checks and the tests on a GPU are made of.
ROOMS = ("spark_engine", "plugins", "models", "builder", "runtime", "check", "tests",
         "benchmarks/rehearsals")  # fmt: skip
ENDINGS = (".py", ".cu", ".cuh")
# What every case is compared and timed by.
BENCH = ("tests/plugins/cuda_node.py", "benchmarks/rehearsals/ops.py", "benchmarks/graphs.py")


def tree(root: Path = ROOT) -> str:
    """Of all sources that an engine and its tests are made of."""
    found = (p for room in ROOMS for p in (root / room).rglob("*") if p.suffix in ENDINGS)
    return digest((str(p.relative_to(root)), p.read_bytes().hex()) for p in sorted(found))


def of_plan(work: Any) -> str:
    """Of a `cuda_node.Planned`: its launches, the kernels with their headers and the compiler, the
    op's case and reference, and what they are compared and timed by."""
    names = {launch.source or work.tactic.source for launch in work.plan.launches}
    texts = {name: text for source in sorted(names) for name, text in _texts(source).items()}
    op = Path(str(import_module(work.op.reference.__module__).__file__)).read_text()
    told = (repr(work.plan), nvrtc.compiler_version(), *sorted(texts.items()), op, _bench())
    return digest(told)


def digest(parts: Iterable[Any]) -> str:
    """Sixteen digits of what JSON makes of the parts."""
    return hashlib.sha256(json.dumps([*parts]).encode()).hexdigest()[:16]


@cache
def _texts(source: str) -> dict[str, str]:
    return sources(source) if (SOURCES / source).is_file() else {}  # NCCL has none


@cache
def _bench() -> str:
    common = sorted((ROOT / "plugins" / "common").glob("*.py"))
    return digest(p.read_text() for p in (*common, *(ROOT / name for name in BENCH)))
