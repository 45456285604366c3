"""The fusions, in the order they are applied. Order matters: see each line's reason."""

from __future__ import annotations

from spark_engine.builder.attention_rules import ATTENTION_DECODE
from spark_engine.builder.delta_rules import GDN_DECODE
from spark_engine.builder.merge_rules import MERGE_PROJECTIONS, SHARED_EXPERT
from spark_engine.builder.moe_rules import MOE_NORM
from spark_engine.builder.quant_rules import ACT_QUANT, GATED_NORM_QUANT, NORM_QUANT
from spark_engine.builder.rewrite import Rule

RULES: tuple[Rule, ...] = (
    MERGE_PROJECTIONS,  # first: a merged projection is one reader of a quantised input
    SHARED_EXPERT,  # needs gate_up merged, and its quantisers still apart
    NORM_QUANT,
    MOE_NORM,  # takes over the norm and all that moved into it
    ACT_QUANT,
    GATED_NORM_QUANT,
    GDN_DECODE,  # takes over what the gated norm has become
    ATTENTION_DECODE,  # takes over what the gate has become
)
