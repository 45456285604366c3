"""The candidates of a block's drafts: the `top` largest logits of each token, in their order.

Of equal logits the lower id precedes. With a `shortlist` the logits are of its ids. NaN and ids
from `vocab` on never are candidates; in place of a missing one there is id 0 with value −∞. The
first token of a row's block and rows without a token (count 0) have none.
"""

import numpy as np

from spark_engine.named import Named
from spark_engine.op import Attrs, Op
from spark_engine.operand import Operand, Result, Role, When
from spark_engine.plugins.common import operands
from spark_engine.plugins.common.onnx_nodes import Text
from spark_engine.plugins.common.sequence_tiles import over
from spark_engine.plugins.kernels.drafts import block_kernels
from spark_engine.plugins.launch import serve
from spark_engine.plugins.ops.drafts.draft_token import ascending
from spark_engine.tensors import Array, DType, TensorSpec

OPERANDS = (
    operands.x("f32[tokens,Vd]", name="logits"),
    Operand("shortlist", Role.WEIGHT, "i32[Vd]", When("shortlist"), fill=ascending),
    operands.COUNTS,
)
RESULTS = (Result("ids", "i32[tokens,top]"), Result("values", "f32[tokens,top]"))


def _check(node: Named) -> str | None:
    top, ids = node.number("top"), node.dim("Vd")
    return None if 1 <= top <= ids else f"top is {top}; there are {ids} logits of a token"


def reference(attrs: Attrs, arrays: tuple[Array, ...]) -> tuple[Array, ...]:
    """(logits, [shortlist], counts) -> (ids, values), token by token."""
    logits, *shortlist, counts = arrays
    top, tile = int(attrs["top"]), int(attrs["tile"])
    known = np.asarray(shortlist[0] if shortlist else range(logits.shape[1]), np.int64)
    ids = np.zeros((len(logits), top), np.int32)
    values = np.full((len(logits), top), -np.inf, np.float32)
    for token in range(len(logits)):
        if counts[token // tile] == 0 or token % tile == 0:
            continue
        legal = np.flatnonzero((known < int(attrs["vocab"])) & ~np.isnan(logits[token]))
        best = legal[np.lexsort((known[legal], -logits[token, legal]))][:top]
        values[token, : len(best)], ids[token, : len(best)] = logits[token, best], known[best]
        ids[token, : len(best)][np.isneginf(logits[token, best])] = 0
    return ids, values


def body(attrs: Attrs, specs: tuple[TensorSpec, ...]) -> str:
    """TopK, which takes the lower of equal ones first; ids ascend."""
    f, node, tile = Text(), OP.named(attrs, specs), int(attrs["tile"])
    wide, vocab = node.dim("Vd"), int(attrs["vocab"])
    ids = f.long("shortlist") if int(attrs.get("shortlist", 0)) else f("Range", 0, wide, 1)
    least = f("Div", -1.0, 0.0)
    legal = f("And", over(f, f("Less", ids, vocab), [0]), f("Equal", "logits", "logits"))
    live = over(f, f("Greater", f.long("counts"), 0), [1])
    live = f("And", live, (np.arange(tile) > 0)[None])
    legal = f("And", legal, f("Reshape", live, [-1, 1]))
    known = f("Where", legal, "logits", least)
    values, at = f.many(2, "TopK", known, [int(attrs["top"])], axis=-1)
    f("Identity", values, out="values")
    found = f("Where", f("Greater", values, least), f("Gather", ids, at), 0)
    f.cast(found, DType.I32, out="ids")
    return f.function("top_ids", OP.names(attrs, len(specs)), OP.outputs)


OP = serve(
    Op(
        name="top_ids",
        operands=OPERANDS,
        results=RESULTS,
        attrs={"tile": None, "top": None, "vocab": None, "shortlist": 0},
        legal={"shortlist": (0, 1)},
        check=_check,
        reference=reference,
        body=body,
    ),
    block_kernels.TOP_IDS,
)
