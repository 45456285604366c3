"""No two tensors that are alive together overlap, and aliases share."""

from itertools import combinations

import onnx_graphsurgeon as gs
from hypothesis import given
from hypothesis import strategies as st

from spark_engine.builder.graph.edit import variable
from spark_engine.builder.graph.memory import LiveBlock, lifetimes, place
from spark_engine.tensors import DType, TensorSpec
from tests.builder.toy import OPS, toy_graph

SPANS = st.tuples(st.integers(0, 500), st.integers(0, 20), st.integers(0, 6))


@given(st.lists(SPANS, max_size=30))
def test_live_blocks_never_overlap(spans: list[tuple[int, int, int]]) -> None:
    blocks = [LiveBlock(f"t{i}", 256 * n, a, a + d) for i, (n, a, d) in enumerate(spans)]
    arena = place(blocks)
    for one, two in combinations(blocks, 2):
        a, b = arena.offsets[one.name], arena.offsets[two.name]
        meet = one.first <= two.last and two.first <= one.last
        if meet and one.nbytes and two.nbytes:
            assert a + one.nbytes <= b or b + two.nbytes <= a
    assert arena.nbytes == max((arena.offsets[b.name] + b.nbytes for b in blocks), default=0)
    peak = max(sum(b.nbytes for b in blocks if b.first <= t <= b.last) for t in range(30))
    assert peak <= arena.nbytes <= sum(b.nbytes for b in blocks)
    assert all(offset % 256 == 0 for offset in arena.offsets.values())


def test_a_small_block_inside_a_large_ones_place_hides_nothing_of_it() -> None:
    """`d` meets all: `a` to byte 2560, and `c`, which ends before that but starts after `a`."""
    spans = {"a": (10, 0, 1), "b": (3, 2, 2), "c": (2, 2, 2), "d": (1, 1, 2)}
    arena = place([LiveBlock(name, 256 * n, *span) for name, (n, *span) in spans.items()])
    assert [arena.offsets[name] // 256 for name in spans] == [0, 0, 3, 10]


def test_blocks_that_follow_each_other_share() -> None:
    arena = place([LiveBlock("a", 512, 0, 1), LiveBlock("b", 512, 2, 3), LiveBlock("c", 256, 1, 2)])
    assert arena.offsets["a"] == arena.offsets["b"] and arena.nbytes == 768


def test_lifetimes_of_a_graph() -> None:
    blocks = {b.name: b for b in lifetimes(toy_graph(), OPS, {"rows": 2, "tokens": 2})}
    names = [n.name for n in toy_graph().nodes]
    assert "x" not in blocks and "total" not in blocks and "total.out" not in blocks
    h = blocks["h"]
    assert names[h.first] == "h" and names[h.last] == "sum.out"
    assert h.nbytes == 256


def test_an_alias_of_an_alias_has_the_place_of_the_first() -> None:
    names = ("x", "inner", "once", "twice", "out")
    x, inner, once, twice, out = (variable(TensorSpec(n, DType.F32, (4,))) for n in names)
    nodes = [
        gs.Node("double", name="n0", inputs=[x], outputs=[inner], domain="spark"),
        gs.Node("accumulate", name="n1", inputs=[x, inner], outputs=[once], domain="spark"),
        gs.Node("accumulate", name="n2", inputs=[x, once], outputs=[twice], domain="spark"),
        gs.Node("double", name="n3", inputs=[twice], outputs=[out], domain="spark"),
    ]
    blocks = lifetimes(gs.Graph(nodes, [x], [out]), OPS, {})
    assert blocks == (LiveBlock("inner", 256, 0, 3),)
