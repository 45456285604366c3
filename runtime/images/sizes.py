"""The size that an image gets: whole rows and columns of the residual stream, within limits.

Knows sizes; knows no file and no pixel.
"""

import math

from spark_engine.errors import RequestError
from spark_engine.vision import VisionInfo

MOST_RATIO = 200  # of the sides
LOW_PIXELS = 512 * 512  # of an image with `detail: low`
DETAILS = ("auto", "low", "high", "original")


class BadImage(RequestError):
    """An image is not read. The caller names the field that has it."""


def resized(
    height: int, width: int, info: VisionInfo, most_pixels: int | None = None, detail: str = "auto"
) -> tuple[int, int]:
    """Height and width in pixels after resizing; transformers' `smart_resize`.

    `most_pixels`: the server's limit of an image's area, in addition to the model's.

    Raises BadImage for sides that differ too much, or cannot be resized into the limit, and for an
    unknown `detail`.
    """
    if detail not in DETAILS:
        raise BadImage(f"detail is {detail[:40]!r}; it must be one of {', '.join(DETAILS)}")
    limits = [info.most_pixels, most_pixels, LOW_PIXELS if detail == "low" else None]
    most = min(limit for limit in limits if limit is not None)
    least = min(info.least_pixels, most)
    if max(height, width) > MOST_RATIO * min(height, width):
        words = f"{width} x {height} pixels: one side is more than {MOST_RATIO} times the other"
        raise BadImage(f"{words}; cut the image")
    unit = info.unit
    sides = round(height / unit) * unit, round(width / unit) * unit
    if sides[0] * sides[1] < least:
        scale = math.sqrt(least / (height * width))
        sides = _grown(height, scale, unit), _grown(width, scale, unit)
    if sides[0] * sides[1] > most:
        scale = math.sqrt(height * width / most)
        sides = _shrunk(height, scale, unit), _shrunk(width, scale, unit)
    if sides[0] * sides[1] > most:  # a side of one unit
        words = f"{width} x {height} pixels cannot be resized to at most {most} pixels"
        raise BadImage(f"{words} in whole squares of {unit}; cut the image to other proportions")
    return sides


def _shrunk(side: int, scale: float, unit: int) -> int:
    return max(unit, math.floor(side / scale / unit) * unit)


def _grown(side: int, scale: float, unit: int) -> int:
    return math.ceil(side * scale / unit) * unit
