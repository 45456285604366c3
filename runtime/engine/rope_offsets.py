"""Positions of a prompt with images: what is added to a token's place before it turns queries.

An image with its first row at rope position s turns row r, column c by (s, s + r, s + c) in time,
height and width; the token after it is at s + max(rows, columns) (transformers,
`modeling_qwen3_5.py`, get_rope_index). Text moves on by one in all three.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from spark_engine.vision import Image


def rope_delta(images: Sequence[Image]) -> int:
    """The offset of every token behind the images."""
    return sum(max(image.rows, image.columns) - image.tokens for image in images)


def write_offsets(out: NDArray[np.int32], images: Sequence[Image], start: int) -> None:
    """Writes i32 [tokens, 3] of the tokens from position `start` on. `images` ascend."""
    end, shift = start + len(out), 0
    out[:] = 0
    for image in images:
        if image.start >= end:
            break
        at = np.arange(max(image.start, start), min(image.end, end))
        if at.size:
            row, column = np.divmod(at - image.start, image.columns)
            first = shift - (at - image.start)
            out[at - start] = np.stack([first, first + row, first + column], 1)
        shift += rope_delta([image])
        out[max(image.end - start, 0) :] = shift
