"""The input of a draft head: the next token's embedding and the hidden state, normalised.

y[t] = [rms_norm(weight[id], norm_e) | rms_norm(hidden[t], norm_h)]; both norm weights include
their +1. With `image_rows` [I+1,H] an id V + r, r < I, reads its row r. Another id outside the
vocabulary reads row 0. The rounding is that of embed and two rms_norms.
"""

import numpy as np

from spark_engine.kernel import Plan
from spark_engine.named import Named
from spark_engine.op import Attrs, Case, Inputs, Op, rtol_of
from spark_engine.operand import Operand, Result, Role, TimedLaunch
from spark_engine.plugins.common import operands
from spark_engine.plugins.common.fragments import rms_norm, widen
from spark_engine.plugins.common.onnx_nodes import Text
from spark_engine.plugins.common.shapes import LEGAL, activation
from spark_engine.plugins.kernels.common import row_quant as rq
from spark_engine.plugins.launch import Candidate, Kernel, Node, serve
from spark_engine.plugins.ops.norm.rms_norm import normalise
from spark_engine.plugins.ops.rowwise.embed import embedded, in_images
from spark_engine.tensors import Array, DType, TensorSpec


def _ids(launch: TimedLaunch, dims: tuple[int, ...], rng: np.random.Generator) -> Array:
    return np.asarray(rng.integers(0, launch.specs["weight"].dims[0], dims), np.int32)


OPERANDS = (
    Operand("ids", Role.ACTIVATION, "i32[tokens]", fill=_ids),
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


def _inputs(rows: int, h: int, dtype: DType, weight: DType, images: bool) -> Inputs:
    vocab = 30

    def make(rng: np.random.Generator) -> tuple[Array, ...]:
        ids = rng.integers(0, vocab, rows)
        ids[rows // 2] = (-1, vocab, 1 << 30)[rows % 3]  # reads row 0
        hidden = 3.0 * rng.standard_normal((rows, h))
        norms = [1.0 + 0.1 * rng.standard_normal(h) for _ in range(2)]
        table = rng.standard_normal((vocab, h)).astype(weight.numpy)
        kept = rng.standard_normal((6, h))
        kept[-1] = np.nan  # scratch
        if images:
            ids[::3] = vocab + np.arange(len(ids[::3])) % 6  # the sixth reads row 0
        return (
            ids.astype(np.int32),
            hidden.astype(dtype.numpy),
            table,
            *(n.astype(np.float32) for n in norms),
            *([kept.astype(dtype.numpy)] if images else []),
        )

    return make


def _case(
    rows: int,
    h: int,
    dtype: DType = DType.F32,
    weight: DType = DType.F32,
    bench: bool = False,
    images: bool = False,
) -> Case:
    attrs: Attrs = {"eps": 1e-6, "dtype": dtype.value}
    label = f"{rows} rows of {h}, {dtype} of {weight}{', images' if images else ''}"
    inputs = _inputs(rows, h, dtype, weight, images)
    return Case(label, attrs, inputs, rtol=rtol_of(dtype), bench=bench)


CASES = (
    _case(1, 64),
    _case(3, 36),
    _case(5, 128, weight=DType.F16),
    _case(8, 256, weight=DType.BF16, bench=True),
    _case(7, 1032, DType.BF16, DType.BF16),
    _case(65, 128, DType.BF16, DType.BF16),
    _case(20, 64, images=True),
    _case(20, 128, DType.BF16, DType.BF16, images=True),
)

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
    macros |= {"IMAGES": node.dim("I")} if "image_rows" in node else {}
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
        cases=CASES,
    ),
    (Candidate("halves", "drafts/mtp_input_fma.cu", _plan, _cost, _refuse),),
)
