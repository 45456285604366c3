"""Embedding lookup: x[t] = weight[id[t]].

id is the host's token, or the last token sampled in the row's slot if that is −1. Ids outside the
vocabulary, of padding rows, are clamped.
"""

import numpy as np

from spark_engine.kernel import Plan
from spark_engine.op import Attrs, Case, Inputs, Op
from spark_engine.operand import Result
from spark_engine.plugins.common import operands
from spark_engine.plugins.common.onnx_nodes import Text
from spark_engine.plugins.kernels.common import row_quant as rq
from spark_engine.plugins.kernels.rowwise.rows_kernels import SOURCE, plan_rows
from spark_engine.plugins.launch import Candidate, Kernel, Node, serve
from spark_engine.tensors import Array, DType, TensorSpec

OPERANDS = (
    operands.TOKEN_IDS,
    operands.LAST_TOKENS,
    operands.SLOTS,
    operands.weight("weight", "W[V,H]"),
)


def tile_of(attrs: Attrs) -> int:
    """Tokens of one row."""
    return int(attrs["tile"])


def reference(attrs: Attrs, arrays: tuple[Array, ...]) -> tuple[Array, ...]:
    """(token_ids, last_tokens, slots, weight) -> (x,)."""
    tokens, last, slots, weight = arrays
    rows = []
    for index, token in enumerate(tokens):
        chosen = last[slots[index // tile_of(attrs)]] if token < 0 else token
        rows.append(weight[min(max(int(chosen), 0), len(weight) - 1)])
    return (np.stack(rows).astype(DType(str(attrs["dtype"])).numpy),)


def resolved_ids(f: Text, attrs: Attrs, vocab: int) -> str:
    """int64 [tokens]: the token ids, −1 replaced by the last token of the slot, clamped.

    Reads the operands `token_ids`, `last_tokens` and `slots`.
    """
    last = f("Gather", "last_tokens", "slots")  # [rows]
    if tile_of(attrs) > 1:
        wide = f("Expand", f("Unsqueeze", last, [1]), [1, tile_of(attrs)])
        last = f("Reshape", wide, [-1])
    chosen = f("Where", f("Less", "token_ids", np.int32(0)), last, "token_ids")
    return f.long(f("Clip", chosen, np.int32(0), np.int32(vocab - 1)))


def body(attrs: Attrs, specs: tuple[TensorSpec, ...]) -> str:
    """One gather of ids, one of rows."""
    f = Text()
    rows = f("Gather", "weight", resolved_ids(f, attrs, OP.named(attrs, specs).dim("V")))
    f.cast(rows, DType(str(attrs["dtype"])), out="x")
    return f.function("embed", OP.inputs, ("x",))


def _inputs(rows: int, tile: int, dtype: DType = DType.F32) -> Inputs:
    vocab, slots = 50, 9

    def make(rng: np.random.Generator) -> tuple[Array, ...]:
        tokens = rng.integers(0, vocab, rows * tile)
        tokens[::3] = -1 if tile == 1 else 0
        tokens[-1] = 1 << 30  # a padding row may hold anything
        last = rng.integers(0, vocab, slots)
        last[-1] = -(1 << 31)  # the scratch row
        chosen = rng.permutation(slots - 1)[:rows]
        chosen[rows // 2 :] = -1
        weight = rng.standard_normal((vocab, 16)).astype(dtype.numpy)
        return tokens.astype(np.int32), last.astype(np.int32), chosen.astype(np.int32), weight

    return make


def _case(label: str, rows: int, tile: int, weight: DType, dtype: DType) -> Case:
    return Case(label, {"tile": tile, "dtype": dtype.value}, _inputs(rows, tile, weight))


CASES = (
    _case("one row", 1, 1, DType.F32, DType.F32),
    _case("decode", 8, 1, DType.F32, DType.F32),
    _case("round", 5, 4, DType.F32, DType.F32),
    _case("longest round", 3, 8, DType.BF16, DType.BF16),
    _case("prefill", 3, 64, DType.F32, DType.F32),
    _case("bf16 weight", 8, 1, DType.BF16, DType.F32),
    _case("bf16 throughout", 2, 64, DType.BF16, DType.BF16),
)

KERNEL = Kernel("embed", "token_ids last_tokens slots weight x")


def _refuse(node: Node) -> str | None:
    if node.text("dtype") != DType.BF16:
        return f"dtype is {node.text('dtype')}; the kernels make bf16 activations"
    return rq.refuse_rows((node["weight"],), node.dim("H"))


def _plan(node: Node) -> Plan:
    macros = {"TILE": node.number("tile"), "VOCAB": node.dim("V"), "SLOTS": node.dim("S+1")}
    return plan_rows(KERNEL, node, *node.shape("tokens", "H"), **macros)


def _cost(node: Node) -> float:
    return rq.seconds((), node.dim("tokens") * node.dim("H") * 4, node.target)


OP = serve(
    Op(
        name="embed",
        operands=OPERANDS,
        results=(Result("x", "A[tokens,H]"),),
        attrs={"tile": None, "dtype": None},
        reference=reference,
        body=body,
        cases=CASES,
    ),
    (Candidate("rows", SOURCE, _plan, _cost, _refuse),),
)
