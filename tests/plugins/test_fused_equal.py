"""A fused op and the ops it replaces give the same bits on onnxruntime, in every format."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from spark_engine.errors import GraphError
from spark_engine.op import Attrs, Case, Op
from spark_engine.plugins import registry
from spark_engine.plugins.common import random_arrays
from spark_engine.plugins.formats import numpy_codecs
from spark_engine.plugins.formats.format import INPUT_SCALES, SUFFIXES
from spark_engine.plugins.formats.registry import FORMATS
from spark_engine.plugins.ops.moe import grouped_moe
from spark_engine.tensors import Array, DType
from tests.plugins import one_node
from tests.plugins.cases.seeded import seeded
from tests.plugins.one_node import Node, run_graph

QUANTS = [("fp8", 1), ("fp8", 3), ("fp8_block", 1), ("nvfp4", 1), ("nvfp4", 2), ("fp8_token", 1)]
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
        unread = [np.isnan(x.astype(np.float32)) for x in (left[a], right[b])]
        assert not unread[0].all(), f"{a} was not written"
        assert (unread[0] == unread[1]).all(), f"{a} and {b} hold NaN in different places"
        assert left[a][~unread[0]].tobytes() == right[b][~unread[0]].tobytes(), f"{a}, {b} differ"


def _fed(
    values: Mapping[str, Array], used: set[str], constant: Sequence[str], outputs: list[str]
) -> tuple[dict[str, Array], list[str], list[str]]:
    """The values, outputs and initializers of one of the graphs."""
    return (
        {k: v for k, v in values.items() if k in used},
        outputs,
        [c for c in constant if c in used],
    )


def names(prefix: str, count: int) -> list[str]:
    return [f"{prefix}{i}" for i in range(count)]


def has_bf16_add(op: Op, case: Case) -> bool:
    """onnxruntime has no Add in bf16."""
    parts = op.fuses(case.attrs).parts if op.fuses else ()
    given = zip(op.given(case.attrs), case.inputs(rng_of()), strict=False)
    return any(p.op == "Add" for p in parts) and any(
        o.narrow and a.dtype == DType.BF16.numpy for o, a in given if o.unit == "token"
    )


FUSED = [
    pytest.param(op, case, id=f"{op.name}-{case.label}")
    for op in registry.OPS
    for case in seeded(op)
    if op.fuses is not None and not has_bf16_add(op, case)
]


def check_parts(op: Op, attrs: Attrs, arrays: Sequence[Array]) -> None:
    """The fused node over the arrays gives the bits of the chain that the op declares."""
    assert op.fuses is not None
    chain = op.fuses(attrs)
    operands = op.names(attrs, len(arrays))
    values = dict(zip(operands, arrays, strict=True))
    constant = [n for n in one_node.constants(op, attrs) if n in values]
    elements = {f"{n}[{i}]": np.asarray(x) for n in constant for i, x in enumerate(values[n])}
    used = {n for part in chain.parts for n in part.inputs}
    elements = {n: x for n, x in elements.items() if n in used}
    plain = [
        node(p.op, p.inputs, p.outputs, p.attrs)
        if p.op in registry.REGISTRY
        else Node(p.op, p.inputs, p.outputs, p.attrs)
        for p in chain.parts
    ]
    got = names("r", len(chain.results))
    same_bits(
        [node(op.name, operands, got, attrs)],
        plain,
        {**values, **elements},
        dict(zip(got, chain.results, strict=True)),
        [*constant, *elements],
    )


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("op", "case"), FUSED)
def test_a_fused_op_equals_its_parts(op: Op, case: Case) -> None:
    """States and pages among the results; rows that must not be read hold NaN on both sides."""
    check_parts(op, case.attrs, case.inputs(rng_of(case.label)))


def families() -> list[Any]:
    """Of each fused op with quantisers the first f32 case of each of its other modes."""
    found = {}
    for op in registry.OPS:
        for case in seeded(op) if op.fuses is not None and "quant" in op.attrs else ():
            modes = (
                (k, v)
                for k, v in case.attrs.items()
                if k not in ("quant", "n", "keep") and (isinstance(v, str) or v in (0, 1))
            )
            if not has_bf16_add(op, case) and not case.label.endswith("bf16"):
                found.setdefault((op.name, *modes), (op, case))
    return [pytest.param(op, case, id=f"{op.name}-{case.label}") for op, case in found.values()]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("op", "case"), families())
def test_with_every_quantiser(op: Op, case: Case) -> None:
    """The same with each format, with several scales, and with y kept or not."""
    values = dict(zip(op.names(case.attrs, 99), case.inputs(rng_of(case.label)), strict=True))
    done = 0
    for (quant, n), keep in product(QUANTS, (0, 1)):
        attrs: Attrs = {**case.attrs, "quant": quant, "n": n, "keep": keep}
        low, high = (0.003, 0.01) if quant == "fp8" else (0.0005, 0.002)
        values["scales"] = random_arrays.positive(rng_of(quant, n), n, low=low, high=high)
        arrays = [values[name] for name in op.names(attrs, 99)]
        try:
            check_parts(op, attrs, arrays)
        except GraphError as error:
            assert quant == "nvfp4" and "divisible by" in str(error)
        else:
            done += 1
    assert done >= 6


def linear_nodes(kind: str, x: str, w: str, scale: str, y: str) -> list[Node]:
    """The ops of one quantised linear layer, its activation quantiser included."""
    form, nodes = FORMATS[kind], []
    given = {"x": x, **zipped((o.name for o in form.stored), (w + s for s in SUFFIXES))}
    if form.inputs is not None:
        made = names(f"{y}_q", len(form.inputs.makes))
        attrs = form.inputs.attrs
        nodes.append(node(form.inputs.op, [x, scale][: 1 + form.static], made, attrs))
        given |= zipped(form.inputs.makes, made)
    if form.inputs is not None and form.static:
        given[form.inputs.scale] = f"{w}_alpha" if folds(kind) else scale
    return [*nodes, node(form.op, [given[o.name] for o in form.operands], [y], F32 | form.attrs)]


def zipped(keys: Iterable[str], values: Iterable[str]) -> dict[str, str]:
    return dict(zip(keys, values, strict=False))


def folds(kind: str) -> bool:
    """Whether the linear op has the input's scale times the weight's own."""
    inputs = FORMATS[kind].inputs
    return inputs is not None and inputs.scale in {o.name for o in FORMATS[kind].stored}


def weight_values(name: str, kind: str, stack: Sequence[Array], expert: int) -> dict[str, Array]:
    """One expert's weight and scales under the names `linear_nodes` uses."""
    return {name + s: part[expert] for s, part in zip(SUFFIXES, stack, strict=False)}


