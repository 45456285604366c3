"""Embedding lookup: x[t] = weight[id[t]].

id is the host's token, or the last token sampled in the row's slot if that is −1. With `image_rows`
[I+1,H] an id V + r, r < I, reads its row r. Other ids outside the vocabulary, of padding rows, are
clamped.
"""

import numpy as np

from spark_engine.kernel import Plan
from spark_engine.named import Named
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
    operands.IMAGE_ROWS,
)


def tile_of(attrs: Attrs) -> int:
    """Tokens of one row."""
    return int(attrs["tile"])


def reference(attrs: Attrs, arrays: tuple[Array, ...]) -> tuple[Array, ...]:
    """(token_ids, last_tokens, slots, weight, [image_rows]) -> (x,)."""
    tokens, last, slots, weight, *images = arrays
    dtype, rows = DType(str(attrs["dtype"])).numpy, []
    for index, token in enumerate(tokens):
        chosen = int(last[slots[index // tile_of(attrs)]] if token < 0 else token)
        table = images[0][:-1] if images and in_images(chosen, weight, *images) else weight
        chosen -= len(weight) if table is not weight else 0
        rows.append(table[min(max(chosen, 0), len(table) - 1)].astype(dtype))
    return (np.stack(rows),)


def in_images(token: int, weight: Array, image_rows: Array) -> bool:
    """True if the id means a row of `image_rows`."""
    return 0 <= token - len(weight) < len(image_rows) - 1


def embedded(f: Text, node: Named, ids: str, legal: str, dtype: DType) -> str:
    """[tokens,H]: rows `legal` of the operand `weight`, or those of `image_rows` that the int64
    `ids` name, if the node has it."""
    rows = f.cast(f("Gather", "weight", legal), dtype)
    if "image_rows" not in node:
        return rows
    row, most = f("Sub", ids, node.dim("V")), node.dim("I")
    inside = f("And", f("GreaterOrEqual", row, 0), f("Less", row, most))
    image = f.cast(f("Gather", "image_rows", f("Clip", row, 0, most)), DType.F32)
    chosen = f("Where", f("Unsqueeze", inside, [1]), image, f.cast(rows, DType.F32))
    return f.cast(chosen, dtype)  # onnxruntime's Where takes no bf16


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
    f, node = Text(), OP.named(attrs, specs)
    legal = resolved_ids(f, attrs, node.dim("V"))
    rows = embedded(f, node, f.long("token_ids"), legal, DType(str(attrs["dtype"])))
    f("Identity", rows, out="x")
    return f.function("embed", OP.names(attrs, len(specs)), ("x",))


def _inputs(rows: int, tile: int, dtype: DType, images: DType | None) -> Inputs:
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
        ids = [x.astype(np.int32) for x in (tokens, last, chosen)]
        if images is None:
            return (*ids, weight)
        ids[0][1::4] = vocab + rng.integers(0, 7, len(ids[0][1::4]))
        ids[0][:3] = vocab, vocab + 6, vocab + 7  # the first row, the last, none
        kept = rng.standard_normal((8, 16))
        kept[-1] = np.nan  # scratch
        return (*ids, weight, kept.astype(images.numpy))

    return make


def _case(
    label: str, rows: int, tile: int, weight: DType, dtype: DType, images: bool = False
) -> Case:
    inputs = _inputs(rows, tile, weight, dtype if images else None)
    return Case(label, {"tile": tile, "dtype": dtype.value}, inputs)


CASES = (
    _case("one row", 1, 1, DType.F32, DType.F32),
    _case("decode", 8, 1, DType.F32, DType.F32),
    _case("round", 5, 4, DType.F32, DType.F32),
    _case("longest round", 3, 8, DType.BF16, DType.BF16),
    _case("prefill", 3, 64, DType.F32, DType.F32),
    _case("bf16 weight", 8, 1, DType.BF16, DType.F32),
    _case("bf16 throughout", 2, 64, DType.BF16, DType.BF16),
    _case("images", 2, 64, DType.BF16, DType.F32, images=True),
    _case("images, bf16", 2, 64, DType.BF16, DType.BF16, images=True),
)

KERNEL = Kernel("embed", "token_ids last_tokens slots weight image_rows? x")


def _refuse(node: Node) -> str | None:
    if node.text("dtype") != DType.BF16:
        return f"dtype is {node.text('dtype')}; the kernels make bf16 activations"
    tables = [node[name] for name in ("weight", "image_rows") if name in node]
    return rq.refuse_rows(tables, node.dim("H"))


def _plan(node: Node) -> Plan:
    macros = {"TILE": node.number("tile"), "VOCAB": node.dim("V"), "SLOTS": node.dim("S+1")}
    macros["IMAGES"] = node.dim("I") if "image_rows" in node else 0
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
