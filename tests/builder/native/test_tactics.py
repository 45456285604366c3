"""Choosing tactics: by prediction, by measurement, and by one order for all buckets."""

from collections.abc import Callable
from dataclasses import replace

import onnx_graphsurgeon as gs
import pytest

from spark_engine.builder.graph.edit import variable
from spark_engine.builder.native import program
from spark_engine.builder.native.tactics import OTHER_BITS, Chooser, Timer, Work, choose, report
from spark_engine.builder.plan.buckets import Size
from spark_engine.kernel import H200, Cuda, Launch, Plan, Tactic
from spark_engine.plugins import registry
from spark_engine.tensors import DType, TensorSpec
from tests.builder import toy
from tests.plugins.packed_node import linear_node

SIZES = [Size("decode", rows) for rows in (1, 8)]
Cost = Callable[[int], float]


def tactic(name: str, cost: Cost, most: int = 99, bits: Callable[[int], str | None] | None = None):
    """A tactic with a cost, a limit and bits that depend on the rows."""

    def rows(specs) -> int:
        return specs[0].dims[0]

    return Tactic(
        name,
        "rowwise/rows_copy.cu",
        lambda a, s, t: f"{rows(s)} rows" if rows(s) > most else None,
        lambda a, s, t: Plan((Launch(name, (rows(s), 1, 1), (32, 1, 1), ()),)),
        lambda a, s, t: cost(rows(s)),
        bits and (lambda a, s, t: bits(rows(s))),
    )


def chooser(*tactics: Tactic, timer: Timer | None = None) -> Chooser:
    op = toy._op("double", ("x",), "y = Add(x, x)", cuda=Cuda(tactics))
    return Chooser({"double": op}, H200, timer)


def graph() -> gs.Graph:
    x, y = (variable(TensorSpec(n, DType.F32, ("rows", 4))) for n in "xy")
    node = gs.Node("double", name="y", inputs=[x], outputs=[y], domain="spark")
    return gs.Graph([node], [x], [y], opset=23)


def few_and_many(**bits) -> tuple[Tactic, Tactic]:
    """`few` is fastest for few rows and refuses many."""
    return (
        tactic("few", lambda rows: rows * 1.0, most=4, bits=bits.get("few")),
        tactic("many", lambda rows: 3.0, bits=bits.get("many")),
    )


def chosen(made: Chooser) -> list[str | None]:
    (node,) = graph().nodes
    choices = [made.node(node, size) for size in SIZES]
    return [c.tactic and c.tactic.name for c in choices]


def test_the_cheapest_that_does_not_refuse() -> None:
    made = chooser(*few_and_many())
    assert chosen(made) == ["few", "many"]
    (node,) = graph().nodes
    choice = made.node(node, SIZES[1])
    assert choice.refused == {"few": "8 rows"} and choice.candidates == {"many": 3.0}


def test_a_timer_overrules_predictions_and_is_asked_once() -> None:
    asked = []

    def timer(work: Work, tactic: Tactic, plan: Plan) -> float:
        asked.append((tactic.name, work.ins[0].dims, work.cold, [s.dims for s in work.outs]))
        return {"few": 9e-6, "many": 2e-6}[tactic.name]

    made = chooser(*few_and_many(), timer=timer)
    assert chosen(made) == ["many", "many"] == chosen(made)
    cold = frozenset({0})
    assert asked == [(n, (1, 4), cold, [(1, 4)]) for n in ("few", "many")], "a lone one is not"
    (node,) = graph().nodes
    (row,) = report("decode_b1.engine", [(node, made.node(node, SIZES[0]))])
    assert row["microseconds"] == {"few": 9.0, "many": 2.0} and row["timed"] is True


def test_what_one_candidate_cannot_be_timed_for_is_predicted_for_all() -> None:
    made = chooser(*few_and_many(), timer=lambda w, t, p: 1e-9 if t.name == "many" else None)
    (node,) = graph().nodes
    choice = made.node(node, SIZES[0])
    assert choice.tactic is not None and choice.tactic.name == "few" and not choice.timed


