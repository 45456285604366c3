"""The rewriting engine, and the rules on graphs made by hand from real ops."""

from collections import Counter
from collections.abc import Callable

import numpy as np
import onnx_graphsurgeon as gs
import pytest

from spark_engine.builder.graph.edit import add_node, detach, variable
from spark_engine.builder.graph.rewrite import Match, RewriteContext, Rule, rewrite
from spark_engine.builder.rules import RULES
from spark_engine.builder.rules.merge import MERGE_PROJECTIONS
from spark_engine.builder.rules.quant import ACT_QUANT, NORM_QUANT
from spark_engine.builder.rules.weights import (
    add_weight,
    joined_name,
    same_value,
    without_input_scale,
)
from spark_engine.errors import GraphError
from spark_engine.models.weights import recipes
from spark_engine.models.weights.recipes import Recipe
from spark_engine.plugins.registry import REGISTRY
from spark_engine.tensors import Array, DType, TensorSpec
from tests.builder.toy import OPS, toy_graph

K = 128


class Store:
    """Scalars of a checkpoint, by name; anything else must not be read."""

    def __init__(self, **values: float) -> None:
        self.values = values

    def read(self, name: str) -> Array:
        return np.array(self.values[name], np.float32)


class Bench:
    """Writes a small graph with real ops."""

    def __init__(self, store: Store | None = None) -> None:
        self.context = RewriteContext(gs.Graph(opset=23), {}, store or Store(), REGISTRY)

    def input(self, name: str, columns: int = K) -> gs.Variable:
        tensor = variable(TensorSpec(name, DType.F32, ("tokens", columns)))
        self.context.graph.inputs.append(tensor)
        return tensor

    def weight(self, name: str, dtype: DType, *shape: int) -> gs.Variable:
        self.context.weights[name] = recipes.weight(name, recipes.source(name, dtype, shape))
        tensor = variable(self.context.weights[name].spec)
        self.context.graph.inputs.append(tensor)
        return tensor

    def op(self, op: str, inputs: list[gs.Tensor], *outputs: str, **attrs: object) -> gs.Tensor:
        node = add_node(REGISTRY, outputs[0], op, inputs, list(outputs), **attrs)
        self.context.graph.nodes.append(node)
        return node.outputs[0] if len(outputs) == 1 else node.outputs

    def standard(
        self, op: str, inputs: list[gs.Tensor], out: str, columns: int, **attrs: object
    ) -> gs.Tensor:
        tensor = variable(TensorSpec(out, DType.F32, ("tokens", columns)))
        self.context.graph.nodes.append(gs.Node(op, out, dict(attrs), inputs, [tensor]))
        return tensor

    def norm(self, x: gs.Tensor, name: str = "norm") -> gs.Tensor:
        return self.op("rms_norm", [x, self.weight(f"{name}.w", DType.F32, K)], name, eps=1e-6)

    def fp8(
        self, x: gs.Tensor, name: str, rows: int = 32, scale: gs.Tensor | None = None
    ) -> gs.Tensor:
        scale = scale or self.weight(f"{name}.scale", DType.F32)
        codes = self.op("fp8_quant", [x, scale], f"{name}.q")
        return self.fp8_linear(codes, scale, name, rows)

    def fp8_linear(self, codes: gs.Tensor, scale: gs.Tensor, name: str, rows: int) -> gs.Tensor:
        matrix = self.weight(f"{name}.weight", DType.F8E4M3, rows, K)
        row_scale = self.weight(f"{name}.weight_scale", DType.F32, rows)
        return self.op("fp8_linear", [codes, matrix, scale, row_scale], name, dtype="f32")

    def done(self, *outputs: gs.Tensor, rules: tuple[Rule, ...] = RULES):  # type: ignore[no-untyped-def]
        self.context.graph.outputs = list(outputs)
        return rewrite(self.context, rules)

    @property
    def ops(self) -> Counter[str]:
        return Counter(n.op for n in self.context.graph.nodes)

    def node(self, op: str) -> gs.Node:
        (found,) = [n for n in self.context.graph.nodes if n.op == op]
        return found


def counting_rule(reason: str | None) -> Rule:
    def pattern(context: RewriteContext, node: gs.Node) -> Match | None:
        return Match(node, {}) if node.op == "double" else None

    def replace(context: RewriteContext, match: Match) -> None:
        match.root.op = "round"

    return Rule("undouble", pattern, lambda context, match: reason, replace)


def toy_scene() -> RewriteContext:
    return RewriteContext(toy_graph(), {}, Store(), OPS)


