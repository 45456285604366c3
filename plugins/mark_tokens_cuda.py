"""The CUDA side of `mark_tokens`: rows of fresh sequences cleared, then tokens counted."""

from __future__ import annotations

from spark_engine.kernel import Attrs, Cuda, Launch, Plan, Pointer, Specs, Tactic, Target
from spark_engine.plugins import row_quant_cuda as rq

THREADS, MOST_CHUNKS = 256, 64


def _refuse(attrs: Attrs, specs: Specs, target: Target) -> str | None:
    return f"tile is {attrs['tile']}; at most 1024 fit" if int(attrs["tile"]) > 1024 else None


def _plan(attrs: Attrs, specs: Specs, target: Target) -> Plan:
    vocab, rows, tile = specs[0].dims[1], specs[3].dims[0], int(attrs["tile"])
    macros = {"VOCAB": vocab, "TILE": tile, "THREADS": THREADS}
    defines = tuple((name, str(value)) for name, value in macros.items())
    chunks = min(-(-vocab // (4 * THREADS)), MOST_CHUNKS)
    seen = Pointer("output", 0)
    steps = [Pointer("input", i) for i in range(1, 7)]  # tokens, last, slots, starts, counts, lens
    clear = Launch(
        "clear", (chunks, rows, 1), (THREADS, 1, 1), (seen, steps[2], steps[3]), 0, (1, 1, 1),
        defines, True,
    )  # fmt: skip
    block = (rq.whole_warps(tile), 1, 1)
    mark = Launch("mark", (rows, 1, 1), block, (seen, *steps), 0, (1, 1, 1), defines, True)
    return Plan((clear, mark))


def _cost(attrs: Attrs, specs: Specs, target: Target) -> float:
    return 2 * rq.LAUNCH_SECONDS


CUDA = Cuda((Tactic("atomics", "mark_tokens.cu", _refuse, _plan, _cost),))
