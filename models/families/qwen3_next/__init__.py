"""Model type qwen3_next: qwen3_5_moe with fused projections, and a draft head that its config.json
does not name."""

from dataclasses import replace

from spark_engine.models.config.json_values import Json
from spark_engine.models.families.model_family import ModelFamily
from spark_engine.models.families.qwen3_5 import vision
from spark_engine.models.families.qwen3_5.config import Qwen3_5Config
from spark_engine.models.families.qwen3_5_moe import config
from spark_engine.models.families.qwen3_next import network


def read(config_json: Json, generation: Json) -> Qwen3_5Config:
    """Reads config.json, as `qwen3_5.config.read` does."""
    found = config.read(config_json, generation, "qwen3_next")
    return replace(found, mtp_layers=1) if found.mtp_layers is None else found


FAMILY: ModelFamily[Qwen3_5Config] = ModelFamily(
    name="qwen3_next",
    model_types=("qwen3_next",),
    architectures=("Qwen3NextForCausalLM",),
    read_config=read,
    network=network.decoder,
    draft_head=network.draft_head,
    tower=vision.tower,
    ignored_prefixes=vision.PREFIXES,
    stacks_experts=False,
)
