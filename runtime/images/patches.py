"""Pixels in the order of the vision tower's patches. Knows no file."""

import numpy as np
from numpy.typing import NDArray

from spark_engine.vision import VisionInfo


def patches_of(pixels: bytes, rows: int, columns: int, info: VisionInfo) -> NDArray[np.uint8]:
    """u8 [4 · rows · columns, 3 · patch · patch] of pixels u8 [rows · unit, columns · unit, 3].

    The patches of one row of the residual stream follow one another; each is (colour, y, x). (4 is
    merge · merge.)
    """
    merge, patch = info.merge, info.patch
    image = np.frombuffer(pixels, np.uint8)
    parts = image.reshape(rows, merge, patch, columns, merge, patch, 3)
    return parts.transpose(0, 3, 1, 4, 6, 2, 5).reshape(-1, 3 * patch * patch)
