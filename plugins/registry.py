"""The table of ops in the order of docs/graph.md, and the standard ONNX operators with kernels."""

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType, ModuleType

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


def _of(*modules: ModuleType) -> Iterator[Op]:
    for module in modules:
        yield from getattr(module, "OPS", None) or (module.OP,)


OPS = (
    *_of(embed, mark_tokens, rms_norm, quantisers, nvfp4_widen, norm_quant, linear),
    *_of(causal_conv, gated_delta, gated_norm, gated_norm_quant, gdn_decode, gdn_prefill),
    *_of(paged_attention, attention_decode, append_kv, sigmoid_gate, silu_mul, act_quant),
    *_of(moe_router, grouped_moe, moe_norm_quant, shared_gate, last_rows),
    *_of(sample, sample_part, sample_join, round_rows, accept_drafts, shift_ids),
    *_of(mtp_input, draft_token, draft_best, store_ids, match_drafts),
    *_of(block_rows, block_conv, block_attention, top_ids, draft_path),
    *_of(all_reduce, gather_logits, reduce_norm_quant),
    *_of(vision_patches, layer_norm, linear_bias, vision_attention, store_rows),
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
