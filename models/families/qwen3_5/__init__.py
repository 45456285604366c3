"""Model type qwen3_5: dense layers of gated delta nets and gated full attention."""

from spark_engine.models.families.model_family import ModelFamily
from spark_engine.models.families.qwen3_5 import config, network, vision

FAMILY: ModelFamily[config.Qwen3_5Config] = ModelFamily(
    name="qwen3_5",
    model_types=("qwen3_5", "qwen3_5_text"),
    architectures=("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"),
    read_config=config.read,
    network=network.decoder,
    draft_head=network.draft_head,
    tower=vision.tower,
    ignored_prefixes=vision.PREFIXES,
)
