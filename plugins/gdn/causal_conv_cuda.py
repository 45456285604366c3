"""The CUDA side of `causal_conv`: one launch for either tile; the state is updated in place."""

from __future__ import annotations

from functools import partial

from spark_engine.interface import PREFILL_TILE
from spark_engine.kernel import (
    NULL,
    Arg,
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
from spark_engine.tensors import DType

CHANNELS = 512  # of one block
SEGMENT = 8  # tokens that one thread slides over


def refuse(attrs: Attrs, specs: Specs, target: Target) -> str | None:
    """Refuses channels that do not come in fours."""
    channels, _ = specs[1].dims
    if channels % 4:
        return f"{channels} channels are not computed four at a time"
    return None


def refuse_words(attrs: Attrs, specs: Specs, target: Target) -> str | None:
    """Refuses what is not a prefill of bf16 whose rows begin at whole 8 bytes."""
    if int(attrs["tile"]) != PREFILL_TILE:
        return f"tiles of {attrs['tile']} tokens; those of a prefill are served"
    if specs[0].dtype is not DType.BF16 or specs[0].dims[1] % 4:
        return f"x is {specs[0]}; bf16 and a multiple of 4 columns are served"
    return refuse(attrs, specs, target)


def plan(attrs: Attrs, specs: Specs, target: Target, words: bool = False) -> Plan:
    """Blocks of channels x rows x segments of a tile."""
    (_, width), (channels, taps) = specs[0].dims, specs[1].dims
    tile, rows = int(attrs["tile"]), specs[3].dims[0]
    args: tuple[Arg, ...] = (
        Pointer("input", 0),
        Scalar("i32", width),
        Scalar("i32", channels),
        Pointer("input", 1),
        Pointer("input", 2),
        Pointer("output", 1),
        *(Pointer("input", i) for i in (3, 4, 5)),
        *((Pointer("input", 6), Pointer("input", 7)) if tile == PREFILL_TILE else (NULL, NULL)),
        Pointer("output", 0),
        Scalar("i32", rows),
    )
    segment = min(tile, SEGMENT)
    grid = (-(-channels // CHANNELS), rows, tile // segment)
    single = int(specs[0].dtype is DType.F32)
    numbers = {
        "ACT_F32": single,
        "ALIGNED": int(width % 4 == 0),
        "DRAFTS": int(attrs.get("drafts", 0)),
        "SEGMENT": segment,
        "TAPS": taps,
        "TILE": tile,
    }
    if words:
        numbers["WORDS"] = 1
    defines = tuple((name, str(value)) for name, value in numbers.items())
    return Plan((Launch("causal_conv", grid, (128, 1, 1), args, defines=defines, pdl=True),))


def cost(attrs: Attrs, specs: Specs, target: Target) -> float:
    """Each column read and written once, the state too, and a launch."""
    tokens, (channels, taps) = specs[0].dims[0], specs[1].dims
    moved = 2 * tokens + 2 * (taps - 1) * specs[3].dims[0]
    return 1.3 * moved * channels * specs[0].dtype.itemsize / target.bandwidth + 3e-6


def cost_words(attrs: Attrs, specs: Specs, target: Target) -> float:
    """As measured on an H200: 0.84 to 0.86 of the other's."""
    return 0.85 * cost(attrs, specs, target)


CUDA = Cuda(
    tactics=(
        Tactic("segments", "gdn/causal_conv.cu", refuse, plan, cost),
        Tactic("words", "gdn/causal_conv.cu", refuse_words, partial(plan, words=True), cost_words),
    )
)
