"""Saved states: a sequence that resumes from a saved row has the bits of the one that saved it,
whichever row of the states it is."""

import zlib
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest

from spark_engine.op import Attrs, Case, Op
from spark_engine.plugins.ops.delta_rule import causal_conv, gated_delta, gdn_prefill
from spark_engine.tensors import Array
from tests.plugins.cases.seeded import seeded
from tests.plugins.run_op import named, run

Operands = dict[str, Array]
Compute = Callable[[Op, Attrs, Operands], Sequence[Array]]
TILE = 64
OPS = (causal_conv.OP, gated_delta.CHUNK, gdn_prefill.OP)
SAVING = [
    pytest.param(op, case, id=f"{op.name}-{case.label}")
    for op in OPS
    for case in seeded(op)
    if "saves" in case.label
]
# A launch carries a state in f32; where it is stored as bf16 a saved one is rounded.
EXACT = [p for p in SAVING if p.values[0] is causal_conv.OP or "bf16" not in str(p.id)]


def by_body(op: Op, attrs: Attrs, operands: Operands) -> Sequence[Array]:
    return run(op, attrs, operands)


def operands_of(op: Op, case: Case) -> Operands:
    seed = zlib.crc32(case.label.encode())
    return named(op, case.inputs(np.random.default_rng(seed)), case.attrs)


def states_of(op: Op, attrs: Attrs) -> list[str]:
    """The state that each result updates, or "" of one that is none."""
    return [r.updates for r in op.made(attrs)]


def left(op: Op, attrs: Attrs, outputs: Sequence[Array], row: int) -> list[bytes]:
    """What a launch left of a sequence in a row of the states; of a ring what it tells."""
    found = []
    for name, output in zip(states_of(op, attrs), outputs, strict=True):
        if name == "gdn_ring" and attrs.get("drafts"):
            found.append(output[row, -1, : 2 * int(attrs["value_heads"])].tobytes())
        elif name == "gdn_ring":
            found.append(output[row, 0, -1:].tobytes())
        elif name:
            found.append(output[row].tobytes())
    return found


def made(
    op: Op, attrs: Attrs, outputs: Sequence[Array], counts: Array, rows: Sequence[int]
) -> list[bytes]:
    """What is of the tokens of some tiles."""
    per_token = [o for n, o in zip(states_of(op, attrs), outputs, strict=True) if not n]
    return [o[r * TILE : r * TILE + counts[r]].tobytes() for o in per_token for r in rows]


def cut(op: Op, operands: Operands, rows: Sequence[int]) -> Operands:
    """The launch of some of the tiles."""
    tokens = np.concatenate([np.arange(r * TILE, (r + 1) * TILE) for r in rows])
    index = {"row": np.asarray(rows), "token": tokens}
    units = {o.name: o.unit for o in op.operands}
    return {n: a[index[str(units[n])]] if units[n] in index else a for n, a in operands.items()}


def resuming(operands: Operands) -> Iterator[tuple[int, list[int]]]:
    """(a tile that saves, the tiles of its sequence behind it)."""
    slots, saves = operands["slots"], operands["saves"]
    for row in np.flatnonzero(saves >= 0):
        behind = list(range(row + 1, len(slots)))
        ended = [i for i in behind if slots[i] != slots[row]]
        yield int(row), behind[: behind.index(ended[0])] if ended else behind


def check_resuming(op: Op, case: Case, compute: Compute) -> None:
    """A sequence resumed from a saved row has the bits that it had; a row saved at a sequence's
    end equals its slot."""
    operands = operands_of(op, case)
    cold = compute(op, case.attrs, dict(operands))
    kinds = set()
    for row, behind in resuming(operands):
        saved = int(operands["saves"][row])
        kinds.add(bool(behind))
        if not behind:
            slot = int(operands["slots"][row])
            assert left(op, case.attrs, cold, saved) == left(op, case.attrs, cold, slot)
            continue
        slot = 0 if saved else 1  # not the saved row
        warm = cut(op, operands, behind)
        warm["slots"] = np.full(len(behind), slot, np.int32)
        warm["sources"] = np.asarray([saved] + [1 << 30] * (len(behind) - 1), np.int32)
        warm["saves"] = np.full(len(behind), -1, np.int32)
        for name, output in zip(states_of(op, case.attrs), cold, strict=True):
            if name:
                warm[name] = output.copy()
                warm[name][slot] = np.nan
        again = compute(op, case.attrs, warm)
        want = made(op, case.attrs, cold, operands["counts"], behind)
        assert made(op, case.attrs, again, warm["counts"], range(len(behind))) == want
        ended = int(operands["slots"][row])
        assert left(op, case.attrs, again, slot) == left(op, case.attrs, cold, ended)
    assert kinds == {True, False}


def check_anywhere(op: Op, case: Case, compute: Compute) -> None:
    """A sequence that resumes from another row has the bits of one that resumes from its slot."""
    operands = operands_of(op, case)
    there = compute(op, case.attrs, dict(operands))
    own = {n: a.copy() for n, a in operands.items()}
    slots, starts = own["slots"], own["starts"]
    states = [n for n in states_of(op, case.attrs) if n]
    moved = 0
    for row, slot in enumerate(slots):
        if slot >= 0 and starts[row] > 0 and not (row and slots[row - 1] == slot):
            moved += own["sources"][row] != slot
            for name in states:
                own[name][slot] = operands[name][own["sources"][row]]
            own["sources"][row] = slot
    assert moved or "begins elsewhere" not in case.label
    here = compute(op, case.attrs, own)
    rows, counts = range(len(slots)), np.where(slots < 0, 0, own["counts"])
    assert made(op, case.attrs, here, counts, rows) == made(op, case.attrs, there, counts, rows)
    for row in {int(r) for r in (*slots, *own["saves"]) if r >= 0}:
        assert left(op, case.attrs, here, row) == left(op, case.attrs, there, row)


@pytest.mark.parametrize(("op", "case"), EXACT)
def test_a_saved_state_resumes_with_the_same_bits(op: Op, case: Case) -> None:
    check_resuming(op, case, by_body)


@pytest.mark.parametrize(("op", "case"), SAVING)
def test_a_state_may_be_in_any_row(op: Op, case: Case) -> None:
    check_anywhere(op, case, by_body)
