"""Kernels that read rows of images, on the host."""

from pathlib import Path

import numpy as np
import pytest

from spark_engine.kernel import H200
from spark_engine.op import Case, Op
from spark_engine.plugins.registry import REGISTRY
from tests.plugins import cuda_node, emulated
from tests.plugins.cases.seeded import seeded

pytestmark = pytest.mark.skipif(emulated.COMPILER is None, reason="needs g++")
CASES = [
    (op, case)
    for op in (REGISTRY["embed"], REGISTRY["mtp_input"])
    for case in seeded(op)
    if "images" in case.label and case.attrs["dtype"] == "bf16"
]


@pytest.mark.parametrize(("op", "case"), CASES, ids=[op.name for op, _ in CASES])
def test_rows_of_images(op: Op, case: Case, cache: Path) -> None:
    arrays = case.inputs(np.random.default_rng(1))
    specs = cuda_node.specs_of(op, case.attrs, arrays)
    (tactic,) = op.cuda.tactics
    assert tactic.refuse(case.attrs, specs, H200) is None
    plan, outs = tactic.plan(case.attrs, specs, H200), op.infer(case.attrs, specs)
    (got,) = emulated.run(plan, tactic.source, arrays, outs, cache, True)
    (want,) = op.reference(case.attrs, arrays)
    assert cuda_node.compare(op.name, got, want, op.tolerance(case.attrs), False) == ""
    assert op.name == "mtp_input" or got.tobytes() == want.tobytes()
