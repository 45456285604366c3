"""As test_saved_states, by the kernels. Needs a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

pytest.importorskip("cuda.bindings", reason="needs the extra `cuda`")

from spark_engine.op import Attrs, Case, Op  # noqa: E402
from spark_engine.tensors import Array  # noqa: E402
from tests.plugins import cuda_node  # noqa: E402
from tests.plugins.test_saved_states import EXACT, SAVING, check_anywhere, check_resuming  # noqa: E402

GPU = pytest.mark.gpu


class OnGpu:
    """The one tactic of each."""

    def __init__(self, bench: cuda_node.Bench) -> None:
        self.bench = bench

    def __call__(self, op: Op, attrs: Attrs, operands: dict[str, Array]) -> Sequence[Array]:
        arrays = tuple(operands.values())
        works = list(cuda_node.planned(op, Case("", attrs, lambda _: arrays), self.bench.target))
        if not works:
            pytest.skip(f"no kernel of {op.name} takes it")
        return cuda_node.run(self.bench, works[0], arrays)


@GPU
@pytest.mark.parametrize(("op", "case"), EXACT)
def test_a_saved_state_resumes_with_the_same_bits(
    op: Op, case: Case, bench: cuda_node.Bench
) -> None:
    check_resuming(op, cuda_node.as_bf16(op, case) or case, OnGpu(bench))


@GPU
@pytest.mark.parametrize(("op", "case"), SAVING)
def test_a_state_may_stand_in_any_row(op: Op, case: Case, bench: cuda_node.Bench) -> None:
    check_anywhere(op, cuda_node.as_bf16(op, case) or case, OnGpu(bench))
