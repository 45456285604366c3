"""The quantised outputs that a fused op appends: their declaration, reference and body.

Knows the formats `fp8`, `fp8_block`, `nvfp4` and `none`, and no op. A fused op with attribute
`n` feeds n consumers of different static scales from one value; fp8_block has no static scale
and so one consumer's worth of output.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from spark_engine.named import Named
from spark_engine.op import Attrs, Chain, Part
from spark_engine.operand import Result
from spark_engine.plugins.common.onnx_nodes import Text
from spark_engine.plugins.formats import format_fragments as ff
from spark_engine.plugins.formats import numeric
from spark_engine.tensors import Array

QUANTS = ("none", "fp8", "fp8_block", "nvfp4")


LEGAL = {"quant": QUANTS}  # `Op.legal`


def takes_scales(attrs: Attrs) -> bool:
    """Whether the op has a `scales` operand."""
    return attrs["quant"] in ("fp8", "nvfp4")


def check(node: Named) -> str | None:
    """Why so many results cannot be."""
    quant, n = node.text("quant"), node.number("n")
    if n < 1 or (n > 1 and quant in ("none", "fp8_block")):
        return f"n is {n}; {quant} gives one result, the others at least one"
    return None


def several(text: str, k: str, *kept: Result) -> Result:
    """The results of a fused op: `kept`, then the quantised copies q0, s0, q1, … of y A[tokens,k].

    `text` is for the table in docs/graph.md.
    """

    def each(attrs: Attrs) -> tuple[Result, ...]:
        first = tuple(r for r in kept if r.when is None or r.when.holds(attrs))
        return (*first, *_quantised(attrs, k))

    return Result("result*", text, each=each)


def _quantised(attrs: Attrs, k: str) -> tuple[Result, ...]:
    made = {
        "none": (),
        "fp8": (f"f8[tokens,{k}]",),
        "fp8_block": (f"f8[tokens,{k}]", f"f32[tokens,⌈{k}/{numeric.FP8_BLOCK}⌉]"),
        "nvfp4": (f"u8[tokens,{k}/2]", f"f8[tokens,{k}/{numeric.NVFP4_BLOCK}]"),
    }[str(attrs["quant"])]
    copies = range(int(attrs["n"]))
    return tuple(
        Result(f"{name}{i}", spec) for i in copies for name, spec in zip("qs", made, strict=False)
    )


def chain(
    attrs: Attrs,
    parts: Sequence[Part],
    before: Sequence[str] = (),
    after: Sequence[str] = (),
) -> Chain:
    """`parts`, which make y, then the stand-alone quantisers: before…, [y], after…, quantised…"""
    quant, tail = attrs["quant"], []
    for i in range(0 if quant == "none" else int(attrs["n"])):
        outs = (f"q{i}",) if quant == "fp8" else (f"q{i}", f"s{i}")
        scale = (f"scales[{i}]",) if takes_scales(attrs) else ()
        tail.append(Part(f"{quant}_quant", ("y", *scale), outs))
    kept = ("y",) if attrs["keep"] else ()
    made = tuple(name for part in tail for name in part.outputs)
    return Chain((*parts, *tail), (*before, *kept, *after, *made))


def reference(attrs: Attrs, y: Array, scales: Array | None) -> list[Array]:
    """The quantised outputs of `y`, which is already rounded to the activation dtype."""
    wide = y.astype(np.float32)
    if attrs["quant"] == "none":
        return []
    if attrs["quant"] == "fp8_block":
        return list(numeric.fp8_block_quantise(wide))
    assert scales is not None
    each = scales.astype(np.float32)
    if attrs["quant"] == "fp8":
        return [numeric.fp8_quantise(wide, s) for s in each]
    return [part for s in each for part in numeric.nvfp4_quantise(wide, s)]


def body(f: Text, attrs: Attrs, y: str, k: int, scales: str, outs: Sequence[str]) -> None:
    """Appends the quantised outputs, named `outs`, of f32 `y` [tokens, k]."""
    if attrs["quant"] == "fp8_block":
        ff.fp8_block_quantise(f, y, k, (outs[0], outs[1]))
    if not takes_scales(attrs):
        return
    for i in range(int(attrs["n"])):
        scale = f("Gather", scales, i, axis=0)
        if attrs["quant"] == "fp8":
            ff.fp8_quantise(f, y, scale, outs[i])
        else:
            ff.nvfp4_quantise(f, y, scale, k, (outs[2 * i], outs[2 * i + 1]))
