"""The quantised outputs that a fused op appends: their declaration, reference and body.

A format's quantiser is `Format.inputs`; `quant` names it, or is `none`. A fused op with attribute
`n` feeds n consumers of different static scales from one value; a format without a static scale
has one consumer's worth of output. Knows no op.
"""

from collections.abc import Sequence

import numpy as np

from spark_engine.named import Named
from spark_engine.op import Attrs, Chain, Part
from spark_engine.operand import Result
from spark_engine.plugins.common.onnx_nodes import Text
from spark_engine.plugins.formats.registry import FORMATS
from spark_engine.tensors import Array

_FORMATS = {
    form.inputs.quant: (form, form.inputs) for form in FORMATS.values() if form.inputs is not None
}
QUANTS = ("none", *_FORMATS)
BY_TOKEN = tuple(q for q, (_, i) in _FORMATS.items() if i.attrs.get("by_token"))
LEGAL = {"quant": QUANTS}  # `Op.legal`


def quant_of(op: str, attrs: Attrs) -> str:
    """The name in `quant` of a stand-alone quantiser; "" of another op."""
    given = {name: value for name, value in attrs.items() if value}
    return next((q for q, (_, i) in _FORMATS.items() if i.op == op and i.attrs == given), "")


def takes_scales(attrs: Attrs) -> bool:
    """Whether the op has a `scales` operand."""
    return attrs["quant"] != "none" and _FORMATS[str(attrs["quant"])][0].static


def check(node: Named) -> str | None:
    """Why so many results cannot be."""
    quant, n = node.text("quant"), node.number("n")
    if n < 1 or (n > 1 and not takes_scales(node.attrs)):
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
    if attrs["quant"] == "none":
        return ()
    form, inputs = _FORMATS[str(attrs["quant"])]
    made = [o.spec.replace("K", k) for o in form.operands if o.name in inputs.makes]
    copies = range(int(attrs["n"]))
    return tuple(
        Result(f"{name}{i}", spec) for i in copies for name, spec in zip("qs", made, strict=False)
    )


def chain(
    attrs: Attrs, parts: Sequence[Part], before: Sequence[str] = (), after: Sequence[str] = ()
) -> Chain:
    """`parts`, which make y, then the stand-alone quantisers: before…, [y], after…, quantised…"""
    quant, tail = str(attrs["quant"]), []
    for i in range(0 if quant == "none" else int(attrs["n"])):
        _, inputs = _FORMATS[quant]
        outs = tuple(f"{part}{i}" for part, _ in zip("qs", inputs.makes, strict=False))
        scale = (f"scales[{i}]",) if takes_scales(attrs) else ()
        tail.append(Part(inputs.op, ("y", *scale), outs, inputs.attrs))
    kept = ("y",) if attrs["keep"] else ()
    made = tuple(name for part in tail for name in part.outputs)
    return Chain((*parts, *tail), (*before, *kept, *after, *made))


def reference(attrs: Attrs, y: Array, scales: Array | None) -> list[Array]:
    """The quantised outputs of `y`, which is already rounded to the activation dtype."""
    if attrs["quant"] == "none":
        return []
    _, inputs = _FORMATS[str(attrs["quant"])]
    each = np.ones(1, np.float32)  # not read where the format has no static scale
    if takes_scales(attrs) and scales is not None:
        each = scales.astype(np.float32)
    return [part for s in each for part in inputs.quantise(y.astype(np.float32), np.asarray(s))]


def body(f: Text, attrs: Attrs, y: str, k: int, scales: str, outs: Sequence[str]) -> None:
    """Appends the quantised outputs, named `outs`, of f32 `y` [tokens, k]."""
    if attrs["quant"] == "none":
        return
    _, inputs = _FORMATS[str(attrs["quant"])]
    each = len(inputs.makes)
    for i in range(int(attrs["n"])):
        scale = f("Gather", scales, i, axis=0) if takes_scales(attrs) else ""
        inputs.quantise_body(f, y, scale, k, outs[each * i : each * (i + 1)])
