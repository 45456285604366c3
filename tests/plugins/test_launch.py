"""Kernels' arguments by name: which become addresses, numbers and null, in which order."""

from collections import defaultdict
from itertools import product

import numpy as np
import pytest

from spark_engine.errors import InternalError
from spark_engine.kernel import H200, NULL, TARGETS, Arg, Pointer, Scalar, Scratch
from spark_engine.op import Op
from spark_engine.plugins import launch, registry
from spark_engine.plugins.launch import Kernel, Node, behind, node_of
from tests.plugins.cases.seeded import arrays_of, seeded
from tests.plugins.packed_node import declared, packed_specs, specs_of

NORM = registry.get("norm_quant")
ATTRS = {"eps": 1e-6, "add": 1, "keep": 0, "quant": "fp8", "n": 2}


def node(**changes: int | str) -> Node:
    attrs = {**ATTRS, **changes}
    return node_of(NORM, attrs, declared(NORM, attrs, tokens=3, K=64, n=2), H200)


def test_arguments_are_where_the_op_has_them() -> None:
    kernel = Kernel("k", "scales x sum q1 gone? partial rows eps")
    made = node().with_scratch(counts=Scratch(4, zeroed=True), partial=256)
    found = kernel.launch(made, (2, 3), 32, {"A": True, "B": 0.5}, rows=3, eps=0.25)
    inputs = Pointer("input", 3), Pointer("input", 0)
    outputs = Pointer("output", 0), Pointer("output", 2)
    numbers = Scalar("i32", 3), Scalar("f32", 0.25)
    assert found.args == (*inputs, *outputs, NULL, Pointer("scratch", 1), *numbers)
    assert (found.grid, found.block, found.pdl) == ((2, 3, 1), (32, 1, 1), True)
    assert found.defines == (("A", "1"), ("B", "0.5"))
    assert made.plan(found).scratch == (Scratch(4, zeroed=True), Scratch(256))


def test_an_operand_that_the_node_lacks_is_named() -> None:
    with pytest.raises(InternalError, match="norm_quant: the node has no residual"):
        node(add=0, quant="none", n=1).args("x weight residual")


def test_a_part_has_the_memory_of_the_whole() -> None:
    whole = node().with_scratch(total=node()["x"])
    part = whole.part(registry.get("all_reduce"), {"ranks": 2}, x="residual", y="total")
    assert part.args("x y") == (Pointer("input", 2), Pointer("scratch", 0))
    assert part.shape("tokens", "H") == (3, 64) and part.number("across") == 0


def test_memory_behind_a_plans_own() -> None:
    later = node().with_later(routed=node()["x"])
    made = Kernel("k", "routed x").launch(later, 1, 32, {})
    plan = behind((made,), (Scratch(8), Scratch(8)), 64)
    assert plan.launches[0].args == (Pointer("scratch", 2), Pointer("input", 0))
    assert plan.scratch == (Scratch(8), Scratch(8), Scratch(64))


def test_what_may_be_null_is_there_for_some_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that no node has would be null everywhere."""
    found: dict[str, set[bool]] = defaultdict(set)
    given = Node._arg

    def arg(self: Node, name: str, values: dict[str, int | float | Arg]) -> Arg:
        made = given(self, name, values)
        if name.endswith("?"):
            found[name].add(made != NULL)
        return made

    monkeypatch.setattr(launch.Node, "_arg", arg)
    for op in registry.OPS:
        plans(op)
    never = {name for name, there in found.items() if True not in there}
    # Of more copies than these have; of ranks that share rows; of operands that no format has.
    copies = {f"{part}{i}?" for part in "qs" for i in (1, 2, 3)}
    assert never == {*copies, "whole_rows?", "nothing?"}
    assert len(found) > 28


def plans(op: Op) -> None:
    """Makes a plan of each case's node by every tactic that takes it."""
    for case in seeded(op) if op.cuda.tactics else ():
        if "bf16" not in f"{case.label} {case.attrs}" and "sample" not in op.name:
            continue
        packed = packed_specs(op, case.attrs, specs_of(op, case.attrs, arrays_of(op, case)))
        for tactic, target in product(op.cuda.tactics, TARGETS.values()):
            if tactic.refuse(case.attrs, packed, target) is None:
                tactic.plan(case.attrs, packed, target)


def test_a_nodes_dimensions_are_those_of_its_operands() -> None:
    found = node()
    assert found.shape("tokens", "K", "2K", "⌈K/128⌉") == (3, 64, 128, 1)
    with pytest.raises(ValueError, match="norm_quant: Q is None, not a number"):
        found.dim("Q")
    assert np.prod(found["x"].dims) == 192 and "residual" in found and "y" not in found
