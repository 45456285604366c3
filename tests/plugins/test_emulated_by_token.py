"""Kernels that quantise by token, on the host: every op that does so, against its reference."""

from pathlib import Path

import numpy as np
import pytest

from spark_engine.op import Case, Op
from spark_engine.plugins.formats.quantised import BY_TOKEN
from spark_engine.plugins.registry import REGISTRY
from spark_engine.tensors import DType
from tests.plugins import cuda_node, emulated
from tests.plugins.moe.test_emulated_moe import BROKEN, FEW, SMALL, TACTICS, drawn, run

pytestmark = pytest.mark.skipif(emulated.COMPILER is None, reason="needs g++")
OPS = ("fp8_quant", "norm_quant", "act_quant", "gated_norm_quant", "moe_norm_quant")


def cases() -> list[object]:
    """Those of bf16 activations that the kernels take: rows of whole 16 bytes."""
    found = []
    for op in map(REGISTRY.__getitem__, OPS):
        for case in cuda_node.cases_of(op):
            first = case.inputs(np.random.default_rng(1))[0]
            whole = first.dtype == DType.BF16.numpy and first.shape[1] % 8 == 0
            own = case.attrs.get("quant") in BY_TOKEN or case.attrs.get("by_token")
            if own and whole and int(case.attrs.get("head_dim", 0)) % 8 == 0:
                found.append(pytest.param(op, case, id=f"{op.name}-{case.label}"))
    return found


@pytest.mark.parametrize(("op", "case"), cases())
def test_a_quantiser(op: Op, case: Case, cache: Path) -> None:
    arrays = case.inputs(np.random.default_rng(1))
    given = cuda_node.specs_of(op, case.attrs, arrays)
    packed = cuda_node.packed_specs(op, case.attrs, given)
    takes = [t for t in op.cuda.tactics if t.refuse(case.attrs, packed, SMALL) is None]
    plan = takes[0].plan(case.attrs, packed, SMALL)
    own, outs = cuda_node.packed_arrays(op, case.attrs, arrays), op.infer(case.attrs, given)
    got = emulated.run(plan, takes[0].source, own, outs, cache, True)
    for ours, want in zip(got, op.reference(case.attrs, arrays), strict=True):
        a, b = (np.asarray(x, np.float64) for x in (ours, want))
        finite = np.isfinite(b)
        assert a.shape == b.shape and finite.any()
        rows = np.linalg.norm(np.where(finite, a - b, 0), axis=1)
        assert (rows <= 0.02 * np.linalg.norm(np.where(finite, b, 0), axis=1)).all(), case.label


def test_experts(cache: Path) -> None:
    attrs, arrays = {"format": "fp8_channel", "dtype": "bf16"}, drawn("fp8_channel", FEW["tiles"])
    got = run(TACTICS["grouped"], attrs, arrays, cache, True).astype(np.float64)
    true = REGISTRY["grouped_moe"].reference(attrs, arrays)[0].astype(np.float64)
    assert np.isnan(got[BROKEN]).all()
    got, true = np.delete(got, BROKEN, 0), np.delete(true, BROKEN, 0)
    error = np.linalg.norm(got - true, axis=1) / np.linalg.norm(true, axis=1)
    assert error.max() < 4e-2, error.max()