def test_counts_and_refusals() -> None:
    assert rewrite(toy_scene(), [counting_rule(None)]).counts == {"undouble": 1}
    done = rewrite(toy_scene(), [counting_rule("it is Sunday")])
    assert done.counts == {"undouble": 0}
    assert [(r.rule, r.node, r.reason) for r in done.refusals] == [
        ("undouble", "h", "it is Sunday")
    ]


def test_what_is_done_in_a_later_sweep_is_no_refusal() -> None:
    """The Add is refused as long as `double` is before it."""

    def find(context: RewriteContext, node: gs.Node) -> Match | None:
        return Match(node, {}) if node.op in ("double", "Add") else None

    def check(context: RewriteContext, match: Match) -> str | None:
        doubled = any(n.op == "double" for n in context.graph.nodes)
        return "later" if match.root.op == "Add" and doubled else None

    def replace(context: RewriteContext, match: Match) -> None:
        match.root.op = "Sub" if match.root.op == "Add" else "round"

    context = toy_scene()
    context.graph.nodes[:2] = context.graph.nodes[1::-1]  # the Add is met first
    done = rewrite(context, [Rule("late", find, check, replace)])
    assert done.counts == {"late": 2} and done.refusals == ()


def test_a_rule_is_applied_until_nothing_is_found() -> None:
    """A sweep of one match may open another."""
    left = iter(("triple", "round"))

    def find(context: RewriteContext, node: gs.Node) -> Match | None:
        return Match(node, {}) if node.op in ("double", "triple") else None

    def replace(context: RewriteContext, match: Match) -> None:
        match.root.op = next(left)

    done = rewrite(toy_scene(), [Rule("down", find, lambda context, match: None, replace)])
    assert done.counts == {"down": 2}


def test_a_node_that_the_sweep_removed_is_passed() -> None:
    """The rule removes the later `double`."""
    context, seen = toy_scene(), []

    def find(context: RewriteContext, node: gs.Node) -> Match | None:
        seen.append(node.name)
        return Match(node, {}) if node.op == "Add" and node.inputs[0].name == "h" else None

    def replace(context: RewriteContext, match: Match) -> None:
        detach(next(n for n in context.graph.nodes if n.op == "double"))
        match.root.inputs[0] = context.graph.inputs[0]

    context.graph.nodes[:2] = context.graph.nodes[1::-1]
    assert rewrite(context, [Rule("cut", find, lambda s, p: None, replace)]).counts == {"cut": 1}
    assert "h" not in seen


def test_a_rule_that_never_ends_is_our_bug() -> None:
    rule = counting_rule(None)
    endless = Rule("endless", rule.pattern, rule.check, lambda context, match: None)
    with pytest.raises(GraphError, match="endless does not converge"):
        rewrite(toy_scene(), [endless])


@pytest.mark.parametrize("shown", [False, True])
def test_a_plain_reader_keeps_the_plain_value(shown: bool) -> None:
    """A node, or an output of the graph."""
    b = Bench()
    h = b.norm(b.input("x"))
    y = b.fp8(h, "a")
    weight = b.weight("b.weight", DType.BF16, 4, K)
    done = b.done(y, h if shown else b.op("linear", [h, weight], "b", dtype="f32"))
    node = b.node("norm_quant")
    assert done.counts["norm_quant"] == 1 and node.attrs["keep"] == 1
    assert [t.name for t in node.outputs] == ["norm", "a.q"]


def test_scales_that_differ_are_stacked() -> None:
    b = Bench(Store(**{"a.scale": 1.0, "b.scale": 2.0}))
    h = b.norm(b.input("x"))
    a, c = b.fp8(h, "a"), b.fp8(h, "b")
    joined = b.standard("Concat", [a, c], "ab", 64, axis=1)
    done = b.done(joined)
    assert done.counts["merge_projections"] == 0
    (refusal,) = done.refusals
    assert (refusal.node, refusal.reason) == ("ab", "b and a read inputs quantised differently")
    node = b.node("norm_quant")
    assert node.attrs["n"] == 2 and node.inputs[-1].shape == [2]
    stacked = b.context.weights["norm.fp8_scales"].evaluate(b.context.checkpoint)
    assert stacked.tolist() == [1.0, 2.0]


