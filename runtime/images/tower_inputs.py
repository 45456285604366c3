"""An image as the vision tower's inputs. Knows the order of patches and of the position table.

The arrays are a bucket's step inputs (docs/graph.md); only those of live patches are written.
"""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from spark_engine.tensors import Array
from spark_engine.vision import ROW_PATCHES, Image, VisionInfo


def fill_inputs(buffers: Mapping[str, Array], image: Image, info: VisionInfo, first: int) -> None:
    """Writes `patches`, `taps`, `tap_weights`, `coords`, `live` and `first` of one launch.

    `first`: the row of `image_rows` for the image's first row. The bucket holds 4 patches for
    each row at least. Other elements, of padding, keep what they held.
    """
    live = image.tokens * ROW_PATCHES
    buffers["patches"][:live] = np.frombuffer(image.pixels, np.uint8).reshape(live, -1)
    coords = coords_of(image.rows, image.columns, info.merge)
    buffers["coords"][:live] = coords
    sizes = image.rows * info.merge, image.columns * info.merge
    taps, weights = _taps(coords, sizes, info.side)
    buffers["taps"][:live], buffers["tap_weights"][:live] = taps, weights
    buffers["live"][0], buffers["first"][0] = live, first


def coords_of(rows: int, columns: int, merge: int) -> NDArray[np.int32]:
    """i32 [patches, 2]: row and column of each patch, block by block of merge x merge."""
    grid = np.indices((rows * merge, columns * merge), np.int32)
    blocks = grid.reshape(2, rows, merge, columns, merge)
    return blocks.transpose(1, 3, 2, 4, 0).reshape(-1, 2)


def _taps(
    coords: NDArray[np.int32], sizes: tuple[int, int], side: int
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """i32 and f32 [patches, 4]: rows of the table and their weights. Bilinear; the first and last
    patch of an axis are on the table's edges (in f32, as transformers computes it)."""
    spread = np.maximum(np.array(sizes, np.float32) - 1, 1)
    at = coords.astype(np.float32) * np.float32(side - 1) / spread
    low = np.floor(at).astype(np.int32)
    high, part = np.minimum(low + 1, side - 1), at - low.astype(np.float32)
    rows, columns = (np.stack([low[:, i], high[:, i]], 1) for i in (0, 1))
    shares = [np.stack([1 - part[:, i], part[:, i]], 1) for i in (0, 1)]
    taps = rows[:, :, None] * np.int32(side) + columns[:, None, :]
    weights = shares[0][:, :, None] * shares[1][:, None, :]
    return taps.reshape(-1, 4), np.asarray(weights.reshape(-1, 4), np.float32)
