"""The table of model families, one row each, and the search for the row of a config.json."""

from collections.abc import Mapping
from typing import Any

from spark_engine.errors import CheckpointError
from spark_engine.models.config.json_values import Json, malformed_json
from spark_engine.models.config.model_config import ModelConfig
from spark_engine.models.families import qwen3_5, qwen3_5_moe, qwen3_next
from spark_engine.models.families.model_family import ModelFamily

FAMILIES: tuple[ModelFamily[Any], ...] = (
    qwen3_5.FAMILY,
    qwen3_5_moe.FAMILY,
    qwen3_next.FAMILY,
)
_BY_NAME = {family.name: family for family in FAMILIES}


def family_of(config: ModelConfig) -> ModelFamily[Any]:
    return _BY_NAME[config.model_type]


def read_config(config: Json, generation: Json | None = None) -> ModelConfig:
    """config.json (and generation_config.json, for its eos ids) as its family reads it.

    Raises CheckpointError naming the key when a value is missing, malformed or unsupported.
    """
    with malformed_json("config.json"):
        read: ModelConfig = _family_named_in(config).read_config(config, generation or {})
        return read


def _family_named_in(config: Json) -> ModelFamily[Any]:
    names, text = config.get("architectures") or [], config.get("text_config")
    own = text.get("model_type") if isinstance(text, Mapping) else None
    by_class = (f.name for f in FAMILIES for name in names if name in f.architectures)
    kind = config.get("model_type") or next(by_class, own)
    types = [name for family in FAMILIES for name in family.model_types]
    architectures = [name for family in FAMILIES for name in family.architectures]
    supported = f"supported are model types {', '.join(types)} with architectures "
    supported += ", ".join(architectures)
    family = next((f for f in FAMILIES if kind in f.model_types), None)
    if family is None:
        raise CheckpointError(f"config.json: model_type is {kind!r}; {supported}")
    if names and not any(name in architectures for name in names):
        raise CheckpointError(f"config.json: architectures is {names!r}; {supported}")
    inner = own or kind
    if inner not in family.model_types:
        raise CheckpointError(
            f"config.json: text_config.model_type {inner!r} contradicts model_type {kind!r}; "
            f"{supported}"
        )
    return family
