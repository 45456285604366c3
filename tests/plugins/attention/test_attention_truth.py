"""Paged attention against a float64 attention written apart: FP8 pages with two unlike scales,
raw pages, sharing, page edges; and literals of RoPE."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np
import pytest

from spark_engine.op import Attrs, Case, Op
from spark_engine.plugins.common.onnx_nodes import Text
from spark_engine.plugins.formats import fp8_codes
from spark_engine.plugins.ops.attention import attention_decode, paged_attention, rope
from spark_engine.tensors import Array
from tests.oracles import attention_truth as truth
from tests.plugins import run_op

if TYPE_CHECKING:
    from tests.plugins.cuda_node import Bench

SCALES = (0.04, 0.5)  # of k, of v: either would saturate or starve the other's codes
TOKENS, SLOT = 70, 1
EPS = 0.05  # large enough that its place shows
PREFILLED, DELTA = 67, -50  # tokens with three offsets each; that of the others
SECTIONS = {"rope_height": 11, "rope_width": 10}
SIZES = {"heads": 4, "kv_heads": 2, "head_dim": 16}


def heads(sizes: Mapping[str, int], half: int, fp8: bool) -> truth.Heads:
    rng = np.random.default_rng(5)
    dim = sizes["head_dim"]
    norms = [rng.uniform(0.8, 1.2, dim).astype(np.float32).astype(np.float64) for _ in range(2)]
    inv_freq = (100.0 ** (-np.arange(half) / half)).astype(np.float32)
    axis = np.zeros(half, int)
    axis[1 : 3 * SECTIONS["rope_height"] : 3] = 1
    axis[2 : 3 * SECTIONS["rope_width"] : 3] = 2
    places = np.arange(TOKENS)[:, None] + offsets()[:, axis]
    scales = SCALES if fp8 else None
    return truth.Heads(
        sizes["heads"], sizes["kv_heads"], dim, EPS, *norms, inv_freq, scales, places
    )


def offsets() -> Array:
    """[TOKENS, 3]: of any sign."""
    found = np.random.default_rng(8).integers(-60, 60, (TOKENS, 3))
    found[PREFILLED:] = DELTA
    return found


def packed(h: truth.Heads, seed: int) -> Array:
    """Values are sixty times as large as keys, so that each side needs its own scale."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((TOKENS, 2 * (h.queries + h.keys) * h.dim))
    x[:, -h.keys * h.dim :] *= 60
    return x.astype(np.float32)


