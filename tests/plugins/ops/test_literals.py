"""Small inputs with results worked out by hand: norms, activations, convolution, experts.

Each is asked of the reference and of the body, so that an error which both share is seen.
"""

from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest

from spark_engine.op import Attrs
from spark_engine.plugins import registry
from spark_engine.tensors import Array, DType
from tests.plugins import one_node

Ask = Callable[[str, Attrs, list[object]], list[Array]]
LN3 = 1.0986123


def _arrays(op: str, attrs: Attrs, values: list[object]) -> tuple[Array, ...]:
    given = registry.get(op).given(attrs)[: len(values)]
    kinds = (np.int32 if DType.I32 in o.dtypes else np.float32 for o in given)
    return tuple(
        v if isinstance(v, np.ndarray) else np.asarray(v, kind)
        for v, kind in zip(values, kinds, strict=True)
    )


def reference(op: str, attrs: Attrs, values: list[object]) -> list[Array]:
    return list(registry.get(op).reference(attrs, _arrays(op, attrs, values)))


def body(op: str, attrs: Attrs, values: list[object]) -> list[Array]:
    return list(one_node.run_op(registry.get(op), attrs, _arrays(op, attrs, values)))


BOTH = pytest.mark.parametrize("ask", [reference, body])


def near(got: Array, want: object) -> None:
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=2e-6, atol=1e-7)


# ---- norms -----------------------------------------------------------------------------------


@BOTH
def test_rms_norm(ask: Ask) -> None:
    """The mean of 9 and 16 is 12.5; with eps = 12.5 the root is 5."""
    (y,) = ask("rms_norm", {"eps": 12.5}, [[[3, 4], [0, 0]], [2, -1]])
    near(y, [[1.2, -0.8], [0, 0]])
    (y,) = ask("rms_norm", {"eps": 1e-6}, [[[1e-3, 1e-3]], [1, 1]])
    near(y, [[0.70710678, 0.70710678]])


@BOTH
def test_norm_quant_adds_before_it_norms(ask: Ask) -> None:
    attrs = {"eps": 12.5, "add": 1, "keep": 1, "quant": "none", "n": 1}
    y, total = ask("norm_quant", attrs, [[[1.0, 6.0]], [2.0, -1.0], [[2.0, -2.0]]])
    near(y, [[1.2, -0.8]])
    near(total, [[3, 4]])


@BOTH
def test_norm_quant_serves_each_consumer_by_its_scale(ask: Ask) -> None:
    """y (1.2, −0.8) by scales 0.1, 0.4: 12 and −8; 3 and −2. What is kept comes first."""
    attrs = {"eps": 12.5, "add": 0, "keep": 1, "quant": "fp8", "n": 2}
    y, first, second = ask("norm_quant", attrs, [[[3.0, 4.0]], [2.0, -1.0], [0.1, 0.4]])
    near(y, [[1.2, -0.8]])
    near(first, [[12, -8]])
    near(second, [[3, -2]])


@BOTH
def test_gated_norm(ask: Ask) -> None:
    """Two heads of (3, 4): normed (1.2, 0.8) by weights (2, 1). silu(ln 3) = ¾ ln 3, silu(−ln 3) =
    −¼ ln 3; z begins at column 3."""
    attrs = {"eps": 12.5, "heads": 2, "offset": 3}
    packed = [[9, 9, 9, LN3, -LN3, 0, LN3, 9]]
    (y,) = ask("gated_norm", attrs, [[[3, 4, 3, 4]], packed, [2, 1]])
    near(y, [[1.2 * 0.75 * LN3, -0.8 * 0.25 * LN3, 0, 0.8 * 0.75 * LN3]])


# ---- activations -----------------------------------------------------------------------------


@BOTH
def test_silu_mul_has_the_gate_first(ask: Ask) -> None:
    (y,) = ask("silu_mul", {}, [[[LN3, -LN3, 2, 4]]])
    near(y, [[0.75 * LN3 * 2, -0.25 * LN3 * 4]])


