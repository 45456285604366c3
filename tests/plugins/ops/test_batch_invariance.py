"""A row's bits do not depend on the other rows, on how many there are, or on threads."""

import numpy as np
import pytest

from spark_engine.op import Case, Op
from spark_engine.plugins import registry
from spark_engine.tensors import Array
from tests.plugins.cases.seeded import arrays_of, seeded
from tests.plugins.one_node import Node, constants, row_wise, run_graph

PAIRS = [
    pytest.param(op, case, id=f"{op.name}-{case.label}")
    for op in registry.OPS
    if row_wise(op)
    for case in seeded(op)
]


def row_operands(op: Op, case: Case, count: int) -> set[int]:
    """The positions of the operands with an axis 0 that counts tokens."""
    given = op.given(case.attrs)[:count]
    return {i for i, operand in enumerate(given) if operand.unit == "token"}


def run_rows(
    op: Op, case: Case, arrays: tuple[Array, ...], pick: list[int], threads: int
) -> list[Array]:
    """The op's outputs over the picked rows."""
    rowwise = row_operands(op, case, len(arrays))
    cut = [a[pick] if i in rowwise else a for i, a in enumerate(arrays)]
    names = op.names(case.attrs, len(cut))
    constant = [n for n in constants(op, case.attrs) if n in names]
    outs = [f"out{i}" for i in range(len(op.reference(case.attrs, tuple(cut))))]
    values = dict(zip(names, cut, strict=True))
    found = run_graph([Node(op, names, outs, case.attrs)], values, outs, constant, threads)
    return [found[n] for n in outs]


def bits(arrays: list[Array], row: int) -> list[bytes]:
    return [a[row].tobytes() for a in arrays]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("op", "case"), PAIRS)
def test_a_row_alone_equals_the_row_among_others(op: Op, case: Case) -> None:
    arrays = arrays_of(op, case)
    rows = len(arrays[0])
    total = max(7, rows)
    among = run_rows(op, case, arrays, [i % rows for i in range(total)], 1)
    threaded = run_rows(op, case, arrays, [i % rows for i in range(total)], 2)
    for row in sorted({0, rows // 2, rows - 1} - {5}):  # row 5 may be a row of NaN
        alone = run_rows(op, case, arrays, [row], 1)
        pair = run_rows(op, case, arrays, [rows - 1 - row, row], 1)
        assert bits(alone, 0) == bits(among, row), f"row {row} alone and among {total}"
        assert bits(pair, 1) == bits(among, row), f"row {row} in a pair and among {total}"
        assert bits(threaded, row) == bits(among, row), f"row {row} with two threads"


def test_ops_over_sequences_are_tested_elsewhere() -> None:
    apart = {op.name for op in registry.OPS if not row_wise(op)}
    reading = {"embed", "last_rows", "round_rows", "shift_ids", "gather_logits", "sample_part"}
    reading |= {"draft_best", "mtp_input", "vision_attention", "layer_norm"}
    reading |= {"block_attention", "block_conv", "block_rows", "top_ids"}
    assert apart == {op.name for op in registry.OPS if op.stateful} | reading


def test_rows_beyond_the_live_ones_may_hold_nan() -> None:
    """Seven live rows give the same bits whether the others are NaN or zero, in every format."""
    for op in registry.OPS:
        if not row_wise(op):
            continue
        case = seeded(op)[0]
        arrays = arrays_of(op, case)
        clean = run_rows(op, case, arrays, [0] * 3, 1)
        first = np.repeat(arrays[0], 3, axis=0)
        if first.dtype == np.int32:
            first[1:] = -(1 << 31)
        elif first.dtype != np.uint8:
            first[1:] = np.nan
        rowwise = row_operands(op, case, len(arrays))
        tripled = [np.repeat(a, 3, axis=0) if i in rowwise else a for i, a in enumerate(arrays)]
        dirty = run_rows(op, case, (first, *tripled[1:]), [0, 1, 2], 1)
        assert bits(clean, 0) == bits(dirty, 0), op.name
