"""Lazy weight recipes: small expression trees over the tensors of a checkpoint.

A recipe knows its dtype and shape without reading files; evaluation reads only its sources, and
plain sources stay views of the file's memory map. The builder's rules that join weights (`concat0`,
`append_expert`) work on recipes. Knows no graph and no tensor name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import numpy as np
from numpy.typing import ArrayLike

from spark_engine.errors import CheckpointError, GraphError
from spark_engine.models.checkpoint.tensor_list import PLAIN
from spark_engine.models.weights import value_checks
from spark_engine.tensors import Array, DType, TensorSpec

ROUND = "to_bf16"  # the op of a recipe
Ranges = tuple[tuple[int, int], ...]
Verified = Literal["finite", "codes", "whole_scale", "input_scale", "part_scale", "signed_scale"]


class Reads(Protocol):
    """The source of tensors for evaluation (`checkpoint.Checkpoint`)."""

    def read(self, name: str) -> Array: ...


@dataclass(frozen=True)
class Recipe:
    """One node of an expression: `op` over `args`, or a leaf."""

    op: str  # a key of the evaluator's table
    # dtype and shape: of the result.
    dtype: DType
    shape: tuple[int, ...]
    args: tuple[Recipe, ...] = ()  # operands
    source: str = ""  # the tensor's name in the file, for the leaf "source"
    values: tuple[float, ...] = ()  # the elements in order, for the leaf "constant"
    # Of "transform"; equal functions make equal recipes.
    function: Callable[..., Array] | None = None

    def sources(self) -> Iterator[str]:
        """Names of the tensors that evaluating reads, in order, repeats included."""
        if self.source:
            yield self.source
        for arg in self.args:
            yield from arg.sources()

    def evaluate(self, checkpoint: Reads) -> Array:
        """The value: a view for a plain source, else a fresh C-contiguous array."""
        if self.op in _JOINS:
            out = np.empty(self.shape, self.dtype.numpy)
            self._fill(checkpoint, out)
            return out
        value = _EVALUATE[self.op](
            self, [arg.evaluate(checkpoint) for arg in self.args], checkpoint
        )
        if value.shape != self.shape or value.dtype != self.dtype.numpy:
            got = f"{value.dtype} {value.shape}"
            raise GraphError(f"recipe {self.op} gave {got}, not {self.dtype} {self.shape}")
        return value

    def _fill(self, checkpoint: Reads, out: Array) -> None:
        """Evaluates into `out`; joins write their parts in place, one at a time."""
        if self.op not in _JOINS:
            out[...] = self.evaluate(checkpoint)
            return
        for arg, part in zip(self.args, _JOINS[self.op](self, out), strict=True):
            arg._fill(checkpoint, part)


@dataclass(frozen=True)
class Weight:
    """A graph input that is computed from the checkpoint once, at build."""

    spec: TensorSpec
    recipe: Recipe

    def evaluate(self, checkpoint: Reads) -> Array:
        return self.recipe.evaluate(checkpoint)


@dataclass(frozen=True)
class _Rows:
    """The function of `take`: a view if there is one range."""

    ranges: Ranges

    def __call__(self, array: Array) -> Array:
        if len(self.ranges) == 1:
            return array[slice(*self.ranges[0])]
        rows = np.concatenate([np.arange(*one) for one in self.ranges])
        return np.take(array, rows, axis=0)


def weight(name: str, recipe: Recipe) -> Weight:
    return Weight(TensorSpec(name, recipe.dtype, recipe.shape), recipe)


def source(name: str, dtype: DType, shape: Sequence[int]) -> Recipe:
    return Recipe("source", dtype, tuple(shape), source=name)


def constant(values: ArrayLike, dtype: DType = DType.F32) -> Recipe:
    """Values that are in no file (rotary frequencies, default scales, ids), exact in f64."""
    given = np.asarray(values, dtype.numpy)
    return Recipe("constant", dtype, given.shape, values=tuple(map(float, given.ravel())))


def take(x: Recipe, ranges: Ranges) -> Recipe:
    """Rows of a matrix or vector: (first, last + 1) of each range, in this order."""
    rows = sum(end - first for first, end in ranges)
    return part(x, (rows, *x.shape[1:]), _Rows(ranges))


def cast(x: Recipe, dtype: DType = DType.F32) -> Recipe:
    """The same values in another dtype; the recipe itself if it has that dtype."""
    return x if x.dtype is dtype else Recipe("cast", dtype, x.shape, (x,))


def verified(x: Recipe, what: Verified) -> Recipe:
    """Values of the file, refused (`value_checks.py`) if they are no `what`.

    Plain numbers: finite. FP8 codes: none NaN. A whole tensor's scale: finite and above 0. An
    expert's input scale: 0 or above. Scales of parts (rows, blocks, groups): finite and 0 or above;
    signed ones: finite.
    """
    return Recipe(what, x.dtype, x.shape, (x,))


def to_bf16(x: Recipe) -> Recipe:
    """An f16 or f32 matrix rounded to bf16 as it is read, joins part by part; bf16 as it is."""
    if x.dtype is DType.BF16:
        return x
    if x.op in _JOINS:
        return replace(x, dtype=DType.BF16, args=tuple(map(to_bf16, x.args)))
    return Recipe(ROUND, DType.BF16, x.shape, (x,))


def rounded(recipe: Recipe) -> Iterator[Recipe]:
    """The sources that evaluating rounds to bf16, repeats included."""
    if recipe.op == ROUND:
        yield leaf(recipe)
    for arg in recipe.args:
        yield from rounded(arg)


def one_plus(x: Recipe) -> Recipe:
    """f32 1 + x, for the zero-centred norms."""
    return Recipe("one_plus", DType.F32, x.shape, (x,))


def reciprocal(x: Recipe) -> Recipe:
    """f32 1 / x, for globals that divide."""
    return Recipe("reciprocal", DType.F32, x.shape, (cast(x),))


def multiply(a: Recipe, b: Recipe) -> Recipe:
    """f32 a · b, of one shape."""
    return Recipe("multiply", DType.F32, _same([a, b]).shape, (cast(a), cast(b)))


def reshape(x: Recipe, shape: Sequence[int]) -> Recipe:
    """The same elements in another shape; the recipe itself if it has that shape."""
    if math.prod(shape) != math.prod(x.shape):
        raise GraphError(f"cannot reshape {x.shape} to {tuple(shape)}")
    return x if x.shape == tuple(shape) else Recipe("reshape", x.dtype, tuple(shape), (x,))


def repeat(x: Recipe, rows: int) -> Recipe:
    """A single element repeated to [rows]."""
    return Recipe("repeat", x.dtype, (rows,), (reshape(x, ()),))


def concat0(parts: Sequence[Recipe]) -> Recipe:
    """Concatenation along axis 0 of parts that agree in other dimensions, and in dtype unless all
    are plain."""
    first, *_ = parts = _alike(parts)
    if any(p.dtype is not first.dtype or p.shape[1:] != first.shape[1:] for p in parts):
        raise GraphError(f"cannot concatenate {[(str(p.dtype), p.shape) for p in parts]}")
    rows = sum(p.shape[0] for p in parts)
    return Recipe("concat0", first.dtype, (rows, *first.shape[1:]), tuple(parts))


def stack(parts: Sequence[Recipe]) -> Recipe:
    """Parts of one shape, and of one dtype unless all are plain, along a new axis 0."""
    first = _same(parts := _alike(parts))
    return Recipe("stack", first.dtype, (len(parts), *first.shape), tuple(parts))


def transform(x: Recipe, to: TensorSpec, function: Callable[..., Array], *more: Recipe) -> Recipe:
    """`function` of whole values, which gives the dtype and shape of `to`."""
    return Recipe("transform", to.dtype, to.dims, (x, *more), function=function)


def part(x: Recipe, shape: tuple[int, ...], function: Callable[[Array], Array]) -> Recipe:
    """The part of `x` that `function` selects: of a tensor of the file no other is read."""
    return transform(x, TensorSpec("", x.dtype, shape), function)


def append_expert(experts: Recipe, one: Recipe) -> Recipe:
    """[E, ...] and one more [...] -> [E+1, ...]."""
    return concat0([experts, reshape(one, (1, *one.shape))])


def leaf(recipe: Recipe) -> Recipe:
    """The source under operations on a single value."""
    while recipe.args:
        recipe = recipe.args[0]
    return recipe


def _alike(parts: Sequence[Recipe]) -> Sequence[Recipe]:
    """Plain parts of several dtypes as f32, which has all their values."""
    dtypes = {p.dtype for p in parts}
    return [cast(p) for p in parts] if len(dtypes) > 1 and dtypes <= {*PLAIN} else parts


def _same(parts: Sequence[Recipe]) -> Recipe:
    first = parts[0]
    if any(p.shape != first.shape or p.dtype is not first.dtype for p in parts):
        raise GraphError(f"parts differ: {[(str(p.dtype), p.shape) for p in parts]}")
    return first


def _split0(recipe: Recipe, out: Array) -> list[Array]:
    ends = np.cumsum([arg.shape[0] for arg in recipe.args])
    return np.split(out, ends[:-1])


_JOINS: Mapping[str, Callable[[Recipe, Array], Sequence[Array]]] = {
    "concat0": _split0,
    "stack": lambda recipe, out: [out[i : i + 1].reshape(out.shape[1:]) for i in range(len(out))],
}


def _checked(recipe: Recipe, value: Array, checkpoint: Reads) -> Array:
    check, name = _CHECKS[recipe.op], leaf(recipe).source
    try:
        return check(name, value)
    except CheckpointError:
        check(name, checkpoint.read(name))  # the place in the file, if the value is a part
        raise


def _reciprocal(value: Array) -> Array:
    with np.errstate(divide="ignore", over="ignore"):  # of 0 it is infinite: no expert's scale
        return np.asarray(np.float32(1) / value.astype(np.float32))


def _transform(recipe: Recipe, values: list[Array]) -> Array:
    assert recipe.function is not None
    return np.ascontiguousarray(recipe.function(*values)).reshape(recipe.shape)


_CHECKS = {
    "codes": value_checks.check_codes,
    "finite": value_checks.check_finite,
    "whole_scale": value_checks.check_whole,
    "part_scale": value_checks.check_part,
    "input_scale": value_checks.check_input,
    "signed_scale": value_checks.check_signed,
    ROUND: value_checks.round_to_bf16,
}
_EVALUATE: Mapping[str, Callable[[Recipe, list[Array], Reads], Array]] = {
    "source": lambda r, a, c: c.read(r.source),
    "constant": lambda r, a, c: np.array(r.values).astype(r.dtype.numpy).reshape(r.shape),
    "cast": lambda r, a, c: a[0].astype(r.dtype.numpy),
    "one_plus": lambda r, a, c: np.asarray(np.float32(1) + a[0].astype(np.float32)),
    "reciprocal": lambda r, a, c: _reciprocal(a[0]),
    "multiply": lambda r, a, c: np.asarray(a[0].astype(np.float32) * a[1].astype(np.float32)),
    "reshape": lambda r, a, c: a[0].reshape(r.shape),
    "repeat": lambda r, a, c: np.full(r.shape, a[0], r.dtype.numpy),
    "transform": lambda r, a, c: _transform(r, a),
    **dict.fromkeys(_CHECKS, lambda r, a, c: _checked(r, a[0], c)),
}
