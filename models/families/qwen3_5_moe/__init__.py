"""Model type qwen3_5_moe: qwen3_5 with experts in place of every MLP."""

from spark_engine.models.families.model_family import ModelFamily
from spark_engine.models.families.qwen3_5 import vision
from spark_engine.models.families.qwen3_5.config import Qwen3_5Config
from spark_engine.models.families.qwen3_5_moe import config, network

FAMILY: ModelFamily[Qwen3_5Config] = ModelFamily(
    name="qwen3_5_moe",
    model_types=("qwen3_5_moe", "qwen3_5_moe_text"),
    architectures=("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"),
    read_config=config.read,
    network=network.decoder,
    draft_head=network.draft_head,
    tower=vision.tower,
    ignored_prefixes=vision.PREFIXES,
)
