"""The MoE router: softmax over all experts, the top k, renormalised to sum 1.

logits = x·wᵀ in f32; softmax over all E renormalised over the chosen k equals the softmax of
the k chosen logits, which is what is computed (transformers, Qwen3.5 MoE: renormalisation is
unconditional). Chosen in descending order of logit, ties to the lowest index. With a shared
gate, one more column: id E, weight sigmoid(x·gateᵀ).
"""

import numpy as np

from spark_engine.named import Named
from spark_engine.op import Attrs, Op
from spark_engine.operand import Operand, Result, Role
from spark_engine.plugins.common import fragments as fr
from spark_engine.plugins.common import operands
from spark_engine.plugins.common.onnx_nodes import Text
from spark_engine.plugins.formats import format_fragments as ff
from spark_engine.plugins.kernels.moe.router import router_kernels
from spark_engine.plugins.launch import serve
from spark_engine.tensors import Array, DType, TensorSpec


def _check(node: Named) -> str | None:
    top_k, experts = node.number("top_k"), node.dim("E")
    if not 1 <= top_k <= experts:
        return f"top_k is {top_k}, expected 1 to {experts} (experts)"
    return None


def reference(attrs: Attrs, arrays: tuple[Array, ...]) -> tuple[Array, ...]:
    """(x, w, [gate]) -> (ids, weights)."""
    x, w, *gate = (a.astype(np.float64) for a in arrays)
    logits = x @ w.T
    ids = np.argsort(-logits, axis=1, kind="stable")[:, : int(attrs["top_k"])]
    chosen = np.take_along_axis(logits, ids, axis=1)
    weights = np.exp(chosen - chosen[:, :1])
    weights /= weights.sum(axis=1, keepdims=True)
    if gate:
        ids = np.concatenate([ids, np.full((len(x), 1), len(w))], axis=1)
        weights = np.concatenate([weights, 1 / (1 + np.exp(-(x @ gate[0].T)))], axis=1)
    return ids.astype(np.int32), weights.astype(np.float32)


def body(attrs: Attrs, specs: tuple[TensorSpec, ...]) -> str:
    """One MatMul for experts and gate, TopK, exponentials."""
    f = Text()
    node = OP.named(attrs, specs)
    experts, gated = node.dim("E"), "gate" in node
    w = fr.widen(f, "w")
    if gated:
        w = f("Concat", w, fr.widen(f, "gate"), axis=0)
    logits = ff.times(f, fr.widen(f, "x"), w)
    routed = fr.columns(f, logits, 0, experts) if gated else logits
    values, ids = f.many(2, "TopK", routed, [int(attrs["top_k"])], axis=-1, largest=1, sorted=1)
    powers = f("Exp", f("Sub", values, fr.columns(f, values, 0, 1)))
    total = fr.row_sum(f, powers, int(attrs["top_k"]))
    if not gated:
        f("Div", powers, total, out="weights")
        f.cast(ids, DType.I32, "ids")
        return f.function("moe_router", ("x", "w"), ("ids", "weights"))
    gate = fr.sigmoid(f, fr.columns(f, logits, experts, experts + 1))
    f("Concat", f("Div", powers, total), gate, axis=-1, out="weights")
    f("Pad", f.cast(ids, DType.I32), [0, 0, 0, 1], np.int32(experts), out="ids")
    return f.function("moe_router", ("x", "w", "gate"), ("ids", "weights"))


OP = serve(
    Op(
        name="moe_router",
        operands=(
            operands.x("A[tokens,H]"),
            operands.weight("w", "W[E,H]"),
            Operand("gate", Role.WEIGHT, "W[1,H]", optional=True, note="of the shared expert"),
        ),
        results=(
            Result("ids", "i32[tokens,k]", note="k is top_k, + 1 with a gate"),
            Result("weights", "f32[tokens,k]"),
        ),
        attrs={"top_k": None},
        dims={"k": lambda node: node.number("top_k") + ("gate" in node)},
        check=_check,
        reference=reference,
        body=body,
    ),
    router_kernels.CANDIDATES,
)
