"""Kernels over the ids of a text, on the host: their bits are the references'."""

from pathlib import Path

import numpy as np
import pytest

from spark_engine.kernel import GB10, H200
from spark_engine.op import Op
from spark_engine.plugins.ops.drafts import match_drafts, store_ids
from tests.plugins import cuda_node, emulated
from tests.plugins.cases.seeded import seeded

pytestmark = pytest.mark.skipif(emulated.COMPILER is None, reason="needs g++")


@pytest.mark.parametrize("op", [store_ids.OP, match_drafts.OP], ids=lambda op: op.name)
def test_kernels_of_ids_do_what_references_do(op: Op, cache: Path) -> None:
    """The scratch rows are not written; each target plans the same launch."""
    (tactic,) = op.cuda.tactics
    for number, case in enumerate(seeded(op)):
        arrays = case.inputs(np.random.default_rng(number))
        specs, outs = cuda_node.specs_of(op, case.attrs, arrays), op.infer(case.attrs, tuple(
            cuda_node.specs_of(op, case.attrs, arrays)))  # fmt: skip
        assert tactic.refuse(case.attrs, specs, H200) is None
        plan = tactic.plan(case.attrs, specs, H200)
        assert plan == tactic.plan(case.attrs, specs, GB10)
        want = op.reference(case.attrs, tuple(a.copy() for a in arrays))
        aliases = {0: 1} if op is store_ids.OP else {1: 3}
        got = emulated.run(plan, tactic.source, arrays, outs, cache, True, aliases)
        for g, w in zip(got, want, strict=True):
            np.testing.assert_array_equal(g, w, case.label)
