"""The CUDA side of `gdn_decode` and `gated_delta_step`: one kernel, the second without convolution
and norm; either with a replay ring or without. With drafts another kernel, of the same shapes, has
a round's tokens.

Knows the kernel's shapes: how value rows are cut into chunks, how many blocks share a head, what
fits in shared memory. A state's output is its input's memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from spark_engine.kernel import (
    NULL,
    Arg,
    Attrs,
    Cuda,
    Early,
    Launch,
    Plan,
    Pointer,
    Scalar,
    Scratch,
    Specs,
    Tactic,
    Target,
)
from spark_engine.plugins.common.quantised import QUANTS
from spark_engine.plugins.gdn.replay_ring import FOLD_ROWS
from spark_engine.tensors import DType

SOURCE, ROUND = "gdn/gdn_decode.cu", "gdn/gdn_round.cu"
COPIES = 2  # quantised copies that one launch writes at most
ROUND_BLOCKS = {
    16: 1,
    8: 2,
    4: 4,
}  # by warps: of a multiprocessor, so that a round has 128 registers
RESERVED = 1024  # bytes of shared memory that a block takes beside its own


@dataclass(frozen=True)
class Shape:
    """Warps of a block, blocks of a multiprocessor, and the way of the state.

    `stages`: chunks that each warp has on their way to shared memory; 0, they come through
    registers. `grouped`: a block has all value heads of a key head, else one.
    """

    warps: int
    blocks: int
    grouped: bool = False
    stages: int = 0


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

    def heads(self, shape: Shape) -> int:
        """Value heads of one block."""
        return self.repeat if shape.grouped else 1

    def shared(self, shape: Shape) -> int:
        """Bytes of the kernel's `Shared`, its alignment included."""
        heads, ages = self.heads(shape), max(self.ring - 1, 0)
        values = heads * self.value_dim
        if self.drafts:
            return self._round(shape, heads, ages)
        floats = 2 * self.key_dim + values * (3 if self.fused else 2) + 4 * heads + 4
        floats += ages * (values + self.key_dim + 3 * heads)
        return self._staged(shape) + 4 * floats + 256

    def _staged(self, shape: Shape) -> int:
        return shape.warps * shape.stages * (self.accesses * 512 + 8)

    def _round(self, shape: Shape, heads: int, ages: int) -> int:
        """Bytes of `Round`."""
        ahead, values = self.drafts + self.tile, heads * self.value_dim
        floats = (ages + ahead) * (values + self.key_dim + heads) + ahead * heads * self.ring
        token = 2 * self.key_dim + values * (2 if self.fused else 1)
        floats += self.tile * (token + 2 * heads * (-(-ages // 4) * 4 + 4))
        return self._staged(shape) + 4 * floats + 256


def problem(attrs: Attrs, specs: Specs) -> Problem:
    """The node's sizes."""
    fused, ring = "quant" in attrs, int(attrs["ring"])
    keys, values = int(attrs["key_heads"]), int(attrs["value_heads"])
    return Problem(
        fused=fused,
        rows=specs[(8 if fused else 5) + (ring > 0)].dims[0],
        key_heads=keys,
        repeat=values // keys,
        key_dim=int(attrs["key_dim"]),
        value_dim=int(attrs["value_dim"]),
        state=specs[6 if fused else 4].dtype,
        single=specs[0].dtype is DType.F32,
        taps=specs[2].dims[1] if fused else 4,
        quant=str(attrs.get("quant", "none")),
        copies=int(attrs.get("n", 1)),
        ring=ring,
        drafts=int(attrs.get("drafts", 0)),
        tile=int(attrs.get("tile", 1)),
    )


def refuse(shape: Shape, attrs: Attrs, specs: Specs, target: Target) -> str | None:
    """Says which size the kernel has no shape for."""
    p = problem(attrs, specs)
    if p.lanes not in (4, 8, 16, 32):
        return f"a row of {p.key_dim} {p.state} is no 4, 8, 16 or 32 lanes of 16 bytes"
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
    return _refuse_ends(p, attrs, specs) if p.fused else None


def _refuse_ends(p: Problem, attrs: Attrs, specs: Specs) -> str | None:
    if specs[0].dims[1] % 4 or int(attrs["offset"]) % 4:
        return f"rows of {specs[0].dims[1]} columns are not read four at a time"
    if p.quant == "fp8_block" and p.value_dim != 128:
        return f"a head of {p.value_dim} columns is not one 128-column block of fp8_block"
    if p.copies > COPIES:
        return f"{p.copies} quantised copies; at most {COPIES} are written"
    return None


def plan(shape: Shape, attrs: Attrs, specs: Specs, target: Target) -> Plan:
    """A block for each row and value head or group of them."""
    p = problem(attrs, specs)
    # Several blocks read a key head's channels, which the last of them shifts.
    readers = p.fused and not p.drafts and p.repeat > p.heads(shape)
    launch = Launch(
        symbol="gdn_round" if p.drafts else "gdn_decode",
        grid=(p.key_heads * p.repeat // p.heads(shape), p.rows, 1),
        block=(32 * shape.warps, 1, 1),
        args=_fused_args(attrs, specs, readers) if p.fused else _step_args(specs, p.ring > 0),
        shared=p.shared(shape),
        defines=_defines(p, shape, attrs, target),
        source=ROUND if p.drafts else None,
        pdl=True,
        early=Early(begins=not p.drafts, lets=not p.drafts),
    )
    return Plan((launch,), (Scratch(p.rows * p.key_heads * 4, zeroed=True),) * readers)


def _defines(p: Problem, shape: Shape, attrs: Attrs, target: Target) -> tuple[tuple[str, str], ...]:
    room = (target.shared_bytes + RESERVED) // (p.shared(shape) + RESERVED)
    numbers = {
        "ACT_F32": p.single,
        "BLOCKS": max(1, min(shape.blocks, room, ROUND_BLOCKS[shape.warps] if p.drafts else room)),
        "COPIES": p.copies,
        "DRAFTS": p.drafts,
        "FUSED": p.fused,
        "G": p.heads(shape),
        "HK": p.key_heads,
        "KD": p.key_dim,
        "KEEP": attrs.get("keep", 1),
        "QUANT": QUANTS.index(p.quant),
        "R": p.repeat,
        "RING": p.ring,
        "STAGES": shape.stages,
        "STATE_BYTES": p.state.itemsize,
        "TAPS": p.taps,
        "TILE": p.tile,
        "VD": p.value_dim,
        "WARPS": shape.warps,
    }
    return tuple((name, str(int(value))) for name, value in numbers.items())


def _fused_args(attrs: Attrs, specs: Specs, readers: bool) -> tuple[Arg, ...]:
    p = problem(attrs, specs)
    ring = int(p.ring > 0)  # operands and results behind the state stand one further
    results: list[Arg] = [Pointer("output", i + ring) for i in range(2, 3 + 2 * COPIES)]
    y = results.pop(0) if attrs["keep"] else NULL
    pairs: list[Arg] = []
    for _ in range(p.copies if p.quant != "none" else 0):
        pairs.append(results.pop(0))
        pairs.append(results.pop(0) if p.quant != "fp8" else NULL)
    pairs += [NULL] * (2 * COPIES - len(pairs))
    return (
        Pointer("input", 0),
        Scalar("i32", specs[0].dims[1]),
        *(Pointer("input", i) for i in (1, 2, 3)),
        Pointer("output", 0),
        *(Pointer("input", i) for i in (4, 5, 6)),
        Pointer("output", 1),
        *((Pointer("input", 7), Pointer("output", 2)) if ring else (NULL, NULL)),
        *(Pointer("input", i + ring) for i in (7, 8, 9, 10)),
        Pointer("input", 11 + ring) if len(specs) > 11 + ring else NULL,
        y,
        *pairs,
        Pointer("scratch", 0) if readers else NULL,
        Scalar("f32", float(attrs["eps"])),
        Scalar("i32", int(attrs["offset"])),
    )


def _step_args(specs: Specs, ring: bool) -> tuple[Arg, ...]:
    return (
        Pointer("input", 0),
        Scalar("i32", specs[0].dims[1]),
        Pointer("input", 1),
        *[NULL] * 3,
        *(Pointer("input", i) for i in (2, 3, 4)),
        Pointer("output", 1),
        *((Pointer("input", 5), Pointer("output", 2)) if ring else (NULL, NULL)),
        NULL,
        *(Pointer("input", i + ring) for i in (5, 6, 7)),
        NULL,
        Pointer("output", 0),
        *[NULL] * 5,
        Scalar("f32", 0.0),
        Scalar("i32", 0),
    )


def cost(shape: Shape, attrs: Attrs, specs: Specs, target: Target) -> float:
    """The state once in and once out (of a ring's, one part in L and half the records), by what
    was measured; few blocks are bound by latency."""
    p = problem(attrs, specs)
    state = p.repeat * p.value_dim * p.key_dim * p.state.itemsize
    passes = 1 + 1 / max(p.ring, 1)
    moved = passes * p.rows * p.key_heads * (state + p.ring * p.repeat * p.value_dim * 2)
    blocks = p.rows * p.key_heads * p.repeat // p.heads(shape)
    reached = min(1.0, blocks * shape.warps * 5e9 / target.bandwidth)  # a warp moves 5 GB/s
    over = 1.1 if shape.stages else 1.13
    if not shape.grouped and (p.ring or p.state is DType.BF16):
        over += 0.2  # less to move behind each block's start and end
    if shape.stages and not shape.grouped and not target.large_shared:
        over += 0.1  # one block an SM: loads and products take turns
    over += 0.15 * (p.tile - 1)
    return over * moved / (target.bandwidth * reached) + 4e-6


def reduction_key(attrs: Attrs, specs: Specs, target: Target) -> str:
    """All tactics sum in one order."""
    return "one order"


def _tactic(name: str, shape: Shape) -> Tactic:
    return Tactic(
        name,
        SOURCE,
        partial(refuse, shape),
        partial(plan, shape),
        partial(cost, shape),
        reduction_key,
    )


CUDA = Cuda(
    tactics=(
        _tactic("staged", Shape(8, 3, stages=2)),
        _tactic("registers", Shape(8, 2)),
        _tactic("small registers", Shape(4, 4)),
        _tactic("many registers", Shape(16, 1)),
        _tactic("grouped", Shape(4, 4, grouped=True, stages=2)),
        _tactic("wide grouped", Shape(8, 3, grouped=True, stages=1)),
    )
)
