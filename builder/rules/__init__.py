"""The fusions, in the order they are applied. Order matters: see each line's reason."""

from spark_engine.builder.graph.rewrite import Rule
from spark_engine.builder.rules.attention import ATTENTION_DECODE
from spark_engine.builder.rules.delta import GDN_DECODE, GDN_PREFILL
from spark_engine.builder.rules.merge import MERGE_PROJECTIONS, SHARED_EXPERT
from spark_engine.builder.rules.quant import ACT_QUANT, FP4_VALUES, GATED_NORM_QUANT, NORM_QUANT
from spark_engine.builder.rules.sum_norm import MOE_NORM, REDUCE_NORM
from spark_engine.kernel import Target

RULES: tuple[Rule, ...] = (
    MERGE_PROJECTIONS,  # first: a merged projection is one reader of a quantised input
    SHARED_EXPERT,  # needs gate_up merged, and its quantisers still apart
    NORM_QUANT,
    MOE_NORM,  # replaces the norm with all that was fused into it
    REDUCE_NORM,  # the same over several ranks
    ACT_QUANT,
    GATED_NORM_QUANT,
    GDN_DECODE,  # replaces the fused gated norm
    GDN_PREFILL,
    ATTENTION_DECODE,  # replaces the fused gate
)
# For executors that cut the graph at collectives (spark_engine/segments.py): no rule fuses one.
SEGMENT_RULES = tuple(rule for rule in RULES if rule is not REDUCE_NORM)


def rules_for(gpu: Target | None) -> tuple[Rule, ...]:
    """Those of a target; None: an executor that cuts at collectives."""
    if gpu is None:
        return SEGMENT_RULES
    return (
        RULES if gpu.fp4_mma else (*RULES, FP4_VALUES)
    )  # last: the others know the op it replaces
