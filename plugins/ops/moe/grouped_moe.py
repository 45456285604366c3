"""The experts: y = Σ_e weight_e · w2_e(silu_mul(w13_e(x))) over each token's chosen experts.

Each expert does exactly what linear (of its format), silu_mul and linear do; the weight meets
the expert's output, and the sum runs in f32 in ascending expert index, the shared expert last
(transformers, Qwen3.5 MoE). Operands by format: docs/graph.md.

The CPU body computes every expert for every token, each by two MatMuls with constant 2-D
weights, and drops what was not chosen. Measured on one core (E = 17, H = 256, I = 128, f32):
0.17 ms for 1 token, 0.8 ms for 32, 26 ms for 512, no slower than batched 3-D MatMuls, which
moreover take another path for 1 token and so have other bits.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from spark_engine.named import Named
from spark_engine.op import Attrs, Case, Op, Tolerance, rtol_of
from spark_engine.operand import Operand, Result, Role, TimedLaunch, When
from spark_engine.plugins.common import fragments as fr
from spark_engine.plugins.common import operands, random_arrays
from spark_engine.plugins.common.onnx_nodes import Text
from spark_engine.plugins.common.shapes import LEGAL, activation
from spark_engine.plugins.formats import expert_packs, numeric
from spark_engine.plugins.formats import format_fragments as ff
from spark_engine.plugins.kernels.moe.experts import experts_kernels
from spark_engine.plugins.launch import serve
from spark_engine.plugins.ops.linear import (
    fp8_block_linear,
    fp8_linear,
    linear,
    nvfp4_linear,
    nvfp4_linear_a4,
)
from spark_engine.plugins.ops.rowwise import silu_mul
from spark_engine.tensors import Array, DType, TensorSpec

PARAMS = expert_packs.OPERANDS  # by format
INPUT_SCALE = {"w13": "x_scale", "w2": "h_scale"}


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


def _declared(kind: str, name: str) -> Operand:
    """A param of a format; E experts stacked, the shared one last when it is merged."""
    n, k = ("2I", "H") if name.startswith("w13") else ("H", "I")
    stored, scales = {
        "dense": (f"W[E,{n},{k}]", ""),
        "fp8": (f"f8[E,{n},{k}]", f"f32[E,{n}]"),
        "fp8_block": (f"f8[E,{n},{k}]", f"f32[E,⌈{n}/128⌉,⌈{k}/128⌉]"),
        "nvfp4": (f"u8[E,{n},{k}/2]", f"f8[E,{n},{k}/16]"),
    }[kind.removesuffix("_a4")]
    when = When("format", (kind,))
    if name in ("w13", "w2"):
        return Operand(name, Role.WEIGHT, stored, when)
    of_input = name in INPUT_SCALE.values()
    spec = "f32[E]" if of_input else f"f32[E,{n}]" if name.endswith("2") else scales
    return Operand(name, Role.SCALE, spec, when)


PARAM_OPERANDS = tuple(_declared(kind, name) for kind, names in PARAMS.items() for name in names)


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


def _project(kind: str, one: dict[str, Array], name: str, x: Array) -> Array:
    """One linear layer of one expert by the reference of its op. x is f32."""
    f32: Attrs = {"dtype": "f32"}
    wide = x.astype(np.float32)
    w, scale = one[name], one.get(f"{name}_scale", x)
    if kind == "dense":
        return linear.reference(f32, (x, w))[0]
    if kind == "fp8_block":
        xq, xs = numeric.fp8_block_quantise(wide)
        return fp8_block_linear.reference(f32, (xq, xs, w, scale))[0]
    if kind == "nvfp4":
        return nvfp4_linear.reference(f32, (x, w, scale, one[f"{name}_scale2"]))[0]
    given = one[INPUT_SCALE[name]].astype(np.float32)
    if kind == "fp8":
        return fp8_linear.reference(f32, (numeric.fp8_quantise(wide, given), w, given, scale))[0]
    packed, xs = numeric.nvfp4_quantise(wide, given)
    alpha = one[f"{name}_scale2"].astype(np.float32) * given
    return nvfp4_linear_a4.reference(f32, (packed, xs, w, scale, alpha))[0]


def body(attrs: Attrs, specs: tuple[TensorSpec, ...]) -> str:
    """`fragment`, cast."""
    f = Text()
    f.cast(fragment(f, OP.named(attrs, specs)), activation(attrs), "y")
    return f.function("grouped_moe", OP.names(attrs, len(specs)), ("y",))


def fragment(f: Text, node: Named) -> str:
    """Every expert on every token, then the weighted sum f32 of what was chosen.

    Reads x, ids, weights and the params.
    """
    kind, (experts, inner, hidden) = node.text("format"), node.shape("E", "I", "H")
    values = {n: _readable(f, n, node[n].dtype) for n in PARAMS[kind]}
    project = _together if kind in ("dense", "nvfp4") else _apart
    outer = project(f, kind, values, (experts, inner, hidden))
    share = _shares(f, experts)
    total = ""
    for e, down in enumerate(outer):
        weight = fr.columns(f, share, e, e + 1)
        # Where, not times zero: an expert nobody chose may overflow and must not matter
        term = f("Where", f("Less", weight, 0.0), 0.0, f("Mul", weight, down))
        total = f("Add", total, term) if total else term
    return total


def _apart(
    f: Text, kind: str, values: dict[str, str], sizes: tuple[int, int, int]
) -> Iterator[str]:
    """w2(silu_mul(w13(x))) f32 [tokens, H], expert by expert."""
    experts, inner, hidden = sizes
    x = fr.widen(f, "x")
    for e in range(experts):
        one = {name: f("Gather", value, e, axis=0) for name, value in values.items()}
        up = _fragment(f, kind, one, "w13", x, (2 * inner, hidden))
        yield _fragment(f, kind, one, "w2", silu_mul.fragment(f, up, inner), (hidden, inner))


def _together(
    f: Text, kind: str, values: dict[str, str], sizes: tuple[int, int, int]
) -> Iterator[str]:
    """The same by one w13 for all experts, where no expert rounds its input its own way.

    Same bits: a column of a MatMul does not depend on its neighbours. An eighth of the nodes,
    which is what opening a session costs.
    """
    experts, inner, hidden = sizes
    w13 = {n: f("Flatten", v, axis=2) for n, v in values.items() if n in ("w13", "w13_scale")}
    if kind == "nvfp4":
        w13["w13_scale2"] = f("Reshape", values["w13_scale2"], [-1])
    up = _fragment(f, kind, w13, "w13", fr.widen(f, "x"), (experts * 2 * inner, hidden))
    rows = f("Reshape", up, [-1, 2 * inner])
    act = f("Reshape", silu_mul.fragment(f, rows, inner), [-1, experts * inner])
    weights, scales = _expert_weights(f, kind, values, sizes)
    for e, weight in enumerate(weights):
        down = f("MatMul", fr.columns(f, act, e * inner, (e + 1) * inner), weight)
        yield f("Mul", down, f("Gather", scales, e, axis=0)) if scales else down


def _expert_weights(
    f: Text, kind: str, values: dict[str, str], sizes: tuple[int, int, int]
) -> tuple[list[str], str]:
    """w2 of each expert as f32 [I, H], and their scales [E, H] if the format has any."""
    experts, inner, hidden = sizes
    weight, scales = values["w2"], ""
    if kind == "nvfp4":
        codes, blocks = (f("Flatten", values[n], axis=2) for n in ("w2", "w2_scale"))
        weight, scales = ff.nvfp4_decode(f, codes, blocks, inner), values["w2_scale2"]
    square = f("Reshape", weight, [experts, hidden, inner])
    turned = f("Transpose", square, perm=[0, 2, 1])
    return [f("Gather", turned, e, axis=0) for e in range(experts)], scales


def _readable(f: Text, value: str, dtype: DType) -> str:
    """Packed bytes as they are, every other param as f32."""
    return value if dtype is DType.U8 else fr.widen(f, value)


def _shares(f: Text, experts: int) -> str:
    """f32 [tokens, experts]: the weight of each expert, -1 where it was not chosen.

    A NaN weight counts as chosen, so that a broken token stays visibly broken.
    """
    shape = f("Concat", f("Shape", "ids", start=0, end=1), [experts], axis=0)
    return f("ScatterElements", f("Expand", -1.0, shape), "ids", "weights", axis=1)


def _fragment(
    f: Text, kind: str, one: dict[str, str], name: str, x: str, shape: tuple[int, int]
) -> str:
    """One linear layer [N,K] = `shape` of one expert by the fragments of its op."""
    w, scale, k = one[name], one.get(f"{name}_scale", ""), shape[1]
    if kind == "dense":
        return ff.times(f, x, w)
    if kind == "fp8_block":
        codes, xs = ff.fp8_block_quantise(f, x, k, ("", ""))
        return fp8_block_linear.fragment(f, fr.widen(f, codes), xs, w, scale, shape)
    if kind == "nvfp4":
        return nvfp4_linear.fragment(f, x, w, scale, one[f"{name}_scale2"], k)
    given = one[INPUT_SCALE[name]]
    if kind == "fp8":
        codes = fr.widen(f, ff.fp8_quantise(f, x, given))
        return fp8_linear.fragment(f, codes, w, given, scale)
    packed, xs = ff.nvfp4_quantise(f, x, given, k, ("", ""))
    alpha = f("Mul", given, one[f"{name}_scale2"])
    return nvfp4_linear_a4.fragment(f, (packed, fr.widen(f, xs)), (w, scale), alpha, k)


def stack(rng: np.random.Generator, kind: str, experts: int, n: int, k: int) -> list[Array]:
    """Random weights [E,N,K] of a format, with their scales in operand order."""
    dense = random_arrays.normal(rng, experts, n, k, scale=1.5 * k**-0.5).astype(np.float32)
    if kind == "dense":
        return [dense.astype(DType.BF16.numpy)]
    if kind.startswith("nvfp4"):
        rows = [numeric.nvfp4_weight(w) for w in dense]
        parts = [list(part) for part in zip(*rows, strict=True)]
        wide = np.stack(parts[2])[:, None] * random_arrays.positive(rng, experts, n)
        return [np.stack(parts[0]), np.stack(parts[1]), wide]
    if kind == "fp8_block":
        return [np.stack(p) for p in zip(*map(numeric.fp8_block_weight, dense), strict=True)]
    codes, scales = zip(*map(numeric.fp8_weight, dense), strict=True)
    return [np.stack(codes), np.stack(scales)[:, None] * random_arrays.positive(rng, experts, n)]


def arrays(
    rng: np.random.Generator, kind: str, rows: int, sizes: tuple[int, int, int, int]
) -> tuple[Array, ...]:
    """x, ids, weights and params; sizes are (experts, top_k, H, I)."""
    experts, top_k, hidden, inner = sizes
    x = random_arrays.normal(rng, rows, hidden)
    ids = np.argsort(rng.random((rows, experts)), axis=1)[:, :top_k].astype(np.int32)
    weights = random_arrays.positive(rng, rows, top_k, low=0.0, high=1.0)
    params = stack(rng, kind, experts, 2 * inner, hidden) + stack(rng, kind, experts, hidden, inner)
    if "x_scale" in PARAMS[kind]:
        top = 448.0 if kind == "fp8" else 2688.0
        params += [
            random_arrays.positive(rng, experts, low=3 / top, high=6 / top) for _ in range(2)
        ]
    return (x, ids, weights, *params)


def _case(
    kind: str,
    rows: int,
    sizes: tuple[int, int, int, int],
    bench: bool = False,
    dtype: DType = DType.F32,
) -> Case:
    def make(rng: np.random.Generator) -> tuple[Array, ...]:
        x, *rest = arrays(rng, kind, rows, sizes)
        if rows > 5:
            x[1], x[5] = 0, np.nan
        return (x.astype(dtype.numpy), *rest)

    label = f"{kind} {rows} rows, {sizes[1]} of {sizes[0]}, {sizes[2]}x{sizes[3]} {dtype}"
    ignore = random_arrays.ignore_rows(5) if rows > 5 else None
    attrs: Attrs = {"format": kind, "dtype": dtype.value}
    rtol = rtol_of(dtype)
    return Case(label, attrs, make, rtol=rtol, atol=rtol, bench=bench, ignore=ignore)


def _unused(rng: np.random.Generator) -> tuple[Array, ...]:
    """Experts 0 and 3 are chosen by nobody and hold NaN; expert 1 is chosen with weight 0."""
    x, _, weights, w13, w2 = arrays(rng, "dense", 7, (5, 2, 32, 24))
    ids = np.array([[1, 2], [2, 4], [4, 1], [2, 1], [1, 4], [4, 2], [2, 1]], np.int32)
    weights[0] = (0.0, 1.0)
    for weight in (w13, w2):
        weight[[0, 3]] = np.nan
    return x, ids, weights, w13, w2


CASES = (
    _case("dense", 1, (8, 2, 64, 48)),
    _case("dense", 7, (4, 1, 37, 19), bench=True),
    _case("nvfp4", 1, (8, 3, 64, 32)),
    _case("nvfp4", 65, (16, 4, 128, 48), bench=True),
    _case("nvfp4", 3, (4, 4, 32, 16)),
    _case("nvfp4_a4", 1, (4, 2, 64, 32)),
    _case("nvfp4_a4", 7, (4, 2, 48, 16), bench=True),
    _case("nvfp4_a4", 512, (4, 2, 64, 32)),
    _case("fp8", 1, (4, 2, 64, 32)),
    _case("fp8", 7, (5, 3, 40, 24), bench=True),
    _case("fp8_block", 1, (4, 2, 128, 128)),
    _case("fp8_block", 7, (3, 2, 200, 72), bench=True),
    _case("dense", 3, (4, 2, 64, 32), dtype=DType.BF16),
    _case("nvfp4", 3, (4, 2, 64, 32), dtype=DType.BF16),
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
