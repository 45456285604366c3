"""The draft head's weights for a build's options: in another dtype, from fewer rows.

Applies `DraftOptions`: quantises the head's plain projections as they are read, and takes the
shortlist's rows of the language model's head. Knows no graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from spark_engine.errors import OptionError
from spark_engine.models.checkpoint.quant_schemes import Scheme
from spark_engine.models.weights.operands import Projection, projection
from spark_engine.models.weights.recipes import take
from spark_engine.models.weights.stored_model import Model

SCHEMES: Mapping[str, Scheme] = {"fp8": Scheme.FP8_BLOCK, "nvfp4": Scheme.NVFP4}


def with_draft_dtype(model: Model, dtype: str) -> Model:
    """The model with the head's plain projections, experts included, in that dtype."""
    if dtype not in SCHEMES:
        return model
    return replace(model, table=model.table.quantising(SCHEMES[dtype]))


def head_rows(model: Model, module: str, ids: Sequence[int]) -> Projection:
    """Rows of a projection [V, H] in its own format.

    Raises OptionError if single rows have no scales.
    """
    whole = projection(model.unsplit, module, model.table[module])
    if whole.scheme is Scheme.FP8_BLOCK:
        raise OptionError(
            f"a draft shortlist takes rows of {module}, but its scales cover 128 rows; draft "
            "from the whole vocabulary"
        )
    rows = tuple((i, i + 1) for i in ids)
    scales = {name: take(scale, rows) for name, scale in whole.scales.items()}
    return replace(whole, weight=take(whole.weight, rows), scales=scales)