def test_a_value_quantised_in_two_formats_is_made_twice() -> None:
    b = Bench()
    x, delta = b.input("x"), b.input("delta")
    h = b.norm(b.standard("Add", [x, delta], "sum", K))
    one = b.fp8(h, "a")
    scale = b.weight("n.scale", DType.F32)
    codes, scales = b.op("nvfp4_quant", [h, scale], "n.q", "n.s")
    b.done(one, codes, scales, rules=(NORM_QUANT,))
    nodes = {n.name: n for n in b.context.graph.nodes if n.op == "norm_quant"}
    assert {name: (n.attrs["add"], n.attrs["quant"]) for name, n in nodes.items()} == {
        "norm": (1, "fp8"),
        "norm.nvfp4": (0, "nvfp4"),
    }
    assert nodes["norm.nvfp4"].inputs[0].name == "sum"
    assert b.ops["nvfp4_quant"] == b.ops["Add"] == 0


def test_an_activation_without_quantiser_stays() -> None:
    b = Bench()
    y = b.op("silu_mul", [b.input("x", 2 * K)], "act")
    assert b.done(y, rules=(ACT_QUANT,)).counts == {"act_quant": 0}
    assert b.ops == {"silu_mul": 1}


def merged(*rows: int, dtypes: tuple[DType, ...] = ()) -> Bench:
    b, parts = Bench(), []
    x = b.input("x")
    for i, n in enumerate(rows):
        dtype = dtypes[i] if dtypes else DType.BF16
        matrix = b.weight(f"m.p{i}.weight", dtype, n, K)
        parts.append(b.op("linear", [x, matrix], f"p{i}", dtype="f32"))
    b.context.graph.outputs = [b.standard("Concat", parts, "all", sum(rows), axis=1)]
    return b


def test_projections_are_merged_by_rows() -> None:
    b = merged(8, 16, 4)
    assert rewrite(b.context, [MERGE_PROJECTIONS]).counts == {"merge_projections": 1}
    node = b.node("linear")
    assert node.name == "all" and node.outputs[0].name == "all"
    assert list(b.context.weights) == ["m.p0+p1+p2.weight"]
    assert b.context.weights["m.p0+p1+p2.weight"].spec.shape == (28, K)
    assert [t.name for t in b.context.graph.inputs] == ["x", "m.p0+p1+p2.weight"]


def read_by_another(b: Bench, name: str) -> None:
    (part,) = [n.outputs[0] for n in b.context.graph.nodes if n.name == name]
    b.context.graph.outputs.append(b.standard("Add", [part, b.input("other", 8)], "sum", 8))


@pytest.mark.parametrize(
    ("second", "change", "reason"),
    [
        (DType.F32, lambda b: None, "p1 and p0 have weights of different dtypes"),
        (
            DType.BF16,
            lambda b: b.context.graph.outputs.append(b.context.graph.nodes[0].outputs[0]),
            "p0 is also read alone",
        ),
        (DType.BF16, lambda b: read_by_another(b, "p0"), "p0 is also read alone"),
        (DType.BF16, lambda b: read_by_another(b, "p1"), "p1 is also read alone"),
        (
            DType.BF16,
            lambda b: b.context.graph.nodes[1].attrs.update(dtype="bf16"),
            "p1 and p0 have different attributes",
        ),
    ],
)
def test_projections_that_stay_apart(
    second: DType, change: Callable[[Bench], None], reason: str
) -> None:
    b = merged(8, 8, dtypes=(DType.BF16, second))
    change(b)
    done = rewrite(b.context, [MERGE_PROJECTIONS])
    assert done.counts == {"merge_projections": 0} and b.ops["linear"] == 2
    assert [r.reason for r in done.refusals] == [reason]


@pytest.mark.parametrize("other", [0.5, 0.25])
def test_fp8_merges_where_the_scales_are_equal(other: float) -> None:
    b = Bench(Store(**{"a.scale": 0.5, "b.scale": other}))
    one, two = b.weight("a.scale", DType.F32), b.weight("b.scale", DType.F32)
    codes = b.op("fp8_quant", [b.input("x"), one], "q")
    parts = [b.fp8_linear(codes, s, n, 16) for n, s in (("a", one), ("b", two))]
    done = b.done(b.standard("Concat", parts, "ab", 32, axis=1))
    if other != 0.5:
        assert [r.reason for r in done.refusals] == ["b and a read inputs quantised differently"]
        return
    assert done.counts["merge_projections"] == 1
    wanted = ["q", "a+b.weight", "a.scale", "a+b.weight_scale"]
    assert [t.name for t in b.node("fp8_linear").inputs] == wanted


