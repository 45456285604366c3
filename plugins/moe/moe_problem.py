"""What the tactics of `grouped_moe` share: a node's sizes, refusals, macros and arguments.

Knows the packed operands (moe_packs) and moe_common.cuh; knows no tactic.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from spark_engine.kernel import Arg, Attrs, Launch, Pointer, Specs, Target
from spark_engine.plugins.common.weight_packing import padded
from spark_engine.plugins.moe import expert_layout as et
from spark_engine.plugins.moe import moe_packs
from spark_engine.tensors import DType

WARPS = 8
THREADS = WARPS * 32
Defines = tuple[tuple[str, str], ...]

# WEIGHTS of moe_common.cuh and QUANT of moe_quantise.cuh.
_WEIGHTS = {"dense": 0, "nvfp4": 1, "nvfp4_a4": 1, "fp8": 2, "fp8_block": 2}
_QUANT = {"dense": 0, "nvfp4": 0, "fp8": 1, "fp8_block": 2, "nvfp4_a4": 3}
M16_BYTES = (2048, 512 + 64, 1024)  # of an m16 tile's k-slab with its block scales
_BYTES = (2.0, 0.5625, 1.0)  # of a weight


@dataclass(frozen=True)
class Problem:
    """The sizes of one node."""

    kind: str
    tokens: int
    chosen: int  # experts a token, the shared one included
    experts: int
    hidden: int
    inner: int

    @property
    def pairs(self) -> int:
        return self.tokens * self.chosen

    @property
    def weights(self) -> int:
        return _WEIGHTS[self.kind]

    @property
    def quant(self) -> int:
        return _QUANT[self.kind]

    @property
    def expert_bytes(self) -> float:
        """Weights of one expert."""
        return 3 * self.hidden * self.inner * _BYTES[self.weights]

    @property
    def hit(self) -> float:
        """Experts that uniform routing hits."""
        return self.experts * (1 - (1 - self.chosen / self.experts) ** self.tokens)


def problem(attrs: Attrs, specs: Specs) -> Problem:
    """The sizes, from packed specs. Where nothing tells I, it counts with its padding of zeros."""
    kind = str(attrs["format"])
    x, ids = specs[:2]
    two = {"dense": "w13", "fp8_block": "w13", "fp8": "w13_scale"}.get(kind, "w13_scale2")
    experts, width = specs[moe_packs.index(kind, two)].dims[:2]
    return Problem(kind, x.dims[0], ids.dims[1], experts, x.dims[1], width // 2)


def split(k: int) -> int:
    """Warps that share a dot product of k: two k-slabs each where there are as many."""
    slabs = -(-k // 64)
    ways = math.gcd(slabs, WARPS)
    return ways // 2 if ways > 1 and slabs == ways else ways


def refuse(attrs: Attrs, specs: Specs) -> str | None:
    """What no tactic serves: a sentence why, or None."""
    kind = str(attrs["format"])
    if specs[0].dtype is not DType.BF16 or attrs["dtype"] != "bf16":
        return f"x is {specs[0].dtype} and dtype {attrs['dtype']}; only bf16 is served"
    w13, w2 = (specs[moe_packs.index(kind, name)] for name in ("w13", "w2"))
    if kind == "dense" and not w13.dtype is w2.dtype is DType.BF16:
        return f"w13 is {w13.dtype}; only bf16 experts are served: cast them when lowering"
    p = problem(attrs, specs)
    if p.hidden % 16 or p.inner % 16:
        return f"H = {p.hidden} and I = {p.inner}; both must be multiples of 16"
    if p.weights != 1 and (w13.dims[2], w2.dims[2]) != (
        padded(p.hidden, et.KSLAB),
        padded(p.inner, et.KSLAB),
    ):
        return f"H = {p.hidden} and I; both must be multiples of 16"
    if kind == "fp8_block" and p.inner % 128:
        return f"I = {p.inner}; in blocks of 128 it must be a multiple of 128"
    for k in (p.hidden, p.inner):
        if -(-k // 64) // split(k) > 4:
            return f"a row of {k} weights is more than the fragments that fit in registers"
    return None


def by_parts(attrs: Attrs, specs: Specs, target: Target) -> str:
    """The reduction key of the tactics that add a dot product in the parts of `split`."""
    return "k in parts"


def macros(p: Problem, **tuning: int) -> Defines:
    """Those of moe_common.cuh, and a tactic's own."""
    sizes = {
        "HIDDEN": p.hidden,
        "INNER": p.inner,
        "EXPERTS": p.experts,
        "K1": p.chosen,
        "UP_WK": split(p.hidden),
        "DOWN_WK": split(p.inner),
        "WEIGHTS": p.weights,
    }
    return tuple((name, str(value)) for name, value in (sizes | tuning).items())


def inputs(*indices: int) -> tuple[Arg, ...]:
    """The addresses of operands."""
    return tuple(Pointer("input", i) for i in indices)


def scratch(*indices: int) -> tuple[Arg, ...]:
    """The addresses of scratch buffers."""
    return tuple(Pointer("scratch", i) for i in indices)


def operand(p: Problem, name: str, instead: str) -> Arg:
    """The pointer of an operand; of another that is never read where the format lacks it."""
    known = moe_packs.OPERANDS[p.kind]
    return Pointer("input", moe_packs.index(p.kind, name if name in known else instead))


def weights(p: Problem, name: str) -> tuple[Arg, ...]:
    """A weight, its block scales and the scales of its rows."""
    rows = f"{name}_scale2" if p.weights == 1 else f"{name}_scale"
    return tuple(operand(p, n, name) for n in (name, f"{name}_scale", rows))


def combine(p: Problem, parts: int, defines: Defines, start: tuple[Arg, ...] = ()) -> Launch:
    """The weighted sum over each token's experts, from the scratch buffer `parts`.

    `start`: the first token, where the node runs in chunks.
    """
    threads = min(256, max(32, padded(p.hidden // 4, 32)))
    args = (*inputs(1, 2), *scratch(parts), Pointer("output", 0), *start)
    return Launch("moe_combine", (p.tokens, 1, 1), (threads, 1, 1), args, defines=defines,
                  pdl=True)  # fmt: skip
