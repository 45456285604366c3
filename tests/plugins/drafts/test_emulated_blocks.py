"""Kernels of a block drafter, on the host: what their references compute."""

from pathlib import Path

import numpy as np
import pytest

from spark_engine.kernel import GB10, H200
from spark_engine.op import Op
from spark_engine.plugins import registry
from spark_engine.plugins.ops.attention import block_attention
from spark_engine.plugins.ops.drafts import block_conv, block_rows, draft_path, top_ids
from spark_engine.tensors import DType, TensorSpec
from tests.plugins import cuda_node, emulated

pytestmark = pytest.mark.skipif(emulated.COMPILER is None, reason="needs g++")
BF16 = DType.BF16.numpy
OPS = (block_rows.OP, block_conv.OP, top_ids.OP, draft_path.OP, block_attention.OP)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # −∞ in place of missing candidates
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_kernels_of_a_block_do_what_references_do(op: Op, cache: Path) -> None:
    """What is written outside is seen, and counters are left zero; each target plans the same."""
    (tactic,) = op.cuda.tactics
    taken = 0
    for number, case in enumerate(cuda_node.cases_of(op)):  # without served sizes: they take long
        arrays = case.inputs(np.random.default_rng(number))
        specs = cuda_node.specs_of(op, case.attrs, arrays)
        if case.bench or tactic.refuse(case.attrs, specs, H200) is not None:
            continue
        taken += 1
        plan, outs = tactic.plan(case.attrs, specs, H200), op.infer(case.attrs, tuple(specs))
        assert plan == tactic.plan(case.attrs, specs, GB10)
        want = op.reference(case.attrs, tuple(a.copy() for a in arrays))
        got = emulated.run(plan, tactic.source, arrays, outs, cache, True, op.aliases(case.attrs))
        for index, (g, w) in enumerate(zip(got, want, strict=True)):
            if case.ignore is not None and index == 0:
                case.ignore(tuple(got))
                case.ignore(want)
            if w.dtype.kind in "iu":
                np.testing.assert_array_equal(g, w, case.label)
            else:
                limits, label = op.tolerance(case.attrs), f"{case.label} output {index}"
                cuda_node.compare(label, g, w, limits, False)
    assert taken >= 5


@pytest.mark.parametrize("widths", [(8, 24, 16, 8, 40), (2, 4, 6, 2, 4, 8, 2, 6)])
def test_taps_are_joined_by_column(widths: tuple[int, ...], cache: Path) -> None:
    (tactic,) = registry.STANDARD["Concat"].tactics
    rng = np.random.default_rng(3)
    arrays = [rng.integers(0, 1 << 16, (3, n)).astype(np.uint16).view(BF16) for n in widths]
    specs = tuple(TensorSpec(f"p{i}", DType.BF16, a.shape) for i, a in enumerate(arrays))
    made = TensorSpec("y", DType.BF16, (3, sum(widths)))
    plan = tactic.plan({"axis": 1}, specs, H200)
    (y,) = emulated.run(plan, tactic.source, arrays, (made,), cache, True)
    np.testing.assert_array_equal(
        y.view(np.uint16), np.concatenate([a.view(np.uint16) for a in arrays], axis=1)
    )
