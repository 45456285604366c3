"""A convolution over two tokens of a block, with factors that depend on the token (DFlash2).

y[i, c] = a[i, c] x[i, c] + b[i, c] x[i−1, c], with 0 in place of x[−1] for the first token of a
row's block. a = base[2·side, c] + deltas[i, 2·side·G + g], b the same of the next row of `base` and
the next G columns of `deltas`; g is the group of column c, of H/G columns. `side` 0 is before a
sublayer, 1 behind it; both have the deltas of the token that enters the sublayer. Computed in f32,
cast once. z-lab/dflash.
"""

import numpy as np

from spark_engine.named import Named
from spark_engine.op import Attrs, Op
from spark_engine.operand import Result
from spark_engine.plugins.common import operands
from spark_engine.plugins.common.fragments import columns, widen
from spark_engine.plugins.common.onnx_nodes import Text
from spark_engine.plugins.kernels.drafts import block_kernels
from spark_engine.plugins.launch import serve
from spark_engine.tensors import Array, TensorSpec

SIDES, TAPS = 2, 2
OPERANDS = (
    operands.x("A[tokens,H]"),
    operands.x("A[tokens,4·G]", name="deltas"),
    operands.weight("base", "f32[4,H]"),
)


def _check(node: Named) -> str | None:
    h, wide = node.dim("H"), int(node["deltas"].shape[1])
    if wide % (SIDES * TAPS) or h % (wide // (SIDES * TAPS)):
        return f"{wide} deltas of a token; {h} columns need four of each group of them"
    if node["deltas"].dtype is not node["x"].dtype:
        return f"deltas are {node['deltas'].dtype}, x is {node['x'].dtype}"
    return None


def reference(attrs: Attrs, arrays: tuple[Array, ...]) -> tuple[Array, ...]:
    """(x, deltas, base) -> (y,), in float64."""
    x, deltas, base = (a.astype(np.float64) for a in arrays)
    tile, side, h = int(attrs["tile"]), int(attrs["side"]), x.shape[1]
    groups = deltas.shape[1] // (SIDES * TAPS)
    each = np.repeat(deltas.reshape(len(x), SIDES * TAPS, groups), h // groups, axis=2)
    factors = base + each
    before = np.zeros_like(x).reshape(-1, tile, h)
    before[:, 1:] = x.reshape(-1, tile, h)[:, :-1]
    y = factors[:, 2 * side] * x + factors[:, 2 * side + 1] * before.reshape(x.shape)
    return (y.astype(arrays[0].dtype),)


def body(attrs: Attrs, specs: tuple[TensorSpec, ...]) -> str:
    """The block moved by a token, and a factor for each tap."""
    f, node = Text(), OP.named(attrs, specs)
    h, wide, tile, side = node.dim("H"), int(node["deltas"].shape[1]), *_numbers(attrs)
    groups = wide // (SIDES * TAPS)
    x, deltas = f("Reshape", widen(f, "x"), [-1, tile, h]), widen(f, "deltas")
    none = f("Mul", f("Slice", x, [0], [1], [1]), 0.0)
    before = f("Concat", none, f("Slice", x, [0], [tile - 1], [1]), axis=1)
    total = []
    for tap, value in enumerate((x, before)):
        at = TAPS * side + tap
        own = f("Reshape", columns(f, deltas, at * groups, (at + 1) * groups), [-1, groups, 1])
        wide_own = f("Expand", own, [1, groups, h // groups])
        factor = f("Add", f("Slice", "base", [at], [at + 1]), f("Reshape", wide_own, [-1, h]))
        total.append(f("Mul", factor, f("Reshape", value, [-1, h])))
    f.cast(f("Add", *total), node["x"].dtype, out="y")
    return f.function("block_conv", OP.inputs, OP.outputs)


def _numbers(attrs: Attrs) -> tuple[int, int]:
    return int(attrs["tile"]), int(attrs["side"])


OP = serve(
    Op(
        name="block_conv",
        operands=OPERANDS,
        results=(Result("y", "A[tokens,H]"),),
        attrs={"tile": None, "side": None},
        legal={"side": (0, 1)},
        check=_check,
        reference=reference,
        body=body,
    ),
    block_kernels.CONV,
)
