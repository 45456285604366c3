"""What a row of the rehearsal was measured of, as a digest: rows of other sources are not current.

Knows our sources, what a script reads of them, and the plans of tactics; measures nothing. A digest
rather changes too often than not: a comment in a kernel changes it, since nothing tells comments
from code.
"""

import ast
import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from spark_engine.builder.native import nvrtc
from spark_engine.builder.native.cuda_sources import SOURCES, sources

ROOT = Path(__file__).parents[2]
# What an engine is made of and run by: all of it counts for every row of an engine.
PRODUCT = ("spark_engine", "device", "plugins", "models", "builder", "runtime")
CHECK = "check"  # counts for those that check one: no other part of the product imports it
ENDINGS = (".py", ".cu", ".cuh")
# What every case is compared and timed by.
BENCH = (
    "tests/plugins/cuda_node.py",
    "tests/plugins/packed_node.py",
    "benchmarks/rehearsal/ops.py",
    "benchmarks/graphs.py",
)
_SCRIPT = re.compile(r"(tests|benchmarks)(\.\w+)+")


def of_script(script: Path, root: Path = ROOT) -> str:
    """Of the whole product (spark-check where it is used), the script, and what it reads of `tests`
    and `benchmarks`: modules that it imports or names in a string (to run them), theirs, the files
    next to them that are no modules, and the `conftest.py` above them."""
    read = {path: path.read_bytes() for path in sorted(_reached(root / script, root))}
    checks = any(f"spark_engine.{CHECK}".encode() in text for text in read.values())
    packages = (*PRODUCT, CHECK) if checks else PRODUCT
    texts = ((str(path.relative_to(root)), text.hex()) for path, text in read.items())
    return digest([_product(root, packages), *texts])


def _product(root: Path, packages: tuple[str, ...]) -> str:
    found = (p for package in packages for p in (root / package).rglob("*") if p.suffix in ENDINGS)
    return digest((str(p.relative_to(root)), p.read_bytes().hex()) for p in sorted(found))


def _reached(script: Path, root: Path) -> set[Path]:
    """The files of `tests` and `benchmarks` that the script depends on, itself among them."""
    found, left = set[Path](), [script]
    while left:
        path = left.pop()
        if path in found:
            continue
        found.add(path)
        found |= {p for p in path.parent.iterdir() if p.suffix in ENDINGS and p.suffix != ".py"}
        above = path.parent.relative_to(root).parts
        left += [
            shared
            for depth in range(1, len(above) + 1)
            if (shared := root.joinpath(*above[:depth]) / "conftest.py").is_file()
        ]
        for name in _named(path):
            base = root.joinpath(*name.split("."))
            left += [p for p in (base.with_suffix(".py"), base / "__init__.py") if p.is_file()]
    return found


def _named(path: Path) -> Iterator[str]:
    """The modules that a file imports or names in a string, dotted; some are none."""
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names = [node.value]
        yield from filter(_SCRIPT.fullmatch, names)


def of_plan(work: Any) -> str:
    """Of a `cuda_node.Planned`: its launches, the kernels with their headers and the compiler, the
    op's case and reference, and what they are compared and timed by."""
    names = {launch.source or work.tactic.source for launch in work.plan.launches}
    texts = {name: text for source in sorted(names) for name, text in _texts(source).items()}
    op = Path(str(import_module(work.op.reference.__module__).__file__)).read_text()
    texts_of = (repr(work.plan), nvrtc.compiler_version(), *sorted(texts.items()), op, _bench())
    return digest(texts_of)


def digest(parts: Iterable[Any]) -> str:
    """Sixteen digits of what JSON makes of the parts."""
    return hashlib.sha256(json.dumps([*parts]).encode()).hexdigest()[:16]


@cache
def _texts(source: str) -> dict[str, str]:
    return sources(source) if (SOURCES / source).is_file() else {}  # NCCL has none


@cache
def _bench() -> str:
    folders = (ROOT / "plugins" / name for name in ("common", "formats"))
    shared = (path for folder in folders for path in sorted(folder.glob("*.py")))
    return digest(p.read_text() for p in (*shared, *(ROOT / name for name in BENCH)))
