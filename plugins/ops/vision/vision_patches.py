"""What the vision tower begins with: pixels of patches as activations, and their position rows.

    x[p] = patches[p] · pixels[0] + pixels[1]
    positions[p] = Σ_t tap_weights[p,t] · table[taps[p,t]]

`pixels` has factor and offset of each of a patch's values: scaling to one, mean and deviation of
its colour. Sums in f32, cast once. Taps outside the table, of padding, are clamped.
"""

import numpy as np

from spark_engine.op import Attrs, Op
from spark_engine.operand import Operand, Result, Role
from spark_engine.plugins.common import operands
from spark_engine.plugins.common.fragments import widen
from spark_engine.plugins.common.onnx_nodes import Text
from spark_engine.plugins.common.shapes import LEGAL, activation
from spark_engine.plugins.kernels.vision.vision_patches_kernels import CANDIDATES
from spark_engine.plugins.launch import serve
from spark_engine.tensors import Array, DType, TensorSpec


def reference(attrs: Attrs, arrays: tuple[Array, ...]) -> tuple[Array, ...]:
    """(patches, taps, tap_weights, pixels, table) -> (x, positions)."""
    patches, taps, weights, pixels, table = arrays
    factor, offset = pixels.astype(np.float64)
    rows = table.astype(np.float64)[np.clip(taps, 0, len(table) - 1)]
    positions = (rows * weights.astype(np.float64)[:, :, None]).sum(1)
    to = activation(attrs).numpy
    return (patches.astype(np.float64) * factor + offset).astype(to), positions.astype(to)


def body(attrs: Attrs, specs: tuple[TensorSpec, ...]) -> str:
    """A multiplication and an addition; a gather and a sum of four."""
    f, node = Text(), OP.named(attrs, specs)
    factor, offset = f.many(2, "Split", "pixels", axis=0, num_outputs=2)
    values = f("Add", f("Mul", f.cast("patches", DType.F32), factor), offset)
    f.cast(values, activation(attrs), "x")
    last = np.int32(node.dim("T") - 1)
    rows = widen(f, f("Gather", "table", f.long(f("Clip", "taps", np.int32(0), last))))
    taps = f.many(node.dim("taps"), "Split", f("Mul", rows, f("Unsqueeze", "tap_weights", [2])),
                  axis=1, num_outputs=node.dim("taps"))  # fmt: skip
    total = taps[0]
    for tap in taps[1:]:
        total = f("Add", total, tap)
    f.cast(f("Squeeze", total, [1]), activation(attrs), "positions")
    return f.function("vision_patches", OP.inputs, OP.outputs)


OP = serve(
    Op(
        name="vision_patches",
        operands=(
            Operand("patches", Role.STEP, "u8[tokens,P]"),
            Operand("taps", Role.STEP, "i32[tokens,taps]"),
            Operand("tap_weights", Role.STEP, "f32[tokens,taps]"),
            operands.weight("pixels", "f32[2,P]", "factors; offsets"),
            operands.weight("table", "W[T,H]"),
        ),
        results=(Result("x", "A[tokens,P]"), Result("positions", "A[tokens,H]")),
        attrs={"dtype": None},
        legal=LEGAL,
        reference=reference,
        body=body,
    ),
    CANDIDATES,
)
