"""infer refuses what is not legal, and its message names the operand or the attribute."""

from dataclasses import replace

import pytest

from spark_engine.errors import GraphError
from spark_engine.op import Attrs, Op
from spark_engine.plugins import registry
from spark_engine.tensors import DType, TensorSpec
from tests.plugins.cases.seeded import arrays_of, seeded
from tests.plugins.one_node import row_wise, spec_of

CASES = [(op, i) for op in registry.OPS if row_wise(op) for i in range(len(seeded(op)))]


def specs_of(op: Op, index: int) -> tuple[Attrs, tuple[TensorSpec, ...]]:
    case = seeded(op)[index]
    arrays = arrays_of(op, case)
    names = op.names(case.attrs, len(arrays))
    return case.attrs, tuple(spec_of(n, a) for n, a in zip(names, arrays, strict=True))


@pytest.mark.parametrize(("op", "index"), CASES)
def test_operands_of_another_form_are_named(op: Op, index: int) -> None:
    """A wrong dtype or rank, one too many or too few."""
    attrs, specs = specs_of(op, index)
    for i, spec in enumerate(specs):
        for bad in (replace(spec, dtype=DType.BOOL), replace(spec, shape=(*spec.shape, 1, 1))):
            with pytest.raises(GraphError, match=rf"operand {_blamed(op, spec)} (is|has)"):
                op.infer(attrs, (*specs[:i], bad, *specs[i + 1 :]))
    if not op.operands[-1].optional:
        with pytest.raises(GraphError, match=f"{op.name} takes"):
            op.infer(attrs, specs[:-1])
    with pytest.raises(GraphError, match=f"{op.name} takes"):
        op.infer(attrs, (*specs, specs[0], specs[0]))


@pytest.mark.parametrize(("op", "index"), CASES)
def test_the_token_dimension_may_be_named(op: Op, index: int) -> None:
    """infer and body do not look at the number of tokens."""
    attrs, specs = specs_of(op, index)
    bound = op.infer(attrs, specs)
    tokens = bound[0].shape[0]
    names = _token_operands(op)
    named = tuple(
        replace(s, shape=("tokens", *s.shape[1:])) if s.name in names and s.shape else s
        for s in specs
    )
    free = op.infer(attrs, named)
    assert [s.shape for s in free] == [("tokens", *s.shape[1:]) for s in bound]
    assert {s.shape[0] for s in bound} == {tokens}
    assert op.body(attrs, named) == op.body(attrs, specs)


def _blamed(op: Op, spec: TensorSpec) -> str:
    """The operand an error may name: the bad one, or one that must agree with it."""
    return r"\w+" if spec.name in _token_operands(op) else spec.name


def _token_operands(op: Op) -> set[str]:
    return {o.name for o in op.operands if o.unit == "token"}


@pytest.mark.parametrize(
    ("name", "attr", "value", "message"),
    [
        ("linear", "dtype", "f64", "linear: dtype is 'f64', expected f32 or bf16"),
        ("norm_quant", "quant", "int8", "quant is 'int8', expected one of none, fp8"),
        ("norm_quant", "n", 0, "n is 0"),
        ("act_quant", "act", "gelu", "act is 'gelu', expected silu_mul or sigmoid_gate"),
        ("moe_router", "top_k", 17, r"top_k is 17, expected 1 to 16 \(experts\)"),
        ("grouped_moe", "format", "int3", "format is 'int3', expected one of dense, fp8"),
    ],
)
def test_an_illegal_attribute_is_named(
    name: str, attr: str, value: int | str, message: str
) -> None:
    op = registry.get(name)
    attrs, specs = specs_of(op, 0)
    with pytest.raises(GraphError, match=message):
        op.infer({**attrs, attr: value}, specs)


def test_a_width_that_is_no_multiple_of_the_block_is_named() -> None:
    x = TensorSpec("x", DType.F32, ("tokens", 24))
    scale = TensorSpec("input_scale", DType.F32, ())
    with pytest.raises(GraphError, match=r"operand x has shape \['tokens', 24\].*divisible by 16"):
        registry.get("nvfp4_quant").infer({}, (x, scale))
