"""Pages of keys and values: sizes, and how a page stores a value. Knows no op."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from spark_engine.interface import MOST_DRAFTS
from spark_engine.op import Attrs
from spark_engine.plugins.formats import fp8_codes
from spark_engine.tensors import Array, DType

SECTIONS = ("rope_height", "rope_width")  # attributes of prefill: pairs that these turn
ROUND = MOST_DRAFTS + 1  # tokens of a row that are as many rows of one; longer tiles are prefill's


@dataclass(frozen=True)
class Sizes:
    """The attributes of one node and the size of its pages."""

    tile: int
    heads: int
    kv_heads: int
    dim: int
    page: int
    storage: DType  # U8 where pages hold FP8 codes

    @property
    def group(self) -> int:
        """Query heads that share a kv head."""
        return self.heads // self.kv_heads


def sizes_of(attrs: Attrs, page: int) -> Sizes:
    """The attributes, typed, and the tokens of a page; keys alone have as many heads as queries."""
    kv_heads, kv = int(attrs["kv_heads"]), DType(str(attrs["kv_dtype"]))
    storage = DType.U8 if kv is DType.F8E4M3 else kv
    heads, tile = int(attrs.get("heads", kv_heads)), int(attrs.get("tile", 1))
    return Sizes(tile, heads, kv_heads, int(attrs["head_dim"]), page, storage)


def store(x: NDArray[np.float64], storage: DType, scale: np.generic | float) -> Array:
    """`x` as pages of this dtype hold it (FP8: codes of x / scale, rounded from f32)."""
    if storage is not DType.U8:
        return x.astype(np.float32).astype(storage.numpy)
    return fp8_codes.encode_array(x.astype(np.float32) / np.float32(scale))


def read_back(pages: Array, storage: DType, scale: np.generic | float) -> NDArray[np.float64]:
    """The inverse of `store`, in float64."""
    if storage is not DType.U8:
        return pages.astype(np.float64)
    return fp8_codes.decode_array(pages).astype(np.float64) * float(scale)
