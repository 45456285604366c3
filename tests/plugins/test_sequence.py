"""What the ops over sequences promise beyond one case: rows do not influence each other, state
may be updated in place, a prompt may be cut anywhere, and chance is as it should be.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from spark_engine.op import Attrs, Case, Op
from spark_engine.plugins import (
    causal_conv,
    fp8_codes,
    gated_delta,
    gated_delta_cases,
    mark_tokens,
    paged_attention,
    paged_attention_cases,
    philox,
    rope,
    sample,
    sample_cases,
)
from spark_engine.plugins.gated_delta_nodes import softplus
from spark_engine.plugins.onnx_nodes import Text
from spark_engine.tensors import Array, DType, TensorSpec
from tests.plugins import one_node

TILE = 64
PER_ROW = {"slots", "starts", "counts", "emit", "logits"}
PER_TOKEN = {"token_ids", "x", "c", "ba", "qkv"}
PAGES = {"k_pages", "v_pages"}
SEQUENCE_OPS = (
    mark_tokens.OP,
    causal_conv.OP,
    gated_delta.STEP,
    gated_delta.CHUNK,
    paged_attention.OP,
    sample.OP,
)
F32, BF16, F8 = DType.F32, DType.BF16, DType.F8E4M3
DECODE = ((3, -1, 0, 2, 5, 6, 1), (69, 0, 127, 1, 300, 64, 0), (1, 0, 1, 1, 1, 1, 1))
PREFILL = ((3, 3, 3, -1, 1, 5, -1), (0, 64, 128, 0, 7, 191, 0), (64, 64, 2, 0, 1, 64, 0))
SIZES = {"keys": 2, "values": 4, "key_dim": 128, "value_dim": 128}


def _run(op: Op, attrs: Attrs, operands: Mapping[str, Array], threads: int = 1) -> list[Array]:
    names = [f"out_{o}" for o in op.outputs]
    fixed = [n for n in op.inputs if n in one_node.WEIGHT_NAMES]
    node = one_node.Node(op, op.inputs, names, attrs)
    results = one_node.run_graph([node], dict(operands), names, fixed, threads)
    return [results[n] for n in names]


def _named(op: Op, arrays: Sequence[Array]) -> dict[str, Array]:
    return dict(zip(op.inputs, arrays, strict=True))


def _take(operands: Mapping[str, Array], rows: Sequence[int], tile: int) -> dict[str, Array]:
    """The launch that holds only these rows, in this order."""
    tokens = np.concatenate([np.arange(r * tile, (r + 1) * tile) for r in rows])
    index = {**dict.fromkeys(PER_ROW, np.asarray(rows)), **dict.fromkeys(PER_TOKEN, tokens)}
    return {n: a[index[n]] if n in index else a for n, a in operands.items()}


def _units(name: str, operands: Mapping[str, Array], slot: int) -> Array:
    """The units of a state that belong to a slot."""
    if name not in PAGES:
        return np.asarray([slot])
    table = operands["page_table"][slot]
    return table[table >= 0]


def _belongings(
    op: Op, operands: Mapping[str, Array], outputs: Sequence[Array], slot: int, tile: int
) -> list[bytes]:
    """The bytes of everything a launch made for one slot."""
    rows = np.flatnonzero(operands["slots"] == slot)
    found = []
    for index, output in enumerate(outputs):
        if index in op.aliases:
            units = _units(op.inputs[op.aliases[index]], operands, slot)
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
        (gated_delta.STEP, ("rows", "three value heads per key head", "bf16")),
        (gated_delta.CHUNK, ("tiles", "equal keys, strong decay")),
        (paged_attention.OP, ("page edges", "decode, eight share", "tiles, small pages")),
        (sample.OP, ("all three", "top_p, hot", "everything", "not finite")),
    )
    for case in op.cases
    if case.label in labels
]
INVARIANT = [pytest.param(op, c, id=f"{op.name}-{c.label}") for op, c in SMALL + _real_cases()]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("op", "case"), INVARIANT)
def test_a_sequence_alone_equals_itself_in_company(op: Op, case: Case, threads: int) -> None:
    """Bit for bit: alone, and with the other sequences in reverse order."""
    operands = _named(op, case.inputs(np.random.default_rng(5)))
    tile = int(case.attrs.get("tile", 1))
    slots = [int(s) for s in dict.fromkeys(operands["slots"]) if s >= 0]
    rows = {s: list(np.flatnonzero(operands["slots"] == s)) for s in slots}
    together = _run(op, case.attrs, operands, threads)
    reverse = _take(operands, [r for s in reversed(slots) for r in rows[s]], tile)
    turned = _run(op, case.attrs, reverse, threads)
    assert len(slots) > 1
    for slot in slots:
        mine = _belongings(op, operands, together, slot, tile)
        single = _take(operands, rows[slot], tile)
        alone = _run(op, case.attrs, single, threads)
        assert mine == _belongings(op, single, alone, slot, tile), f"slot {slot} alone"
        assert mine == _belongings(op, reverse, turned, slot, tile), f"slot {slot} turned"


@pytest.mark.parametrize(("op", "case"), INVARIANT)
def test_state_may_be_updated_in_place(op: Op, case: Case) -> None:
    """Input and output of a state in the same memory give what separate memory gives."""
    operands = _named(op, case.inputs(np.random.default_rng(6)))
    apart = _run(op, case.attrs, operands)
    names = [f"out_{o}" for o in op.outputs]
    fixed = [n for n in op.inputs if n in one_node.WEIGHT_NAMES]
    node = one_node.Node(op, op.inputs, names, case.attrs)
    session, specs = one_node.build([node], operands, names, fixed)
    buffers = {n: np.ascontiguousarray(a).copy() for n, a in operands.items() if n not in fixed}
    binding = session.io_binding()
    for name, a in buffers.items():
        element = DType.of(a.dtype).onnx
        binding.bind_input(name, "cpu", 0, element, a.shape, a.ctypes.data)
    results = []
    for index, name in enumerate(names):
        aliased = index in op.aliases
        source = op.inputs[op.aliases[index]] if aliased else ""
        a = buffers[source] if aliased else one_node.poison(specs[name])
        element = DType.of(a.dtype).onnx
        binding.bind_output(name, "cpu", 0, element, a.shape, a.ctypes.data)
        results.append(a)
    session.run_with_iobinding(binding)
    slots = [int(s) for s in dict.fromkeys(operands["slots"]) if s >= 0]
    tile = int(case.attrs.get("tile", 1))
    for slot in slots:
        want = _belongings(op, operands, apart, slot, tile)
        assert _belongings(op, operands, results, slot, tile) == want
    for index, operand in op.aliases.items():
        units = [_units(op.inputs[operand], operands, s) for s in slots]
        others = np.ones(len(results[index]), np.bool_)
        others[np.concatenate(units)] = others[-1] = False
        before = operands[op.inputs[operand]]
        assert results[index][others].tobytes() == before[others].tobytes(), "a bystander changed"


CUTS = ([0, 150], [0, 1, 150], [0, 37, 101, 102, 150], [0, 64, 128, 150], [0, 3, 67, 150])
LENGTH, SLOT = 150, 2


def _launch(operands: Mapping[str, Array], start: int, stop: int) -> dict[str, Array]:
    """The operands of one launch over tokens start…stop of a sequence of LENGTH tokens."""
    tiles = -(-(stop - start) // TILE)
    pad = tiles * TILE - (stop - start)
    made = dict(operands)
    for name in PER_TOKEN & set(operands):
        tokens = operands[name][start:stop]
        filler = np.full((pad, *tokens.shape[1:]), np.nan if tokens.dtype.kind == "f" else 0)
        made[name] = np.concatenate([tokens, filler.astype(tokens.dtype)])
    steps = start + TILE * np.arange(tiles)
    made["slots"] = np.full(tiles, SLOT, np.int32)
    made["starts"] = steps.astype(np.int32)
    made["counts"] = np.minimum(stop - steps, TILE).astype(np.int32)
    return made


def _in_launches(
    op: Op, attrs: Attrs, operands: Mapping[str, Array], cuts: Sequence[int]
) -> tuple[list[Array], dict[str, Array]]:
    """(per-token outputs joined, states) after the launches between the cuts."""
    state = dict(operands)
    parts: list[list[Array]] = []
    for start, stop in zip(cuts, cuts[1:], strict=False):
        outputs = _run(op, attrs, _launch(state, start, stop))
        state.update({op.inputs[i]: outputs[o] for o, i in op.aliases.items()})
        kept = [x for o, x in enumerate(outputs) if o not in op.aliases]
        parts.append([x[: stop - start] for x in kept])
    return [np.concatenate(x) for x in zip(*parts, strict=True)], state


def _sequence(op: Op) -> tuple[Attrs, dict[str, Array]]:
    """Operands of a fresh sequence of LENGTH tokens in slot SLOT, padded to three tiles."""
    rng = np.random.default_rng(9)
    rows = ((SLOT,) * 3, (0, 64, 128), (64, 64, LENGTH - 128))
    if op is paged_attention.OP:
        attention = paged_attention_cases.Launch(TILE, *rows)
        return attention.attrs, _named(op, attention.inputs(rng))
    if op is gated_delta.CHUNK:
        chunk = gated_delta_cases.Launch(TILE, *rows)
        return chunk.attrs, _named(op, chunk.inputs(rng))
    case = op.cases[0]
    arrays = _named(op, case.inputs(rng))
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
    for operand in op.aliases.values():
        name = op.inputs[operand]
        units = _units(name, operands, SLOT)
        got, want = cut_state[name][units], state[name][units]
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=3e-6)


def test_chunk_equals_steps() -> None:
    attrs, operands = _sequence(gated_delta.CHUNK)
    chunked, after = _in_launches(gated_delta.CHUNK, attrs, operands, [0, 100])
    state = dict(operands)
    for t in range(100):
        step = {n: state[n][t : t + 1] if n in PER_TOKEN else state[n] for n in state}
        step |= {n: np.asarray([x], np.int32) for n, x in zip(
            ("slots", "starts", "counts"), (SLOT, t, 1), strict=True)}  # fmt: skip
        o, state["gdn_state"] = _run(gated_delta.STEP, {**attrs, "tile": 1}, step)
        np.testing.assert_allclose(o[0], chunked[0][t], rtol=1e-5, atol=3e-6)
    np.testing.assert_allclose(
        state["gdn_state"][SLOT], after["gdn_state"][SLOT], rtol=1e-5, atol=3e-6
    )


def _nodes(build: Any, inputs: Mapping[str, Array], outputs: Mapping[str, Array]) -> list[Array]:
    """Runs nodes that `build(text)` appends; `outputs` gives examples of name, dtype, shape."""

    def infer(_: Attrs, __: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
        return tuple(one_node.spec_of(n, a) for n, a in outputs.items())

    def body(_: Attrs, __: tuple[TensorSpec, ...]) -> str:
        f = Text()
        build(f)
        return f.function("probe", list(inputs), list(outputs))

    def reference(_: Attrs, arrays: tuple[Array, ...]) -> tuple[Array, ...]:
        return arrays

    op = Op("probe", tuple(inputs), tuple(outputs), {}, infer, reference, body, ())
    return _run(op, {}, inputs)


VECTORS = (  # the known answers published with Random123
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (
        (0xFFFFFFFF,) * 4,
        (0xFFFFFFFF,) * 2,
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
)


def test_philox_gives_the_published_words() -> None:
    for counter, key, words in VECTORS:
        assert philox.words(counter, key) == words


def test_philox_nodes_equal_the_published_words_and_the_reference() -> None:
    rng = np.random.default_rng(0)
    counters = np.concatenate([[v[0] for v in VECTORS], rng.integers(0, 1 << 32, (200, 4))])
    keys = np.concatenate([[v[1] for v in VECTORS], rng.integers(0, 1 << 32, (200, 2))])
    inputs = {"even": counters[:, ::2], "odd": counters[:, 1::2], "key": keys}

    def build(f: Text) -> None:
        for name, value in zip(("a", "b"), philox.words_text(f, *inputs), strict=True):
            f("Identity", value, out=name)

    even, odd = _nodes(build, inputs, {"a": keys, "b": keys})
    got = np.stack([even[:, 0], odd[:, 0], even[:, 1], odd[:, 1]], axis=1).tolist()
    pairs = zip(counters.tolist(), keys.tolist(), strict=True)
    assert got[:3] == [list(v[2]) for v in VECTORS]
    assert got == [list(philox.words(c, k)) for c, k in pairs]


def test_every_fp8_code_survives_decode_and_encode() -> None:
    codes = np.arange(256, dtype=np.uint8)
    values = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    finite = np.isfinite(values)
    grid = np.sort(values[finite])
    middles = (grid[1:] + grid[:-1]) / 2  # ties
    around = [np.nextafter(middles, np.float32(s)) for s in (-1e9, 1e9)]
    wild = np.float32([500, -1e30, 464, 465, 1e-9, -1e-9, 2.0**-10, -(2.0**-10)])
    noise = np.random.default_rng(0).standard_normal(1000).astype(np.float32) * 40
    x = np.concatenate([grid, middles, *around, wild, noise]).astype(np.float32)

    def build(f: Text) -> None:
        f("Identity", fp8_codes.encode(f, "x"), out="encoded")
        f("Identity", fp8_codes.decode(f, "codes", [256]), out="decoded")

    like = {"encoded": np.zeros(len(x), np.uint8), "decoded": values}
    encoded, decoded = _nodes(build, {"x": x, "codes": codes}, like)
    np.testing.assert_array_equal(decoded[finite], values[finite])
    assert np.isfinite(decoded).all()
    rounded = np.clip(x, -448, 448).astype(ml_dtypes.float8_e4m3fn)
    np.testing.assert_array_equal(
        encoded.view(ml_dtypes.float8_e4m3fn).astype(np.float32), rounded.astype(np.float32)
    )
    np.testing.assert_array_equal(encoded[x != 0], rounded.view(np.uint8)[x != 0])
    np.testing.assert_array_equal(encoded, fp8_codes.encode_array(x))


def test_cosine_sine_and_softplus_are_exact_to_f32() -> None:
    at = np.asarray([0, 1, 2, 3, 5, 63, 64, 1000, 4095, 65537, 262143])[:, None]
    inv_freq = (1e7 ** (-np.arange(32) / 32)).astype(np.float32)
    x = np.linspace(-60, 60, 1001).astype(np.float32)

    def build(f: Text) -> None:
        cos, sin = rope.cos_sin(f, "at", "inv_freq")
        for name, value in (("cos", cos), ("sin", sin), ("soft", softplus(f, "x"))):
            f("Identity", value, out=name)

    angle = at.astype(np.float32) * inv_freq
    like = {"cos": angle, "sin": angle, "soft": x}
    cos, sin, soft = _nodes(build, {"at": at, "inv_freq": inv_freq, "x": x}, like)
    np.testing.assert_allclose(cos, np.cos(angle.astype(np.float64)), rtol=0, atol=1.5e-7)
    np.testing.assert_allclose(sin, np.sin(angle.astype(np.float64)), rtol=0, atol=1.5e-7)
    np.testing.assert_allclose(soft, np.logaddexp(0, x.astype(np.float64)), rtol=5e-7)


DRAWS = (
    {},
    {"temperature": 0.6, "top_k": 5},
    {"temperature": 2.0, "top_p": 0.7},
    {"temperature": 1.4, "min_p": 0.05, "top_k": 12, "top_p": 0.9},
)


@pytest.mark.parametrize("settings", DRAWS, ids=str)
def test_draws_follow_the_distribution(settings: dict[str, float]) -> None:
    """Pearson's statistic of 8,192 draws, by position and by seed, against the exact weights."""
    rows, vocab = 4096, 30
    launch = sample_cases.Launch(**settings, width=vocab, vocab=vocab, spread=1.2, slots=(0,))  # type: ignore[arg-type]
    operands = _named(sample.OP, launch.inputs(np.random.default_rng(3)))
    weights = _exact(operands, launch.top_k)
    counts = np.zeros(vocab)
    for seed in (0, -77):
        operands["sampling_i"][0, 1:3] = seed
        many = {n: np.repeat(a, rows, 0) if n in PER_ROW else a for n, a in operands.items()}
        many["starts"] = np.arange(rows, dtype=np.int32)
        counts += np.bincount(_run(sample.OP, launch.attrs, many)[0], minlength=vocab)
    expected = weights * counts.sum()
    assert counts[weights == 0].sum() == 0
    likely = expected > 5
    statistic = np.sum((counts - expected)[likely] ** 2 / expected[likely])
    freedom = likely.sum() - 1
    assert statistic < freedom + 4 * np.sqrt(2 * freedom), (statistic, freedom)


def _exact(operands: Mapping[str, Array], top_k: int) -> NDArray[np.float64]:
    """The probability of every id by the definition, written without the op's own code."""
    heat, top_p, min_p = (float(x) for x in operands["sampling_f"][0, :3])
    logits = operands["logits"][0].astype(np.float64)
    p = np.exp(logits / heat) / np.exp(logits / heat).sum()
    kept = [i for i in np.argsort(-p) if p[i] >= min_p * p.max()][: top_k or None]
    mass = sum(p[i] for i in kept)
    chosen: list[int] = []
    while sum(p[i] for i in chosen) < top_p * mass and len(chosen) < len(kept):
        chosen.append(kept[len(chosen)])
    q = np.zeros_like(p)
    q[chosen] = p[chosen]
    exact: NDArray[np.float64] = q / q.sum()
    return exact
