"""What the ops over sequences promise beyond one case: rows do not influence each other, state
may be updated in place, and a prompt may be cut anywhere.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from spark_engine.op import Attrs, Case, Op
from spark_engine.plugins.ops.attention import paged_attention
from spark_engine.plugins.ops.delta_rule import causal_conv, gated_delta
from spark_engine.plugins.ops.sampling import mark_tokens, sample
from spark_engine.tensors import Array, DType
from tests.plugins import one_node
from tests.plugins.cases.attention import paged_attention as paged_attention_cases
from tests.plugins.cases.delta_rule import gated_delta as gated_delta_cases
from tests.plugins.cases.sampling import sample as sample_cases
from tests.plugins.cases.seeded import seeded
from tests.plugins.run_op import named, run

TILE = 64
F32, BF16, F8 = DType.F32, DType.BF16, DType.F8E4M3
DECODE = ((3, -1, 0, 2, 5, 6, 1), (69, 0, 127, 1, 300, 64, 0), (1, 0, 1, 1, 1, 1, 1))
PREFILL = ((3, 3, 3, -1, 1, 5, -1), (0, 64, 128, 0, 7, 191, 0), (64, 64, 2, 0, 1, 64, 0))
SIZES = {"keys": 2, "values": 4, "key_dim": 128, "value_dim": 128, "units": 7}


def _per(op: Op, unit: str) -> set[str]:
    """The operands with a first dimension that counts such units."""
    return {o.name for o in op.operands if o.unit == unit}


def _take(
    op: Op, operands: Mapping[str, Array], rows: Sequence[int], tile: int
) -> dict[str, Array]:
    """The launch that holds only these rows, in this order."""
    tokens = np.concatenate([np.arange(r * tile, (r + 1) * tile) for r in rows])
    index = dict.fromkeys(_per(op, "row"), np.asarray(rows))
    index |= dict.fromkeys(_per(op, "token"), tokens)
    return {n: a[index[n]] if n in index else a for n, a in operands.items()}


def _units(op: Op, name: str, operands: Mapping[str, Array], slot: int) -> Array:
    """The units of a state that belong to a slot."""
    if name not in _per(op, "page"):
        return np.asarray([slot])
    table = operands["page_table"][slot]
    return table[table >= 0]


def _updates(op: Op, attrs: Attrs) -> list[tuple[int, str]]:
    """(result, state that it updates) of a node with these attributes."""
    return [(i, result.updates) for i, result in enumerate(op.made(attrs)) if result.updates]


def _belongings(
    op: Op, operands: Mapping[str, Array], outputs: Sequence[Array], slot: int, tile: int
) -> list[bytes]:
    """The bytes of everything a launch made for one slot."""
    rows = np.flatnonzero(operands["slots"] == slot)
    found = []
    for index, output in enumerate(outputs):
        if op.results[index].updates:
            units = _units(op, op.results[index].updates, operands, slot)
            found.append(output[units].tobytes())
            continue
        per_row = output.reshape(len(operands["slots"]), -1, *output.shape[1:])
        tokens = per_row.shape[1]
        for row in rows:
            live = operands["counts"][row] if tokens == tile > 1 else tokens
            found.append(per_row[row, :live].tobytes())
    return found


def _real_cases() -> list[tuple[Op, Case]]:
    """Launches of seven rows at the sizes of the served models' heads."""
    step = gated_delta_cases.Launch(1, *DECODE, **SIZES)
    chunk = gated_delta_cases.Launch(TILE, *PREFILL, **SIZES)
    decode = paged_attention_cases.Launch(1, *DECODE, dim=256, half=32)
    prefill = paged_attention_cases.Launch(TILE, *PREFILL, dim=256, half=32)
    draw = sample_cases.Launch(1.5, 0.9, 0.001, 1.2, 0.3, 0.1, width=4096, vocab=4090, bias=True)
    launches: list[tuple[Op, Any]] = [
        (gated_delta.STEP, step),
        (gated_delta.STEP, replace(step, state=BF16)),
        (gated_delta.CHUNK, chunk),
        (gated_delta.STEP, replace(step, ring=8)),
        (gated_delta.STEP, replace(step, state=BF16, ring=8)),
        (gated_delta.CHUNK, replace(chunk, ring=8)),
        (paged_attention.OP, decode),
        (paged_attention.OP, replace(decode, heads=1)),
        (paged_attention.OP, replace(decode, kv=F8)),
        (paged_attention.OP, prefill),
        (sample.OP, draw),
        (sample.OP, replace(draw, top_k=20)),
        (sample.OP, replace(draw, temperature=0.0)),
    ]
    return [(op, Case(f"real {i}", x.attrs, x.inputs)) for i, (op, x) in enumerate(launches)]


