"""Tensors that change nothing, so that a checkpoint is read without them: known by their names.

Some are without effect whatever they hold: what is computed here, what rounds the products inside
attention, which are exact here, and scales of inputs that have none in their scheme. Others are
so only if they are zero: biases and zero points. Knows no network.
"""

from collections.abc import Collection

import numpy as np

from spark_engine.models.checkpoint import foreign_formats
from spark_engine.models.checkpoint.files import Checkpoint

ZERO = {"bias": "a bias", "zero_point": "a zero point"}
IDLE = (
    ".rotary_emb.inv_freq", ".rotary_emb.original_inv_freq",
    ".self_attn.q_scale", ".self_attn.prob_scale",
    ".input_scale", ".input_global_scale", *ZERO,
)  # fmt: skip


def idle_note(checkpoint: Checkpoint, names: Collection[str], format: str) -> tuple[str, ...]:
    """A note about those of `names` that are idle. Raises CheckpointError for a bias or a zero
    point that is not zero, in a file of this format."""
    idle = [name for name in names if name.endswith(IDLE)]
    for name in idle:
        kind = next((kind for end, kind in ZERO.items() if name.endswith(end)), "")
        if kind and (values := checkpoint.read(name).astype(np.float32).reshape(-1)).any():
            at = int(values.nonzero()[0][0])
            value = f"element {at} is {values[at]}, not 0"
            raise foreign_formats.refused(f"{format} with {kind}", name, value)
    if not idle:
        return ()
    named = idle[0] if len(idle) == 1 else f"{idle[0]}, ..., {idle[-1]}"
    return (f"tensors without effect are not read, {len(idle)} of them: {named}",)
