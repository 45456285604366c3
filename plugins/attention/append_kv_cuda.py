"""The CUDA side of `append_kv`: one launch, a block for each token."""

from __future__ import annotations

from spark_engine.kernel import Attrs, Cuda, Launch, Plan, Scalar, Specs, Tactic, Target
from spark_engine.plugins.attention.paged_attention_nodes import Sizes, sizes_of
from spark_engine.plugins.attention.paged_decode_cuda import (
    pages_macros,
    pointers,
    refuse_pages,
    token_bytes,
)

WARPS = 8  # of a block, at most: a head of keys or values each at a time


def _sizes(attrs: Attrs, specs: Specs) -> Sizes:
    return sizes_of({"heads": attrs["kv_heads"], **attrs}, specs[4], "append_kv")


def refuse(attrs: Attrs, specs: Specs, target: Target) -> str | None:
    """What the pages' layout forbids."""
    return refuse_pages(_sizes(attrs, specs), specs[0].dtype, specs[2].dims[0])


def plan(attrs: Attrs, specs: Specs, target: Target) -> Plan:
    """Its warps take a token's heads of keys and of values in turn."""
    s, rows = _sizes(attrs, specs), specs[7].dims[0]
    macros = pages_macros(s, 0, specs[2].dims[0], float(attrs["eps"]))
    warps = min(WARPS, 2 * s.kv_heads)
    launch = Launch(
        "append_kv",
        (rows * s.tile, 1, 1),
        (32 * warps, 1, 1),
        (
            *pointers("input", 0, 1, 2, 3),
            *pointers("output", 0, 1),
            *pointers("input", 6, 7, 8, 9),
            Scalar("i32", specs[6].dims[1]),
        ),
        defines=(*macros, ("TOKENS", str(s.tile)), ("WARPS", str(warps))),
        pdl=True,
    )
    return Plan((launch,))


def cost(attrs: Attrs, specs: Specs, target: Target) -> float:
    """A short launch; in a prefill, what it reads and writes."""
    s, rows = _sizes(attrs, specs), specs[7].dims[0]
    token = 2 * s.kv_heads * (2 * s.dim + token_bytes(s))
    return 4e-6 + rows * s.tile * token / (0.5 * target.bandwidth)


CUDA = Cuda(tactics=(Tactic("tokens", "attention/append_kv.cu", refuse, plan, cost),))
