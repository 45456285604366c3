"""The seeded cases of every op: those next to it, or the `CASES` of the module here with its name.

An op has its cases here if a few lines do not make them. A module for several ops has them by op.
"""

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from types import MappingProxyType

from spark_engine.op import Case, Op


def _read() -> Mapping[str, tuple[Case, ...]]:
    found: dict[str, tuple[Case, ...]] = {}
    for path in sorted(Path(__file__).parent.glob("*/[a-z]*.py")):
        module = import_module(f"{__package__}.{path.parent.name}.{path.stem}")
        cases = getattr(module, "CASES", {})
        found |= cases if isinstance(cases, dict) else {path.stem: cases}
    return MappingProxyType(found)


CASES = _read()


def seeded(op: Op) -> tuple[Case, ...]:
    """The cases of an op, at least one. Raises KeyError where it has none."""
    return op.cases or CASES[op.name]
