"""A fused op and the ops it replaces give the same bits on onnxruntime, in every format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from spark_engine.op import Attrs, Case
from spark_engine.plugins import registry
from spark_engine.plugins.attention import attention_decode
from spark_engine.plugins.common import formats, samples
from spark_engine.plugins.gdn import gdn_decode
from spark_engine.plugins.moe import grouped_moe, moe_norm_quant
from spark_engine.tensors import Array
from tests.plugins.one_node import Node, run_graph

ROWS = 5
QUANTS = [("fp8", 1), ("fp8", 3), ("fp8_block", 1), ("nvfp4", 1), ("nvfp4", 2)]
SCALED = ("fp8", "nvfp4")  # formats whose quantiser takes a scale
F32: Attrs = {"dtype": "f32"}


def rng_of(*parts: object) -> np.random.Generator:
    """A generator that depends on the test's parameters alone."""
    return np.random.default_rng(list(repr(parts).encode()))


def node(
    op: str, inputs: Sequence[str], outputs: Sequence[str], attrs: Attrs | None = None
) -> Node:
    return Node(registry.get(op), inputs, outputs, attrs or {})


def same_bits(
    fused: Sequence[Node],
    plain: Sequence[Node],
    values: Mapping[str, Array],
    pairs: Mapping[str, str],
    constant: Sequence[str] = (),
) -> None:
    """Runs both graphs and compares output by output; `pairs` maps fused name to plain name."""
    used = {name for graph in (fused,) for n in graph for name in n.inputs}
    left = run_graph(fused, *_fed(values, used, constant, list(pairs)))
    used = {name for n in plain for name in n.inputs}
    right = run_graph(plain, *_fed(values, used, constant, list(pairs.values())))
    for a, b in pairs.items():
        assert left[a].dtype == right[b].dtype and left[a].shape == right[b].shape
        assert not np.isnan(left[a].astype(np.float32)).any(), f"{a} was not written"
        assert left[a].tobytes() == right[b].tobytes(), f"{a} and {b} differ"


def _fed(
    values: Mapping[str, Array], used: set[str], constant: Sequence[str], outputs: list[str]
) -> tuple[dict[str, Array], list[str], list[str]]:
    """The values, outputs and initializers of one of the graphs."""
    return (
        {k: v for k, v in values.items() if k in used},
        outputs,
        [c for c in constant if c in used],
    )


def quantisers(quant: str, n: int, y: str) -> tuple[list[Node], list[str]]:
    """The stand-alone quantise nodes over `y`, and their outputs in the fused op's order."""
    if quant == "fp8_block":
        return [node("fp8_block_quant", [y], ["q0", "s0"])], ["q0", "s0"]
    if quant == "fp8":
        outs = [f"q{i}" for i in range(n)]
        return [node("fp8_quant", [y, f"scale{i}"], [outs[i]]) for i in range(n)], outs
    rows = [node("nvfp4_quant", [y, f"scale{i}"], [f"q{i}", f"s{i}"]) for i in range(n)]
    return rows, [name for row in rows for name in row.outputs]


def scales_of(rng: np.random.Generator, quant: str, n: int) -> dict[str, Array]:
    """`scales` f32[n] and its elements `scale{i}` f32[], of a format that has them."""
    if quant == "fp8_block":
        return {}
    low, high = (0.003, 0.01) if quant == "fp8" else (0.0005, 0.002)
    scales = samples.positive(rng, n, low=low, high=high)
    return {"scales": scales, **{f"scale{i}": np.asarray(s) for i, s in enumerate(scales)}}


def names(prefix: str, count: int) -> list[str]:
    return [f"{prefix}{i}" for i in range(count)]


def check_fused_quantiser(
    fused: str,
    operands: Sequence[str],
    plain: Sequence[Node],
    kept: Sequence[str],
    attrs: Attrs,
    values: Mapping[str, Array],
) -> None:
    """`fused` over operands equals the `plain` nodes (which make y) and the quantisers over y."""
    tail, outs = quantisers(str(attrs["quant"]), int(attrs["n"]), "y")
    want = [*kept, *outs]
    scales = ["scales"] if "scales" in values else []
    got = names("r", len(want))
    constant = [k for k in values if k.startswith(("scale", "weight"))]
    same_bits(
        [node(fused, [*operands, *scales], got, attrs)],
        [*plain, *tail],
        values,
        dict(zip(got, want, strict=True)),
        constant,
    )


