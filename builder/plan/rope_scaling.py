"""The option `--rope-scaling`: a rope type in place of the checkpoint's, to extend the context.

Knows the option's forms and keys; `models/config/rope.py` knows what they mean.
"""

import json
from typing import Any

from spark_engine.errors import CheckpointError, OptionError
from spark_engine.models.config.rope import TYPES, rope_from_hf

EXAMPLE = '{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 262144}'
_KEYS = {"rope_type", "type", "factor", "original_max_position_embeddings", "beta_fast"}
_KEYS |= {"beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate", "rope_theta"}


def parse_rope_scaling(text: str) -> dict[str, Any]:
    """`yarn:4`, `default`, or a JSON object as transformers and vLLM have it. Raises OptionError
    for anything else."""
    kind, colon, factor = text.partition(":")
    try:
        row = json.loads(text) if text.startswith("{") else {"rope_type": kind}
        if row == {"rope_type": kind} and colon:
            row["factor"] = float(factor)
        strange = sorted(row.keys() - _KEYS)
        named = {"rope_theta": 1e7, **row}
        if named.get("rope_type", named.get("type")) not in TYPES or strange:
            raise ValueError(f"{strange[0]} is not known" if strange else f"types are {TYPES}")
        if rope_from_hf({"rope_parameters": named}).yarn and "factor" not in row:
            raise ValueError("factor is missing")
    except (ValueError, RecursionError, CheckpointError) as error:
        raise OptionError(
            f"--rope-scaling {text[:60]}: {str(error)[:80]}; write yarn:4, or as in {EXAMPLE}"
        ) from error
    return row
