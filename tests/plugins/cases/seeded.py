"""The seeded cases of every op: those next to it, or the module here that has its name.

An op has its cases here if a few lines do not make them.
"""

from collections.abc import Mapping
from types import MappingProxyType

from spark_engine.op import Case, Op
from spark_engine.plugins.ops.sampling import sample_part as part
from tests.plugins.cases.attention import (
    append_kv,
    attention_decode,
    block_attention,
    paged_attention,
)
from tests.plugins.cases.delta_rule import (
    causal_conv,
    gated_delta,
    gated_norm,
    gated_norm_quant,
    gdn_decode,
)
from tests.plugins.cases.drafts import (
    accept_drafts,
    block_conv,
    block_rows,
    draft_best,
    draft_path,
    draft_token,
    match_drafts,
    mtp_input,
    round_rows,
    shift_ids,
    store_ids,
    top_ids,
)
from tests.plugins.cases.moe import moe_norm_quant, moe_router, shared_gate
from tests.plugins.cases.norm import norm_quant, rms_norm
from tests.plugins.cases.ranks import all_reduce, gather_logits, reduce_norm_quant
from tests.plugins.cases.rowwise import (
    act_quant,
    nvfp4_widen,
    quantisers,
    sigmoid_gate,
    silu_mul,
)
from tests.plugins.cases.sampling import mark_tokens, sample, sample_part
from tests.plugins.cases.vision import (
    layer_norm,
    linear_bias,
    store_rows,
    vision_attention,
    vision_patches,
)

CASES: Mapping[str, tuple[Case, ...]] = MappingProxyType(
    {
        "mark_tokens": mark_tokens.CASES,
        "causal_conv": causal_conv.CASES,
        "gated_delta_step": gated_delta.STEP,
        "gated_delta_chunk": gated_delta.CHUNK,
        "gdn_decode": gdn_decode.CASES,
        "paged_attention": paged_attention.CASES,
        "attention_decode": attention_decode.CASES,
        "append_kv": append_kv.CASES,
        "sample": sample.CASES,
        "sample_part": sample_part.PARTS,
        "sample_join": tuple(sample_part.join_case(s, part.reference) for s in sample_part.SHARED),
        "round_rows": round_rows.CASES,
        "accept_drafts": accept_drafts.CASES,
        "shift_ids": shift_ids.CASES,
        "mtp_input": mtp_input.CASES,
        "draft_token": draft_token.CASES,
        "draft_best": draft_best.CASES,
        "store_ids": store_ids.CASES,
        "match_drafts": match_drafts.CASES,
        "block_rows": block_rows.CASES,
        "block_conv": block_conv.CASES,
        "block_attention": block_attention.CASES,
        "top_ids": top_ids.CASES,
        "draft_path": draft_path.CASES,
        "rms_norm": rms_norm.CASES,
        "fp8_quant": quantisers.FP8,
        "fp8_block_quant": quantisers.FP8_BLOCK,
        "nvfp4_quant": quantisers.NVFP4,
        "nvfp4_widen": nvfp4_widen.CASES,
        "norm_quant": norm_quant.CASES,
        "gated_norm": gated_norm.CASES,
        "gated_norm_quant": gated_norm_quant.CASES,
        "sigmoid_gate": sigmoid_gate.CASES,
        "act_quant": act_quant.CASES,
        "all_reduce": all_reduce.CASES,
        "gather_logits": gather_logits.CASES,
        "reduce_norm_quant": reduce_norm_quant.CASES,
        "vision_patches": vision_patches.CASES,
        "layer_norm": layer_norm.CASES,
        "linear_bias": linear_bias.CASES,
        "vision_attention": vision_attention.CASES,
        "store_rows": store_rows.CASES,
        "silu_mul": silu_mul.CASES,
        "shared_gate": shared_gate.CASES,
        "moe_router": moe_router.CASES,
        "moe_norm_quant": moe_norm_quant.CASES,
    }
)


def seeded(op: Op) -> tuple[Case, ...]:
    """The cases of an op, at least one. Raises KeyError where it has none."""
    return op.cases or CASES[op.name]
