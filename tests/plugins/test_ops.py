"""Every op, every case: infer, reference and body agree; the contract of Op is kept."""

from dataclasses import replace

import numpy as np
import onnx.parser
import pytest

from spark_engine.errors import GraphError
from spark_engine.op import DOMAIN, Case, Op
from spark_engine.plugins import registry
from spark_engine.tensors import Array, DType, TensorSpec
from tests.plugins import one_node
from tests.plugins.cases.seeded import CASES, arrays_of, seeded

PAIRS = [
    pytest.param(op, case, id=f"{op.name}-{case.label}")
    for op in registry.OPS
    for case in seeded(op)
]

FREE = ("rows", "tokens")
FIXED = ("vision_attention", "store_rows")  # the tower's buckets have a model each


def reference(op: Op, case: Case, arrays: tuple[Array, ...]) -> tuple[Array, ...]:
    """The reference's outputs over copies: it may not change its inputs."""
    copies = tuple(a.copy() for a in arrays)
    outputs = op.reference(case.attrs, copies)
    for copy, array in zip(copies, arrays, strict=True):
        assert copy.tobytes() == array.tobytes(), f"{op.name}'s reference changed its input"
    return tuple(o.copy() for o in outputs)


def check_declared(op: Op, case: Case, arrays: tuple[Array, ...]) -> None:
    """Attributes, dtypes and ranks are the op's; dimensions of one name are of one size."""
    assert set(case.attrs) <= set(op.attrs)
    assert {k for k, v in op.attrs.items() if v is None} <= set(case.attrs)
    given = op.given(case.attrs)
    assert len(given) - sum(o.optional for o in given) <= len(arrays) <= len(given)
    sizes: dict[str, int] = {}
    for operand, array in zip(given, arrays, strict=False):
        assert DType.of(array.dtype) in operand.dtypes, operand.name
        assert len(operand.dims) == array.ndim, operand.name
        for dim, size in zip(operand.dims, array.shape, strict=True):
            if dim.isidentifier():
                assert sizes.setdefault(dim, size) == size, f"{operand.name}: {dim}"


def check_function(op: Op, case: Case, specs: tuple[TensorSpec, ...]) -> None:
    """The body is one function, and each value is defined once."""
    function = onnx.parser.parse_function(op.body(case.attrs, specs))
    outputs = one_node.result_names(op, case.attrs, len(op.infer(case.attrs, specs)))
    assert (function.domain, function.name) == (DOMAIN, op.name)
    assert (list(function.input), list(function.output)) == ([s.name for s in specs], outputs)
    assert [(i.domain, i.version) for i in function.opset_import] == [("", 23)]
    defined = [name for node in function.node for name in node.output]
    assert len(set(defined)) == len(defined), "a value is defined twice"


@pytest.mark.parametrize(("op", "case"), PAIRS)
def test_infer_and_body_agree_with_the_reference(op: Op, case: Case) -> None:
    arrays = arrays_of(op, case)
    check_declared(op, case, arrays)
    names = op.names(case.attrs, len(arrays))
    specs = tuple(one_node.spec_of(n, a) for n, a in zip(names, arrays, strict=True))
    check_function(op, case, specs)
    inferred, want = op.infer(case.attrs, specs), reference(op, case, arrays)
    assert [(s.dtype.numpy, s.dims) for s in inferred] == [(r.dtype, r.shape) for r in want]
    assert [s.name for s in inferred] == one_node.result_names(op, case.attrs, len(inferred))
    got = one_node.run_op(op, case.attrs, arrays)
    if case.ignore is not None:
        case.ignore(want)
        case.ignore(got)
    for index, (g, w) in enumerate(zip(got, want, strict=True)):
        label = f"{op.name}/{case.label} output {index}"
        np.testing.assert_allclose(
            one_node.widen(g), one_node.widen(w), rtol=case.rtol, atol=case.atol, err_msg=label
        )


@pytest.mark.parametrize("op", registry.OPS, ids=lambda op: op.name)
def test_op_keeps_the_contract(op: Op) -> None:
    module = __import__(op.reference.__module__, fromlist=["__doc__"])
    assert len((module.__doc__ or "").strip()) > 40, "an op's module states its formula and source"
    assert len({case.label for case in seeded(op)}) == len(seeded(op)) > 0
    assert not (op.cases and op.name in CASES), "its cases are in two places"
    assert all(not r.name.endswith("*") for r in op.results[:-1])
    for function in (op.reference, op.body):
        assert function.__doc__
    for result in op.results:
        assert not result.updates or result.updates in {o.name for o in op.states()}
    assert not any(o.optional for o in op.operands[:-1])


def test_registry_refuses_two_ops_of_one_name() -> None:
    with pytest.raises(GraphError, match="two ops are named rms_norm"):
        registry.index([*registry.OPS, registry.get("rms_norm")])


def test_registry_names_the_legal_ops() -> None:
    assert list(registry.REGISTRY) == [op.name for op in registry.OPS]
    with pytest.raises(GraphError, match=r"no op is named 'rmsnorm'; the ops are .*rms_norm"):
        registry.get("rmsnorm")


def test_every_op_refuses_a_missing_operand() -> None:
    for op in registry.OPS:
        with pytest.raises(GraphError, match=op.name):
            op.infer(seeded(op)[0].attrs, ())


@pytest.mark.parametrize(("op", "case"), [p for p in PAIRS if p.values[0].name not in FIXED])
def test_a_body_is_the_same_for_any_number_of_rows(op: Op, case: Case) -> None:
    """So the buckets of a family have one model."""
    arrays = arrays_of(op, case)
    given = op.given(case.attrs)
    bound = tuple(
        TensorSpec(o.name, DType.of(a.dtype), a.shape) for o, a in zip(given, arrays, strict=False)
    )
    free = tuple(
        replace(s, shape=tuple(d if d in FREE else n for d, n in zip(o.dims, s.dims, strict=True)))
        for o, s in zip(given, bound, strict=False)
    )
    assert op.body(case.attrs, free) == op.body(case.attrs, bound)
