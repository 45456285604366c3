"""The input of a draft head: the next token's embedding and the hidden state, normalised.

y[t] = [rms_norm(weight[id], norm_e) | rms_norm(hidden[t], norm_h)]; both norm weights include
their +1. With `image_rows` [I+1,H] an id V + r, r < I, reads its row r. Another id outside the
vocabulary reads row 0. The rounding is that of embed and two rms_norms.
"""

import numpy as np

from spark_engine.kernel import Plan
from spark_engine.named import Named
from spark_engine.op import Attrs, Op
from spark_engine.operand import Operand, Result, Role
from spark_engine.plugins.common import operands
from spark_engine.plugins.common.fragments import rms_norm, widen
from spark_engine.plugins.common.onnx_nodes import Text
from spark_engine.plugins.common.shapes import LEGAL, activation
from spark_engine.plugins.kernels.common import row_quant as rq
from spark_engine.plugins.launch import Candidate, Kernel, Node, serve
from spark_engine.plugins.ops.norm.rms_norm import normalise
from spark_engine.plugins.ops.rowwise.embed import embedded, in_images
from spark_engine.tensors import Array, TensorSpec

OPERANDS = (
    Operand("ids", Role.ACTIVATION, "i32[tokens]", fill=operands.ids_of("weight")),
    operands.x("A[tokens,H]", name="hidden"),
    operands.weight("weight", "W[V,H]"),
    operands.weight("norm_e", "f32[H]"),
    operands.weight("norm_h", "f32[H]"),
    operands.IMAGE_ROWS,
)


def _check(node: Named) -> str | None:
    hidden = node["hidden"]
    if hidden.dtype != activation(node.attrs):
        return f"operand {hidden.name} is {hidden.dtype}, expected {node.attrs['dtype']}"
    return None


def reference(attrs: Attrs, arrays: tuple[Array, ...]) -> tuple[Array, ...]:
    """(ids, hidden, weight, norm_e, norm_h, [image_rows]) -> (y,)."""
    ids, hidden, weight, norm_e, norm_h, *images = arrays
    wide = ids.astype(np.int64)
    legal = np.where((wide >= 0) & (wide < len(weight)), wide, 0)
    embedded = weight[legal].astype(hidden.dtype)
    for t, token in enumerate(wide.tolist()):
        if images and in_images(token, weight, *images):
            embedded[t] = images[0][token - len(weight)]
    eps = float(attrs["eps"])
    parts = [normalise(embedded, norm_e, eps), normalise(hidden, norm_h, eps)]
    return (np.concatenate(parts, axis=1),)


def body(attrs: Attrs, specs: tuple[TensorSpec, ...]) -> str:
    """A gather, two norms, a concatenation."""
    f, node = Text(), OP.named(attrs, specs)
    h, vocab, dtype = node.dim("H"), node.dim("V"), node["hidden"].dtype
    ids = f.long("ids")
    legal = f("And", f("GreaterOrEqual", ids, 0), f("Less", ids, vocab))
    x = widen(f, embedded(f, node, ids, f("Where", legal, ids, 0), dtype))
    eps = float(attrs["eps"])
    parts = [
        rms_norm(f, part, norm, h, eps)
        for part, norm in ((x, "norm_e"), (widen(f, "hidden"), "norm_h"))
    ]
    f.cast(f("Concat", *parts, axis=1), dtype, out="y")
    return f.function("mtp_input", OP.names(attrs, len(specs)), OP.outputs)


MOST_THREADS = 512
VECTORS = 4  # most 16-byte loads of a thread
KERNEL = Kernel("mtp_input", "ids hidden weight norm_e norm_h image_rows? y")


def _refuse(node: Node) -> str | None:
    h = node.dim("H")
    if h > rq.VECTOR * VECTORS * MOST_THREADS:
        return f"rows of {h} columns; up to {rq.VECTOR * VECTORS * MOST_THREADS} fit a block"
    tables = [node[name] for name in ("hidden", "weight", "image_rows") if name in node]
    return rq.refuse_rows(tables, h)


def _plan(node: Node) -> Plan:
    tokens, h, vocab = node.shape("tokens", "H", "V")
    vectors = h // rq.VECTOR
    per = next(n for n in range(1, VECTORS + 1) if vectors <= n * MOST_THREADS)
    threads = rq.whole_warps(-(-vectors // per))
    macros = {"H": h, "VOCAB": vocab, "THREADS": threads, "VECS": per, "EPS": node.real("eps")}
    macros["IMAGES"] = node.dim("I") if "image_rows" in node else 0
    return node.plan(KERNEL.launch(node, (2, tokens), threads, macros))


def _cost(node: Node) -> float:
    read = node["ids"], node["hidden"]
    return rq.seconds(read, node["hidden"].nbytes * 3, node.target)


OP = serve(
    Op(
        name="mtp_input",
        operands=OPERANDS,
        results=(Result("y", "A[tokens,2H]"),),
        attrs={"eps": None, "dtype": None},
        legal=LEGAL,
        check=_check,
        reference=reference,
        body=body,
    ),
    (Candidate("halves", "drafts/mtp_input_fma.cu", _plan, _cost, _refuse),),
)
