"""Tensor types: the dtypes of checkpoints, graphs and engine files, and a named shape."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from spark_engine.typed import typed

Array = NDArray[np.generic]
Bytes = NDArray[np.uint8]
Dim = int | str  # a str is a dimension that a bucket binds: "rows", "tokens"


class DType(enum.StrEnum):
    """Element types. NVFP4 values are packed two to a `U8`; FP8 KV pages are `U8` codes."""

    F32 = "f32"
    F16 = "f16"
    BF16 = "bf16"
    F8E4M3 = "f8e4m3"
    F8E8M0 = "f8e8m0"  # a power of two; scales of files have it, no graph
    U8 = "u8"
    I32 = "i32"
    U32 = "u32"
    I64 = "i64"
    BOOL = "bool"

    @property
    def numpy(self) -> np.dtype[np.generic]:
        return _FORMS[self].numpy

    @property
    def itemsize(self) -> int:
        return self.numpy.itemsize

    @property
    def onnx(self) -> int:
        """The number in `onnx.TensorProto.DataType`."""
        return _FORMS[self].onnx

    @property
    def onnx_text(self) -> str:
        """The name in ONNX's textual syntax."""
        return _FORMS[self].onnx_text

    @property
    def safetensors(self) -> str:
        """The name in a safetensors header."""
        return _FORMS[self].safetensors

    @classmethod
    def of(cls, dtype: np.dtype[np.generic] | type) -> DType:
        """The DType of a numpy dtype. Raises KeyError for one that is not ours."""
        return _BY_NUMPY[np.dtype(dtype)]


class _Forms(NamedTuple):
    """A dtype elsewhere."""

    numpy: np.dtype[np.generic]
    onnx: int
    onnx_text: str
    safetensors: str


_FORMS = {
    DType.F32: _Forms(np.dtype(np.float32), 1, "float", "F32"),
    DType.F16: _Forms(np.dtype(np.float16), 10, "float16", "F16"),
    DType.BF16: _Forms(np.dtype(ml_dtypes.bfloat16), 16, "bfloat16", "BF16"),
    DType.F8E4M3: _Forms(np.dtype(ml_dtypes.float8_e4m3fn), 17, "float8e4m3fn", "F8_E4M3"),
    DType.F8E8M0: _Forms(np.dtype(ml_dtypes.float8_e8m0fnu), 24, "float8e8m0", "F8_E8M0"),
    DType.U8: _Forms(np.dtype(np.uint8), 2, "uint8", "U8"),
    DType.I32: _Forms(np.dtype(np.int32), 6, "int32", "I32"),
    DType.U32: _Forms(np.dtype(np.uint32), 12, "uint32", "U32"),
    DType.I64: _Forms(np.dtype(np.int64), 7, "int64", "I64"),
    DType.BOOL: _Forms(np.dtype(np.bool_), 9, "bool", "BOOL"),
}
_BY_NUMPY = {forms.numpy: dtype for dtype, forms in _FORMS.items()}


@dataclass(frozen=True)
class TensorSpec:
    """A name, a dtype and a shape; a bucket binds its string dimensions."""

    name: str
    dtype: DType
    shape: tuple[Dim, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor. Raises ValueError while a dimension is unbound."""
        return math.prod(self.dims) * self.dtype.itemsize

    @property
    def dims(self) -> tuple[int, ...]:
        """The shape, all bound. Raises ValueError while a dimension is unbound."""
        if str in map(type, self.shape):
            raise ValueError(f"tensor {self.name} has unbound dimensions {self.shape}")
        return tuple(map(int, self.shape))

    def bind(self, dims: dict[str, int]) -> TensorSpec:
        """The same spec with named dimensions replaced by numbers."""
        shape = tuple(dims.get(d, d) if isinstance(d, str) else d for d in self.shape)
        return replace(self, shape=shape)

    def to_json(self) -> dict[str, object]:
        return {"name": self.name, "dtype": self.dtype.value, "shape": list(self.shape)}

    @classmethod
    def from_json(cls, row: dict[str, object]) -> TensorSpec:
        """The inverse of `to_json`. Raises KeyError, TypeError or ValueError when malformed."""
        name, dtype, shape = row["name"], row["dtype"], row["shape"]
        if not isinstance(shape, list):
            raise ValueError(f"shape of {name} is {shape!r}, not a list")
        return _spec(name, dtype, *shape)


@lru_cache(1 << 14, typed=True)  # most are the same in all buckets of an engine
def _spec(name: object, dtype: object, *shape: object) -> TensorSpec:
    """A spec of JSON values. Raises TypeError or ValueError when one is malformed."""
    dims = tuple(d if isinstance(d, str) else typed(int, d, str(name)) for d in shape)
    return TensorSpec(typed(str, name, "name"), DType(typed(str, dtype, "dtype")), dims)
