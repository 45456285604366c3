"""The CUDA side of `gdn_decode` and `gated_delta_step`: one kernel, the second without convolution
and norm; either with a replay ring or without, of one token or of a round's.

Knows the kernel's shapes: how value rows are cut into chunks, how many blocks share a head, what
fits in shared memory. A state's output is its input's memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from spark_engine.kernel import Early, Plan, Scratch
from spark_engine.plugins.formats.quantised import BY_TOKEN, QUANTS
from spark_engine.plugins.launch import Candidate, Kernel, Node
from spark_engine.plugins.state.replay_ring import FOLD_ROWS
from spark_engine.plugins.tuning.sizes import HEADS, HeadBlocks
from spark_engine.tensors import DType

ARGS = (
    "qkvz width ba conv_weight? conv_state? conv_state_out? a_log dt_bias"
    " gdn_state gdn_state_out gdn_ring? gdn_ring_out? norm_weight? slots starts counts scales?"
    " y? q0? s0? q1? s1? readers? offset"
)
DECODE = Kernel("gdn_decode", ARGS, early=Early(begins=True, lets=True))
COPIES = 2  # quantised copies that one launch writes at most
RESERVED = 1024  # bytes of shared memory that a block takes in addition


@dataclass(frozen=True)
class Problem:
    """The sizes of a node, whichever of the two ops it is."""

    fused: bool
    rows: int
    key_heads: int
    repeat: int
    key_dim: int
    value_dim: int
    state: DType
    single: bool
    taps: int
    quant: str
    copies: int
    ring: int
    drafts: int
    tile: int

    @property
    def lanes(self) -> int:
        """Lanes that hold one value row at 16 bytes each."""
        return self.key_dim * self.state.itemsize // 16

    @property
    def accesses(self) -> int:
        """16-byte accesses a lane makes for one chunk (ACCESSES of the kernel)."""
        if self.lanes < 16:
            return self.lanes // 2
        return 8 if self.state is DType.F32 else 4

    def heads(self, shape: HeadBlocks) -> int:
        """Value heads of one block."""
        return self.repeat if shape.grouped or shape.chunked and self.repeat == 2 else 1

    def shared(self, shape: HeadBlocks) -> int:
        """Bytes of the kernel's `Shared`, its alignment included."""
        heads, ages = self.heads(shape), max(self.ring - 1, 0)
        ahead, values = self.drafts + self.tile, heads * self.value_dim
        most = ages + ahead if shape.chunked else max(self.ring, 1)
        near = ages + (ahead if self.tile > 1 else 1)  # of keys and deltas
        floats = near * (values + self.key_dim) + (ages + ahead + ahead * most) * heads
        floats += 16 * self.key_dim * shape.chunked  # operands
        token = 2 * self.key_dim + values * (2 if self.fused else 1)
        floats += self.tile * (token + 2 * heads * (max(-(-(most - 1) // 4), 1) * 4 + 4))
        staged = shape.warps * shape.stages * (self.accesses * 512 + 8)
        return staged + 4 * floats + 256

    @staticmethod
    def of(node: Node) -> Problem:
        """The node's sizes."""
        fused = "quant" in node.attrs
        keys, values = node.number("key_heads"), node.number("value_heads")
        return Problem(
            fused=fused,
            rows=node.dim("rows"),
            key_heads=keys,
            repeat=values // keys,
            key_dim=node.number("key_dim"),
            value_dim=node.number("value_dim"),
            state=node["gdn_state"].dtype,
            single=node["qkvz"].dtype is DType.F32,
            taps=node.dim("K") if fused else 4,
            quant=node.text("quant") if fused else "none",
            copies=node.number("n") if fused else 1,
            ring=node.number("ring"),
            drafts=node.number("drafts"),
            tile=node.number("tile"),
        )


def refuse(node: Node, shape: HeadBlocks) -> str | None:
    """Says which size the kernel has no shape for."""
    p, target = Problem.of(node), node.target
    if p.lanes not in (4, 8, 16, 32):
        return f"a row of {p.key_dim} {p.state} is no 4, 8, 16 or 32 lanes of 16 bytes"
    if shape.chunked and not (p.fused and 2 < p.tile <= 4):
        return f"{p.tile} tokens are no round of three or four of the fused op"
    if shape.chunked and (p.state is not DType.F32 or p.ring + p.drafts + p.tile > 33):
        return f"a {p.state} state with a ring of {p.ring} is not one in f32 of a warp's 32 entries"
    chunk = p.accesses * 32 // p.lanes
    if p.value_dim % max(chunk, 16):
        return f"{p.value_dim} value rows do not come in chunks of {max(chunk, 16)}"
    if p.ring and p.value_dim % FOLD_ROWS:
        return f"{p.value_dim} value rows do not fold in groups of {FOLD_ROWS}"
    if shape.grouped and p.repeat == 1:
        return "a key head has one value head: nothing to group"
    blocks = p.rows * p.key_heads * p.repeat // p.heads(shape)
    if shape.warps > 8 and blocks > target.sms:
        return f"{blocks} blocks of {shape.warps} warps are more than {target.sms} multiprocessors"
    if p.heads(shape) > shape.warps:
        return f"{p.repeat} value heads a key head are more than {shape.warps} warps"
    if p.shared(shape) > target.shared_bytes:
        return f"{p.shared(shape)} bytes of shared memory are more than {target.shared_bytes}"
    return _refuse_ends(p, node) if p.fused else None


def _refuse_ends(p: Problem, node: Node) -> str | None:
    if (width := node.dim("X")) % 4 or node.number("offset") % 4:
        return f"rows of {width} columns are not read four at a time"
    if p.quant == "fp8_block" and p.value_dim != 128:
        return f"a head of {p.value_dim} columns is not one 128-column block of fp8_block"
    if p.quant in BY_TOKEN:
        return f"the heads of a token are in several blocks, and {BY_TOKEN} have a scale for all"
    if p.copies > COPIES:
        return f"{p.copies} quantised copies; at most {COPIES} are written"
    return None


def plan(node: Node, shape: HeadBlocks) -> Plan:
    """A block for each row and value head or group of them."""
    p = Problem.of(node)
    # Several blocks read a key head's channels, which the last of them shifts.
    if p.fused and not p.drafts and p.repeat > p.heads(shape):
        node = node.with_scratch(readers=Scratch(p.rows * p.key_heads * 4, zeroed=True))
    launch = DECODE.launch(
        node,
        (p.key_heads * p.repeat // p.heads(shape), p.rows),
        32 * shape.warps,
        _macros(p, shape, node),
        p.shared(shape),
        width=node["qkvz"].dims[1],
        offset=node.number("offset"),
    )
    return node.plan(launch)


def _macros(p: Problem, shape: HeadBlocks, node: Node) -> dict[str, float]:
    resident = (node.target.shared_bytes + RESERVED) // (p.shared(shape) + RESERVED)
    return {
        "ACT_F32": p.single,
        "BLOCKS": max(1, min(shape.blocks, resident)),
        "CHUNKED": shape.chunked,
        "COPIES": p.copies,
        "DRAFTS": p.drafts,
        "EPS": node.real("eps") if p.fused else 0.0,
        "FUSED": p.fused,
        "G": p.heads(shape),
        "HK": p.key_heads,
        "KD": p.key_dim,
        "KEEP": node.number("keep") if p.fused else 1,
        "QUANT": QUANTS.index(p.quant),
        "R": p.repeat,
        "RING": p.ring,
        "STAGES": shape.stages,
        "STATE_BYTES": p.state.itemsize,
        "STATE_F16": p.state is DType.F16,
        "TAPS": p.taps,
        "TILE": p.tile,
        "VD": p.value_dim,
        "WARPS": shape.warps,
    }


def cost(node: Node, shape: HeadBlocks) -> float:
    """The state once in and once out (of a ring's, one part in L and half the records), by what
    was measured; few blocks are bound by latency."""
    p, target = Problem.of(node), node.target
    state = p.repeat * p.value_dim * p.key_dim * p.state.itemsize
    passes = 1 + 1 / max(p.ring, 1)
    moved = passes * p.rows * p.key_heads * (state + p.ring * p.repeat * p.value_dim * 2)
    blocks = p.rows * p.key_heads * p.repeat // p.heads(shape)
    reached = min(1.0, blocks * shape.warps * 5e9 / target.bandwidth)  # a warp moves 5 GB/s
    over = 1.1 if shape.stages else 1.13
    if not shape.grouped and (p.ring or p.state.itemsize == 2):
        over += 0.2  # less to move behind each block's start and end
    over += 0.15 * (p.tile - 1) + 0.05 * shape.chunked  # chosen by measured times alone
    return over * moved / (target.bandwidth * reached) + 4e-6


def reduction_key(node: Node, shape: HeadBlocks) -> str:
    """All tactics sum in one order but for those of several tokens at once."""
    return "tokens at once" if shape.chunked else "one order"


def _recorded(node: Node) -> tuple[int, int] | None:
    """Value heads and rows, of states in f32 with a ring."""
    p = Problem.of(node)
    kept = p.ring and p.state is DType.F32 and p.key_dim == p.value_dim == 128
    return (p.key_heads * p.repeat, p.rows) if kept else None


def _candidate(shape: HeadBlocks, why: str = "") -> Candidate:
    return Candidate(
        shape.name,
        "delta_rule/delta_decode_fma.cu",
        partial(plan, shape=shape),
        partial(cost, shape=shape),
        partial(refuse, shape=shape),
        partial(reduction_key, shape=shape),
        why or shape.why,
        recorded=_recorded,
    )


CANDIDATES = tuple(map(_candidate, HEADS))
UNFUSED = tuple(_candidate(h, "nodes that no fusion takes") for h in HEADS if h.fallback)
# gated_delta_step's operands and results, as the kernel calls gdn_decode's.
STEP = {"c": "qkvz", "state_out": "gdn_state_out", "ring_out": "gdn_ring_out", "o": "y"}
