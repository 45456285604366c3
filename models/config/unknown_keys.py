"""Keys of config.json that nothing here reads: most say nothing about the network, some change it.

A config of another network may have every key that a family reads, and one more (`hc_count`). So a
key is refused if it is unknown, a word of its name is one that networks' keys have, and its value
switches something on. Other unknown keys (training, generation, tools) are ignored.
"""

import re

from spark_engine.errors import CheckpointError
from spark_engine.models.config.json_values import Json

# Words of keys that describe a network, and of keys that only seem to (training, the draft head,
# which its tensors describe).
_NETWORK, _APART = (
    re.compile(f"(?:^|_)(?:{words.replace(' ', '|')})(?:_|$)")
    for words in (
        "n num dims? depth width lowrank hidden inner intermediate layers? blocks? heads? experts? "
        "shared routed routing router moe mod mlp ffn ff feed glu gates? gated gating scoring topk "
        "groups? attn attentions? mla mqa gqa gdn kda dsa nsa qsa mha msa swa q k v o qk qkv kv "
        "index indexer sinks? window sliding sparse sparsity compress compression dilated dilation "
        "kernel conv convolution ssm mamba delta linear recurrent recurrence state memories decay "
        "hc mhc hyper streams? residuals? loops? looped recursion ple ngrams? engram embeds? "
        "embeddings? vocab positions? rope nope rotary yarn alibi norms? layernorm rmsnorm eps "
        "bias act activation softcap softcapping scales? scaling multiplier factor altup laurel "
        "skip logits? softmax cap caps limits? clamp clip swiglu swish",
        "train training epochs? batch samples? params? images? videos? audio vision labels? beams? "
        "version dataset devices? gpus? workers? grad gradient optim optimizer learning warmup "
        "seed dropout loss coef jitter init dtype implementation impl flash sdpa backend parallel "
        "ctx keep quant quantize quantized bits mtp nextn draft speculative",
    )
)
# Keys with such words that families read, or that change nothing.
_KNOWN = frozenset(
    """
    attention_bias attn_output_gate decoder_sparse_step full_attention_interval head_dim hidden_act
    hidden_size intermediate_size layer_norm_eps layer_types linear_conv_kernel_dim
    linear_key_head_dim linear_num_key_heads linear_num_value_heads linear_value_head_dim
    max_position_embeddings max_window_layers mlp_only_layers moe_intermediate_size
    norm_topk_prob num_attention_heads num_experts num_experts_per_tok num_hidden_layers
    num_key_value_heads num_return_sequences original_max_position_embeddings output_attentions
    output_gate_type output_hidden_states output_router_logits partial_rotary_factor rms_norm_eps
    rope_parameters rope_scaling rope_theta shared_expert_intermediate_size sliding_window
    tie_word_embeddings top_k vocab_size
    """.split()
)


def refuse_unknown(config: Json, text: Json, model_type: str) -> None:
    """Raises CheckpointError naming the keys of a network that `model_type` does not have. `text`:
    the text configuration, inside `config` or the same. A family takes out what it reads alone."""
    rows = {"": config, "text_config.": text} if text is not config else {"": config}
    found = [
        f"{where}{key} ({_short(value)})"
        for where, row in rows.items()
        for key, value in row.items()
        if _NETWORK.search(key) and not _APART.search(key) and key not in _KNOWN and _on(value)
    ]
    if found:
        more = f" and {len(found) - 2} more keys" if len(found) > 2 else ""
        raise CheckpointError(
            f"config.json: {', '.join(found[:2])}{more}: {model_type} has no such key, so this is "
            "another network; give a checkpoint of a supported one, or remove keys without effect"
        )


def _on(value: object) -> bool:
    """True unless the value switches nothing on; a factor of 1.0 does not."""
    return bool(value) and not (isinstance(value, float) and value == 1)


def _short(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 40 else shown[:37] + "..."