SMALL = [
    (op, case)
    for op, labels in (
        (mark_tokens.OP, ("decode", "prefill", "several tiles")),
        (causal_conv.OP, ("decode", "prefill", "three tiles", "bf16")),
        (causal_conv.OP, ("begins elsewhere and saves", "drafts, begins elsewhere and saves")),
        (gated_delta.STEP, ("rows", "three value heads per key head", "bf16")),
        (gated_delta.STEP, ("ring of 8, rows", "ring of 16, rows", "ring of 8, bf16")),
        (gated_delta.STEP, ("ring of 8, three value heads per key head",)),
        (gated_delta.CHUNK, ("tiles", "equal keys, strong decay")),
        (gated_delta.CHUNK, ("ring of 8, tiles", "ring of 8, strong decay")),
        (gated_delta.CHUNK, ("begins elsewhere and saves, tiles",)),
        (gated_delta.CHUNK, ("begins elsewhere and saves, ring of 8",)),
        (gated_delta.CHUNK, ("begins elsewhere and saves, 3 drafts, ring of 8",)),
        (paged_attention.OP, ("page edges", "decode, eight share", "tiles, small pages")),
        (sample.OP, ("all three", "top_p, hot", "everything", "not finite")),
    )
    for case in seeded(op)
    if case.label in labels
]
INVARIANT = [pytest.param(op, c, id=f"{op.name}-{c.label}") for op, c in SMALL + _real_cases()]


@pytest.mark.parametrize(("op", "case"), INVARIANT)
def test_a_sequence_alone_equals_itself_in_company(op: Op, case: Case) -> None:
    """Bit for bit: alone, and with the other sequences in reverse order; by one thread and two."""
    operands = named(op, case.inputs(np.random.default_rng(5)), case.attrs)
    tile = int(case.attrs.get("tile", 1))
    slots = [int(s) for s in dict.fromkeys(operands["slots"]) if s >= 0]
    rows = {s: list(np.flatnonzero(operands["slots"] == s)) for s in slots}
    scratch = [len(operands[n]) - 1 for n in _per(op, "slot") & operands.keys()]
    assert max(slots) < min(scratch, default=1 << 30), "padding writes the scratch row too"
    together = run(op, case.attrs, operands, 1)
    reverse = _take(op, operands, [r for s in reversed(slots) for r in rows[s]], tile)
    turned = run(op, case.attrs, reverse, 2)
    assert len(slots) > 1
    for slot in slots:
        mine = _belongings(op, operands, together, slot, tile)
        single = _take(op, operands, rows[slot], tile)
        alone = run(op, case.attrs, single, 2)
        assert mine == _belongings(op, single, alone, slot, tile), f"slot {slot} alone"
        assert mine == _belongings(op, reverse, turned, slot, tile), f"slot {slot} turned"


@pytest.mark.parametrize(("op", "case"), INVARIANT)
def test_state_may_be_updated_in_place(op: Op, case: Case) -> None:
    """Input and output of a state in the same memory give what separate memory gives."""
    operands = named(op, case.inputs(np.random.default_rng(6)), case.attrs)
    apart = run(op, case.attrs, operands)
    names = [f"out_{r.name}" for r in op.made(case.attrs)]
    fixed = one_node.constants(op, case.attrs)
    node = one_node.Node(op, list(operands), names, case.attrs)
    session, specs = one_node.build([node], operands, names, fixed)
    buffers = {n: np.ascontiguousarray(a).copy() for n, a in operands.items() if n not in fixed}
    binding = session.io_binding()
    for name, a in buffers.items():
        element = DType.of(a.dtype).onnx
        binding.bind_input(name, "cpu", 0, element, a.shape, a.ctypes.data)
    results = []
    for index, name in enumerate(names):
        source = op.results[index].updates
        a = buffers[source] if source else one_node.poison(specs[name])
        element = DType.of(a.dtype).onnx
        binding.bind_output(name, "cpu", 0, element, a.shape, a.ctypes.data)
        results.append(a)
    session.run_with_iobinding(binding)
    slots = [int(s) for s in dict.fromkeys(operands["slots"]) if s >= 0]
    slots += [int(s) for s in operands.get("saves", ()) if s >= 0]
    tile = int(case.attrs.get("tile", 1))
    for slot in slots:
        want = _belongings(op, operands, apart, slot, tile)
        assert _belongings(op, operands, results, slot, tile) == want
    for index, name in _updates(op, case.attrs):
        units = [_units(op, name, operands, s) for s in slots]
        others = np.ones(len(results[index]), np.bool_)
        others[np.concatenate(units)] = others[-1] = False
        before = operands[name]
        assert results[index][others].tobytes() == before[others].tobytes(), "a bystander changed"


