"""As test_saved_states, by the kernels. Needs a GPU."""

import pytest

pytest.importorskip("cuda.bindings", reason="needs the extra `cuda`")

from spark_engine.op import Case, Op  # noqa: E402
from tests.plugins import cuda_node  # noqa: E402
from tests.plugins.delta_rule.test_cuda_rounds import OnGpu  # noqa: E402
from tests.plugins.delta_rule.test_saved_states import EXACT, SAVING, check_anywhere, check_resuming  # noqa: E402

GPU = pytest.mark.gpu


@GPU
@pytest.mark.parametrize(("op", "case"), EXACT)
def test_a_saved_state_resumes_with_the_same_bits(
    op: Op, case: Case, bench: cuda_node.Bench
) -> None:
    check_resuming(op, cuda_node.as_bf16(op, case) or case, OnGpu(bench))


@GPU
@pytest.mark.parametrize(("op", "case"), SAVING)
def test_a_state_may_be_in_any_row(op: Op, case: Case, bench: cuda_node.Bench) -> None:
    check_anywhere(op, cuda_node.as_bf16(op, case) or case, OnGpu(bench))
