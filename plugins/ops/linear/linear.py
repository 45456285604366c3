"""A linear layer y = x · wᵀ in each weight format: an op for each (plugins/formats/registry.py).

Sums in f32, casts once. The CPU body dequantises the weight at load and multiplies once.
"""

from collections.abc import Iterator
from itertools import zip_longest

import numpy as np

from spark_engine.op import Attrs, Case, Op, rtol_of
from spark_engine.operand import Operand, Result
from spark_engine.plugins.common import fragments as fr
from spark_engine.plugins.common import random_arrays
from spark_engine.plugins.common.onnx_nodes import Text
from spark_engine.plugins.common.shapes import LEGAL, activation
from spark_engine.plugins.formats import format_fragments as ff
from spark_engine.plugins.formats.format import F64, Format, Names, Values
from spark_engine.plugins.formats.numpy_codecs import F32
from spark_engine.plugins.formats.registry import FORMATS
from spark_engine.plugins.kernels.gemm.linear_kernels import SERVED
from spark_engine.plugins.launch import serve
from spark_engine.tensors import Array, DType, TensorSpec


def product(form: Format, values: Values) -> F64:
    """y, float64, of the operands by name."""
    x = form.inputs.decode(values) if form.inputs else values["x"].astype(np.float64)
    y, scale = x @ form.decode(values).T, np.ones((), np.float64)
    for name in form.rows:
        scale = scale * values[name].astype(np.float64)
    return y * scale if form.rows else y


def fragment(f: Text, form: Format, values: Names, shape: tuple[int, int]) -> str:
    """y, f32, of the operands by name, each as `readable` has it; w is [N,K] = `shape`."""
    x = form.inputs.decode_body(f, values, shape[1]) if form.inputs else values["x"]
    y, scale = ff.times(f, x, form.decode_body(f, values, shape)), ""
    for name in form.rows:
        scale = f("Mul", scale, values[name]) if scale else values[name]
    return f("Mul", y, scale) if scale else y


def readable(f: Text, operand: Operand, value: str) -> str:
    """A value of the operand: u8 and f32 as they are, any other as f32."""
    return value if operand.dtype in ("u8", "f32") else fr.widen(f, value)


def quantised(form: Format, values: Values, x: Array, scale: Array) -> dict[str, Array]:
    """The operands that `x` and its static scale, if the format has one, become.

    `values`: of the weight; where the input's scale multiplies its scales of rows, these alone.
    """
    inputs = form.inputs
    if inputs is None:
        return {"x": x}
    given = scale.astype(np.float32)
    made = dict(zip(inputs.makes, inputs.quantise(x.astype(np.float32), given), strict=True))
    if form.static:
        own = values.get(inputs.scale)
        made[inputs.scale] = given if own is None else given * own.astype(np.float32)
    return made


def quantised_body(
    f: Text, form: Format, values: Names, x: str, scale: str, k: int
) -> dict[str, str]:
    """`quantised` of f32 `x` [tokens, k] in a body."""
    inputs = form.inputs
    if inputs is None:
        return {"x": x}
    made = dict(zip(inputs.makes, inputs.quantise_body(f, x, scale, k, ("", "")), strict=True))
    if scale:
        own = values.get(inputs.scale, "")
        made[inputs.scale] = f("Mul", scale, own) if own else scale
    by_name = {operand.name: operand for operand in form.operands}
    return {name: readable(f, by_name[name], value) for name, value in made.items()}


def stored(rng: np.random.Generator, form: Format, dense: F32) -> list[Array]:
    """Weights [E,N,K] in the format, with their scales; those of rows differ."""
    parts = [np.stack(part) for part in zip(*map(form.quantise, dense), strict=True)]
    return [
        part * random_arrays.positive(rng, *part.shape) if operand.dims == ("N",) else part
        for operand, part in zip(form.stored, parts, strict=True)
    ]


def _case(form: Format, dtype: DType, size: tuple[int, int, int], weight: DType | None) -> Case:
    """A case; of three rows or more, row 1 is zeros and row 2 NaN."""
    m, n, k = size

    def arrays(rng: np.random.Generator) -> tuple[Array, ...]:
        x = random_arrays.normal(rng, m, k, dtype=dtype)
        if m > 2:
            x[1], x[2] = 0, np.nan
        dense = random_arrays.normal(rng, n, k, scale=k**-0.5).astype(np.float32)
        dense = dense * np.exp(rng.standard_normal((n, k))).astype(np.float32)
        dense[n // 2, :16] = 0
        parts = (part[0] for part in stored(rng, form, dense[None]))
        values = dict(zip((operand.name for operand in form.stored), parts, strict=True))
        if weight is not None:
            values["w"] = dense.astype(weight.numpy)
        largest = form.inputs.largest if form.inputs else 0.0
        scale = np.nanmax(np.abs(x.astype(np.float32))) / np.float32(largest or 1)
        values |= quantised(form, values, x, np.asarray(scale))
        return tuple(values[operand.name] for operand in form.operands)

    rtol = rtol_of(dtype)
    label = " ".join(map(str, (f"{m}x{n}x{k}", *form.attrs, *([weight] if weight else []), dtype)))
    attrs: Attrs = {"dtype": dtype.value, **form.attrs}
    return Case(label, attrs, arrays, rtol, rtol, bench=m == 65)


def _cases(form: Format) -> Iterator[Case]:
    pairs = ((dtype, size) for dtype, sizes in form.linear_sizes.items() for size in sizes)
    for (dtype, size), weight in zip_longest(pairs, form.weights):
        yield _case(form, dtype, size, weight)


def op_of(forms: tuple[Format, ...]) -> Op:
    """The linear op of a format, or of several that differ in its nodes' attributes."""
    form = forms[0]
    names = tuple(operand.name for operand in form.operands)
    each = dict.fromkeys(o for same in zip(*(f.operands for f in forms), strict=True) for o in same)

    def reference(attrs: Attrs, given: tuple[Array, ...]) -> tuple[Array, ...]:
        """`product`, cast once."""
        y = product(_form(forms, attrs), dict(zip(names, given, strict=True)))
        return (y.astype(activation(attrs).numpy),)

    def body(attrs: Attrs, specs: tuple[TensorSpec, ...]) -> str:
        """`fragment`, cast once."""
        f, (n, k) = Text(), op.named(attrs, specs).shape("N", "K")
        own = _form(forms, attrs)
        values = {operand.name: readable(f, operand, operand.name) for operand in own.operands}
        f.cast(fragment(f, own, values, (n, k)), activation(attrs), "y")
        return f.function(form.op, names, ("y",))

    op = Op(
        name=form.op,
        operands=tuple(each),
        results=(Result("y", "A[tokens,N]"),),
        attrs={"dtype": None, **{name: 0 for f in forms for name in f.attrs}},
        legal=LEGAL,
        reference=reference,
        body=body,
        cases=tuple(case for f in forms for case in _cases(f)),
    )
    return serve(op, *SERVED.get(form.name, ((), {})))


def _form(forms: tuple[Format, ...], attrs: Attrs) -> Format:
    return next(f for f in reversed(forms) if all(attrs.get(n) == v for n, v in f.attrs.items()))


def format_of(op: str, attrs: Attrs) -> str:
    """The weights' format of a node of a linear op; of another node the op."""
    return _form(BY_OP[op], attrs).name if op in BY_OP else op


BY_OP = {
    each.op: tuple(f for f in FORMATS.values() if f.op == each.op) for each in FORMATS.values()
}
OPS = tuple(map(op_of, BY_OP.values()))