CUTS = ([0, 150], [0, 1, 150], [0, 37, 101, 102, 150], [0, 64, 128, 150], [0, 3, 67, 150])
LENGTH, SLOT = 150, 2


def _launch(
    op: Op, attrs: Attrs, operands: Mapping[str, Array], start: int, stop: int
) -> dict[str, Array]:
    """The operands of one launch over tokens start…stop of a sequence of LENGTH tokens."""
    tiles = -(-(stop - start) // TILE)
    pad = tiles * TILE - (stop - start)
    made = dict(operands)
    for name in _per(op, "token"):
        tokens = operands[name][start:stop]
        filler = np.full((pad, *tokens.shape[1:]), np.nan if tokens.dtype.kind == "f" else 0)
        made[name] = np.concatenate([tokens, filler.astype(tokens.dtype)])
    if "rope_offsets" in operands:
        turns = np.zeros((tiles * TILE, 3), np.int32)
        turns[: stop - start] = operands["rope_offsets"].reshape(-1, 3)[start:stop]
        made["rope_offsets"] = turns.reshape(tiles, -1)
    steps = start + TILE * np.arange(tiles)
    made["slots"] = np.full(tiles, SLOT, np.int32)
    made["starts"] = steps.astype(np.int32)
    made["counts"] = np.minimum(stop - steps, TILE).astype(np.int32)
    made["sources"] = made["slots"]
    made["saves"] = np.full(tiles, -1, np.int32)
    made = {n: made[n] for n in op.names(attrs, len(made))}
    return made


def _in_launches(
    op: Op, attrs: Attrs, operands: Mapping[str, Array], cuts: Sequence[int]
) -> tuple[list[Array], dict[str, Array]]:
    """(per-token outputs joined, states) after the launches between the cuts."""
    state = dict(operands)
    parts: list[list[Array]] = []
    for start, stop in zip(cuts, cuts[1:], strict=False):
        outputs = run(op, attrs, _launch(op, attrs, state, start, stop))
        state.update({name: outputs[o] for o, name in _updates(op, attrs)})
        kept = [x for o, x in enumerate(outputs) if not op.results[o].updates]
        parts.append([x[: stop - start] for x in kept])
    return [np.concatenate(x) for x in zip(*parts, strict=True)], state


def _sequence(op: Op) -> tuple[Attrs, dict[str, Array]]:
    """Operands of a fresh sequence of LENGTH tokens in slot SLOT, padded to three tiles."""
    rng = np.random.default_rng(9)
    rows = ((SLOT,) * 3, (0, 64, 128), (64, 64, LENGTH - 128))
    if op is paged_attention.OP:
        attention = paged_attention_cases.Launch(TILE, *rows)
        return attention.attrs, named(op, attention.inputs(rng))
    if op is gated_delta.CHUNK:
        chunk = gated_delta_cases.Launch(TILE, *rows)
        return chunk.attrs, named(op, chunk.inputs(rng), chunk.attrs)
    case = seeded(op)[0]
    arrays = named(op, case.inputs(rng), case.attrs)
    if "x" in arrays:
        arrays["x"] = rng.standard_normal((3 * TILE, arrays["x"].shape[1])).astype(np.float32)
    else:
        arrays["token_ids"] = rng.integers(0, 12, 3 * TILE).astype(np.int32)
    return {"tile": TILE}, arrays


@pytest.mark.parametrize("cuts", CUTS[1:], ids=str)
@pytest.mark.parametrize(
    "op",
    [mark_tokens.OP, causal_conv.OP, gated_delta.CHUNK, paged_attention.OP],
    ids=lambda o: o.name,
)
def test_a_prompt_may_be_cut_anywhere(op: Op, cuts: list[int]) -> None:
    attrs, operands = _sequence(op)
    outputs, state = _in_launches(op, attrs, operands, CUTS[0])
    cut_outputs, cut_state = _in_launches(op, attrs, operands, cuts)
    for got, want in zip(cut_outputs, outputs, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=3e-6)
    for _, name in _updates(op, attrs):
        units = _units(op, name, operands, SLOT)
        got, want = cut_state[name][units], state[name][units]
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=3e-6)