@BOTH
def test_sigmoid_gate_reads_q_then_gate_of_each_head(ask: Ask) -> None:
    """sigmoid(ln 3) = ¾, sigmoid(−ln 3) = ¼; behind them k and v."""
    qkv = [[9, 9, LN3, -LN3, 9, 9, 0, LN3, 9, 9, 9, 9]]
    (y,) = ask("sigmoid_gate", {"heads": 2, "head_dim": 2}, [[[4, 4, 4, 4]], qkv])
    near(y, [[3, 1, 2, 3]])


@BOTH
def test_shared_gate_weighs_the_shared_expert(ask: Ask) -> None:
    (y,) = ask("shared_gate", {}, [[[1, 2]], [[4, 8]], [[1, 1]], [[LN3, 0]]])
    near(y, [[1 + 3, 2 + 6]])


# ---- tokens ----------------------------------------------------------------------------------


@BOTH
def test_embed_takes_the_last_token_of_the_slot(ask: Ask) -> None:
    weight = [[0, 1], [10, 11], [20, 21], [30, 31]]
    values = [[2, -1, -1, 0], [3, 1, 0], [1, 1, 0, -1], weight]
    (x,) = ask("embed", {"tile": 1, "dtype": "f32"}, values)
    near(x, [[20, 21], [10, 11], [30, 31], [0, 1]])


@BOTH
def test_last_rows_is_the_last_valid_token(ask: Ask) -> None:
    x = np.arange(12, dtype=np.float32).reshape(12, 1)
    (y,) = ask("last_rows", {"tile": 4}, [x, [3, 1, 4]])
    near(y, [[2], [4], [11]])


# ---- convolution -----------------------------------------------------------------------------


def silu(y: Array) -> Array:
    wide = np.asarray(y, np.float64)
    return np.asarray(wide / (1 + np.exp(-wide)))


TAPS = [[0.03125, -0.0625, 0.125, 0.25]]  # oldest first; ¼ multiplies the current token


@BOTH
def test_conv_decode_steps_shift_the_window(ask: Ask) -> None:
    """The window 1, 2, 3 and the new 4: (1 − 4 + 12 + 32) / 32. Slot 0 is fresh: 5 / 4 alone."""
    state = np.asarray([[[np.nan]] * 3, [[1], [2], [3]], [[np.nan]] * 3], np.float32)
    rows = [[1, 0, -1], [7, 0, 0], [1, 1, 0]]
    x = [[4, 9], [5, 9], [0, 9]]
    c, new = ask("causal_conv", {"tile": 1}, [x, TAPS, state, *rows])
    near(c[:2], silu(np.asarray([[41 / 32], [40 / 32]])))
    near(new[:2, :, 0], [[0, 0, 5], [2, 3, 4]])


@BOTH
def test_conv_windows_reach_over_the_edges_of_tiles(ask: Ask) -> None:
    """A sequence continues from position 7 over a tile's edge into a tile of one token."""
    state = np.full((3, 3, 1), np.nan, np.float32)
    state[1, :, 0] = (10, 20, 30)
    x = np.arange(1, 129, dtype=np.float32).reshape(128, 1) / 64
    rows = [[1, 1], [7, 71], [64, 1], [1, 99], [-1, -1]]
    c, new = ask("causal_conv", {"tile": 64}, [x, TAPS, state, *rows])
    line = [10, 20, 30, *(i / 64 for i in range(1, 66))]
    want = [sum(w * line[t + j] for j, w in enumerate(TAPS[0])) for t in range(65)]
    near(c[:65, 0], silu(np.asarray(want)))
    assert (
        want[0] == (10 - 40 + 120 + 8 / 64) / 32
        and want[2] == (30 - 2 / 64 + 8 / 64 + 24 / 64) / 32
    )
    near(new[1, :, 0], [63 / 64, 64 / 64, 65 / 64])


@BOTH
def test_conv_begins_from_a_row_and_saves_behind_a_tile(ask: Ask) -> None:
    """From row 1 (columns 10, 20, 30) in slot 0; its first tile is saved to row 2."""
    state = np.full((4, 3, 1), np.nan, np.float32)
    state[1, :, 0] = (10, 20, 30)
    x = np.arange(1, 129, dtype=np.float32).reshape(128, 1) / 64
    rows = [[0, 0], [7, 71], [64, 1], [1, 99], [2, -1]]
    c, new = ask("causal_conv", {"tile": 64}, [x, TAPS, state, *rows])
    near(c[:2, 0], silu(np.asarray([10 - 40 + 120 + 8 / 64, 20 - 60 + 4 / 64 + 16 / 64]) / 32))
    near(new[:3, :, 0], [[63 / 64, 1, 65 / 64], [10, 20, 30], [62 / 64, 63 / 64, 1]])


