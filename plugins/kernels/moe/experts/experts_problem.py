"""What the tactics of `grouped_moe` share: a node's sizes, refusals, macros and arguments.

Knows the formats' packed operands and experts_common.cuh; knows no tactic.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from spark_engine.kernel import Launch
from spark_engine.plugins.formats import expert_layout as et
from spark_engine.plugins.formats.format import Format
from spark_engine.plugins.formats.registry import FORMATS
from spark_engine.plugins.formats.weight_packing import padded
from spark_engine.plugins.launch import Kernel, Macros, Node
from spark_engine.tensors import DType

WARPS = 8
MOST_SLABS = 8  # k-slabs of a warp's part of a dot product, where its activations are in registers
THREADS = WARPS * 32
COMBINE = Kernel("moe_combine", "ids weights parts y")
COMBINE_CHUNK = Kernel("moe_combine", "ids weights parts y start")


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
    def form(self) -> Format:
        return FORMATS[self.kind]

    @property
    def weights(self) -> int:
        """Macro WEIGHTS of experts_common.cuh."""
        return self.form.experts.weights if self.form.experts else 0

    @property
    def four_bits(self) -> bool:
        """True for codes of 4 bits, packed with their scales along k."""
        return self.form.experts is not None and self.form.experts.pack_scales is not None

    @property
    def quant(self) -> int:
        """Macro QUANT of experts_quantise.cuh."""
        return self.form.experts.quant if self.form.experts else 0

    @property
    def m16_bytes(self) -> int:
        """Of an m16 tile's k-slab with its block scales."""
        return int(et.M16 * et.KSLAB * self.form.bits / 8)

    @property
    def expert_bytes(self) -> float:
        """Weights of one expert."""
        return 3 * self.hidden * self.inner * self.form.bits / 8

    @property
    def hit(self) -> float:
        """Experts that uniform routing hits."""
        return self.experts * (1 - (1 - self.chosen / self.experts) ** self.tokens)

    @staticmethod
    def of(node: Node) -> Problem:
        """Of a node. Where no scales have I, it includes the padding of zeros."""
        kind = node.text("format")
        by_row = (o.name for o in FORMATS[kind].expert_operands if o.dims == ("E", "2I"))
        experts, width, *_ = node[next(by_row, "w13")].dims
        tokens, chosen, hidden = node.shape("tokens", "k", "H")
        return Problem(kind, tokens, chosen, experts, hidden, width // 2)


def split(k: int) -> int:
    """Warps that share a dot product of k: two k-slabs each where there are as many."""
    slabs = -(-k // 64)
    shares = math.gcd(slabs, WARPS)
    return shares // 2 if shares > 1 and slabs == shares else shares


def part_slabs(k: int) -> int:
    """K-slabs of a warp's part of a dot product of k."""
    return -(-k // 64) // split(k)


def refuse(node: Node) -> str | None:
    """What no tactic serves: a sentence why, or None."""
    kind, x, w13, w2 = node.text("format"), node["x"], node["w13"], node["w2"]
    if x.dtype is not DType.BF16 or node.text("dtype") != "bf16":
        return f"x is {x.dtype} and dtype {node.text('dtype')}; only bf16 is served"
    if FORMATS[kind].experts is None:
        return f"no kernel reads experts of format {kind}"
    if kind == "dense" and not w13.dtype is w2.dtype is DType.BF16:
        return f"w13 is {w13.dtype}; only bf16 experts are served: cast them when lowering"
    p = Problem.of(node)
    if p.hidden % 16 or p.inner % 16:
        return f"H = {p.hidden} and I = {p.inner}; both must be multiples of 16"
    if not p.four_bits and (w13.dims[2], w2.dims[2]) != (
        padded(p.hidden, et.KSLAB),
        padded(p.inner, et.KSLAB),
    ):
        return f"H = {p.hidden} and I; both must be multiples of 16"
    if kind == "fp8_block" and p.inner % 128:
        return f"I = {p.inner}; in blocks of 128 it must be a multiple of 128"
    return None


def by_parts(node: Node) -> str:
    """The reduction key of the tactics that add a dot product in the parts of `split`."""
    return "k in parts"


def macros(p: Problem, **tuning: int) -> dict[str, int]:
    """Those of experts_common.cuh, and a tactic's own."""
    sizes = {
        "HIDDEN": p.hidden,
        "INNER": p.inner,
        "EXPERTS": p.experts,
        "K1": p.chosen,
        "UP_WK": split(p.hidden),
        "DOWN_WK": split(p.inner),
        "WEIGHTS": p.weights,
    }
    return sizes | tuning


def operand(p: Problem, name: str, instead: str) -> str:
    """An argument: of another operand, which is never read, where the format lacks it."""
    return name if name in p.form.params else instead


def weights(p: Problem, name: str) -> str:
    """Arguments: a weight, its block scales and the scales of its rows."""
    own = p.form.names_of(name)
    rows = own[-1] if len(own) > 1 else f"{name}_scale"
    return " ".join(operand(p, n, name) for n in (name, f"{name}_scale", rows))


def combine(node: Node, p: Problem, macros: Macros, start: int | None = None) -> Launch:
    """The weighted sum over each token's experts, from the scratch buffer `parts`.

    `start`: the first token, where the node runs in chunks.
    """
    threads = min(256, max(32, padded(p.hidden // 4, 32)))
    if start is None:
        return COMBINE.launch(node, p.tokens, threads, macros)
    return COMBINE_CHUNK.launch(node, p.tokens, threads, macros, start=start)
