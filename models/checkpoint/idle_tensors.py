"""Tensors that change nothing, which must have the values that change nothing.

Idle are those without an entry in the table of expected tensors: what is computed here, what rounds
products that are exact here, scales of inputs that have none in their scheme, biases and zero
points of 0. The groups of int4 columns are in the table, and in order: no kernel permutes.
"""

from collections.abc import Collection, Mapping

import numpy as np

from spark_engine.models.checkpoint.expected_tensors import Expected
from spark_engine.models.checkpoint.files import Checkpoint
from spark_engine.models.checkpoint.foreign_formats import refused
from spark_engine.models.checkpoint.quant_schemes import GROUP_OF, IDLE, ZERO


def idle_note(
    checkpoint: Checkpoint, names: Collection[str], expected: Mapping[str, Expected], format: str
) -> tuple[str, ...]:
    """A note about those of `names` that are idle, in files of this format. Raises CheckpointError
    for one that has an effect, and for groups of int4 columns that are missing."""
    idle = [name for name in names if name not in expected and name.endswith(IDLE)]
    for name in (n for n in idle if n.endswith(ZERO)):
        values = checkpoint.read(name).astype(np.float32).reshape(-1)
        if values.any():
            value = f"{values[values != 0][0]:.4g}, not 0"
            raise refused(f"{format} with a {name.rpartition('.')[2]}", name, value)
    for name in (n for n in names if n in expected and n.endswith(GROUP_OF)):
        value = "missing"
        if name in checkpoint.tensors:
            groups = checkpoint.read(name)
            moved = np.flatnonzero(groups != np.arange(groups.size) // expected[name].scheme.group)
            if not moved.size or (groups == -1).all():  # which compressed-tensors has as in order
                continue
            value = f"column {moved[0]} has group {groups[moved[0]]}"
        key = "" if name.endswith("weight_g_idx") else " (desc_act)"
        raise refused(f"{format} int4 with permuted columns{key}", name, value)
    if not idle:
        return ()
    named = idle[0] if len(idle) == 1 else f"{idle[0]}, ..., {idle[-1]}"
    return (f"tensors without effect are not read, {len(idle)} of them: {named}",)