@BOTH
def test_conv_state_of_a_tile_shorter_than_the_window(ask: Ask) -> None:
    state = np.full((3, 3, 1), 7.0, np.float32)
    x = np.zeros((64, 1), np.float32)
    x[:2, 0] = (1, 2)
    _, new = ask("causal_conv", {"tile": 64}, [x, TAPS, state, [0], [5], [2], [0], [-1]])
    near(new[0, :, 0], [7, 1, 2])
    _, new = ask("causal_conv", {"tile": 64}, [x, TAPS, state, [0], [0], [2], [99], [-1]])
    near(new[0, :, 0], [0, 1, 2])


# ---- mixture of experts ----------------------------------------------------------------------


@BOTH
def test_router_orders_ties_and_weighs(ask: Ask) -> None:
    """Logits ln 2, 0, ln 4, ln 2, 0: the chosen four weigh 4 : 2 : 2 : 1 in that order."""
    ln2 = 0.6931472
    w = [[ln2, 1], [0, 1], [2 * ln2, 1], [ln2, 1], [0, 1]]
    ids, weights = ask("moe_router", {"top_k": 4}, [[[1, 0]], w])
    assert ids.tolist() == [[2, 0, 3, 1]]
    near(weights, [[4 / 9, 2 / 9, 2 / 9, 1 / 9]])


@BOTH
def test_router_appends_the_shared_gate(ask: Ask) -> None:
    """sigmoid(ln 3) = ¾ under the id behind the last; it takes no part in the normalisation."""
    w = [[0, 0], [1, 0], [0, 5]]
    ids, weights = ask("moe_router", {"top_k": 1}, [[[1, 0]], w, [[LN3, 7]]])
    assert ids.tolist() == [[1, 3]]
    near(weights, [[1, 0.75]])


def experts(w2: list[float]) -> list[Array]:
    """Dense experts of one column: gate ln 3, up 4 / (¾ ln 3), so that silu(gate) · up = 4."""
    up = 4 / (0.75 * LN3)
    w13 = np.asarray([[[LN3], [up]]] * len(w2), np.float32)
    return [w13, np.asarray(w2, np.float32).reshape(-1, 1, 1)]


@BOTH
def test_experts_are_weighed_and_unchosen_ones_silent(ask: Ask) -> None:
    attrs = {"format": "dense", "dtype": "f32"}
    ids, weights = [[3, 1], [0, 2]], [[0.25, 0.75], [0.5, 2.0]]
    (y,) = ask("grouped_moe", attrs, [[[1], [1]], ids, weights, *experts([1, 10, 100, 1000])])
    near(y, [[4 * (250 + 7.5)], [4 * (0.5 + 200)]])


def test_experts_add_up_in_ascending_order_in_f32() -> None:
    """1, 2³⁰, −2³⁰ in f32 is 0 in that order and 1 in any other that ends with the 1."""
    attrs = {"format": "dense", "dtype": "f32"}
    params = experts([0.25, 2.0**28, -(2.0**28)])
    params[0] = np.asarray([[[30.0], [4 / 30]]] * 3, np.float32)
    for ids in ([2, 1, 0], [0, 1, 2], [1, 2, 0]):
        (y,) = body("grouped_moe", attrs, [[[1]], [ids], [[1, 1, 1]], *params])
        assert abs(float(y[0, 0])) < 0.5, ids


# ---- linear layers ---------------------------------------------------------------------------


@BOTH
def test_fp8_linear_multiplies_both_scales(ask: Ask) -> None:
    f8 = ml_dtypes.float8_e4m3fn
    x, w = np.asarray([[2, -4]], f8), np.asarray([[1, 0.5], [448, 0]], f8)
    values: list[object] = [x, w, np.float32(0.25).reshape(()), [8, 0.5]]
    (y,) = ask("fp8_linear", {"dtype": "f32"}, values)
    near(y, [[0 * 8 * 0.25, 896 * 0.5 * 0.25]])