def decode_attention(rows: int, table: int, pool: int, tile: int = 1) -> Work:
    """`paged_attention` over pages of 64 tokens: `table` a sequence, `pool` in all."""
    op, pages = registry.get("paged_attention"), (pool + 1, 2, 64, 64)
    shapes = [(rows * tile, 512), (64,), (64,), (8,), (rows, 1), (2,), pages, pages]
    shapes += [(rows + 1, table), *[(rows,)] * 3]
    specs = tuple(TensorSpec("t", DType.BF16, s) for s in shapes)
    return Work(op.name, op, {"tile": tile}, specs, (), frozenset())


@pytest.mark.parametrize(
    ("rows", "table", "pool", "contexts"),
    [
        (1, 512, 9999, (1024, 512 * 64 - 1)),  # as long as a sequence may be
        (32, 512, 32 * 40 + 31, (1024, 40 * 64 - 1)),  # as every row may be at once
        (32, 512, 32 * 32, (1024, 2047)),
        (32, 512, 32 * 32 - 1, (1024,)),  # nothing is learnt so near
        (1, 24, 9999, (1024,)),
    ],
)
def test_contexts_of_attention(rows: int, table: int, pool: int, contexts: tuple[int, ...]) -> None:
    assert decode_attention(rows, table, pool).contexts == contexts
    round = decode_attention(rows, table, pool, tile=4).contexts
    assert round == (contexts[0], *(c - 3 for c in contexts[1:])), "four tokens fit at the end"


@pytest.mark.parametrize(
    ("rows", "table", "pool", "contexts"),
    [
        (16, 2048, 9999, (1024, 16_384, 65_536)),
        (16, 512, 9999, (1024, 16_384)),  # a sequence has 32,768 at most
        (16, 2048, 256, (1024, 16_384)),
        (16, 2048, 255, (1024,)),
        (256, 2048, 9999, (1024, 16_384, 65_536)),
        (257, 2048, 9999, (1024, 65_536)),  # a launch is no longer than the sequence
    ],
)
def test_contexts_of_prefill(rows: int, table: int, pool: int, contexts: tuple[int, ...]) -> None:
    work = decode_attention(rows, table, pool, tile=64)
    assert work.contexts == contexts and len(work.shares) == len(contexts)


def test_prefill_is_chosen_by_twelve_short_launches_three_long_and_a_very_long_one() -> None:
    times = {
        "short": {1024: 4e-6, 16_384: 50e-6, 65_536: 900e-6},
        "long": {1024: 20e-6, 16_384: 40e-6, 65_536: 500e-6},
    }
    tactics = tuple(tactic(name, lambda rows: 1.0, most=1024) for name in times)
    work = decode_attention(16, 2048, 9999, tile=64)
    made = choose(Cuda(tactics), work, H200, lambda w, t, p: times[t.name][w.context])
    assert made.tactic is not None and made.tactic.name == "long"
    assert made.candidates == pytest.approx({"short": 68.625e-6, "long": 53.75e-6})


def test_attention_is_chosen_by_three_short_steps_and_a_long_one() -> None:
    times = {
        "short": {1024: 4e-6, 32767: 50e-6},  # 15.5 weighted
        "long": {1024: 9e-6, 32767: 31e-6},  # 14.5
        "even": {1024: 7e-6, 32767: 40e-6},  # 15.25
    }
    tactics = tuple(tactic(name, lambda rows: 1.0) for name in times)
    work = decode_attention(1, 512, 9999)
    made = choose(Cuda(tactics), work, H200, lambda w, t, p: times[t.name][w.context])
    assert made.tactic is not None and made.tactic.name == "long" and made.timed
    assert made.candidates == pytest.approx({"short": 15.5e-6, "long": 14.5e-6, "even": 15.25e-6})
    (row,) = report("decode_b1.engine", [(gs.Node("paged_attention", "o"), made)])
    assert row["microseconds_at"] == {
        "1024": {"short": 4.0, "long": 9.0, "even": 7.0},
        "32767": {"short": 50.0, "long": 31.0, "even": 40.0},
    }
    assert row["microseconds"]["long"] == 14.5


