"""Depthwise causal convolution over q|k|v, then SiLU (Qwen3.5 gated delta net).

c[t,ch] = silu(Σ_j weight[ch,j] · x[t−K+1+j, ch]), j = 0…K−1: weight[:, K−1] multiplies the
current token. Columns before the row's first token come from the tile before it in the launch if
that tile is continued, else from `conv_state` (oldest first); they are zero before position 0.
The new state is the last K−1 raw columns before position starts + counts. With `drafts` the state
is a ring of K + drafts columns: that of position q is at q mod (K + drafts), those of a row's last
tokens are written, and nothing else changes; rejected tokens' are overwritten.
A prefill begins from the state of row `sources` and leaves it in its slot, and after a tile with
a row in `saves`, in that row too.
"""

import numpy as np

from spark_engine.interface import MOST_DRAFTS, PREFILL_TILE
from spark_engine.named import Named
from spark_engine.op import Attrs, Op
from spark_engine.operand import Completes, Operand, Result, Role
from spark_engine.plugins.common import operands
from spark_engine.plugins.common.onnx_nodes import Text
from spark_engine.plugins.common.sequence_tiles import (
    Rows,
    continuing,
    final_slots,
    over,
    read_rows,
    read_tiles,
    state_rows,
    store_tiles,
    valid_tokens,
)
from spark_engine.plugins.kernels.delta_rule.causal_conv_kernels import CANDIDATES
from spark_engine.plugins.launch import serve
from spark_engine.tensors import Array, DType, TensorSpec


def _last(columns: Array, end: int, drafts: int) -> Array:
    """The K−1 columns of a slot before position `end`, oldest first, zero before position 0."""
    if not drafts:
        return columns
    at = np.arange(end - (len(columns) - drafts) + 1, end)
    return np.where(at[:, None] < 0, 0.0, columns[at % len(columns)].astype(np.float64))


OPERANDS = (
    operands.x("A[tokens,X]", "first C columns"),
    operands.weight("weight", "f32[C,K]"),
    Operand(
        "conv_state",
        Role.STATE,
        "A[S+1,kept,C]",
        completes=Completes("conv_state", lambda _, own, end, drafts: _last(own, end, drafts)),
    ),
    *operands.ROWS,
    operands.SOURCES,
    operands.SAVES,
)


def inputs(attrs: Attrs) -> tuple[str, ...]:
    """The names of a node's operands."""
    return tuple(o.name for o in OPERANDS if o.when is None or o.when.holds(attrs))


def fits(node: Named) -> str | None:
    """Why so many taps are not served."""
    taps, tile, drafts = node.dim("K"), node.number("tile"), node.number("drafts")
    if not (1 < taps and (tile <= 1 + drafts or node.dim("kept") <= tile)):
        return f"{taps} taps do not fit a tile of {tile} tokens"
    return None


def conv_rows(taps: int, drafts: int) -> int:
    """Columns that a slot's state keeps: behind a round's first token and of all of its tokens."""
    return taps + drafts if drafts else taps - 1


DIMS = {"kept": lambda node: conv_rows(node.dim("K"), node.number("drafts"))}


def reference(attrs: Attrs, arrays: tuple[Array, ...]) -> tuple[Array, ...]:
    """The operands -> (c, state_out)."""
    x, weight, state, slots, starts, counts, *prefill = arrays
    tile, drafts = int(attrs["tile"]), int(attrs.get("drafts", 0))
    sources, saves = state_rows(slots, starts, prefill)
    channels, taps = weight.shape
    wide = weight.astype(np.float64)
    c = np.zeros((len(x), channels))
    new_state = state.copy()
    for row, (start, count) in enumerate(zip(starts.tolist(), counts.tolist(), strict=True)):
        if slots[row] < 0:
            continue
        kept = new_state[sources[row]].copy()
        if start == 0 and (prefill or not drafts):
            kept[...] = 0
        given = x[row * tile : row * tile + count, :channels]
        columns = np.concatenate([_last(kept, start, drafts), given]).astype(np.float64)
        for t in range(count):
            y = np.sum(columns[t : t + taps] * wide.T, axis=0)
            c[row * tile + t] = y / (1 + np.exp(-y))
        if drafts:
            kept[np.arange(start, start + count) % len(kept)] = given  # the last of each place
        else:
            kept = columns[count:]
        for at in (slots[row], saves[row]):
            if at >= 0:
                new_state[at] = kept
    return c.astype(x.dtype), new_state


def body(attrs: Attrs, specs: tuple[TensorSpec, ...]) -> str:
    """K shifted multiply-adds; the state is gathered before and scattered at the end."""
    f = Text()
    fragment(f, OP.named(attrs, specs), ("x", "weight"), ("c", "state_out"))
    return f.function("causal_conv", inputs(attrs), ("c", "state_out"))


