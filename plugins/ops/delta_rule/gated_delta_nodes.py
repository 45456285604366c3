"""What a step and a chunk of the gated delta rule take of their tokens, in ONNX: q, k, v and rates.

All is elementwise or of a shape that the number of rows does not change, so that a row's result
does not depend on the other rows. onnxruntime's Softplus and Log are not used: their last bit
depends on the place of an element in its buffer.
"""

from spark_engine.plugins.common.onnx_nodes import Text
from spark_engine.plugins.common.sequence_tiles import Rows, over, valid_tokens
from spark_engine.plugins.state.replay_ring import Heads
from spark_engine.tensors import DType


def per_head(f: Text, h: Heads, rows: Rows, c: str = "c") -> tuple[str, str, str]:
    """(q, k, v) f32 [rows, Hv, tile, D], normalised; zero where there is no token."""
    c = f("Reshape", f.cast(c, DType.F32), [-1, h.tile, h.width])
    c = f("Where", over(f, valid_tokens(f, rows, h.tile), [2]), c, 0.0)
    size = h.keys * h.key_dim
    q = _split(f, h, c, 0, h.keys, h.key_dim)
    k = _split(f, h, c, size, h.keys, h.key_dim)
    v = _split(f, h, c, 2 * size, h.values, h.value_dim)
    q = f("Mul", _unit(f, q), float(h.key_dim**-0.5))
    return _repeat(f, h, q), _repeat(f, h, _unit(f, k)), v


def _split(f: Text, h: Heads, c: str, offset: int, heads: int, dim: int) -> str:
    part = f("Slice", c, [offset], [offset + heads * dim], [2])
    return f("Transpose", f("Reshape", part, [-1, h.tile, heads, dim]), perm=[0, 2, 1, 3])


def _unit(f: Text, x: str) -> str:
    squares = f("ReduceSum", f("Mul", x, x), [3], keepdims=1)
    return f("Div", x, f("Sqrt", f("Add", squares, 1e-6)))


def _repeat(f: Text, h: Heads, x: str) -> str:
    """Key heads to value heads: each is there `repeat` times in a row."""
    if h.repeat == 1:
        return x
    wide = f("Expand", f("Unsqueeze", x, [2]), [1, 1, h.repeat, 1, 1])
    return f("Reshape", wide, [-1, h.values, h.tile, h.key_dim])


def rates(f: Text, h: Heads, rows: Rows, ba: str = "ba") -> tuple[str, str]:
    """(β, g) f32 [rows, Hv, tile]; both zero, that is without effect, where there is no token."""
    ba = f("Reshape", f.cast(ba, DType.F32), [-1, h.tile, 2 * h.values])
    ba = f("Transpose", ba, perm=[0, 2, 1])
    b, a = f.many(2, "Split", ba, axis=1, num_outputs=2)
    valid = f("Unsqueeze", valid_tokens(f, rows, h.tile), [1])
    speed = f("Neg", f("Exp", f("Unsqueeze", "a_log", [1])))  # [Hv, 1]
    soft = softplus(f, f("Add", a, f("Unsqueeze", "dt_bias", [1])))
    beta = f("Where", valid, f("Sigmoid", b), 0.0)
    return beta, f("Where", valid, f("Mul", speed, soft), 0.0)


def softplus(f: Text, x: str) -> str:
    """log(1 + e^x) = max(x, 0) + log1p(u), u = e^−|x|; log1p(u) = 2 atanh(u / (2 + u)).

    The series of atanh in s ≤ 1/3 is cut where its terms pass below 1e-9 of the sum.
    """
    u = f("Exp", f("Neg", f("Abs", x)))
    s = f("Div", u, f("Add", u, 2.0))
    square = f("Mul", s, s)
    total = f("Mul", square, 1.0 / 17)
    for odd in (15, 13, 11, 9, 7, 5, 3):
        total = f("Mul", square, f("Add", total, 1.0 / odd))
    log = f("Mul", f("Add", s, s), f("Add", total, 1.0))
    return f("Add", f("Relu", x), log)
