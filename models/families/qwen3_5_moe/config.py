"""config.json of model type qwen3_5_moe: qwen3_5's keys, and those of its experts."""

from spark_engine.errors import CheckpointError
from spark_engine.models.config.json_values import Json, Reader
from spark_engine.models.config.model_config import MoeConfig
from spark_engine.models.families.qwen3_5.config import MOST_LAYERS, Qwen3_5Config, read_as

MOST_EXPERTS = 1 << 17  # of all layers


def read(config: Json, generation: Json, model_type: str = "qwen3_5_moe") -> Qwen3_5Config:
    """Reads config.json, as `qwen3_5.config.read` does."""
    return read_as(model_type, config, generation, _moe)


def _moe(text: Reader) -> MoeConfig:
    layers = text.count("num_hidden_layers", most=MOST_LAYERS)
    moe = MoeConfig(
        experts=text.count("num_experts", most=MOST_EXPERTS // layers),
        top_k=text.count("num_experts_per_tok"),
        intermediate=text.count("moe_intermediate_size"),
        shared_intermediate=text.count("shared_expert_intermediate_size"),
    )
    if moe.top_k > moe.experts:
        raise CheckpointError(
            f"config.json: num_experts_per_tok is {moe.top_k}, more than num_experts {moe.experts}"
        )
    return moe