@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.parametrize("kind", grouped_moe.PARAMS)
def test_shared_expert_as_last_expert(kind: str, rows: int) -> None:
    """router with gate + grouped_moe over E experts == E-1 routed, the shared one alone, gate."""
    experts, top_k, hidden, inner = 5, 2, 160, 96
    rng = rng_of(kind, rows)
    _, _, _, *params = grouped_moe.arrays(rng, kind, rows, (experts, top_k, hidden, inner))
    named = dict(zip(grouped_moe.PARAMS[kind], params, strict=True))
    values: dict[str, Array] = {
        "x": random_arrays.normal(rng, rows, hidden),
        "router": random_arrays.normal(rng, experts - 1, hidden, scale=0.2),
        "gate": random_arrays.normal(rng, 1, hidden, scale=0.2),
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
    for name, scale in INPUT_SCALES.items():
        if folds(kind):
            last[f"{name}_alpha"] = np.multiply(*_f32(last, f"{name}_scale2", scale))
    return last


@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.parametrize("kind", grouped_moe.PARAMS)
def test_merged_linears(kind: str, rows: int) -> None:
    """One linear over concatenated weights == Concat of the separate ones."""
    widths, k = ((128, 256, 37) if kind == "fp8_block" else (48, 1, 37)), 160
    rng = rng_of("merged", kind, rows)
    values: dict[str, Array] = {"x": random_arrays.normal(rng, rows, k)}
    values["scale"] = np.asarray(random_arrays.positive(rng, low=0.005, high=0.01))
    for i, n in enumerate(widths):
        stack = grouped_moe.stack(rng, kind, 1, n, k)
        values |= weight_values(f"w{i}", kind, stack, 0)
        if folds(kind):
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
    a, b = (random_arrays.normal(rng, n, 130).astype(np.float32) for n in (128, 37))
    (ca, sa), (cb, sb) = numpy_codecs.fp8_block_weight(a), numpy_codecs.fp8_block_weight(b)
    codes, scales = numpy_codecs.fp8_block_weight(np.concatenate([a, b]))
    assert codes.tobytes() == ca.tobytes() + cb.tobytes()
    np.testing.assert_array_equal(scales, np.concatenate([sa, sb]))
