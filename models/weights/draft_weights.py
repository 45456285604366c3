"""The draft head's weights for a build's options: in another dtype, from fewer rows.

Applies `DraftOptions`: quantises the head's plain projections as they are read, and takes the
shortlist's rows of the language model's head. Knows no graph.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from spark_engine.errors import CheckpointError, OptionError
from spark_engine.interface import BLOCK_DRAFTER
from spark_engine.models.checkpoint.expected_tensors import MTP
from spark_engine.models.checkpoint.quant_schemes import Scheme
from spark_engine.models.checkpoint.tensor_list import linears
from spark_engine.models.weights.operands import Projection, projection
from spark_engine.models.weights.recipes import take
from spark_engine.models.weights.stored_model import Model
from spark_engine.models.weights.value_checks import check_finite

SCHEMES: Mapping[str, Scheme] = {"fp8": Scheme.FP8_BLOCK, "nvfp4": Scheme.NVFP4}


def with_draft_dtype(model: Model, dtype: str) -> Model:
    """The model with the head's plain projections, experts included, in that dtype."""
    if dtype not in SCHEMES or (table := model.table.quantising(SCHEMES[dtype])) == model.table:
        return model
    return replace(model, table=table)


def head_fault(model: Model, block: bool = False) -> str:
    """Why the values of the head's tensors, or those of a block drafter, cannot be used; "" if they
    can."""
    checkpoint = model.checkpoint
    assert checkpoint is not None
    drafts = [e for e in model.expected.values() if e.part == MTP and e.name in checkpoint.tensors]
    stored = [e for e in drafts if e.name.startswith(BLOCK_DRAFTER) == block]
    try:
        for name in (e.name for e in stored if checkpoint.maps):  # drawn ones are sound
            check_finite(name, checkpoint.read(name))
        for linear in linears({e.row: None for e in stored}):
            scheme = model.table[linear.table_key]
            if linear.group and scheme is Scheme.NVFP4_A4:
                scheme = Scheme.NVFP4  # scales of experts' inputs may be missing
            for scale in projection(model.unsplit, linear.module, scheme).scales.values():
                scale.evaluate(checkpoint)
    except CheckpointError as error:
        return f"the checkpoint's draft head is not used: {error}"
    return ""


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