@pytest.mark.parametrize(("quant", "n"), QUANTS)
@pytest.mark.parametrize("add", [0, 1])
@pytest.mark.parametrize("keep", [0, 1])
@pytest.mark.parametrize("width", [48, 256])
def test_norm_quant(quant: str, n: int, add: int, keep: int, width: int) -> None:
    rng = rng_of(quant, n, add, keep, width)
    values: dict[str, Array] = {
        "x": samples.awkward(rng, ROWS, width),
        "residual": samples.normal(rng, ROWS, width),
        "weight": samples.positive(rng, width),
        **scales_of(rng, quant, n),
    }
    attrs: Attrs = {"eps": 1e-6, "add": add, "keep": keep, "quant": quant, "n": n}
    normed = node("rms_norm", ["sum" if add else "x", "weight"], ["y"], {"eps": 1e-6})
    plain = [*([Node("Add", ["x", "residual"], ["sum"])] if add else []), normed]
    kept = ["y"] * keep + ["sum"] * add
    operands = ["x", "weight", *(["residual"] if add else [])]
    check_fused_quantiser("norm_quant", operands, plain, kept, attrs, values)


@pytest.mark.parametrize(("quant", "n"), QUANTS)
@pytest.mark.parametrize("keep", [0, 1])
def test_gated_norm_quant(quant: str, n: int, keep: int) -> None:
    rng = rng_of(quant, n, keep)
    values: dict[str, Array] = {
        "o": samples.awkward(rng, ROWS, 3 * 48),
        "packed": samples.normal(rng, ROWS, 300, scale=3.0),
        "weight": samples.positive(rng, 48),
        **scales_of(rng, quant, n),
    }
    gate: Attrs = {"eps": 1e-6, "heads": 3, "offset": 100}
    operands = ["o", "packed", "weight"]
    plain = [node("gated_norm", operands, ["y"], gate)]
    attrs: Attrs = {**gate, "keep": keep, "quant": quant, "n": n}
    check_fused_quantiser("gated_norm_quant", operands, plain, ["y"] * keep, attrs, values)


MIXERS = [*gdn_decode.OP.cases, *gdn_decode.RING_OP.cases]


@pytest.mark.parametrize("case", MIXERS, ids=lambda c: c.label)
def test_gdn_decode(case: Case) -> None:
    """The whole mixer of a decode step, states included, over rows with and without tokens."""
    attrs, arrays = case.attrs, case.inputs(rng_of(case.label))
    ring = bool(attrs["ring"])
    known = gdn_decode.operands_of(attrs)
    values = dict(zip(known, arrays, strict=False))
    if ring:  # records of no use hold NaN, which is not equal
        values["gdn_ring"] = np.nan_to_num(values["gdn_ring"])
    rows = ["slots", "starts", "counts"]
    inert = values["counts"] == 0
    values["qkvz"][inert] = 0  # what an inert row holds must not matter, but NaN is not equal
    values["ba"][inert] = 0
    for name in ("conv_state", "gdn_state"):
        values[name][-1] = 0
    quant, n = str(attrs["quant"]), int(attrs["n"])
    if len(arrays) > len(known):
        scales = arrays[-1]
        values |= {"scales": scales, **{f"scale{i}": np.asarray(s) for i, s in enumerate(scales)}}
    sizes = {k: attrs[k] for k in gdn_decode.SIZES}
    norm: Attrs = {"eps": attrs["eps"], "heads": attrs["value_heads"], "offset": attrs["offset"]}
    states = ["gdn_state", "gdn_ring"] if ring else ["gdn_state"]
    delta = ["c", "ba", "a_log", "dt_bias", *states, *rows]
    step = "gated_delta_ring_step" if ring else "gated_delta_step"
    moved = [f"{name}_out" for name in states]
    conv = ["qkvz", "conv_weight", "conv_state", *rows]
    plain = [
        node("causal_conv", conv, ["c", "conv_out"], {"tile": 1}),
        node(step, delta, ["o", *moved], {"tile": 1, **sizes}),
        node("gated_norm", ["o", "qkvz", "norm_weight"], ["y"], norm),
    ]
    tail, outs = quantisers(quant, n, "y") if quant != "none" else ([], [])
    want = ["conv_out", *moved, *(["y"] if attrs["keep"] else []), *outs]
    got = names("r", len(want))
    name = gdn_decode.name_of(attrs)
    fused = node(name, [n for n in values if not n.startswith("scale")], got, attrs)
    if "scales" in values:
        fused = node(name, [*fused.inputs, "scales"], got, attrs)
    fixed = [k for k in values if k.startswith("scale") or k.endswith("weight")]
    same_bits([fused], [*plain, *tail], values, dict(zip(got, want, strict=True)), fixed)