class Sequence:
    """One sequence through an op, its pages and table kept from launch to launch."""

    def __init__(self, h: truth.Heads, how: str, page: int, seed: int = 0) -> None:
        self.h, self.how, self.at = h, how, 0
        self.given = packed(h, seed)
        need = -(-TOKENS // page)
        order = np.random.default_rng(3).permutation(need + 2)[:need]
        self.table = np.full((3, need), -1, np.int32)
        self.table[SLOT], self.table[-1] = order, 1 << 30
        shape = (need + 3, h.keys, page, h.dim)
        empty = np.full(shape, 0x7F, np.uint8) if h.scales else np.full(shape, np.nan, np.float32)
        self.pages = [empty, empty.copy()]
        self.page = page

    def go(self, op: Op, tile: int, count: int) -> Array:
        """The op's result for the next `count` tokens."""
        tokens = np.full((-(-count // tile) * tile, self.given.shape[1]), np.nan, np.float32)
        tokens[:count] = self.given[self.at : self.at + count]
        starts = range(self.at, self.at + count, tile)
        rows = [
            np.full(len(starts), SLOT),
            starts,
            [min(tile, self.at + count - s) for s in starts],
        ]
        h, scales = self.h, self.h.scales or (math.nan, math.nan)
        floats = [np.asarray(x, np.float32) for x in (h.q_norm, h.k_norm, h.inv_freq, scales)]
        steps = [np.asarray(r, np.int32) for r in rows]
        own = np.full((len(tokens), 3), 1 << 30)
        own[:count] = offsets()[self.at : self.at + count]
        turns = (own.reshape(len(starts), -1) if tile == 64 else own[::tile, :1]).astype(np.int32)
        arrays = (tokens, *floats[:-1], turns, floats[-1], *self.pages, self.table, *steps)
        outputs = self.run(op, attrs_of(h, op, tile), arrays)
        first = op.name == "paged_attention"
        result = outputs[0] if first else outputs[2]
        self.pages = list(outputs[1:3] if first else outputs[:2])
        self.at += count
        return np.asarray(result[:count], np.float32)

    def run(self, op: Op, attrs: Attrs, arrays: tuple[Array, ...]) -> list[Array]:
        if self.how == "reference":
            return list(op.reference(attrs, arrays))
        outs = [*op.outputs[:2], "result0"] if op.name == "attention_decode" else list(op.outputs)
        return run_op.run_named(op, attrs, dict(zip(op.inputs, arrays, strict=True)), outs)

    def stored(self) -> list[Array]:
        """What the pages hold of the tokens so far: k and v [T,keys,D]."""
        found = []
        for pages in self.pages:
            own = np.moveaxis(pages[self.table[SLOT]], 2, 1).reshape(-1, self.h.keys, self.h.dim)
            found.append(own[: self.at])
        return found


def attrs_of(h: truth.Heads, op: Op, tile: int) -> Attrs:
    kv = "f8e4m3" if h.scales else "f32"
    sizes = {"heads": h.queries, "kv_heads": h.keys, "head_dim": h.dim, "eps": EPS, "kv_dtype": kv}
    if op.name == "attention_decode":
        return {**sizes, "keep": 1, "quant": "none", "n": 1}
    return {**sizes, "tile": tile, **(SECTIONS if tile == 64 else {})}


def clear(h: truth.Heads) -> int:
    """A seed for which no value is near the border of two codes."""
    return next(s for s in range(50) if truth.attend(h, packed(h, s)).margin > 2e-5)


@pytest.mark.parametrize("how", ["reference", "body"])
@pytest.mark.parametrize("fp8", [True, False], ids=["fp8", "raw"])
@pytest.mark.parametrize("page", [16, 64])
def test_pages_hold_and_give_what_the_truth_says(page: int, fp8: bool, how: str) -> None:
    """A full tile, a short one, then decode steps; codes equal, results to f32."""
    h = heads(SIZES, 3, fp8)
    seed = clear(h) if fp8 else 0
    want = truth.attend(h, packed(h, seed))
    sequence = Sequence(h, how, page, seed)
    parts = [sequence.go(paged_attention.OP, 64, PREFILLED)]
    parts += [sequence.go(paged_attention.OP, 1, 1) for _ in range(2)]
    gated = sequence.go(attention_decode.OP, 1, 1)
    atol = 2e-6 * np.abs(want.o).max()
    got = np.concatenate(parts).reshape(-1, h.queries, h.dim)
    np.testing.assert_allclose(got, want.o[:69], rtol=2e-5, atol=atol)
    y = want.o[69] / (1 + np.exp(-want.gate[69]))
    np.testing.assert_allclose(gated.reshape(h.queries, h.dim), y, rtol=2e-5, atol=atol)
    for found, held in zip(sequence.stored(), (want.k, want.v), strict=True):
        if fp8:
            np.testing.assert_array_equal(found, held)
        else:
            np.testing.assert_allclose(found, held, rtol=2e-6, atol=2e-6)


def test_the_two_scales_are_distinguished() -> None:
    """With the scales exchanged the truth is far away: the test above can fail."""
    h = heads(SIZES, 3, True)
    x = packed(h, 0)
    other = truth.Heads(**{**vars(h), "scales": SCALES[::-1]})
    there, here = truth.attend(other, x).o, truth.attend(h, x).o
    assert np.abs(there - here).max() > 0.1 * np.abs(here).max()


def test_literal_codes_of_pages() -> None:
    """25 is between 24 (0x5C) and 26, 27 between 26 and 28 (0x5E): ties go to the even code."""
    assert truth.e4m3_value(0x40) == 2 and truth.e4m3_value(0x5C) == 24
    x = np.asarray([2, 25, 27, -25, 460, -1e9, 2**-9, 2**-10, -(2**-10), -0.0], np.float32)
    want = [0x40, 0x5C, 0x5E, 0xDC, 0x7E, 0xFE, 0x01, 0x00, 0x80, 0x00]
    assert truth.encode(x)[0].tolist() == want
    assert fp8_codes.encode_array(x).tolist() == want

    def build(f: Text) -> None:
        f("Identity", fp8_codes.encode(f, "x"), out="codes")

    (codes,) = run_op.run_nodes(build, {"x": x}, {"codes": np.zeros(len(x), np.uint8)})
    assert codes.tolist() == want


# ---- RoPE --------------------------------------------------------------------------------------


def by_reference(x: Array, position: int, inv_freq: Array) -> Array:
    return np.asarray(rope.rotate_array(x.astype(np.float64), position, inv_freq))


def by_nodes(x: Array, position: int, inv_freq: Array) -> Array:
    inputs = {"x": x[None], "at": np.asarray([[position]]), "inv_freq": inv_freq}

    def build(f: Text) -> None:
        cos, sin = rope.cos_sin(f, "at", "inv_freq")
        y = rope.rotate(f, "x", cos, sin, len(inv_freq), x.shape[-1])
        f("Identity", y, out="y")

    return np.asarray(run_op.run_nodes(build, inputs, {"y": x[None]})[0][0])


@pytest.mark.parametrize("turn", [by_reference, by_nodes])
@pytest.mark.parametrize(
    ("position", "want"),
    [
        (0, [1, 2, 3, 4, 5]),
        (1, [-3, 2 * 0.0 - 4 * 1.0, 1, 2.0, 5]),
        (2, [-1, -2, -3, -4, 5]),
        (3, [3, 4, -1, -2, 5]),
    ],
)
def test_literal_quarter_turns_pair_the_halves(turn, position: int, want: list[float]) -> None:  # type: ignore[no-untyped-def]
    """inv_freq π/2 for both pairs (1,3) and (2,4); the fifth element is not rotated."""
    inv_freq = np.full(2, math.pi / 2, np.float32)
    got = turn(np.asarray([1, 2, 3, 4, 5], np.float32), position, inv_freq)
    np.testing.assert_allclose(got, want, atol=1e-6)


@pytest.mark.parametrize("turn", [by_reference, by_nodes])
def test_literal_pairs_turn_at_their_own_speed(turn) -> None:  # type: ignore[no-untyped-def]
    """At position 3: 3 rad for the first pair, 0.3 for the second, the rest as it is."""
    x = np.asarray([1, 1, 0, 0, 7, 8], np.float32)
    got = turn(x, 3, np.asarray([1.0, 0.1], np.float32))
    want = [-0.98999250, 0.95533649, 0.14112001, 0.29552021, 7, 8]
    np.testing.assert_allclose(got, want, atol=1e-6)


# ---- the kernels ---------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_the_kernels_keep_the_two_scales_apart(bench: Bench) -> None:
    """Served sizes in bf16: v's codes are exact, k's may differ by a step where it is near."""
    from tests.plugins import cuda_node

    sizes = {"heads": 12, "kv_heads": 2, "head_dim": 256}
    h = heads(sizes, 32, True)
    given = packed(h, 0).astype(ml_dtypes.bfloat16)
    want = truth.attend(h, given.astype(np.float64))

    class OnGpu(Sequence):
        def run(self, op: Op, attrs: Attrs, arrays: tuple[Array, ...]) -> list[Array]:
            arrays = (arrays[0].astype(ml_dtypes.bfloat16), *arrays[1:])
            case = Case("truth", attrs, lambda _: arrays)
            work = next(iter(cuda_node.planned(op, case, bench.target)))
            return list(cuda_node.run(bench, work, arrays))

    sequence = OnGpu(h, "cuda", 64)
    sequence.given = given
    parts = [sequence.go(paged_attention.OP, 64, PREFILLED)]
    parts += [sequence.go(paged_attention.OP, 1, 1) for _ in range(2)]
    gated = sequence.go(attention_decode.OP, 1, 1)
    limit = 2.0**-6 * np.abs(want.o).max()
    got = np.concatenate(parts).reshape(-1, h.queries, h.dim)
    assert np.abs(got - want.o[:69]).max() <= limit
    y = want.o[69] / (1 + np.exp(-want.gate[69]))
    assert np.abs(gated.reshape(y.shape) - y).max() <= limit
    k, v = sequence.stored()
    np.testing.assert_array_equal(v, want.v)
    off = np.abs(k.astype(int) - np.asarray(want.k).astype(int))
    assert np.mean(off > 0) < 0.02 and np.mean(off > 1) < 1e-3
