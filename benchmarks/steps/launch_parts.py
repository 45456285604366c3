"""To which part of a model a kernel's time belongs, by the kernel's name.

Knows names alone; measures nothing.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from spark_engine.interface import HEADS

PARTS = {  # by the beginning of the kernel's name, the first that fits
    "embed": "embed",
    "norm_quant": "norm",
    "reduce_norm": "norm",  # with a sum over ranks
    "all_reduce": "ranks",
    "gather_logits": "ranks",
    "add": "norm",
    "last_rows": "norm",
    "fp8_linear": "linear-fp8",
    "nvfp4_linear": "linear-nvfp4",
    "int4_linear": "linear-int4",
    "linear": "linear-bf16",
    "gdn": "gdn",
    "gated": "gdn",
    "causal_conv": "gdn",
    "paged": "attention",
    "attention": "attention",
    "act_quant": "activation",
    "moe_router": "router",
    "moe": "moe",
    "each": "moe",
    "wide": "moe",
    "quantise": "moe",
    "fp8_block_linear": "linear-fp8",
    "shared_gate": "moe",
    "sample": "sample",
    "mark": "sample",
    "clear": "sample",
    "round_rows": "sample",
    "accept": "sample",
    "shift": "sample",
    "draft_token": "token",
    "mtp_input": "embed",
    "append_kv": "attention",
}
FILL, DRAFT = HEADS, "draft."  # nodes of the draft head over all tokens, and of one draft


@dataclass(frozen=True)
class Timed:
    """One launch: the node and kernel it belongs to, and its median microseconds."""

    node: str
    symbol: str
    microseconds: float


def part_of(symbol: str, node: str = "") -> str:
    """The part that a kernel belongs to; that of the draft head where its node does."""
    if node.startswith(FILL):
        return "fill"
    part = next((part for start, part in PARTS.items() if symbol.startswith(start)), symbol)
    return f"draft-{part.partition('-')[0]}" if node.startswith(DRAFT) else part


def by_part(timed: Sequence[Timed], gap: float = 0.0) -> Mapping[str, float]:
    """Milliseconds by part, largest first; `gap` microseconds of each launch are not counted."""
    found: Counter[str] = Counter()
    for row in timed:
        found[part_of(row.symbol, row.node)] += (row.microseconds - gap) / 1e3
    return {part: round(ms, 4) for part, ms in found.most_common()}


def counts(timed: Sequence[Timed]) -> Mapping[str, int]:
    return dict(Counter(part_of(row.symbol, row.node) for row in timed).most_common())