@pytest.mark.parametrize("case", attention_decode.OP.cases, ids=lambda c: c.label)
def test_attention_decode(case: Case) -> None:
    """Decode attention with its gate and quantisers, pages included."""
    attrs, arrays = case.attrs, case.inputs(rng_of(case.label))
    values = dict(zip(attention_decode.OPERANDS, arrays, strict=False))
    values["qkv"][values["counts"] == 0] = 0  # what such a row holds must not matter
    values["kv_scale"] = np.nan_to_num(values["kv_scale"], nan=1.0)
    for name in ("k_pages", "v_pages"):  # NaN is not equal to itself; a code of NaN is
        if values[name].dtype != np.uint8:
            values[name] = np.nan_to_num(values[name].astype(np.float32)).astype(values[name].dtype)
    quant, n = str(attrs["quant"]), int(attrs["n"])
    operands = list(values)
    if len(arrays) > len(operands):
        scales = arrays[-1]
        values |= {"scales": scales, **{f"scale{i}": np.asarray(s) for i, s in enumerate(scales)}}
    sizes: Attrs = {"tile": 1, **{k: attrs[k] for k in attention_decode.SIZES}}
    gate: Attrs = {k: attrs[k] for k in ("heads", "head_dim")}
    plain = [
        node("paged_attention", operands, ["o", "k_out", "v_out"], sizes),
        node("sigmoid_gate", ["o", "qkv"], ["y"], gate),
    ]
    tail, outs = quantisers(quant, n, "y") if quant != "none" else ([], [])
    want = ["k_out", "v_out", *(["y"] if attrs["keep"] else []), *outs]
    got = names("r", len(want))
    given = [*operands, "scales"] if "scales" in values else operands
    fused = node("attention_decode", given, got, attrs)
    fixed = [k for k in values if k.startswith("scale")]
    same_bits([fused], [*plain, *tail], values, dict(zip(got, want, strict=True)), fixed)


# onnxruntime has no Add in bf16
F32_EXPERTS = [c for c in moe_norm_quant.OP.cases if c.attrs["dtype"] == "f32"]


@pytest.mark.parametrize("case", F32_EXPERTS, ids=lambda c: c.label)
def test_moe_norm_quant(case: Case) -> None:
    """The experts, the residual, the norm and its quantisers, in every format of experts."""
    attrs, arrays = case.attrs, case.inputs(rng_of(case.label))
    kind, quant, n = str(attrs["format"]), str(attrs["quant"]), int(attrs["n"])
    given = ["x", "ids", "weights", "residual", "norm_weight", *grouped_moe.PARAMS[kind]]
    values = dict(zip(given, arrays, strict=False))
    values["x"] = np.nan_to_num(values["x"].astype(np.float32)).astype(values["x"].dtype)
    if len(arrays) > len(given):
        scales = arrays[-1]
        values |= {"scales": scales, **{f"scale{i}": np.asarray(s) for i, s in enumerate(scales)}}
    tail, outs = quantisers(quant, n, "y") if quant != "none" else ([], [])
    want = [*(["y"] if attrs["keep"] else []), "sum", *outs]
    got = names("r", len(want))
    shape: Attrs = {k: attrs[k] for k in moe_norm_quant.EXPERTS}
    experts = ["x", "ids", "weights", *grouped_moe.PARAMS[kind]]
    plain = [
        node("grouped_moe", experts, ["routed"], shape),
        Node("Add", ["residual", "routed"], ["sum"]),
        node("rms_norm", ["sum", "norm_weight"], ["y"], {"eps": attrs["eps"]}),
    ]
    fused = node("moe_norm_quant", [*given, *(["scales"] if quant in SCALED else [])], got, attrs)
    fixed = [k for k in values if k not in ("x", "ids", "weights", "residual")]
    same_bits([fused], [*plain, *tail], values, dict(zip(got, want, strict=True)), fixed)