def test_the_likely_fastest_is_timed_first() -> None:
    """By prediction, then by the times at the context before: a timer leaves others early."""
    asked = []

    def timer(work: Work, tactic: Tactic, plan: Plan) -> float:
        asked.append(tactic.name)
        return {"a": 2e-6, "b": 1e-6, "c": 3e-6}[tactic.name]

    costs = {"a": 3.0, "b": 2.0, "c": 1.0}
    tactics = tuple(tactic(name, lambda rows, name=name: costs[name]) for name in costs)
    made = choose(Cuda(tactics), decode_attention(1, 512, 9999), H200, timer)
    assert "".join(asked) == "cba" + "bac" and [*made.candidates] == [*costs]


def test_nodes_of_one_shape_are_read_once() -> None:
    made = chooser(*few_and_many())
    works = [
        made.work(one, size)[1] for one in (graph().nodes[0], graph().nodes[0]) for size in SIZES
    ]
    assert works[0] is works[2] and works[1] is works[3] and works[0].key != works[1].key


def test_a_context_that_cannot_be_timed_is_left_out_for_all() -> None:
    def timer(work: Work, tactic: Tactic, plan: Plan) -> float | None:
        if work.context > 1024 and tactic.name == "many":
            return None
        return {"few": 2e-6, "many": 3e-6}[tactic.name]

    made = choose(Cuda(few_and_many()), decode_attention(1, 512, 9999), H200, timer)
    assert made.timed and made.candidates == {"few": 2e-6, "many": 3e-6} and made.at == {}
    (row,) = report("decode_b1.engine", [(gs.Node("paged_attention", "o"), made)])
    assert "microseconds_at" not in row


def test_one_order_for_all_buckets() -> None:
    made = chooser(*few_and_many())
    assert chosen(made) == ["few", "many"], "which is decided again"
    assert made.agree([(graph(), SIZES)]) == {}
    assert chosen(made) == ["many", "many"]
    (node,) = graph().nodes
    assert made.node(node, SIZES[0]).refused == {"few": OTHER_BITS}


def test_tactics_of_equal_bits_may_take_turns() -> None:
    same = {"few": lambda rows: "same", "many": lambda rows: "same"}
    made = chooser(*few_and_many(**same))
    assert made.agree([(graph(), SIZES)]) == {} and chosen(made) == ["few", "many"]


def test_bits_that_hang_on_neighbours_are_no_choice() -> None:
    made = chooser(*few_and_many(many=lambda rows: None if rows > 4 else "many"))
    assert list(made.agree([(graph(), SIZES)])) == ["double"]
    made = chooser(*few_and_many(many=lambda rows: f"of {rows}"))
    assert "decode_b1.engine, decode_b8.engine" in made.agree([(graph(), SIZES)])["double"]


def test_an_order_is_as_fast_as_its_fastest_tactic() -> None:
    """`a` has two tactics, the slow one last; `b` is between them."""
    same = {"bits": lambda rows: "a"}
    made = chooser(
        tactic("a fast", lambda rows: 1.0, **same),
        tactic("a slow", lambda rows: 9.0, **same),
        tactic("b", lambda rows: 3.0),
    )
    assert made.agree([(graph(), SIZES)]) == {} and chosen(made) == ["a fast", "a fast"]


def test_the_order_agreed_on_is_fastest_over_all_buckets_and_known_to_all() -> None:
    """`one` is fastest for one row, `both` in sum; `ends` lacks the bucket in the middle."""
    sizes = [Size("decode", rows) for rows in (1, 4, 8)]
    one = tactic("one", lambda rows: 1.0 if rows == 1 else 50.0)
    both = tactic("both", lambda rows: 5.0)
    ends = tactic("ends", lambda rows: 0.1, bits=lambda rows: None if rows == 4 else "ends")
    made = chooser(one, both, ends)
    assert made.agree([(graph(), sizes)]) == {} and chosen(made) == ["both", "both"]


