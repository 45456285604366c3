"""What an engine has for images: the tower's buckets and the rows that its results take.

Knows sizes of images and options; knows no graph. An image that is larger than the largest bucket
is resized to it, so that `most_pixels` of the engine's `VisionInfo` follows from the buckets.
"""

from dataclasses import dataclass, replace

from spark_engine.errors import OptionError
from spark_engine.kernel import Target
from spark_engine.vision import MERGE, PATCH, ROW_PATCHES, VisionInfo

ROW_PIXELS = (MERGE * PATCH) ** 2
SIZES = (256, 1024, 2304, 4096, 8192, 16_384, 65_536)  # patches
# On the CPU each bucket is a session to open.
CPU_SIZES = (1024, 4096)
MOST_PIXELS, CPU_MOST_PIXELS = 16_384 * PATCH**2, 4096 * PATCH**2  # without the option
KEPT = 4  # images of the largest size that the state holds the rows of, or more smaller ones


@dataclass(frozen=True)
class ImagePlan:
    """`patches` of each bucket, ascending; `rows` of the state. Empty without images."""

    patches: tuple[int, ...] = ()
    rows: int = 0
    info: VisionInfo | None = None


def decide(
    wanted: bool, most_pixels: int | None, found: VisionInfo | str, gpu: Target | None
) -> ImagePlan:
    """The plan for a checkpoint: how it reads images, or why it reads none.

    Raises OptionError for a limit that no image fits, or without a tower.
    """
    if isinstance(found, str):
        if most_pixels is not None:
            raise OptionError(f"--max-image-pixels {most_pixels}: {found}; leave it out")
        return ImagePlan()
    if not wanted:
        if most_pixels is not None:
            raise OptionError("--max-image-pixels does nothing with --no-vision; give one of them")
        return ImagePlan()
    default = min(found.most_pixels, MOST_PIXELS if gpu else CPU_MOST_PIXELS)
    asked = default if most_pixels is None else most_pixels
    if not ROW_PIXELS <= asked <= found.most_pixels:
        raise OptionError(
            f"--max-image-pixels {asked}: give {ROW_PIXELS} to {found.most_pixels}, the area of "
            "the largest image that the model reads"
        )
    rows = asked // ROW_PIXELS
    sizes = [n for n in (SIZES if gpu else CPU_SIZES) if n < rows * ROW_PATCHES]
    info = replace(found, most_pixels=asked, least_pixels=min(found.least_pixels, asked))
    return ImagePlan((*sizes, rows * ROW_PATCHES), KEPT * rows, info)
