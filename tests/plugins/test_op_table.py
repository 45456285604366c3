"""docs/graph.md has the ops as they declare themselves."""

import pytest

from spark_engine.op import Op
from spark_engine.plugins import registry
from tests.plugins.op_table import PAGE, written


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
