"""What builder and runtime agree on about images: the tower's sizes and an image of a prompt.

Knows the arithmetic of patches, rows and positions (transformers' `modeling_qwen3_5.py` and
`image_processing_pil_qwen2_vl.py`); knows no file format and no network.
"""

from dataclasses import dataclass

VISION = "vision"  # the family of the tower: its buckets count rows of `image_rows`
IMAGE_ROWS = "image_rows"  # the state that the tower writes and prefill reads
PATCH, MERGE, COLOURS = 16, 2, 3  # the sizes that are compiled: pixels, patches, channels
ROW_PATCHES = MERGE * MERGE  # of a row of the stream
PATCH_VALUES = COLOURS * PATCH * PATCH  # u8 values of a patch
TAPS = 4  # rows of the position table that a patch blends
DIGEST = 16  # bytes of an image's digest


@dataclass(frozen=True)
class VisionInfo:
    """How images become rows of a network's residual stream."""

    patch: int  # pixels of a patch's side
    merge: int  # patches of a row's side: a row of the stream holds merge x merge patches
    # least_pixels and most_pixels: area of an image after resizing.
    least_pixels: int
    most_pixels: int
    # mean and std: of each colour, of values from 0 to 1.
    mean: tuple[float, ...]
    std: tuple[float, ...]
    # image_id, start_id and end_id: tokens: one a row of an image, before and after an image.
    image_id: int
    start_id: int
    end_id: int
    side: int = 48  # rows and columns of the square table of positions

    @property
    def unit(self) -> int:
        """Pixels of the side of what becomes one row; sides of resized images are multiples."""
        return self.patch * self.merge


@dataclass(frozen=True, slots=True)
class Image:
    """An image of a prompt, resized."""

    start: int  # position of its first row in the prompt; its rows are consecutive
    # rows and columns: of the residual stream; the image has rows · columns tokens.
    rows: int
    columns: int
    # u8 [4 · rows · columns, 3 · patch · patch], RGB by patches in the tower's order.
    pixels: bytes
    digest: bytes  # of sizes and pixels; images with equal digests are one image

    @property
    def tokens(self) -> int:
        return self.rows * self.columns

    @property
    def end(self) -> int:
        return self.start + self.tokens
