"""Int4 weights of four packings as the operands of `int4_linear` (plugins/formats/int4.py).

    GPTQ                qweight i32 [K/8, N], qzeros i32 [K/g, N/8], scales [K/g, N]; eight codes of
                        a word ascend, and zero points are stored less one, modulo 16
    GPTQ v2             the same, zero points as they are
    AWQ                 qweight i32 [K, N/8]: eight rows in the order 0 2 4 6 1 3 5 7; qzeros alike
    compressed-tensors  weight_packed i32 [N, K/8], weight_scale [N, K/g], weight_zero_point i32
                        [N/8, K/g] unless all are 8

A matrix is read whole: ranks and slices take their parts of the result. Groups are repeated to 32
columns, which are in order (idle_tensors.py). Knows arrays and tensor names; knows no config.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from spark_engine.models.checkpoint.quant_schemes import Dialect, Scheme
from spark_engine.models.weights import recipes
from spark_engine.models.weights.recipes import Recipe
from spark_engine.models.weights.stored_model import Model
from spark_engine.plugins.formats import int4, numpy_codecs
from spark_engine.plugins.formats.numpy_codecs import U8
from spark_engine.plugins.formats.weight_packing import INT4_GROUP
from spark_engine.tensors import Array, DType, TensorSpec

_AWQ = np.argsort([0, 2, 4, 6, 1, 3, 5, 7])  # the nibble that has a row


def projection_parts(model: Model, module: str, scheme: Scheme) -> dict[str, Recipe]:
    """`weight`, `weight_scale` and `w_scale2` of a module, all rows that it has of all columns."""
    dialect = model.table.dialect_of(module)
    rows, columns = _shape(model, module, dialect)
    wide = (rows, columns // INT4_GROUP)
    weight, scale, zero = "qweight", "scales", "qzeros"
    if dialect is Dialect.COMPRESSED:
        weight, scale, zero = "weight_packed", "weight_scale", "weight_zero_point"

    def read(name: str) -> Recipe:
        return _stored(model, f"{module}.{name}")

    def made(
        x: Recipe, dtype: DType, shape: tuple[int, ...], function: Function, *more: Recipe
    ) -> Recipe:
        return recipes.transform(x, TensorSpec("", dtype, shape), function, *more)

    codes = made(read(weight), DType.U8, (rows, columns // 2), _CODES[dialect])
    widen = _Groups(dialect is not Dialect.COMPRESSED, scheme.group // INT4_GROUP)
    stored = recipes.verified(read(scale), "signed_scale")
    scales = made(recipes.cast(stored), DType.F32, wide, widen)
    if scheme.symmetric:
        zeros = made(scales, DType.F32, wide, _eights)
    else:
        zeros = made(read(zero), DType.F32, wide, _Zeros(dialect, rows, widen))
    pairs = made(scales, DType.F32, (rows, 2 * wide[1]), int4.paired, zeros)
    factors = made(scales, DType.F32, (rows,), int4.row_factors)
    parts = {"weight": codes, "weight_scale": pairs, "w_scale2": factors}
    part_of = model.layout.slices.get(module)
    if part_of is not None:
        parts = {name: recipes.take(x, part_of.ranges) for name, x in parts.items()}
    return parts


Function = Callable[..., Array]


def _stored(model: Model, name: str) -> Recipe:
    """A tensor of the file, of which no slice or share is taken yet."""
    spec = model.tensors[model.layout.file_name(name)]
    return recipes.source(spec.name, spec.dtype, spec.dims)


def _shape(model: Model, module: str, dialect: Dialect) -> tuple[int, int]:
    """Rows and columns of the stored matrix."""
    name = "weight_packed" if dialect is Dialect.COMPRESSED else "qweight"
    first, second = _stored(model, f"{module}.{name}").shape
    if dialect is Dialect.COMPRESSED:
        return first, 8 * second
    return (8 * second, first) if dialect is Dialect.AWQ else (second, 8 * first)


def _bytes(words: Array) -> U8:
    """i32 [..., n] -> its bytes [..., n, 4]: two codes each, the low nibble first."""
    raw: U8 = np.ascontiguousarray(words).view(np.uint8).reshape(*words.shape, 4)
    return raw


def _unpacked(words: Array, order: Array | None = None) -> U8:
    """i32 [..., n] -> codes [..., 8n]."""
    codes = numpy_codecs.unpack(_bytes(words))
    codes = codes if order is None else codes[..., order]
    whole: U8 = codes.reshape(*words.shape[:-1], -1)
    return whole


def _gptq_codes(words: Array) -> Array:
    """[K/8, N] -> [N, K/2]: the bytes of a word are four pairs of k already."""
    return _bytes(words).swapaxes(0, 1).reshape(words.shape[1], -1)


def _awq_codes(words: Array) -> Array:
    """[K, N/8] -> [N, K/2]."""
    codes = _unpacked(words, _AWQ)
    return numpy_codecs.pack(np.ascontiguousarray(codes.T))


def _compressed_codes(words: Array) -> Array:
    """[N, K/8] -> [N, K/2]."""
    return _bytes(words).reshape(len(words), -1)


_CODES = {
    Dialect.GPTQ: _gptq_codes,
    Dialect.GPTQ_V2: _gptq_codes,
    Dialect.AWQ: _awq_codes,
    Dialect.COMPRESSED: _compressed_codes,
}


@dataclass(frozen=True)
class _Groups:
    """Values of groups as [N, groups of 32]; `by_group`: they are stored as [groups, N]."""

    by_group: bool
    times: int

    def __call__(self, values: Array) -> Array:
        return np.repeat(values.T if self.by_group else values, self.times, axis=1)


@dataclass(frozen=True)
class _Zeros:
    """Zero points f32 of words that pack eight rows."""

    dialect: Dialect
    rows: int
    widen: _Groups

    def __call__(self, words: Array) -> Array:
        if self.dialect is Dialect.COMPRESSED:
            zeros = _unpacked(words.T)[:, : self.rows].T
        else:
            zeros = _unpacked(words, _AWQ if self.dialect is Dialect.AWQ else None)[:, : self.rows]
        less = 1 if self.dialect is Dialect.GPTQ else 0
        return self.widen(zeros.astype(np.float32) + less) % 16


def _eights(scales: Array) -> Array:
    return np.full_like(scales, 8)
