"""docs/graph.md tells the ops as they declare themselves, and the cases are what is declared."""

from __future__ import annotations

import zlib

import numpy as np
import pytest

from spark_engine.op import Case, Op
from spark_engine.plugins import registry
from spark_engine.tensors import DType
from tests.plugins.op_table import PAGE, written

PAIRS = [
    pytest.param(op, case, id=f"{op.name}-{case.label}") for op in registry.OPS for case in op.cases
]


def test_the_table_is_current() -> None:
    page = PAGE.read_text()
    assert page == written(page), "run .venv/bin/python -m tests.plugins.op_table"


@pytest.mark.parametrize(
    ("op", "attr"),
    [pytest.param(op, attr, id=f"{op.name}-{attr}") for op in registry.OPS for attr in op.attrs],
)
def test_an_attribute_is_in_the_table(op: Op, attr: str) -> None:
    (line,) = [x for x in PAGE.read_text().splitlines() if x.startswith(f"| `{op.name}`")]
    assert attr in line.split(" | ")[2].split(", ")


@pytest.mark.parametrize(("op", "case"), PAIRS)
def test_a_case_has_the_operands_that_are_declared(op: Op, case: Case) -> None:
    """Dtypes, ranks, and dimensions of one name of one size throughout."""
    arrays = case.inputs(np.random.default_rng(zlib.crc32(case.label.encode())))
    given = op.given(case.attrs)
    assert len(given) - sum(o.optional for o in given) <= len(arrays) <= len(given)
    sizes: dict[str, int] = {}
    for operand, array in zip(given, arrays, strict=False):
        assert DType.of(array.dtype) in operand.dtypes, operand.name
        assert len(operand.dims) == array.ndim, operand.name
        for dim, size in zip(operand.dims, array.shape, strict=True):
            if dim.isidentifier():
                assert sizes.setdefault(dim, size) == size, f"{operand.name}: {dim}"
