"""Values with the same key in the config.json of every model family of transformers.

The place of the text configuration, dtypes, tied embeddings, eos ids. Each function names the key
and the value in a CheckpointError.
"""

from collections.abc import Mapping

from spark_engine.errors import CheckpointError
from spark_engine.models.config.json_values import Json, Reader
from spark_engine.tensors import DType

DTYPES = {"bfloat16": DType.BF16, "float16": DType.F16, "float32": DType.F32}


def is_nested(config: Json) -> bool:
    """True if the text configuration is inside a multimodal one."""
    return "text_config" in config


def text_of(config: Json) -> Reader:
    """The text configuration, nested or not."""
    return Reader(_mapping(config, "text_config") if is_nested(config) else config, "config.json")


def _mapping(config: Json, key: str) -> Json:
    value = config[key]
    if not isinstance(value, Mapping):
        raise CheckpointError(f"config.json: {key} is {value!r}: expected an object")
    return value


def is_tied(config: Json, text: Json) -> bool:
    """The outer config decides, as in transformers; absent means not tied."""
    value = config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))
    if not isinstance(value, bool):
        raise CheckpointError(f"config.json: tie_word_embeddings is {value!r}: expected a boolean")
    return value


def dtype(config: Json, text: Json) -> DType:
    """The dtype of unquantised tensors: bfloat16 if absent."""
    keys = ("dtype", "torch_dtype")
    named = [row.get(k) for row in (text, config) for k in keys if row.get(k) is not None]
    name = str(named[0] if named else "bfloat16").removeprefix("torch.")
    if name not in DTYPES:
        raise CheckpointError(f"config.json: dtype is {name!r}; supported: {', '.join(DTYPES)}")
    return DTYPES[name]


def eos_token_ids(*rows: Json) -> tuple[int, ...]:
    """The ids of both generation_config and config, which disagree in published checkpoints."""
    ids: list[int] = []
    for row in rows:
        value = row.get("eos_token_id")
        listed = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in listed):
            raise CheckpointError(f"eos_token_id is {value!r}: expected a token id or a list")
        ids += listed
    return tuple(dict.fromkeys(ids))
