"""The table of ops in the order of docs/graph.md, and the standard ONNX operators with kernels."""

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from spark_engine.errors import GraphError
from spark_engine.kernel import Cuda
from spark_engine.op import Op
from spark_engine.plugins.kernels.rowwise import concat_kernels, rows_kernels
from spark_engine.plugins.ops.attention import (
    append_kv,
    attention_decode,
    block_attention,
    paged_attention,
)
from spark_engine.plugins.ops.delta_rule import (
    causal_conv,
    gated_delta,
    gated_norm,
    gated_norm_quant,
    gdn_decode,
    gdn_prefill,
)
from spark_engine.plugins.ops.drafts import (
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
from spark_engine.plugins.ops.linear import linear
from spark_engine.plugins.ops.moe import grouped_moe, moe_norm_quant, moe_router, shared_gate
from spark_engine.plugins.ops.norm import norm_quant, rms_norm
from spark_engine.plugins.ops.ranks import all_reduce, gather_logits, reduce_norm_quant
from spark_engine.plugins.ops.rowwise import (
    act_quant,
    embed,
    last_rows,
    nvfp4_widen,
    quantisers,
    sigmoid_gate,
    silu_mul,
)
from spark_engine.plugins.ops.sampling import mark_tokens, sample, sample_join, sample_part
from spark_engine.plugins.ops.vision import (
    layer_norm,
    linear_bias,
    store_rows,
    vision_attention,
    vision_patches,
)

OPS: tuple[Op, ...] = (
    embed.OP,
    mark_tokens.OP,
    rms_norm.OP,
    *quantisers.OPS,
    nvfp4_widen.OP,
    norm_quant.OP,
    *linear.OPS,
    causal_conv.OP,
    gated_delta.STEP,
    gated_delta.CHUNK,
    gated_norm.OP,
    gated_norm_quant.OP,
    gdn_decode.OP,
    gdn_prefill.OP,
    paged_attention.OP,
    attention_decode.OP,
    append_kv.OP,
    sigmoid_gate.OP,
    silu_mul.OP,
    act_quant.OP,
    moe_router.OP,
    grouped_moe.OP,
    moe_norm_quant.OP,
    shared_gate.OP,
    last_rows.OP,
    sample.OP,
    sample_part.OP,
    sample_join.OP,
    round_rows.OP,
    accept_drafts.OP,
    shift_ids.OP,
    mtp_input.OP,
    draft_token.OP,
    draft_best.OP,
    store_ids.OP,
    match_drafts.OP,
    block_rows.OP,
    block_conv.OP,
    block_attention.OP,
    top_ids.OP,
    draft_path.OP,
    all_reduce.OP,
    gather_logits.OP,
    reduce_norm_quant.OP,
    vision_patches.OP,
    layer_norm.OP,
    linear_bias.OP,
    vision_attention.OP,
    store_rows.OP,
)

# Standard ONNX operators by op_type: the only ones that a graph may have in addition to our ops.
STANDARD: Mapping[str, Cuda] = MappingProxyType(
    {"Add": rows_kernels.ADD, "Concat": concat_kernels.CONCAT}
)


def index(ops: Iterable[Op]) -> Mapping[str, Op]:
    """The ops by name, read-only. Raises GraphError if two have one name."""
    found: dict[str, Op] = {}
    for op in ops:
        if op.name in found:
            raise GraphError(f"two ops are named {op.name}; rename one of them")
        found[op.name] = op
    return MappingProxyType(found)


REGISTRY: Mapping[str, Op] = index(OPS)


def get(name: str) -> Op:
    """The op with this name. Raises GraphError, with the legal names."""
    if name not in REGISTRY:
        raise GraphError(f"no op is named {name!r}; the ops are {', '.join(sorted(REGISTRY))}")
    return REGISTRY[name]
