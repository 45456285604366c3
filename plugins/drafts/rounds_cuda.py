"""The CUDA side of what begins and ends a round: round_rows, accept_drafts, shift_ids."""

from __future__ import annotations

from spark_engine.kernel import (
    Attrs,
    Cuda,
    Launch,
    Plan,
    Pointer,
    Scalar,
    Specs,
    Tactic,
    Target,
)
from spark_engine.plugins.common import row_quant_cuda as rq

SOURCE = "drafts/rounds.cu"
THREADS = 128


def _refuse(attrs: Attrs, specs: Specs, target: Target) -> str | None:
    return None


def _cost(attrs: Attrs, specs: Specs, target: Target) -> float:
    return rq.LAUNCH_SECONDS


def _plan(symbol: str, threads: int, inputs: int, outputs: int, **macros: int) -> Plan:
    """`threads` of them are needed; the kernel gets all pointers, then that number."""
    defines = {"THREADS": THREADS, **macros}
    pointers = [Pointer("input", i) for i in range(inputs)]
    pointers += [Pointer("output", i) for i in range(outputs)]
    launch = Launch(
        symbol,
        (-(-threads // THREADS), 1, 1),
        (THREADS, 1, 1),
        (*pointers, Scalar("i32", threads)),
        defines=tuple((name, str(value)) for name, value in defines.items()),
        pdl=True,
    )
    return Plan((launch,))


def _plan_rows(attrs: Attrs, specs: Specs, target: Target) -> Plan:
    most = specs[2].dims[1]
    return _plan("round_rows", specs[0].dims[0], 7, 3, TILE=int(attrs["tile"]), DRAFTS=most)


def _plan_accept(attrs: Attrs, specs: Specs, target: Target) -> Plan:
    vocab = specs[2].dims[1]
    return _plan("accept_drafts", specs[5].dims[0], 8, 5, TILE=int(attrs["tile"]), VOCAB=vocab)


def _plan_shift(attrs: Attrs, specs: Specs, target: Target) -> Plan:
    return _plan("shift_ids", specs[0].dims[0], 4, 1, TILE=int(attrs["tile"]))


ROUND_ROWS = Cuda((Tactic("tokens", SOURCE, _refuse, _plan_rows, _cost),))
ACCEPT_DRAFTS = Cuda((Tactic("rows", SOURCE, _refuse, _plan_accept, _cost),))
SHIFT_IDS = Cuda((Tactic("tokens", SOURCE, _refuse, _plan_shift, _cost),))
