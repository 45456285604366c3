"""The seeded cases of every op: those next to it, or the `CASES` of a module here.

An op has its cases here if a few lines do not make them. `CASES` are of the op
with the name of the module, or by op.
"""

import zlib
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from types import MappingProxyType

import numpy as np

from spark_engine.op import Case, Op
from spark_engine.tensors import Array


def _read() -> Mapping[str, tuple[Case, ...]]:
    found: dict[str, tuple[Case, ...]] = {}
    folder = Path(__file__).parent
    for path in sorted([*folder.glob("[a-z]*.py"), *folder.glob("*/[a-z]*.py")]):
        if path == Path(__file__):
            continue
        name = path.relative_to(folder).with_suffix("").as_posix().replace("/", ".")
        module = import_module(f"{__package__}.{name}")
        cases = getattr(module, "CASES", {})
        found |= cases if isinstance(cases, dict) else {path.stem: cases}
    return MappingProxyType(found)


CASES = _read()


def seeded(op: Op) -> tuple[Case, ...]:
    """The cases of an op, at least one. Raises KeyError where it has none."""
    return op.cases or CASES[op.name]


def arrays_of(op: Op, case: Case) -> tuple[Array, ...]:
    """The case's operands; the seed is a digest of its name, so cases do not shift each other."""
    return case.inputs(np.random.default_rng(zlib.crc32(f"{op.name}/{case.label}".encode())))
