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
    Scratch,
    Specs,
    Tactic,
    Target,
)

CELL = 256
WARPS = 8  # of the first kernel's block
THREADS = 512  # of the second's
SMALL, FEW, ROOM, BINS = 64, 1024, 4096, 2048


def _cells(specs: Specs) -> int:
    return -(-specs[0].dims[1] // CELL)


def _per(specs: Specs, target: Target) -> int:
    """Cells a warp: few where few rows must fill the GPU."""
    blocks = specs[0].dims[0] * -(-_cells(specs) // WARPS)
    return 4 if blocks >= 16 * target.sms else 1


def _shared(specs: Specs) -> int:
    """Bytes of the second kernel's `RowMemory` (sample_work.cuh), which checks them."""
    cells, biases = _cells(specs), specs[4].dims[1]
    fixed = 8 * (ROOM + 2 * FEW + BINS + SMALL) + 5 * THREADS + 256
    return -(-(20 * cells + 8 * biases + fixed) // 128) * 128


def _macros(values: dict[str, int]) -> tuple[tuple[str, str], ...]:
    return tuple((name, str(value)) for name, value in values.items())


def refuse(attrs: Attrs, specs: Specs, target: Target) -> str | None:
    """Refuses rows that 16-byte loads do not divide, and those beyond shared memory."""
    width, top = specs[0].dims[1], int(attrs["top"])
    if width % 4:
        return f"a row of {width} logits; pad the vocabulary to a multiple of 4"
    if top > min(SMALL, width):
        return f"top is {top}; up to {min(SMALL, width)} is served"
    if _shared(specs) > target.shared_bytes - 1024:
        return f"{width} logits a row need {_shared(specs)} bytes of shared memory"
    return None


def plan(attrs: Attrs, specs: Specs, target: Target) -> Plan:
    """sample_cells, sample_rows."""
    rows, width = specs[0].dims
    cells, per = _cells(specs), _per(specs, target)
    row = {"WIDTH": width, "VOCAB": int(attrs["vocab"]), "BIASES": specs[4].dims[1]}
    drafted = bool(attrs.get("drafts", 0))
    if drafted:
        row["TILE"] = int(attrs["tile"])
    first_pass = _macros({**row, "PER": per})
    second_pass = _macros({**row, "TOP": int(attrs["top"]), "SHARED": _shared(specs)})
    ids: Arg = Pointer("input", 11) if drafted else NULL
    given = (*(Pointer("input", i) for i in range(11)), ids)
    left = tuple(Pointer("scratch", i) for i in range(4))
    first = Launch(
        "sample_cells",
        (-(-cells // (WARPS * per)), rows, 1),
        (32 * WARPS, 1, 1),
        (*given, *left),
        defines=first_pass,
        pdl=True,
        source="sampling/sample_cells.cu",
    )
    made = (Pointer("output", i) for i in range(5))
    emitted: tuple[Arg, ...] = (Pointer("input", 11), Pointer("output", 5))
    second = Launch(
        "sample_rows",
        (rows, 1, 1),
        (THREADS, 1, 1),
        (*given, *left, *made, *((NULL, NULL) if drafted else emitted)),
        _shared(specs),
        defines=second_pass,
        pdl=True,
    )
    return Plan((first, second), tuple(Scratch(4 * rows * cells) for _ in left))


def cost(attrs: Attrs, specs: Specs, target: Target) -> float:
    """The logits once, and the latency of the second kernel."""
    return 1.1 * specs[0].nbytes / target.bandwidth + 12e-6


CUDA = Cuda(tactics=(Tactic("cells", "sampling/sample.cu", refuse, plan, cost),))