@pytest.mark.parametrize(("rows", "merges"), [((128, 64), 1), ((256, 128, 32), 1), ((64, 128), 0)])
def test_scale_blocks_must_end_with_their_weight(rows: tuple[int, ...], merges: int) -> None:
    b = Bench()
    codes, scales = b.op("fp8_block_quant", [b.input("x")], "q", "s")
    parts = []
    for i, n in enumerate(rows):
        matrix = b.weight(f"p{i}.weight", DType.F8E4M3, n, K)
        scale = b.weight(f"p{i}.scale", DType.F32, -(-n // 128), 1)
        operands = [codes, scales, matrix, scale]
        parts.append(b.op("fp8_block_linear", operands, f"p{i}", dtype="f32"))
    done = b.done(b.standard("Concat", parts, "all", sum(rows), axis=1))
    assert done.counts["merge_projections"] == merges
    assert all("64 rows, not a multiple of its 128-row" in r.reason for r in done.refusals)
    assert len(done.refusals) == 1 - merges


def test_joined_names() -> None:
    assert joined_name(["l.0.q.weight", "l.0.k.weight"]) == "l.0.q+k.weight"
    assert joined_name(["a.b", "a.b.c"]) == "a.b+a.b.c"


def test_the_input_scale_comes_out_of_alpha() -> None:
    store = Store(read=3.0, scale=0.5)
    read, scale = (recipes.source(n, DType.F32, ()) for n in ("read", "scale"))
    alpha: Recipe = recipes.concat0([recipes.repeat(recipes.multiply(read, scale), 2)] * 2)
    assert alpha.evaluate(store).tolist() == [1.5] * 4
    assert without_input_scale(alpha).evaluate(store).tolist() == [0.5] * 4
    with pytest.raises(GraphError, match="no product"):
        without_input_scale(scale)


def test_experts_with_a_sum_that_is_read_alone_stay_apart() -> None:
    b = Bench()
    x, router = b.input("x"), b.weight("router", DType.F32, 4, K)
    chosen = b.op("moe_router", [x, router], "ids", "shares", top_k=2)
    params = [b.weight("w13", DType.F32, 4, 64, K), b.weight("w2", DType.F32, 4, K, 32)]
    experts = {"format": "dense", "dtype": "f32"}
    routed = b.op("grouped_moe", [x, *chosen, *params], "routed", **experts)
    done = b.done(b.norm(b.standard("Add", [b.input("h"), routed], "sum", K)), routed)
    assert done.counts["moe_norm"] == 0 and b.ops["grouped_moe"] == b.ops["norm_quant"] == 1
    assert [r.reason for r in done.refusals] == ["routed is also read alone"]


def test_a_weight_of_another_recipe_under_a_known_name_is_our_bug() -> None:
    b = Bench()
    one, two = (recipes.source(n, DType.F32, (2,)) for n in ("one", "two"))
    first = add_weight(b.context, "w", one)
    assert add_weight(b.context, "w", one) is first and len(b.context.graph.inputs) == 1
    with pytest.raises(GraphError, match="two different weights are named w"):
        add_weight(b.context, "w", two)


def test_small_weights_are_equal_by_value_dtype_and_shape() -> None:
    b = Bench(Store(a=0.5, b=0.5, c=0.25))
    a, same, other = (b.weight(n, DType.F32) for n in "abc")
    assert same_value(b.context, a, same) and not same_value(b.context, a, other)
    wide = recipes.reshape(recipes.source("a", DType.F32, ()), (1,))
    assert not same_value(b.context, a, add_weight(b.context, "wide", wide))
    assert not same_value(b.context, a, b.input("x"))


def attention_bench(tile: int) -> tuple[Bench, gs.Tensor, list[gs.Tensor], dict[str, object]]:
    """A bench, a merged projection of two heads of 32, attention's results and sizes."""
    b = Bench()
    rows = variable(TensorSpec("slots", DType.I32, ("rows" if tile > 1 else "tokens",)))
    pages = [variable(TensorSpec(n, DType.F32, (5, 1, 16, 32))) for n in ("k_pages", "v_pages")]
    table = variable(TensorSpec("page_table", DType.I32, (3, 2)))
    turns = (rows.shape[0], 192 if tile == 64 else 1)
    offsets = variable(TensorSpec("rope_offsets", DType.I32, turns))
    b.context.graph.inputs += [rows, offsets, *pages, table]
    qkv = b.input("qkv", 2 * 3 * 32)
    *floats, scales = [
        b.weight(n, DType.F32, k) for n, k in (("qn", 32), ("kn", 32), ("f", 4), ("s", 2))
    ]
    sizes: dict[str, object] = {"heads": 2, "kv_heads": 1, "head_dim": 32, "eps": 1e-6}
    attrs = {"tile": tile, **sizes, "kv_dtype": "f32"}
    operands = [qkv, *floats, offsets, scales, *pages, table, rows, rows, rows]
    results = b.op("paged_attention", operands, "o", "k_out", "v_out", **attrs)
    return b, qkv, list(results), sizes


@pytest.mark.parametrize("why", ["tiles", "read alone", "read by another", "another projection"])
def test_attention_that_stays_apart(why: str) -> None:
    b, qkv, (o, *pages), _ = attention_bench(64 if why == "tiles" else 1)
    gates = b.input("other", 2 * 3 * 32) if why == "another projection" else qkv
    y = b.op("sigmoid_gate", [o, gates], "y", heads=2, head_dim=32)
    shown = [o] if why == "read alone" else []
    if why == "read by another":
        shown = [b.op("sigmoid_gate", [o, b.input("q2", 2 * 3 * 32)], "y2", heads=2, head_dim=32)]
    done = b.done(y, *pages, *shown)
    assert done.counts["attention_decode"] == 0 and b.ops["paged_attention"] == 1
    alone = "o is also read alone"
    reasons = {"tiles": [], "read alone": [alone], "read by another": [alone, alone]}
    want = reasons.get(why, ["o and y read different projections"])
    assert [r.reason for r in done.refusals if r.rule == "attention_decode"] == want


def delta_bench(why: str = "", tile: int = 1) -> tuple[Bench, list[gs.Tensor]]:
    """A layer's convolution, rule and norm, with one thing amiss; and its results."""
    b, value, unit = Bench(), 2 * 32, "tokens" if tile == 1 else "rows"
    names = ("slots", "starts", "counts", "sources", "saves")[: 3 if tile == 1 else 5]
    *rows, other = (variable(TensorSpec(n, DType.I32, (unit,))) for n in (*names, "o"))
    conv_state = variable(TensorSpec("conv_state", DType.F32, (5, 3, 3 * value)))
    state = variable(TensorSpec("gdn_state", DType.F32, (5, 2, 32, 32)))
    b.context.graph.inputs += [*rows, other, conv_state, state]
    qkvz, ba = b.input("qkvz", 4 * value), b.input("ba", 4)
    kernel = b.weight("conv.weight", DType.F32, 3 * value, 4)
    operands = [qkvz, kernel, conv_state, *rows]
    mixed, conv_out = b.op("causal_conv", operands, "c", "c.out", tile=tile)
    decay = [b.weight(n, DType.F32, 2) for n in ("A_log", "dt_bias")]
    heads = {"key_heads": 2, "value_heads": 2, "key_dim": 32, "value_dim": 32, "ring": 0}
    seen = [*rows[:-1], other] if why == "other rows" else rows
    operands = [mixed, ba, *decay, state, *seen]
    kind = "step" if tile == 1 else "chunk"
    o, state_out = b.op(f"gated_delta_{kind}", operands, "o_", "state.out", **heads, tile=tile)
    gates = b.input("other_qkvz", 4 * value) if why == "another projection" else qkvz
    norm = {"eps": 1e-6, "heads": 2, "offset": 3 * value}
    y = b.op("gated_norm", [o, gates, b.weight("n", DType.F32, 32)], "y", **norm)
    alone = {"convolution read": [mixed], "step shown": [o]}.get(why, [])
    return b, [y, conv_out, state_out, *alone]


@pytest.mark.parametrize(
    ("why", "reason"),
    [
        ("convolution read", "c is also read alone"),
        ("step shown", "o_ is also read alone"),
        ("another projection", "c and y read different projections"),
        ("other rows", "c and o_ read different rows"),
    ],
)
def test_a_delta_net_that_stays_apart(why: str, reason: str) -> None:
    b, results = delta_bench(why)
    done = b.done(*results)
    assert done.counts["gdn_decode"] == 0 and b.ops["gated_norm"] == 1
    assert [r.reason for r in done.refusals if r.rule == "gdn_decode"] == [reason]


@pytest.mark.parametrize(
    ("why", "reasons"),
    [
        ("", []),
        ("convolution read", ["c is also read alone"]),
        ("other rows", ["c and o_ read different rows"]),
    ],
)
def test_a_prefill_takes_its_convolution(why: str, reasons: list[str]) -> None:
    b, results = delta_bench(why, 64)
    done = b.done(*results)
    assert done.counts["gdn_prefill"] == b.ops["gdn_prefill"] == (not reasons)
    assert b.ops["causal_conv"] == b.ops["gated_delta_chunk"] == len(reasons)
    assert [r.reason for r in done.refusals if r.rule == "gdn_prefill"] == reasons
