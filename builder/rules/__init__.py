"""The fusions, in the order they are applied. Order matters: see each line's reason."""

from __future__ import annotations

from spark_engine.builder.graph.rewrite import Rule
from spark_engine.builder.rules.attention import ATTENTION_DECODE
from spark_engine.builder.rules.delta import GDN_DECODE
from spark_engine.builder.rules.merge import MERGE_PROJECTIONS, SHARED_EXPERT
from spark_engine.builder.rules.moe import MOE_NORM
from spark_engine.builder.rules.quant import ACT_QUANT, GATED_NORM_QUANT, NORM_QUANT
from spark_engine.builder.rules.ranks import REDUCE_NORM

RULES: tuple[Rule, ...] = (
    MERGE_PROJECTIONS,  # first: a merged projection is one reader of a quantised input
    SHARED_EXPERT,  # needs gate_up merged, and its quantisers still apart
    NORM_QUANT,
    MOE_NORM,  # takes over the norm and all that moved into it
    REDUCE_NORM,  # likewise, where ranks stand between
    ACT_QUANT,
    GATED_NORM_QUANT,
    GDN_DECODE,  # takes over what the gated norm has become
    ATTENTION_DECODE,  # takes over what the gate has become
)
# Where ranks meet between nodes (spark_engine/segments.py) nothing may join a collective.
SEGMENT_RULES = tuple(rule for rule in RULES if rule is not REDUCE_NORM)
