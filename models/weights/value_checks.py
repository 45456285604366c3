"""Checks the values of stored scales and codes when they are read, tensor by tensor.

    codes of FP8 weights    any sign, no NaN
    scale of a whole        finite and above 0: of a tensor, an input, a cache. Zero would wipe the
                            tensor out or divide by zero, and signs belong to the codes
    scale of an input       of a routed expert: 0 or above. Without calibration it is 0, infinite or
                            denormal, and is replaced (`borrowed_scales.py`)
    scale of a part         finite and 0 or above: of a row, an FP8 block, an NVFP4 group. Zero says
                            that this part of the tensor is zero, whatever its codes
    scale of an int4 group  finite; AutoRound gives some a sign
    matrix rounded to bf16  finite in bf16: f32 has its range but for the last 0.4 % (above
                            3.39e38), f16 far less; NaN and infinities were damage before

One pass over the bytes while they are in the cache. Knows arrays and names; knows no recipe.
"""

from collections.abc import Callable
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from spark_engine.errors import CheckpointError
from spark_engine.tensors import Array, DType

_NAN = 0x7F  # e4m3's, without the sign; negative codes are above it
_AT_ONCE = 1 << 18  # bytes
# The least number with a finite reciprocal that kernels do not flush to zero.
# The exponent of infinity and NaN.
_INFINITE: dict[DType, np.uint16 | np.uint32] = {
    DType.BF16: np.uint16(0x7F80),
    DType.F16: np.uint16(0x7C00),
    DType.F32: np.uint32(0x7F800000),
}
LEAST, MOST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
U8 = NDArray[np.uint8]


def check_codes(name: str, array: Array) -> Array:
    """e4m3 codes without NaN. Raises CheckpointError naming tensor, place and value."""
    at = _first(array, lambda part: (part & np.uint8(_NAN)).max() == _NAN, _is_nan)
    if at is not None:
        _refuse(name, array, at, "an FP8 weight must be a number")
    return array


def check_finite(name: str, array: Array) -> Array:
    """Numbers, none infinite or NaN. Raises as `check_codes` does."""
    if array.dtype == DType.F8E4M3.numpy:
        return check_codes(name, array)
    if (infinite := _INFINITE.get(DType.of(array.dtype))) is not None:
        flat = array.reshape(-1).view(infinite.dtype)
        for begin in range(0, flat.size, _AT_ONCE):
            part = flat[begin : begin + _AT_ONCE] & infinite
            if part.max() == infinite:
                at = begin + int((part == infinite).argmax())
                _refuse(name, array, at, "a weight must be a number")
    return array


def _scales(least: float, most: float, wanted: str) -> Callable[[str, Array], Array]:
    """A check of scales from `least` to `most`, which raises as `check_codes` does."""

    def check(name: str, array: Array) -> Array:
        wide = array.astype(np.float32).reshape(-1)
        bad = ~((wide >= least) & (wide <= most))
        if bad.any():
            _refuse(name, array, int(bad.argmax()), wanted)
        return array

    return check


_PART = "the scale of a part must be finite and 0 or above"
_check_part = _scales(0, MOST, _PART)
check_whole = _scales(LEAST, MOST, "the scale of a tensor must be finite and above 0")
check_input = _scales(0, np.inf, "the scale of an input must be 0 or above")
check_signed = _scales(-MOST, MOST, "the scale of a group must be finite")


def check_part(name: str, array: Array) -> Array:
    """Scales of rows, blocks or groups, 0 or above. Raises as `check_codes` does."""
    if array.dtype != DType.F8E4M3.numpy:
        return _check_part(name, array)
    at = _first(array, lambda part: part.max() >= _NAN, lambda part: part >= _NAN)
    if at is not None:
        _refuse(name, array, at, _PART)
    return array


def round_to_bf16(name: str, array: Array) -> Array:
    """An f16 or f32 matrix rounded to nearest even in bf16. Raises CheckpointError for values out
    of range."""
    rounded = array.astype(DType.BF16.numpy)
    bits, most = rounded.view(np.uint16).reshape(-1), 0x7F80  # the exponent of infinity
    for begin in range(0, bits.size, _AT_ONCE):
        part = bits[begin : begin + _AT_ONCE] & np.uint16(0x7FFF)
        if part.max() >= most:
            at = begin + int((part >= most).argmax())
            _refuse(name, array, at, "bf16, which GPU kernels read, has no such number")
    return rounded


def _first(array: Array, fails: Callable[[U8], bool], bad: Callable[[U8], Array]) -> int | None:
    """The index of the first bad byte. `fails`: a cheap test of whether a range has one."""
    flat = array.view(np.uint8).reshape(-1)
    for begin in range(0, flat.size, _AT_ONCE):
        part = flat[begin : begin + _AT_ONCE]
        if fails(part):
            return begin + int(bad(part).argmax())
    return None


def _is_nan(part: U8) -> Array:
    return np.asarray((part & np.uint8(_NAN)) == _NAN)


def _refuse(name: str, array: Array, at: int, wanted: str) -> NoReturn:
    place = [int(i) for i in np.unravel_index(at, array.shape)] if array.shape else []
    value = float(array.reshape(-1)[at])
    raise CheckpointError(
        f"{name}{place or ''} is {value}: {wanted}; download the checkpoint again, or quantise it "
        "again"
    )
