"""The CUDA side of `draft_token`: many blocks a row, the last of which to arrive ends it."""

from __future__ import annotations

from spark_engine.kernel import (
    NULL,
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
from spark_engine.plugins.common import row_quant_cuda as rq

THREADS = 256
WIDTH = 4  # logits of one load
FEW, MANY = 2, 8  # loads of a thread


def _loads(specs: Specs, target: Target) -> int:
    """Loads of a thread: few where few rows must fill the GPU."""
    rows, logits = specs[0].dims
    blocks = rows * -(-logits // (THREADS * WIDTH * MANY))
    return MANY if blocks >= 8 * target.sms else FEW


def _refuse(attrs: Attrs, specs: Specs, target: Target) -> str | None:
    logits = specs[0].dims[1]
    if logits % WIDTH:
        return f"a row of {logits} logits; pad the vocabulary to a multiple of {WIDTH}"
    return None


def _plan(attrs: Attrs, specs: Specs, target: Target) -> Plan:
    (rows, logits), short = specs[0].dims, int(attrs["shortlist"])
    loads, pairs = _loads(specs, target), int(attrs.get("pairs", 0))
    parts = -(-logits // (THREADS * WIDTH * loads))
    macros = {"LOGITS": logits, "VOCAB": int(attrs["vocab"]), "LOADS": loads, "THREADS": THREADS}
    macros |= {"DRAFTS": specs[1 + short].dims[1], "INDEX": int(attrs["index"]), "SHORTLIST": short}
    if pairs:
        macros["PAIRS"] = pairs
    shortlist = Pointer("input", 1) if short else NULL
    steps = (Pointer("input", i + short) for i in (2, 3, 4))
    outputs = (Pointer("output", i) for i in range(3))
    scratch = (Pointer("scratch", i) for i in range(2))
    launch = Launch(
        "draft_token",
        (parts, rows, 1),
        (THREADS, 1, 1),
        (
            Pointer("input", 0),
            shortlist,
            *steps,
            *outputs,
            *scratch,
        ),
        defines=tuple((name, str(value)) for name, value in macros.items()),
        pdl=True,
    )
    return Plan((launch,), (Scratch(8 * rows, zeroed=True), Scratch(4 * rows, zeroed=True)))


def _cost(attrs: Attrs, specs: Specs, target: Target) -> float:
    return specs[0].nbytes / target.bandwidth + rq.LAUNCH_SECONDS


def _plan_best(attrs: Attrs, specs: Specs, target: Target) -> Plan:
    rows, logits = specs[0].dims
    loads = _loads(specs, target)
    parts = -(-logits // (THREADS * WIDTH * loads))
    macros = {"LOGITS": logits, "VOCAB": int(attrs["vocab"]), "LOADS": loads, "THREADS": THREADS}
    macros |= {"SHORTLIST": 0, "BEST": 1}
    launch = Launch(
        "draft_best",
        (parts, rows, 1),
        (THREADS, 1, 1),
        (
            *(Pointer("input", i) for i in (0, 4, 1, 3)),
            Pointer("output", 0),
            *(Pointer("scratch", i) for i in range(2)),
        ),
        defines=tuple((name, str(value)) for name, value in macros.items()),
        pdl=True,
    )
    return Plan((launch,), (Scratch(8 * rows, zeroed=True), Scratch(4 * rows, zeroed=True)))


BEST = Cuda((Tactic("parts", "drafts/draft_token.cu", _refuse, _plan_best, _cost),))
CUDA = Cuda((Tactic("parts", "drafts/draft_token.cu", _refuse, _plan, _cost),))
