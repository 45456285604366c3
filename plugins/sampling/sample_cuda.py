"""The CUDA side of `sample`: one pass over the logits, one block a row over what it left."""

from __future__ import annotations

from spark_engine.kernel import (
    NULL,
    Arg,
    Attrs,
    Cuda,
    Launch,
    Plan,
    Pointer,
    Rank,
    Scalar,
    Scratch,
    Specs,
    Tactic,
    Target,
)
from spark_engine.plugins.ranks.collectives_cuda import VECTOR, symmetric_bytes

CELL = 256
WARPS = 8  # of the first kernel's block
THREADS = 512  # of the second's
SMALL, FEW, ROOM, BINS = 64, 1024, 4096, 2048
STATIC = 2048  # bytes of shared memory beside `RowMemory`
MAIL = 2048  # vectors that a block shows other ranks at a time: of a row in whole, 32 KiB


def _cells(width: int) -> int:
    return -(-width // CELL)


def _per(specs: Specs, target: Target) -> int:
    """Cells a warp: few where few rows must fill the GPU."""
    blocks = specs[0].dims[0] * -(-_cells(specs[0].dims[1]) // WARPS)
    return 4 if blocks >= 16 * target.sms else 1


def _shared(specs: Specs, width: int) -> int:
    """Bytes of the second kernel's `RowMemory` (sample_work.cuh), which checks them."""
    cells, biases = _cells(width), specs[4].dims[1]
    fixed = 8 * (ROOM + 2 * FEW + BINS + SMALL) + 5 * THREADS + 256
    return -(-(20 * cells + 8 * biases + fixed) // 128) * 128


def _macros(values: dict[str, int]) -> tuple[tuple[str, str], ...]:
    return tuple((name, str(value)) for name, value in values.items())


def refuse(attrs: Attrs, specs: Specs, target: Target) -> str | None:
    """Refuses rows that 16-byte loads do not divide, and those beyond shared memory."""
    share, top, ranks = specs[0].dims[1], int(attrs["top"]), max(1, int(attrs.get("ranks", 0)))
    if share % 4:
        return f"a row of {share} logits; pad the vocabulary to a multiple of 4"
    if top > min(SMALL, share):
        return f"top is {top}; up to {min(SMALL, share)} is served"
    if ranks > 1 and share < CELL:
        return f"a rank has {share} logits of a row; {CELL} are shown together"
    needed = _shared(specs, share * ranks)
    if needed > target.shared_bytes - STATIC:
        return f"{share * ranks} logits a row need {needed} bytes of shared memory"
    return None


def plan(attrs: Attrs, specs: Specs, target: Target) -> Plan:
    """sample_cells, sample_rows; of ranks that share the vocabulary as one with the others."""
    ranks, drafted = max(1, int(attrs.get("ranks", 0))), bool(attrs.get("drafts", 0))
    rows, share = specs[0].dims
    width = ranks * share
    cells, per = _cells(width), _per(specs, target)
    row = {"WIDTH": width, "VOCAB": int(attrs["vocab"]), "BIASES": specs[4].dims[1]}
    if drafted:
        row["TILE"] = int(attrs["tile"])
    if ranks > 1:
        row["RANKS"] = ranks
    blocks = min(rows, target.sms)
    mail = max(MAIL, 1 + SMALL + SMALL // 4 + CELL // 2 + share // CELL + 2)
    shared = _shared(specs, width)
    first_pass = _macros({**row, "PER": per})
    if ranks > 1:
        row["MAIL"] = mail
    second_pass = _macros({**row, "TOP": int(attrs["top"]), "SHARED": shared})
    ids: Arg = Pointer("input", 11) if drafted else NULL
    given = (*(Pointer("input", i) for i in range(11)), ids)
    left = tuple(Pointer("scratch", i) for i in range(4))
    own = _cells(share) + (1 if share % CELL else 0)  # a share may begin and end within a cell
    first = Launch(
        "sample_cells",
        (-(-own // (WARPS * per)), rows, 1),
        (32 * WARPS, 1, 1),
        (*given, *left, Rank()),
        defines=first_pass,
        pdl=True,
        source="sampling/sample_cells.cu",
    )
    made = (Pointer("output", i) for i in range(5))
    emitted: tuple[Arg, ...] = (Pointer("input", 11), Pointer("output", 5))
    each = 1 + max(1, -(-share // (4 * mail)))  # meetings of a row at most
    numbers = (Scalar("i32", rows), Scalar("i32", -(-rows // blocks) * each | 1))
    others: tuple[Arg, ...] = (NULL, NULL, Rank())
    if ranks > 1:
        others = (Pointer("scratch", 4), Pointer("peers", 0), Rank())
    second = Launch(
        "sample_rows",
        (blocks if ranks > 1 else rows, 1, 1),
        (THREADS, 1, 1),
        (*given, *left, *made, *((NULL, NULL) if drafted else emitted), *numbers, *others),
        shared,
        defines=second_pass,
        pdl=True,
        resident=ranks > 1,
    )
    scratch = tuple(Scratch(4 * rows * cells) for _ in left)
    if ranks == 1:
        return Plan((first, second), scratch)
    room = Scratch(4 * blocks * width)
    region = symmetric_bytes(blocks * mail * VECTOR)
    return Plan((first, second), (*scratch, room), symmetric=region)


def cost(attrs: Attrs, specs: Specs, target: Target) -> float:
    """The logits once, and the latency of the second kernel and of its meeting."""
    meeting = 5e-6 if int(attrs.get("ranks", 0)) > 1 else 0.0
    return 1.1 * specs[0].nbytes / target.bandwidth + 12e-6 + meeting


CUDA = Cuda(tactics=(Tactic("cells", "sampling/sample.cu", refuse, plan, cost),))