@BOTH
def test_nvfp4_linear_scales_blocks_and_rows(ask: Ask) -> None:
    """Codes 2 (1.0) and 15 (−6) in turns, low nibble first; blocks scaled by 2 and 0.5."""
    w = np.full((1, 16), 0xF2, np.uint8)
    scale = np.asarray([[2, 0.5]], ml_dtypes.float8_e4m3fn)
    x = np.zeros((4, 32), np.float32)
    x[0, 0], x[1, 1], x[2, 16], x[3, 31] = 1, 1, 1, 1
    (y,) = ask("nvfp4_linear", {"dtype": "f32"}, [x, w, scale, [0.25]])
    near(y, [[0.5], [-3], [0.125], [-0.75]])


@BOTH
def test_nvfp4_linear_a4_scales_both_sides(ask: Ask) -> None:
    """x: codes 3 (1.5), blocks scaled 4 and 1; w: codes 4 (2), blocks 0.5 and 8; alpha 0.125."""
    f8 = ml_dtypes.float8_e4m3fn
    x, w = np.full((1, 16), 0x33, np.uint8), np.full((1, 16), 0x44, np.uint8)
    scales = [np.asarray([s], f8) for s in ([4, 1], [0.5, 8])]
    values: list[object] = [x, scales[0], w, scales[1], [0.125]]
    (y,) = ask("nvfp4_linear_a4", {"dtype": "f32"}, values)
    near(y, [[16 * 3 * (4 * 0.5 + 1 * 8) * 0.125]])


@BOTH
def test_fp8_by_token(ask: Ask) -> None:
    """A scale is amax / 448 of a whole row, 1 where that is 0; 1.0625 is a tie."""
    x = np.zeros((3, 300), np.float32)
    x[0, [0, 200, 299]], x[1, 299] = (2.125, -896, 896), 56
    codes, scale = ask("fp8_quant", {"by_token": 1}, [x])
    assert scale.tolist() == [[2], [0.125], [1]]
    assert codes[:, [0, 200, 299]].view(np.uint8).tolist() == [
        *([0x38, 0xFE, 0x7E], [0, 0, 0x7E], [0, 0, 0])
    ]
    w = np.zeros((2, 300), codes.dtype)
    w[0, [0, 299]], w[1, 200] = 1, -2
    (y,) = ask("fp8_linear", {"dtype": "f32", "by_token": 1}, [codes, w, scale, [0.5, 3]])
    near(y, [[(1 + 448) * 2 * 0.5, 448 * 2 * 2 * 3], [448 * 0.125 * 0.5, 0], [0, 0]])


@BOTH
def test_fp8_block_linear_scales_blocks_of_128(ask: Ask) -> None:
    """One row of w in each of two row blocks, x and w of two column blocks; the last are narrow."""
    f8 = ml_dtypes.float8_e4m3fn
    x, w = np.zeros((1, 130), f8), np.zeros((130, 130), f8)
    x[0, 127], x[0, 128] = 2, 3
    w[127], w[128] = 1, 1
    values: list[object] = [x, [[10, 100]], w, [[1, 2], [4, 8]]]
    (y,) = ask("fp8_block_linear", {"dtype": "f32"}, values)
    near(y[0, 126:], [0, 2 * 10 * 1 + 3 * 100 * 2, 2 * 10 * 4 + 3 * 100 * 8, 0])


@pytest.mark.parametrize(("end", "seen"), [(9, [6, 7, 8]), (2, [0, 0, 1]), (0, [0, 0, 0])])
def test_a_slot_of_drafts_shows_the_columns_before_a_position(end: int, seen: list[int]) -> None:
    """Four taps and two drafts: a state of six columns, in which a position's place is its rest."""
    state = np.zeros((6, 1), np.float32)
    for position in range(max(0, end - 6), end):
        state[position % 6] = position
    (operand,) = (o for o in registry.get("causal_conv").operands if o.completes)
    assert operand.completes is not None
    shown = operand.completes.whole(state, state, end, 2)
    assert shown[:, 0].tolist() == seen