def fragment(f: Text, node: Named, names: tuple[str, str], outs: tuple[str, str]) -> None:
    """The body over `names` (x, weight), conv_state and the rows, written to `outs`."""
    tile, drafts = node.number("tile"), node.number("drafts")
    channels, taps = node.shape("C", "K")
    prefill = tile == PREFILL_TILE
    rows = read_tiles(f) if prefill else read_rows(f, "slots", "starts", "counts")
    x = f.cast(f("Slice", names[0], [0], [channels], [1]), DType.F32)
    x = f("Reshape", x, [-1, tile, channels])
    x = f("Where", over(f, valid_tokens(f, rows, tile), [2]), x, 0.0)
    prompt = tile > 1 + MOST_DRAFTS or not drafts  # tiles may continue each other
    kept = conv_rows(taps, drafts)
    stored = _stored(f, rows, kept, drafts)
    history = _history(f, rows, x, tile, stored, kept) if prompt else stored
    columns = f("Concat", history, x, axis=1)
    seen = f("Concat", _recent(f, rows, history, taps, kept), x, axis=1) if drafts else columns
    y = _convolve(f, names[1], seen, tile, taps)
    silu = f("Mul", y, f("Sigmoid", y))
    f.cast(f("Reshape", silu, [-1, channels]), node["conv_state"].dtype, out=outs[0])
    steps = f("Add", over(f, rows.counts, [1]), np.arange(kept)[None])  # [rows, kept]
    if drafts:  # place r takes the last position that is r modulo `kept`
        end = over(f, f("Add", rows.starts, rows.counts), [1])
        back = f("Mod", f("Sub", f("Sub", end, 1), np.arange(kept)[None]), kept)
        steps = f("Sub", over(f, f("Add", rows.counts, kept - 1), [1]), back)
    newest = f("GatherND", columns, over(f, steps, [2]), batch_dims=1)
    update = f.cast(newest, node["conv_state"].dtype)
    if prefill:
        store_tiles(f, rows, "conv_state", update, outs[1])
        return
    target = over(f, final_slots(f, rows) if tile > 1 and prompt else rows.slots, [1])
    f("ScatterND", "conv_state", target, update, out=outs[1])


def _stored(f: Text, rows: Rows, kept: int, drafts: int) -> str:
    """f32 [rows, kept, C]: the raw columns that the slots hold, oldest first."""
    stored = f.cast(f("Gather", "conv_state", rows.sources), DType.F32)
    if not drafts or rows.saves:
        stored = f("Where", over(f, rows.fresh, [1, 2]), 0.0, stored)
    if not drafts:
        return stored
    places = f("Mod", f("Add", over(f, rows.starts, [1]), np.arange(kept)[None]), kept)
    return f("GatherND", stored, over(f, places, [2]), batch_dims=1)


def _recent(f: Text, rows: Rows, history: str, taps: int, kept: int) -> str:
    """f32 [rows, K−1, C]: the last of the history, zero before position 0."""
    columns = f("Slice", history, [kept - taps + 1], [kept], [1])
    position = f("Add", over(f, rows.starts, [1]), np.arange(1 - taps, 0)[None])
    return f("Where", over(f, f("Less", position, 0), [2]), 0.0, columns)


def _history(f: Text, rows: Rows, x: str, tile: int, stored: str, kept: int) -> str:
    """f32 [rows, kept, C]: the raw columns before each row's first token."""
    if tile == 1:
        return stored
    tails = f("Slice", x, [tile - kept], [tile], [1])
    first = f("Slice", stored, [0], [1], [0])  # no tile precedes the first
    before = f("Concat", first, f("Slice", tails, [0], [-1], [0]), axis=0)
    return f("Where", over(f, continuing(f, rows), [1, 2]), before, stored)


def _convolve(f: Text, weight: str, columns: str, tile: int, taps: int) -> str:
    """f32 [rows, tile, C]: the sum over taps, oldest first."""
    by_tap = f("Transpose", weight, perm=[1, 0])  # [K, C]
    total = ""
    for j in range(taps):
        term = f(
            "Mul", f("Slice", columns, [j], [j + tile], [1]), f("Slice", by_tap, [j], [j + 1], [0])
        )
        total = f("Add", total, term) if total else term
    return total


OP = serve(
    Op(
        name="causal_conv",
        operands=OPERANDS,
        results=(
            Result("c", "A[tokens,C]", note="after SiLU"),
            Result("state_out", "A[S+1,kept,C]", updates="conv_state"),
        ),
        attrs={"tile": None, "drafts": 0},
        dims=DIMS,
        check=fits,
        reference=reference,
        body=body,
    ),
    CANDIDATES,
)
