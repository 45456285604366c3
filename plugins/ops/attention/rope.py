"""Partial rotary embedding in the half-split (NeoX) pairing, as nodes.

The angle is the f32 product position · inv_freq, as in transformers; its sine and cosine are exact
to f32. onnxruntime's Sin and Cos are not used: their last bit depends on an element's place in its
buffer, and so on the number of rows.
"""

import math

import numpy as np
from numpy.typing import NDArray

from spark_engine.interface import PREFILL_TILE, ROPE_ROWS
from spark_engine.op import Attrs
from spark_engine.plugins.common.onnx_nodes import Text
from spark_engine.plugins.state.paged_kv import SECTIONS
from spark_engine.tensors import Array, DType

# Taylor coefficients; on |r| ≤ π/4 the first omitted terms are below 2e-9.
_SINE = tuple((-1.0) ** k / math.factorial(2 * k + 1) for k in range(5))
_COSINE = tuple((-1.0) ** k / math.factorial(2 * k) for k in range(6))


def axes(attrs: Attrs, half: int) -> NDArray[np.int64]:
    """int64 [half]: whether time (0), height (1) or width (2) turns a pair: they alternate."""
    at, axis = np.arange(half), np.arange(half) % ROPE_ROWS
    ends = np.asarray([half, *(ROPE_ROWS * int(attrs.get(name, 0)) for name in SECTIONS)])
    return np.where(at < ends[axis], axis, 0)


def places(attrs: Attrs, starts: Array, offsets: Array, half: int) -> NDArray[np.int64]:
    """int64 [rows, tile, half]: the position by which each pair of each token turns."""
    tile = int(attrs.get("tile", 1))
    own = offsets.astype(np.int64).reshape(len(starts), -1, min(offsets.shape[1], ROPE_ROWS))
    if tile == PREFILL_TILE:
        own = own[:, :, axes(attrs, half)]
    at = starts.astype(np.int64)[:, None] + np.arange(tile)
    return np.asarray(np.broadcast_to(at[:, :, None] + own, (*at.shape, half)))


def rotate_array(
    x: NDArray[np.float64], position: int | Array, inv_freq: Array
) -> NDArray[np.float64]:
    """Rotates the first 2·len(inv_freq) of the last axis of `x`, by a position or one a pair."""
    half = len(inv_freq)
    at = np.asarray(position, np.float32)
    angle = (at * inv_freq.astype(np.float32)).astype(np.float64)
    cos, sin = np.cos(angle), np.sin(angle)
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1)


def rotate(f: Text, x: str, cos: str, sin: str, half: int, dim: int) -> str:
    """`rotate_array` as nodes, for x [..., dim], cos and sin [..., half]."""
    a = f("Slice", x, [0], [half], [-1])
    b = f("Slice", x, [half], [2 * half], [-1])
    turned_a = f("Sub", f("Mul", a, cos), f("Mul", b, sin))
    turned_b = f("Add", f("Mul", b, cos), f("Mul", a, sin))
    rest = [f("Slice", x, [2 * half], [dim], [-1])] if 2 * half < dim else []
    return f("Concat", turned_a, turned_b, *rest, axis=-1)


def cos_sin(f: Text, positions: str, inv_freq: str) -> tuple[str, str]:
    """f32 (cos, sin) [..., half] of int64 positions [..., 1 or half].

    The angle is reduced in float64: r = angle − n·π/2 with |r| ≤ π/4; n mod 4 selects ±sin r or
    ±cos r.
    """
    angle = f.double(f("Mul", f.cast(positions, DType.F32), inv_freq))
    turns = f("Round", f("Mul", angle, np.float64(2 / math.pi)))
    r = f.cast(f("Sub", angle, f("Mul", turns, np.float64(math.pi / 2))), DType.F32)
    square = f("Mul", r, r)
    sine = f("Mul", r, _horner(f, square, _SINE))
    cosine = _horner(f, square, _COSINE)
    quarter = f("Mod", f.long(turns), 4)  # never negative
    odd = f("Equal", f("Mod", quarter, 2), 1)
    below = f("GreaterOrEqual", quarter, 2)
    left = f("Equal", f("Mod", f("Add", quarter, 1), 4), 2)
    left = f("Or", left, f("Equal", quarter, 2))
    sin = _signed(f, below, f("Where", odd, cosine, sine))
    return _signed(f, left, f("Where", odd, sine, cosine)), sin


def _horner(f: Text, x: str, coefficients: tuple[float, ...]) -> str:
    total = f("Mul", x, coefficients[-1])
    for c in coefficients[-2:0:-1]:
        total = f("Mul", x, f("Add", total, c))
    return f("Add", total, coefficients[0])


def _signed(f: Text, negative: str, x: str) -> str:
    return f("Where", negative, f("Neg", x), x)
