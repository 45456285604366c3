"""Runs a tactic of an op on the GPU over numpy arrays. Knows no op."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from spark_engine.device.gpu import Gpu
from spark_engine.kernel import H200, Tactic
from spark_engine.op import Attrs, Case, Op
from spark_engine.tensors import Array, DType, TensorSpec
from tests.plugins import cuda_node

CACHE = Path("/tmp/gdn_cubins")


def specs_of(op: Op, arrays: Sequence[Array]) -> tuple[TensorSpec, ...]:
    """The arrays' specs under generated names."""
    return tuple(TensorSpec(f"a{i}", DType.of(a.dtype), a.shape) for i, a in enumerate(arrays))


def run(
    gpu: Gpu, op: Op, tactic: Tactic, attrs: Attrs, arrays: Sequence[Array]
) -> tuple[Array, ...]:
    """The outputs of the plan, run twice between guards (see cuda_node.run)."""
    case = Case("", attrs, lambda _: tuple(arrays))
    plan = tactic.plan(attrs, specs_of(op, arrays), H200)
    bench = cuda_node.Bench(gpu, H200, CACHE)
    return cuda_node.run(bench, cuda_node.Planned(op, case, tactic, plan), arrays)