@pytest.mark.parametrize(("quant", "n"), QUANTS)
@pytest.mark.parametrize("keep", [0, 1])
@pytest.mark.parametrize("act", ["silu_mul", "sigmoid_gate"])
def test_act_quant(act: str, quant: str, n: int, keep: int) -> None:
    rng = rng_of(act, quant, n, keep)
    heads: Attrs = {"heads": 3, "head_dim": 48} if act == "sigmoid_gate" else {}
    values: dict[str, Array] = {
        "x": samples.awkward(rng, ROWS, 144 if heads else 288),
        "qkv": samples.normal(rng, ROWS, 400, scale=3.0),
        **scales_of(rng, quant, n),
    }
    operands = ["x", "qkv"] if heads else ["x"]
    plain = [node(act, operands, ["y"], heads)]
    attrs: Attrs = {"act": act, **heads, "keep": keep, "quant": quant, "n": n}
    check_fused_quantiser("act_quant", operands, plain, ["y"] * keep, attrs, values)


def linear_nodes(kind: str, x: str, w: str, scale: str, y: str) -> list[Node]:
    """The ops of one quantised linear layer, its activation quantiser included."""
    ws, ws2 = f"{w}_scale", f"{w}_scale2"
    if kind == "dense":
        return [node("linear", [x, w], [y], F32)]
    if kind == "nvfp4":
        return [node("nvfp4_linear", [x, w, ws, ws2], [y], F32)]
    q, s = f"{y}_q", f"{y}_s"
    if kind == "fp8":
        made = node("fp8_quant", [x, scale], [q])
        return [made, node("fp8_linear", [q, w, scale, ws], [y], F32)]
    if kind == "fp8_block":
        made = node("fp8_block_quant", [x], [q, s])
        return [made, node("fp8_block_linear", [q, s, w, ws], [y], F32)]
    made = node("nvfp4_quant", [x, scale], [q, s])
    return [made, node("nvfp4_linear_a4", [q, s, w, ws, f"{w}_alpha"], [y], F32)]


def weight_values(name: str, kind: str, stack: Sequence[Array], expert: int) -> dict[str, Array]:
    """One expert's weight and scales under the names `linear_nodes` uses."""
    suffixes = ("", "_scale", "_scale2")
    return {name + s: part[expert] for s, part in zip(suffixes, stack, strict=False)}


@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.parametrize("kind", grouped_moe.PARAMS)
def test_shared_expert_as_last_expert(kind: str, rows: int) -> None:
    """router with gate + grouped_moe over E experts == E-1 routed, the shared one alone, gate."""
    experts, top_k, hidden, inner = 5, 2, 144, 48
    rng = rng_of(kind, rows)
    _, _, _, *params = grouped_moe.arrays(rng, kind, rows, (experts, top_k, hidden, inner))
    named = dict(zip(grouped_moe.PARAMS[kind], params, strict=True))
    values: dict[str, Array] = {
        "x": samples.normal(rng, rows, hidden),
        "router": samples.normal(rng, experts - 1, hidden, scale=0.2),
        "gate": samples.normal(rng, 1, hidden, scale=0.2),
        **{f"all_{k}": v for k, v in named.items()},
        **{f"routed_{k}": v[:-1] for k, v in named.items()},
        **_shared_values(kind, named),
    }
    shape: Attrs = {"format": kind, **F32}
    fused = [
        node("moe_router", ["x", "router", "gate"], ["ids", "weights"], {"top_k": top_k}),
        node("grouped_moe", ["x", "ids", "weights", *(f"all_{k}" for k in named)], ["y"], shape),
    ]
    operands = ["x", "ids", "weights", *(f"routed_{k}" for k in named)]
    plain = [
        node("moe_router", ["x", "router"], ["ids", "weights"], {"top_k": top_k}),
        node("grouped_moe", operands, ["routed"], shape),
        *linear_nodes(kind, "x", "w13", "x_scale", "up"),
        node("silu_mul", ["up"], ["h"]),
        *linear_nodes(kind, "h", "w2", "h_scale", "shared"),
        node("shared_gate", ["routed", "shared", "x", "gate"], ["y"]),
    ]
    same_bits(fused, plain, values, {"y": "y"}, [k for k in values if k != "x"])


