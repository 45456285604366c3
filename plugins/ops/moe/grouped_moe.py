"""The experts: y = Σ_e weight_e · w2_e(silu_mul(w13_e(x))) over each token's chosen experts.

Each expert does exactly what linear (of its format), silu_mul and linear do; the weight meets
the expert's output, and the sum runs in f32 in ascending expert index, the shared expert last
(transformers, Qwen3.5 MoE). Operands by format: docs/graph.md.

The CPU body computes every expert for every token, each by two products with constant 2-D
weights, and drops what was not chosen. Measured on one core (E = 17, H = 256, I = 128, f32):
0.17 ms for 1 token, 0.8 ms for 32, 26 ms for 512, no slower than batched 3-D MatMuls, which
moreover take another path for 1 token and so have other bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from spark_engine.named import Named
from spark_engine.op import Attrs, Case, Op, Tolerance, rtol_of
from spark_engine.operand import Operand, Result, Role, TimedLaunch
from spark_engine.plugins.common import fragments as fr
from spark_engine.plugins.common import operands, random_arrays
from spark_engine.plugins.common.onnx_nodes import Text
from spark_engine.plugins.common.shapes import LEGAL, activation
from spark_engine.plugins.formats import expert_packs
from spark_engine.plugins.formats import format_fragments as ff
from spark_engine.plugins.formats.format import INPUT_SCALES, Format
from spark_engine.plugins.formats.registry import FORMATS
from spark_engine.plugins.kernels.moe.experts import experts_kernels
from spark_engine.plugins.launch import serve
from spark_engine.plugins.ops.linear import linear
from spark_engine.plugins.ops.rowwise import silu_mul
from spark_engine.tensors import Array, DType, TensorSpec

PARAMS = {name: form.params for name, form in FORMATS.items()}
PARAM_OPERANDS = tuple(o for form in FORMATS.values() for o in form.expert_operands)


def _experts(launch: TimedLaunch, dims: tuple[int, ...], rng: np.random.Generator) -> Array:
    """i32 [tokens, k]: distinct experts; the last column is the last expert, as if shared."""
    experts = launch.specs["w13"].dims[0]
    order = np.argsort(rng.random((dims[0], experts - 1)), axis=1)
    ids = np.concatenate([order[:, : dims[1] - 1], np.full((dims[0], 1), experts - 1)], axis=1)
    return np.asarray(ids, np.int32)


ROUTED = (
    operands.x("A[tokens,H]"),
    Operand("ids", Role.ACTIVATION, "i32[tokens,k]", fill=_experts),
    Operand("weights", Role.SCALE, "f32[tokens,k]"),
)


def reference(attrs: Attrs, arrays: tuple[Array, ...]) -> tuple[Array, ...]:
    """(x, ids, weights, params…) -> (y,): each expert over the tokens that chose it."""
    kind = str(attrs["format"])
    x, ids, weights = arrays[:3]
    params = dict(zip(PARAMS[kind], arrays[3:], strict=True))
    y = np.zeros(x.shape, np.float64)
    for e in range(len(params["w2"])):
        rows, places = np.nonzero(ids == e)
        if not len(rows):
            continue
        one = {name: array[e] for name, array in params.items()}
        inner = silu_mul.evaluate(_project(kind, one, "w13", x[rows].astype(np.float32)))
        outer = _project(kind, one, "w2", inner).astype(np.float64)
        y[rows] += weights.astype(np.float64)[rows, places][:, None] * outer
    return (y.astype(activation(attrs).numpy),)


def _project(kind: str, one: Mapping[str, Array], name: str, x: Array) -> Array:
    """One linear layer of one expert by the product of its op. x is f32."""
    form = FORMATS[kind]
    own = zip(form.stored, form.names_of(name), strict=True)
    values = {operand.name: one[param] for operand, param in own}
    values |= linear.quantised(form, values, x, one.get(INPUT_SCALES[name], x))
    return linear.product(form, values).astype(np.float32)


def body(attrs: Attrs, specs: tuple[TensorSpec, ...]) -> str:
    """`fragment`, cast."""
    f = Text()
    f.cast(fragment(f, OP.named(attrs, specs)), activation(attrs), "y")
    return f.function("grouped_moe", OP.names(attrs, len(specs)), ("y",))


def fragment(f: Text, node: Named) -> str:
    """Every expert on every token, then the weighted sum f32 of what was chosen.

    Reads x, ids, weights and the params.
    """
    form, (experts, inner, hidden) = FORMATS[node.text("format")], node.shape("E", "I", "H")
    # packed bytes as they are, every other param as f32
    values = {n: n if node[n].dtype is DType.U8 else fr.widen(f, n) for n in form.params}
    by_row = all(operand.dims[0] == "N" for operand in form.stored)
    project = _together if form.inputs is None and by_row else _apart
    outer = project(f, form, values, (experts, inner, hidden))
    share = _shares(f, experts)
    total = ""
    for e, down in enumerate(outer):
        weight = fr.columns(f, share, e, e + 1)
        # Where, not times zero: an expert that no token chose may overflow and must not matter
        term = f("Where", f("Less", weight, 0.0), 0.0, f("Mul", weight, down))
        total = f("Add", total, term) if total else term
    return total


def _apart(
    f: Text, form: Format, values: dict[str, str], sizes: tuple[int, int, int]
) -> Iterator[str]:
    """w2(silu_mul(w13(x))) f32 [tokens, H], expert by expert."""
    experts, inner, hidden = sizes
    x = fr.widen(f, "x")
    for e in range(experts):
        one = {name: f("Gather", value, e, axis=0) for name, value in values.items()}
        up = _fragment(f, form, one, "w13", x, (2 * inner, hidden))
        yield _fragment(f, form, one, "w2", silu_mul.fragment(f, up, inner), (hidden, inner))


def _together(
    f: Text, form: Format, values: dict[str, str], sizes: tuple[int, int, int]
) -> Iterator[str]:
    """The same by one w13 for all experts, where no expert rounds its input separately.

    Same bits: a column of a MatMul does not depend on its neighbours. An eighth of the nodes,
    which is what opening a session costs.
    """
    experts, inner, hidden = sizes
    w13 = _flat(f, form, values, "w13")
    up = _fragment(f, form, w13, "w13", fr.widen(f, "x"), (experts * 2 * inner, hidden))
    rows = f("Reshape", up, [-1, 2 * inner])
    act = f("Reshape", silu_mul.fragment(f, rows, inner), [-1, experts * inner])
    weights, scales = _expert_weights(f, form, values, sizes)
    for e, weight in enumerate(weights):
        down = ff.times(f, fr.columns(f, act, e * inner, (e + 1) * inner), weight)
        yield f("Mul", down, f("Gather", scales, e, axis=0)) if scales else down


def _flat(f: Text, form: Format, values: dict[str, str], weight: str) -> dict[str, str]:
    """The params of a weight, the rows of all experts one below the other."""
    names = zip(form.stored, form.names_of(weight), strict=True)
    return {
        name: f("Flatten", values[name], axis=2)
        if len(operand.dims) > 1
        else f("Reshape", values[name], [-1])
        for operand, name in names
    }


def _expert_weights(
    f: Text, form: Format, values: dict[str, str], sizes: tuple[int, int, int]
) -> tuple[tuple[str, ...], str]:
    """w2 of each expert as f32 [H, I], and their scales [E, H] if the format has any."""
    experts, inner, hidden = sizes
    own = dict(zip((o.name for o in form.stored), form.names_of("w2"), strict=True))
    along_k = [name for name in own if name not in form.rows]
    flat = {name: f("Flatten", values[own[name]], axis=2) for name in along_k}
    weight = form.decode_body(f, flat, (experts * hidden, inner))
    scales = next((values[own[name]] for name in form.rows), "")
    return f.many(experts, "Split", weight, axis=0, num_outputs=experts), scales


def _shares(f: Text, experts: int) -> str:
    """f32 [tokens, experts]: the weight of each expert, -1 where it was not chosen.

    A NaN weight counts as chosen, so that a broken token stays visibly broken.
    """
    shape = f("Concat", f("Shape", "ids", start=0, end=1), [experts], axis=0)
    return f("ScatterElements", f("Expand", -1.0, shape), "ids", "weights", axis=1)


def _fragment(
    f: Text, form: Format, one: dict[str, str], name: str, x: str, shape: tuple[int, int]
) -> str:
    """One linear layer [N,K] = `shape` of one expert by the fragment of its op."""
    own = zip(form.stored, form.names_of(name), strict=True)
    values = {operand.name: one[param] for operand, param in own}
    given = one[INPUT_SCALES[name]] if form.static else ""
    values |= linear.quantised_body(f, form, values, x, given, shape[1])
    return linear.fragment(f, form, values, shape)


def stack(rng: np.random.Generator, kind: str, experts: int, n: int, k: int) -> list[Array]:
    """Random weights [E,N,K] of a format, with their scales in operand order."""
    dense = random_arrays.normal(rng, experts, n, k, scale=1.5 * k**-0.5).astype(np.float32)
    return linear.stored(rng, FORMATS[kind], dense)


def arrays(
    rng: np.random.Generator, kind: str, rows: int, sizes: tuple[int, int, int, int]
) -> tuple[Array, ...]:
    """x, ids, weights and params; sizes are (experts, top_k, H, I)."""
    experts, top_k, hidden, inner = sizes
    x = random_arrays.normal(rng, rows, hidden)
    ids = np.argsort(rng.random((rows, experts)), axis=1)[:, :top_k].astype(np.int32)
    weights = random_arrays.positive(rng, rows, top_k, low=0.0, high=1.0)
    params = stack(rng, kind, experts, 2 * inner, hidden) + stack(rng, kind, experts, hidden, inner)
    inputs = FORMATS[kind].inputs
    if inputs is not None and inputs.scale:
        low, high = 3 / inputs.largest, 6 / inputs.largest
        params += [random_arrays.positive(rng, experts, low=low, high=high) for _ in INPUT_SCALES]
    return (x, ids, weights, *params)


def _case(kind: str, dtype: DType, rows: int, *sizes: int) -> Case:
    def make(rng: np.random.Generator) -> tuple[Array, ...]:
        x, *rest = arrays(rng, kind, rows, (sizes[0], sizes[1], sizes[2], sizes[3]))
        if rows > 5:
            x[1], x[5] = 0, np.nan
        return (x.astype(dtype.numpy), *rest)

    label = f"{kind} {rows} rows, {sizes[1]} of {sizes[0]}, {sizes[2]}x{sizes[3]} {dtype}"
    ignore = random_arrays.ignore_rows(5) if rows > 5 else None
    attrs: Attrs = {"format": kind, "dtype": dtype.value}
    rtol = rtol_of(dtype)
    return Case(label, attrs, make, rtol=rtol, atol=rtol, bench=5 < rows < 100, ignore=ignore)


def _unused(rng: np.random.Generator) -> tuple[Array, ...]:
    """Experts 0 and 3 are chosen by no token and hold NaN; expert 1 is chosen with weight 0."""
    x, _, weights, w13, w2 = arrays(rng, "dense", 7, (5, 2, 32, 24))
    ids = np.array([[1, 2], [2, 4], [4, 1], [2, 1], [1, 4], [4, 2], [2, 1]], np.int32)
    weights[0] = (0.0, 1.0)
    for weight in (w13, w2):
        weight[[0, 3]] = np.nan
    return x, ids, weights, w13, w2


CASES = (
    *(
        _case(name, dtype, *size)
        for name, form in FORMATS.items()
        for dtype, sizes in form.expert_sizes.items()
        for size in sizes
    ),
    Case("unused experts hold NaN", {"format": "dense", "dtype": "f32"}, _unused, atol=1e-5),
)


def tolerance(attrs: Attrs) -> Tolerance:
    """Activations are bf16 between the two products, which the reference keeps whole: a sum over
    few inner columns then cancels to 2^-6 of its spread (numpy with that one rounding does so)."""
    return Tolerance(element=2.0**-5)


OP = serve(
    Op(
        name="grouped_moe",
        operands=(*ROUTED, *PARAM_OPERANDS),
        results=(Result("y", "A[tokens,H]"),),
        attrs={"format": None, "dtype": None},
        legal={"format": tuple(PARAMS), **LEGAL},
        reference=reference,
        body=body,
        cases=CASES,
        tolerance=tolerance,
    ),
    experts_kernels.CANDIDATES,
    expert_packs.PACKS,
)
