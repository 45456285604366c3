"""Plain matrices quantised at build: FP8 in 128x128 blocks, and NVFP4.

    fp8_block   scale = amax/448 of a block, f32; code = e4m3(w / scale)
    nvfp4       global = amax/2688 of a matrix, f32; scale = e4m3(amax/(6·global)) of 16 columns, in
                [2^-9, 448]; code = e2m1(w / (scale·global))

Rounds to nearest even, in f32; a part of zeros has scale 1. Matrices may be stacked, and are
processed some rows at a time, so that little memory is needed in addition to the result. Codes and
scales of a quantised matrix are separate recipes over the stored one. Knows no module.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from spark_engine.errors import CheckpointError, GraphError
from spark_engine.models.checkpoint.quant_schemes import Scheme
from spark_engine.models.weights.recipes import Recipe, leaf, transform
from spark_engine.plugins.formats import numpy_codecs
from spark_engine.plugins.formats.numpy_codecs import E2M1_MAX, E4M3_MAX, FP8_BLOCK, NVFP4_BLOCK
from spark_engine.tensors import Array, DType, TensorSpec

AT_ONCE = 1 << 20  # elements in f32
E2M1 = np.dtype(ml_dtypes.float4_e2m1fn)  # a byte each; beyond 6 it saturates
F32 = NDArray[np.float32]


def quantised_parts(weight: Recipe, scheme: Scheme) -> dict[str, Recipe]:
    """`weight` and its scales by suffix, in operand order, of a plain matrix [..., N, K].

    Raises CheckpointError when its columns do not split into groups.
    """
    *stack, n, k = weight.shape
    if scheme is Scheme.NVFP4 and k % NVFP4_BLOCK:
        raise CheckpointError(
            f"{leaf(weight).source}: {k} columns do not split into NVFP4 groups of {NVFP4_BLOCK}; "
            "choose another dtype for the draft head"
        )
    if scheme not in _PARTS:
        raise GraphError(f"no matrix is quantised to {scheme} at build")
    return {
        suffix: transform(weight, TensorSpec("", dtype, (*stack, *shape(n, k))), part)
        for suffix, (dtype, shape, make) in _PARTS[scheme].items()
        for part in (_Part(leaf(weight).source, scheme, suffix),)
    }


@dataclass(frozen=True)
class _Part:
    """One recipe's function of a matrix; `source` names the matrix."""

    source: str
    scheme: Scheme
    suffix: str

    def __call__(self, w: Array) -> Array:
        """The part of w [..., N, K]. Raises CheckpointError unless w is finite."""
        dtype, shape, make = _PARTS[self.scheme][self.suffix]
        *stack, n, k = w.shape
        out = np.empty((*stack, *shape(n, k)), dtype.numpy)
        for matrix, into in zip(w.reshape(-1, n, k), out.reshape(-1, *shape(n, k)), strict=True):
            with np.errstate(invalid="ignore", over="ignore"):
                make(matrix, into, self._amax)
        return out

    def _amax(self, part: F32) -> np.float32:
        found = np.float32(np.abs(part).max())
        if not np.isfinite(found):
            raise CheckpointError(
                f"{self.source} holds a number that is not finite; download the checkpoint again"
            )
        return found


Amax = Callable[[F32], np.float32]


def _rows(matrix: Array) -> Iterator[tuple[int, F32]]:
    """(first row, rows in f32), whole FP8 blocks at a time."""
    step = max(1, AT_ONCE // (matrix.shape[1] * FP8_BLOCK)) * FP8_BLOCK
    for first in range(0, len(matrix), step):
        yield first, matrix[first : first + step].astype(np.float32)


def _block_codes(matrix: Array, out: Array, amax: Amax) -> None:
    for first, part in _rows(matrix):
        amax(part)
        wide = numpy_codecs.fp8_block_expand(numpy_codecs.fp8_block_scale(part), part.shape)
        out[first : first + len(part)] = numpy_codecs.e4m3(np.divide(part, wide, out=part))


def _block_scales(matrix: Array, out: Array, amax: Amax) -> None:
    for first, part in _rows(matrix):
        amax(part)
        scales = numpy_codecs.fp8_block_scale(part)
        out[first // FP8_BLOCK : first // FP8_BLOCK + len(scales)] = scales


def _fp4_codes(matrix: Array, out: Array, amax: Amax) -> None:
    whole = _global(matrix, amax)
    for first, part in _rows(matrix):
        groups = part.reshape(len(part), -1, NVFP4_BLOCK)
        unit = numpy_codecs.nvfp4_scale(groups, whole).astype(np.float32)[..., None] * whole
        codes = np.divide(groups, unit, out=groups).astype(E2M1).view(np.uint8).reshape(part.shape)
        out[first : first + len(part)] = numpy_codecs.pack(codes)


def _fp4_scales(matrix: Array, out: Array, amax: Amax) -> None:
    whole = _global(matrix, amax)
    for first, part in _rows(matrix):
        groups = part.reshape(len(part), -1, NVFP4_BLOCK)
        out[first : first + len(part)] = numpy_codecs.nvfp4_scale(groups, whole)


def _fp4_globals(matrix: Array, out: Array, amax: Amax) -> None:
    out[...] = _global(matrix, amax)


def _global(matrix: Array, amax: Amax) -> np.float32:
    largest = max(amax(part) for _, part in _rows(matrix))
    return largest / np.float32(E2M1_MAX * E4M3_MAX) or np.float32(1)


Shape = Callable[[int, int], tuple[int, ...]]
Make = Callable[[Array, Array, Amax], None]
_PARTS: Mapping[Scheme, Mapping[str, tuple[DType, Shape, Make]]] = {
    Scheme.FP8_BLOCK: {
        "weight": (DType.F8E4M3, lambda n, k: (n, k), _block_codes),
        "weight_scale": (
            DType.F32,
            lambda n, k: (-(-n // FP8_BLOCK), -(-k // FP8_BLOCK)),
            _block_scales,
        ),
    },
    Scheme.NVFP4: {
        "weight": (DType.U8, lambda n, k: (n, k // 2), _fp4_codes),
        "weight_scale": (DType.F8E4M3, lambda n, k: (n, k // NVFP4_BLOCK), _fp4_scales),
        "w_scale2": (DType.F32, lambda n, k: (n,), _fp4_globals),
    },
}