def test_families_agree_apart() -> None:
    """What decode agreed on does not bind prefill: its tactics take other numbers of rows."""
    made = chooser(*few_and_many())
    made.agree([(graph(), SIZES)])
    (node,) = graph().nodes
    choice = made.node(node, Size("prefill", 1))
    assert choice.tactic is not None and choice.tactic.name == "few"


def test_decode_and_its_rounds_agree_together() -> None:
    """A node of one name is one node in both families; what the draft head makes goes alone."""
    made = chooser(*few_and_many())
    target, head = graph(), graph()
    head.nodes[0].name = target.nodes[0].name = "layers.0.y"
    wide = [Size("verify_k1", 1), Size("verify_k1", 8)]
    assert made.agree([(target, [Size("decode", 1)]), (head, wide)]) == {}
    assert made.node(target.nodes[0], Size("decode", 1)).tactic.name == "many"
    assert made.node(head.nodes[0], wide[0]).tactic.name == "many"

    made = chooser(*few_and_many())
    head.nodes[0].name = target.nodes[0].name = "mtp.y"
    assert made.agree([(target, [Size("decode", 1)]), (head, wide)]) == {}
    assert made.node(target.nodes[0], Size("decode", 1)).tactic.name == "few"


def test_what_no_bucket_of_a_round_shares_is_named_with_all_files() -> None:
    made = chooser(*few_and_many(many=lambda rows: f"of {rows}"))
    failed = made.agree([(graph(), SIZES[:1]), (graph(), [Size("verify_k3", 8)])])
    assert "decode_b1.engine, verify_b8_k3.engine" in failed["double"]


def test_a_bucket_costs_what_its_nodes_were_chosen_by() -> None:
    made = program.decide(graph(), SIZES[1], chooser(*few_and_many()))
    assert made.seconds == 3.0
    twice = replace(made, nodes=made.nodes * 2)
    assert twice.seconds == 6.0


def test_nodes_of_other_dtypes_are_decided_apart() -> None:
    work = {d: Work("op", None, {}, (TensorSpec("x", d, (4,)),), (), frozenset()) for d in DType}
    assert len({w.key for w in work.values()}) == len(DType)


def test_candidates_that_compete_are_compiled_before_those_without_a_rival() -> None:
    made = chooser(*few_and_many())
    found = made.candidates([(graph(), [*reversed(SIZES), *SIZES])])
    assert [(s, p.launches[0].symbol) for s, p in found] == [
        ("rowwise/rows_copy.cu", n) for n in ("few", "many", "many")
    ]


@pytest.mark.parametrize("op", ["linear", "fp8_linear", "nvfp4_linear"])
def test_linear_rows_have_one_order_up_to_128_and_whole_tiles_beyond(op: str) -> None:
    def orders(m: int) -> set[str | None]:
        node = linear_node(registry.get(op), m, 5120, 5120, H200)
        given = dict(node.attrs), node.specs, H200
        takers = [t for t in registry.get(op).cuda.tactics if t.refuse(*given) is None]
        return {t.reduction_key(*given) for t in takers}

    assert all(("skinny" in orders(m)) == (m <= 16) for m in (1, 8, 9, 16, 17, 128))
    streamed = orders(1) - {"ascending k", "skinny"}
    assert all(streamed <= orders(m) for m in (8, 9, 64, 128)), "the fast one is shared"
    assert "ascending k" in set.intersection(*(orders(m) for m in (1, 64, 128, 256, 4096)))
    assert set.intersection(*(orders(m) for m in (64, 256, 4096))) == {"ascending k"}


def test_an_empty_op_has_no_choice() -> None:
    work = Work("none", None, {}, (), (), frozenset())
    assert choose(Cuda(), work, H200).tactic is None
