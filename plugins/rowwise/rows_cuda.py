"""The CUDA side of what moves or adds whole rows: embed, last_rows and the standard Add."""

from __future__ import annotations

from spark_engine.kernel import Arg, Attrs, Cuda, Launch, Plan, Pointer, Specs, Tactic, Target
from spark_engine.plugins.common import row_quant_cuda as rq
from spark_engine.tensors import DType

SOURCE = "rowwise/rows.cu"
THREADS = 256


def _launch(symbol: str, rows: int, h: int, args: tuple[Arg, ...], **macros: int) -> Plan:
    vectors = h // rq.VECTOR
    threads = min(THREADS, rq.whole_warps(vectors))
    defines = tuple((k, str(v)) for k, v in {"THREADS": threads, "H": h, **macros}.items())
    grid, block = (-(-vectors // threads), rows, 1), (threads, 1, 1)
    return Plan((Launch(symbol, grid, block, args, 0, (1, 1, 1), defines, True),))


def _inputs(count: int) -> tuple[Arg, ...]:
    return (*(Pointer("input", i) for i in range(count)), Pointer("output", 0))


def _refuse_embed(attrs: Attrs, specs: Specs, target: Target) -> str | None:
    if attrs["dtype"] != DType.BF16:
        return f"dtype is {attrs['dtype']}; the kernels make bf16 activations"
    return rq.refuse_rows(specs[3:4], specs[3].dims[1])


def _plan_embed(attrs: Attrs, specs: Specs, target: Target) -> Plan:
    tokens, last, _, weight = (s.dims for s in specs)
    macros = {"TILE": int(attrs["tile"]), "VOCAB": weight[0], "SLOTS": last[0]}
    return _launch("embed", tokens[0], weight[1], _inputs(4), **macros)


def _cost_embed(attrs: Attrs, specs: Specs, target: Target) -> float:
    return rq.seconds((), specs[0].dims[0] * specs[3].dims[1] * 4, target)


def _refuse_last(attrs: Attrs, specs: Specs, target: Target) -> str | None:
    return rq.refuse_rows(specs[:1], specs[0].dims[1])


def _plan_last(attrs: Attrs, specs: Specs, target: Target) -> Plan:
    h, rows = specs[0].dims[1], specs[1].dims[0]
    return _launch("last_rows", rows, h, _inputs(2), TILE=int(attrs["tile"]))


def _cost_last(attrs: Attrs, specs: Specs, target: Target) -> float:
    return rq.seconds((), specs[1].dims[0] * specs[0].dims[1] * 4, target)


def _refuse_add(attrs: Attrs, specs: Specs, target: Target) -> str | None:
    a, b = specs
    if a.shape != b.shape:
        return f"{a.name} is {list(a.shape)} and {b.name} {list(b.shape)}; one shape is added"
    return rq.refuse_rows(specs, a.dims[1])


def _plan_add(attrs: Attrs, specs: Specs, target: Target) -> Plan:
    rows, h = specs[0].dims
    return _launch("add", rows, h, _inputs(2))


def _cost_add(attrs: Attrs, specs: Specs, target: Target) -> float:
    return rq.seconds(specs, specs[0].nbytes, target)


EMBED = Cuda((Tactic("rows", SOURCE, _refuse_embed, _plan_embed, _cost_embed),))
LAST_ROWS = Cuda((Tactic("rows", SOURCE, _refuse_last, _plan_last, _cost_last),))
ADD = Cuda((Tactic("rows", SOURCE, _refuse_add, _plan_add, _cost_add),))
