"""Runs a tactic of an op on the GPU over numpy arrays. Knows no op."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.prepared import CACHE as CACHE
from benchmarks.prepared import Prepared
from benchmarks.prepared import specs_of as specs_of
from spark_engine.kernel import Tactic
from spark_engine.op import Attrs, Op
from spark_engine.runtime.device import Gpu
from spark_engine.tensors import Array


def run(
    gpu: Gpu, op: Op, tactic: Tactic, attrs: Attrs, arrays: Sequence[Array]
) -> tuple[Array, ...]:
    """The outputs of one launch of the plan."""
    node = Prepared(gpu, op, tactic, attrs, arrays)
    node.launch()
    results = node.fetch()
    node.free()
    return results
