"""Kernels of ops over rows on the host, whenever copies arrive: what their references compute."""

from pathlib import Path

import numpy as np
import pytest

from spark_engine.kernel import GB10, H200
from spark_engine.op import Case, Op
from spark_engine.plugins import registry
from spark_engine.plugins.formats.quantised import BY_TOKEN
from spark_engine.tensors import DType, TensorSpec
from tests.plugins import cuda_node, emulated

pytestmark = pytest.mark.skipif(emulated.COMPILER is None, reason="needs g++")
BF16 = DType.BF16.numpy
BLOCKS = ("block_rows", "block_conv", "top_ids", "draft_path", "block_attention")
IDS = ("store_ids", "match_drafts")
CONVOLUTION = "causal_conv"
VISION = ("vision_patches", "layer_norm", "store_rows")
QUANTISERS = ("fp8_quant", "norm_quant", "act_quant", "gated_norm_quant", "moe_norm_quant")


def _tried(op: Op, case: Case) -> bool:
    """Of the ops that others emulate too: rows of images, quantisers by token, gated norms; not
    served sizes, which take long."""
    if op.name in ("embed", "mtp_input"):
        return "images" in case.label
    if op.name in QUANTISERS and op.name != "gated_norm_quant":
        return bool(case.attrs.get("quant") in BY_TOKEN or case.attrs.get("by_token"))
    return op.name in (CONVOLUTION, *QUANTISERS, *BLOCKS, *IDS, *VISION) and not case.bench


def _cases() -> list[object]:
    found = []
    for op in registry.OPS:
        for case in cuda_node.cases_of(op):
            works = list(cuda_node.planned(op, case, GB10)) if _tried(op, case) else []
            if works:
                found.append(pytest.param(op, case, id=f"{op.name}-{case.label}"))
    return found


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # −∞ in place of missing candidates
@pytest.mark.parametrize(("op", "case"), _cases())
def test_an_op_equals_its_reference(op: Op, case: Case, cache: Path) -> None:
    """What is written outside is seen, and counters are left zero."""
    arrays = case.inputs(np.random.default_rng(1))
    first, other = (next(cuda_node.planned(op, case, target)) for target in (GB10, H200))
    clusters = first.plan != other.plan and len(op.cuda.tactics) == 1
    want = op.reference(case.attrs, tuple(a.copy() for a in arrays))
    runs = [emulated.results(op, first.tactic.name, case.attrs, arrays, GB10, cache)]
    if clusters:
        runs.append(emulated.results(op, other.tactic.name, case.attrs, arrays, H200, cache))
    for outputs in (*runs, want) if case.ignore is not None else ():
        case.ignore(tuple(outputs))  # type: ignore[misc]
    got = [output for outputs in runs for output in outputs]
    for i, (ours, theirs) in enumerate(zip(got, want * len(runs), strict=True)):
        limits, label = op.tolerance(case.attrs), f"{case.label} output {i}"
        cuda_node.compare(label, ours, theirs, limits, False)
        assert op.name not in ("embed", "store_rows") or ours.tobytes() == theirs.tobytes()


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