def _f32(values: Mapping[str, Array], *keys: str) -> list[NDArray[np.float32]]:
    return [np.asarray(values[key], np.float32) for key in keys]


def _shared_values(kind: str, named: Mapping[str, Array]) -> dict[str, Array]:
    """The last expert's params as those of plain linear layers."""
    last = {k: np.asarray(v[-1]) for k, v in named.items()}
    for name, scale in grouped_moe.INPUT_SCALE.items():
        if kind == "nvfp4_a4":
            last[f"{name}_alpha"] = np.multiply(*_f32(last, f"{name}_scale2", scale))
    return last


@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.parametrize("kind", grouped_moe.PARAMS)
def test_merged_linears(kind: str, rows: int) -> None:
    """One linear over concatenated weights == Concat of the separate ones."""
    widths, k = ((128, 256, 37) if kind == "fp8_block" else (48, 1, 37)), 144
    rng = rng_of("merged", kind, rows)
    values: dict[str, Array] = {"x": samples.normal(rng, rows, k)}
    values["scale"] = np.asarray(samples.positive(rng, low=0.005, high=0.01))
    for i, n in enumerate(widths):
        stack = grouped_moe.stack(rng, kind, 1, n, k)
        values |= weight_values(f"w{i}", kind, stack, 0)
        if kind == "nvfp4_a4":
            values[f"w{i}_alpha"] = np.multiply(*_f32(values, f"w{i}_scale2", "scale"))
    for suffix in ("", "_scale", "_scale2", "_alpha"):
        if f"w0{suffix}" in values:
            parts = [values[f"w{i}{suffix}"] for i in range(3)]
            values[f"w{suffix}"] = np.concatenate(parts)
    fused = linear_nodes(kind, "x", "w", "scale", "y")
    plain = [n for i in range(3) for n in linear_nodes(kind, "x", f"w{i}", "scale", f"y{i}")]
    plain.append(Node("Concat", names("y", 3), ["all"], {"axis": -1}))
    same_bits(fused, plain, values, {"y": "all"}, [name for name in values if name != "x"])


def test_the_comparison_can_fail() -> None:
    """same_bits sees one unit in the last place."""
    x = np.ones((1, 16), np.float32)
    values: dict[str, Array] = {"x": x, "v": x, "w": x * 2, "u": np.nextafter(x * 2, x)}
    left, right = [node("linear", ["x", "w"], ["y"], F32)], [node("linear", ["v", "u"], ["y"], F32)]
    same_bits(left, [node("linear", ["v", "w"], ["y"], F32)], values, {"y": "y"}, ["w"])
    with pytest.raises(AssertionError, match="differ"):
        same_bits(left, right, values, {"y": "y"}, ["w", "u"])


def test_weights_fit_the_merge() -> None:
    """fp8_block weights may be merged where all but the last end on a block edge."""
    rng = rng_of("edge")
    a, b = (samples.normal(rng, n, 130).astype(np.float32) for n in (128, 37))
    (ca, sa), (cb, sb) = formats.fp8_block_weight(a), formats.fp8_block_weight(b)
    codes, scales = formats.fp8_block_weight(np.concatenate([a, b]))
    assert codes.tobytes() == ca.tobytes() + cb.tobytes()
    np.testing.assert_array_equal(scales, np.concatenate([sa, sb]))
